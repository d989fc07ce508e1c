"""Answers of `/v1/completions`: the events of a stream, or one body (journey row 9).

Owns: echo, and where logprobs and token ids go. Does not know: HTTP.
"""

import msgspec
from msgspec import UNSET, UnsetType

from common.engine.outputs import PositionLogprobs
from common.engine.tokenizer import Tokenizer
from common.openai.responses import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs
from common.openai.stream import CompletionChunk, CompletionChunkChoice
from common.serving.generation import ChoiceDelta
from common.serving.job import CompletionJob
from common.serving.logprobs import CompletionLogprobsWriter, TokenSpelling, prompt_logprobs
from common.serving.tally import Tally, finish_word, timeline_report

PromptPositions = tuple[PositionLogprobs | None, ...]


class _Choice:
    """What one choice needs from delta to delta: its logprobs' offsets, whether it has begun."""

    def __init__(self, completion: CompletionJob, spelling: TokenSpelling, prompt_index: int) -> None:
        self._completion = completion
        self._prompt_index = prompt_index
        self._writer = CompletionLogprobsWriter(spelling)
        self._begun = False

    def text(self, delta: ChoiceDelta) -> str:
        """New text, with the prompt before the first of it when it is to be echoed."""
        echo = self._completion.echo
        before = echo[self._prompt_index] if echo is not None and not self._begun else ""
        return before if self._completion.only_prompt else before + delta.text

    def logprobs(self, delta: ChoiceDelta, positions: PromptPositions | None) -> CompletionLogprobs | None:
        """Logprobs of what `text` gave; None where none were asked for. `positions` are the prompt's, if computed."""
        options = self._completion.job.options
        if options.logprobs is None:
            return None
        prompt: list[CompletionLogprobs] = []
        if self._completion.echo is not None and not self._begun and positions is not None:
            token_ids = self._completion.job.requests[self._prompt_index].prompt_token_ids
            prompt.append(self._writer.write_prompt(token_ids, positions))
        if not self._completion.only_prompt:
            prompt.append(self._writer.write(delta.logprobs))
        return _joined(prompt)

    def begin(self) -> bool:
        """Whether this is the first call."""
        first, self._begun = not self._begun, True
        return first


def _joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for part in parts:
        result.text_offset.extend(part.text_offset)
        result.token_logprobs.extend(part.token_logprobs)
        result.tokens.extend(part.tokens)
        result.top_logprobs.extend(part.top_logprobs)
    return result


class _Choices:
    """All choices of one job, made when their first delta comes."""

    def __init__(self, completion: CompletionJob, tokenizer: Tokenizer) -> None:
        self.completion = completion
        self.spelling = TokenSpelling(tokenizer, as_ids=completion.job.options.tokens_as_ids)
        self._choices: dict[int, _Choice] = {}
        self._prompt_positions: dict[int, PromptPositions] = {}

    def positions(self, delta: ChoiceDelta) -> PromptPositions | None:
        """Of the delta's prompt; they come once per prompt, with its first delta."""
        if delta.tokens.prompt_logprobs is not None:
            self._prompt_positions[delta.prompt_index] = delta.tokens.prompt_logprobs
        return self._prompt_positions.get(delta.prompt_index)

    def of(self, delta: ChoiceDelta) -> _Choice:
        """The choice that `delta` belongs to, made with its first delta."""
        if delta.index not in self._choices:
            self._choices[delta.index] = _Choice(self.completion, self.spelling, delta.prompt_index)
        return self._choices[delta.index]

    def token_ids(self, delta: ChoiceDelta) -> tuple[int, ...] | UnsetType:
        """Of `delta`, where the client asked for ids; none where it wanted its prompt only."""
        if not self.completion.job.options.token_ids:
            return UNSET
        return () if self.completion.only_prompt else delta.token_ids

    def prompt_token_ids(self, delta: ChoiceDelta) -> tuple[int, ...] | UnsetType:
        """Of the delta's prompt, where the client asked for ids."""
        job = self.completion.job
        return job.requests[delta.prompt_index].prompt_token_ids if job.options.token_ids else UNSET

    def prompt_logprobs(self, delta: ChoiceDelta) -> PromptLogprobs | UnsetType:
        """Of the delta's prompt, where the client asked and `delta` brings them."""
        positions = delta.tokens.prompt_logprobs
        if positions is None or not self.completion.job.options.prompt_logprobs:
            return UNSET
        return prompt_logprobs(positions, self.spelling)


class CompletionStream:
    """Events of a stream, as JSON."""

    def __init__(self, completion: CompletionJob, tokenizer: Tokenizer) -> None:
        self._completion = completion
        self._choices = _Choices(completion, tokenizer)
        self._tally = Tally(completion.job, count_output=not completion.only_prompt)
        self._encoder = msgspec.json.Encoder()

    def events(self, delta: ChoiceDelta) -> list[bytes]:
        """The event of one delta; none when nothing of it can be shown yet. The first of a choice always shows."""
        self._tally.add(delta)
        choice = self._choices.of(delta)
        text, logprobs = choice.text(delta), choice.logprobs(delta, self._choices.positions(delta))
        first = choice.begin()
        token_ids = self._choices.token_ids(delta)
        shows_tokens = bool(logprobs and logprobs.tokens) or bool(token_ids is not UNSET and token_ids)
        if not (first or text or shows_tokens) and delta.finish is None:
            return []
        return [
            self._encode(
                CompletionChunkChoice(
                    index=delta.index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=finish_word(delta.finish),
                    stop_reason=delta.stop_reason,
                    token_ids=token_ids,
                    prompt_token_ids=self._choices.prompt_token_ids(delta) if first else UNSET,
                    prompt_logprobs=self._choices.prompt_logprobs(delta),
                    constraint_check=delta.constraint_check or UNSET,
                )
            )
        ]

    def closing_events(self) -> list[bytes]:
        """Usage and timeline, where asked for, in one event without choices."""
        options = self._completion.job.options
        if not (options.include_usage or options.timeline):
            return []
        return [self._encode(None)]

    def _encode(self, choice: CompletionChunkChoice | None) -> bytes:
        job = self._completion.job
        options = job.options
        shows_usage = options.include_usage and (choice is None or options.continuous_usage)
        return self._encoder.encode(
            CompletionChunk(
                id=job.answer_id,
                created=job.created_s,
                model=job.model,
                choices=[choice] if choice is not None else [],
                usage=self._tally.usage() if shows_usage else (None if options.include_usage else UNSET),
                timeline=timeline_report(job.timeline) if options.timeline and choice is None else UNSET,
            )
        )


class CompletionWhole:
    """One body, grown delta by delta."""

    def __init__(self, completion: CompletionJob, tokenizer: Tokenizer) -> None:
        self._completion = completion
        self._choices = _Choices(completion, tokenizer)
        self._tally = Tally(completion.job, count_output=not completion.only_prompt)
        self._parts: dict[int, list[CompletionChoice]] = {}
        self._handoff: dict[str, object] | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Take one delta in."""
        self._tally.add(delta)
        if delta.tokens.handoff is not None:
            self._handoff = delta.tokens.handoff.to_json()
        choice = self._choices.of(delta)
        text, logprobs = choice.text(delta), choice.logprobs(delta, self._choices.positions(delta))
        first = choice.begin()
        part = CompletionChoice(
            index=delta.index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_word(delta.finish),
            stop_reason=delta.stop_reason,
            token_ids=self._choices.token_ids(delta),
            prompt_token_ids=self._choices.prompt_token_ids(delta) if first else UNSET,
            prompt_logprobs=self._choices.prompt_logprobs(delta),
            constraint_check=delta.constraint_check or UNSET,
        )
        self._parts.setdefault(delta.index, []).append(part)

    def body(self) -> bytes:
        """The JSON of everything added."""
        job = self._completion.job
        return msgspec.json.encode(
            Completion(
                id=job.answer_id,
                created=job.created_s,
                model=job.model,
                choices=[_merged(self._parts[index]) for index in sorted(self._parts)],
                usage=self._tally.usage(),
                kv_transfer_params=self._handoff,
                timeline=timeline_report(job.timeline) if job.options.timeline else UNSET,
            )
        )


def _merged(parts: list[CompletionChoice]) -> CompletionChoice:
    first, last = parts[0], parts[-1]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    ids = [part.token_ids for part in parts if not isinstance(part.token_ids, UnsetType)]
    prompt = [part.prompt_logprobs for part in parts if not isinstance(part.prompt_logprobs, UnsetType)]
    return CompletionChoice(
        index=first.index,
        text="".join(part.text for part in parts),
        logprobs=_joined(logprobs) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_ids=tuple(token for part in ids for token in part) if ids else UNSET,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=prompt[0] if prompt else UNSET,
        constraint_check=last.constraint_check,
    )
