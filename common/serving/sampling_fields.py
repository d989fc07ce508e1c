"""Sampling fields of a body → checked `SamplingParams` (journey row 5, on an engine).

Owns: what the two endpoints mean by `logprobs` and a missing `max_tokens`. Does not know: ranges (sampling.validation).
"""

import msgspec

from common.engine.sampling import checks
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.raw import RawSampling, SamplingContext
from common.engine.sampling.validation import normalise
from common.openai.requests import SamplingFields

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for `/v1/completions`; a chat may use what is left of the context."""


class SamplingReader:
    """Reads sampling parameters for one engine.

    Args:
        context: what they are checked against.
    """

    def __init__(self, context: SamplingContext) -> None:
        self._context = context

    def completion(
        self,
        written: SamplingFields,
        logprobs: int | None,
        prompt_logprobs: int | None,
        *,
        num_prompt_tokens: int,
        only_prompt: bool,
    ) -> SamplingParams:
        """Parameters of one prompt of `/v1/completions`.

        Args:
            written: as in the body.
            logprobs: the body's number.
            prompt_logprobs: wanted for the answer or for `echo`.
            num_prompt_tokens: of this prompt.
            only_prompt: nothing is to be generated; the engine makes one token that nobody sees.

        Raises:
            ClientError: a value outside its range; the prompt leaves no room.
        """
        asked = written.max_tokens if written.max_completion_tokens is None else written.max_completion_tokens
        max_tokens = 1 if only_prompt else (COMPLETION_MAX_TOKENS if asked is None else asked)
        edited = msgspec.structs.replace(
            written, max_tokens=max_tokens, max_completion_tokens=None, prompt_logprobs=prompt_logprobs
        )
        return self._normalised(edited, logprobs, num_prompt_tokens)

    def chat(self, written: SamplingFields, logprobs: int | None, *, num_prompt_tokens: int) -> SamplingParams:
        """Parameters of a chat; `logprobs` counts alternatives, 0 for the chosen token alone.

        Raises:
            ClientError: a value outside its range; the prompt leaves no room.
        """
        return self._normalised(written, logprobs, num_prompt_tokens)

    def check_logprobs(self, num_logprobs: int | None) -> None:
        """Refuse more alternatives than this engine reports, as `completion` and `chat` do.

        Raises:
            InvalidRequest: too many.
        """
        checks.num_logprobs("logprobs", num_logprobs, self._context.limits.max_logprobs, self._context.vocab_size)

    def _normalised(self, written: SamplingFields, logprobs: int | None, num_prompt_tokens: int) -> SamplingParams:
        raw = RawSampling(logprobs=logprobs, **msgspec.structs.asdict(written))
        return normalise(raw, self._context, num_prompt_tokens=num_prompt_tokens)
