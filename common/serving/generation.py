"""From requests to text: every choice of one job, pushed into a sink as it grows (journey rows 8, 9).

Owns: one text per choice, the end of choices, the abort of the rest when anything fails. Does not know: HTTP, JSON.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.engine.outputs import PositionLogprobs, TokenDelta
from common.engine.request import GenerateRequest
from common.engine.request_state import FinishReason
from common.engine.text_output import TextOutput
from common.engine.tokenizer import Tokenizer
from common.errors import EngineError
from common.openai.responses import ConstraintCheck
from common.serving.ports import Engine
from common.tasks import only_cause


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What is new in one choice.

    Attributes:
        index: of the choice, over all prompts of the job.
        prompt_index: whose prompt it continues.
        tokens: what the engine said; may hold tokens beyond a stop string.
        text: new text, stop strings and held-back text taken care of.
        token_ids: new tokens of the choice.
        logprobs: one per token when asked for, else empty.
        finish: set in the last delta of the choice.
        stop_reason: the stop string or stop token that ended it; None for EOS and length.
        constraint_check: of the whole text, in the last delta, where generation did not obey the whole constraint.
    """

    index: int
    prompt_index: int
    tokens: TokenDelta
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    constraint_check: ConstraintCheck | None = None


class Sink(Protocol):
    """Takes deltas; called by one task per prompt."""

    async def push(self, delta: ChoiceDelta) -> None:
        """Take the next delta; waits while the reader is slow."""
        ...


async def generate(engine: Engine, requests: Sequence[GenerateRequest], tokenizer: Tokenizer, sink: Sink) -> None:
    """Run all prompts until every choice has ended.

    Raises:
        PDError: of the first request that failed; the others are aborted.
    """
    if len(requests) == 1:
        await _run(engine, requests[0], 0, tokenizer, sink)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(_run(engine, request, index, tokenizer, sink))
    except BaseExceptionGroup as failures:
        raise only_cause(failures) from failures


async def _run(engine: Engine, request: GenerateRequest, prompt_index: int, tokenizer: Tokenizer, sink: Sink) -> None:
    num_choices = request.sampling.n
    texts = [TextOutput(tokenizer, request.sampling) for _ in range(num_choices)]
    growing = set(range(num_choices))
    async with engine.submit(request) as stream:
        while growing:
            tokens = await stream.next()
            if tokens.finish is FinishReason.ERROR:
                raise tokens.error or EngineError("the engine failed this request without saying why")
            if tokens.index not in growing:
                continue  # ended here by a stop string; the engine was a step ahead, or says that it let go
            new = texts[tokens.index].push(tokens)
            if new.finish is not None:
                growing.discard(tokens.index)
                if tokens.finish is None and growing:
                    stream.end_choice(tokens.index)
            await sink.push(
                ChoiceDelta(
                    index=prompt_index * num_choices + tokens.index,
                    prompt_index=prompt_index,
                    tokens=tokens,
                    text=new.text,
                    token_ids=new.token_ids,
                    logprobs=new.logprobs,
                    finish=new.finish,
                    stop_reason=new.stop_reason,
                )
            )
