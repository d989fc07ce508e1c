"""From a body to a job: everything that can be refused is refused here, before any prefill (journey row 5).

Owns: the order of the checks and the two endpoints' jobs. Does not know: HTTP; ranges of sampling parameters
(engine.sampling.validation); spelling of constraints (openai.constraint).
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from common.clock import Clock
from common.engine.request import GenerateRequest
from common.engine.sampling.params import SamplingParams
from common.engine.structured_output.grammar import GrammarService
from common.engine.structured_output.thinking import Thinking
from common.errors import InvalidRequest
from common.ids import RequestId
from common.openai import requests
from common.openai.constraint import parse_constraint
from common.openai.requests import AnswerFields, ChatFields, CompletionFields, SamplingFields
from common.serving import decode_checks, prompts
from common.serving.job import AnswerOptions, ChatJob, CompletionJob, Job, ToolForm
from common.serving.kv_intent import KvIntent, check_single_prompt
from common.serving.sampling_fields import SamplingReader
from common.serving.served_model import ServedModel
from common.telemetry.timeline import Event, Timeline
from common.wire import kv_params
from common.wire.constraint import Constraint
from common.wire.kv_params import KvReference

FREE = "free"
"""Metric label of a request without a constraint."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a request brings along whatever its prompts are."""

    intent: KvIntent
    timeline: Timeline
    options: AnswerOptions
    constraint: Constraint | None
    thinking: Thinking = Thinking.NONE


_LONG_FIELDS = frozenset({"messages", "prompt", "kv_transfer_params"})
"""Read elsewhere; never part of a constraint."""

_TEMPLATE_READS = ("response_format", "tool_choice", "structured_outputs")


class Intake:
    """Makes jobs.

    Args:
        model: what is served.
        sampling: reads sampling parameters.
        grammars: refuses constraints at the door.
        clock: of timelines and `created`.
    """

    def __init__(self, model: ServedModel, sampling: SamplingReader, grammars: GrammarService, clock: Clock) -> None:
        self._model = model
        self._sampling = sampling
        self._grammars = grammars
        self._clock = clock

    def begin(self) -> Timeline:
        """The timeline of a request that has just come in."""
        timeline = Timeline(self._clock)
        timeline.mark(Event.RECEIVED)
        return timeline

    async def completion(self, body: bytes, intent: KvIntent, timeline: Timeline) -> CompletionJob:
        """The job of a `/v1/completions` body.

        Raises:
            ClientError: anything wrong with it.
        """
        answer = self._answer_fields(body)
        fields = requests.read(body, CompletionFields)
        written = _sampling_fields(body, intent)
        _refuse_completion_fields(fields)
        if intent.ask is not None:
            decode_checks.check_completion(intent.ask.decode_fields, self._sampling)
        constraint = self._constraint(body, intent)
        check_single_prompt(intent, prompts.count(fields))
        if intent.reference is None:
            prompt_ids = await prompts.completion_prompts(fields, self._model)
        else:
            prompt_ids = (self._handed_over(intent.reference),)
        only_prompt = fields.echo is True and written.max_tokens == 0
        prompt_logprobs = written.prompt_logprobs
        if fields.echo and fields.logprobs is not None:
            prompt_logprobs = max(fields.logprobs, prompt_logprobs or 0)
        samplings = [
            self._sampling.completion(
                written, fields.logprobs, prompt_logprobs, num_prompt_tokens=len(ids), only_prompt=only_prompt
            )
            for ids in prompt_ids
        ]
        _refuse_remote_prompt_logprobs(intent, prompt_logprobs)
        options = _options(answer, fields.logprobs, shows_prompt=written.prompt_logprobs is not None)
        job = self._job("cmpl", prompt_ids, samplings, _Frame(intent, timeline, options, constraint))
        echo = tuple(map(self._text_of, prompt_ids)) if fields.echo else None
        return CompletionJob(job=job, echo=echo, only_prompt=only_prompt)

    async def chat(self, body: bytes, intent: KvIntent, timeline: Timeline) -> ChatJob:
        """The job of a `/v1/chat/completions` body.

        Raises:
            ClientError: anything wrong with it.
        """
        answer = self._answer_fields(body)
        fields = requests.read(body, ChatFields)
        written = _sampling_fields(body, intent)
        prompts.check_chat(fields)
        _refuse_chat_fields(fields)
        num_logprobs = decode_checks.chat_logprobs(fields.logprobs, fields.top_logprobs)
        if intent.ask is not None:
            decode_checks.check_chat(intent.ask.decode_fields, self._sampling)
        whole = requests.read_mapping(body, without=_LONG_FIELDS)
        constraint = self._constraint_in(whole, intent)
        if intent.reference is None:
            extras = {key: whole[key] for key in _TEMPLATE_READS if key in whole}
            prompt_ids = await prompts.chat_prompt(fields, self._model, self._extras(extras))
        else:
            prompt_ids = self._handed_over(intent.reference)
        sampling = self._sampling.chat(written, num_logprobs, num_prompt_tokens=len(prompt_ids))
        _refuse_remote_prompt_logprobs(intent, written.prompt_logprobs)
        options = _options(answer, num_logprobs, shows_prompt=written.prompt_logprobs is not None)
        thinking_opened = prompts.ends_in_thinking(prompt_ids, self._model)
        frame = _Frame(intent, timeline, options, constraint, self._thinking(is_open=thinking_opened))
        job = self._job("chatcmpl", (prompt_ids,), [sampling], frame)
        tool_form, tool_name = self._tool_form(fields, whole)
        return ChatJob(
            job=job,
            tool_form=tool_form,
            tool_name=tool_name,
            thinking_opened=thinking_opened,
            show_reasoning=fields.include_reasoning,
        )

    def _answer_fields(self, body: bytes) -> AnswerFields:
        answer = requests.read(body, AnswerFields)
        self._model.require(answer.model)
        decode_checks.check_answer(answer)
        return answer

    def _constraint(self, body: bytes, intent: KvIntent) -> Constraint | None:
        return self._constraint_in(requests.read_mapping(body, without=_LONG_FIELDS), intent)

    def _constraint_in(self, body: Mapping[str, Any], intent: KvIntent) -> Constraint | None:
        """The constraint to enforce, refused here when that is cheap to see."""
        if intent.ignores_constraint:
            return None
        constraint = parse_constraint(body, self._model.tools)
        if constraint is not None:
            self._grammars.check(constraint)
        return constraint

    def _handed_over(self, reference: KvReference) -> tuple[int, ...]:
        """The prompt as P tokenised it; never rendered again."""
        return prompts.checked_ids(reference.prompt_token_ids, self._model, param=kv_params.FIELD)

    def _extras(self, constraint_fields: dict[str, object]) -> dict[str, object]:
        return constraint_fields if self._model.constraint_in_prompt else {}

    def _text_of(self, prompt_ids: tuple[int, ...]) -> str:
        return self._model.tokenizer.decode(prompt_ids, skip_special_tokens=True)

    def _thinking(self, *, is_open: bool) -> Thinking:
        """What may stand before the constrained part of a chat's answer."""
        if self._model.reasoning is None:
            return Thinking.NONE
        return Thinking.OPEN if is_open or self._model.reasoning.starts_inside else Thinking.MAY_BEGIN

    def _tool_form(self, fields: ChatFields, body: Mapping[str, Any]) -> tuple[ToolForm, str | None]:
        choice = body.get("tool_choice")
        if not fields.tools or choice == "none":
            return ToolForm.NONE, None
        if choice == "required":
            return ToolForm.REQUIRED, None
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            return ToolForm.NAMED, name if isinstance(name, str) else None
        return (ToolForm.TAGGED if self._model.tools is not None else ToolForm.NONE), None

    def _job(
        self,
        prefix: str,
        prompt_ids: tuple[tuple[int, ...], ...],
        samplings: list[SamplingParams],
        frame: _Frame,
    ) -> Job:
        intent, constraint = frame.intent, frame.constraint
        unique = uuid.uuid4().hex
        generate = tuple(
            GenerateRequest(
                request_id=RequestId(f"{unique}-{index}"),
                prompt_token_ids=ids,
                sampling=_handed_off(sampling) if intent.ask is not None else sampling,
                timeline=frame.timeline,
                constraint=constraint,
                reference=intent.reference,
                hand_off=intent.ask is not None,
                thinking=frame.thinking,
            )
            for index, (ids, sampling) in enumerate(zip(prompt_ids, samplings, strict=True))
        )
        return Job(
            answer_id=f"{prefix}-{unique}",
            model=self._model.name,
            created_s=int(self._clock.wall_s()),
            requests=generate,
            timeline=frame.timeline,
            kind=FREE if constraint is None else constraint.label,
            num_choices=generate[0].sampling.n,
            options=frame.options,
        )


def _sampling_fields(body: bytes, intent: KvIntent) -> SamplingFields:
    """The body's sampling fields; on a prefill leg with those of the decode leg in place of what the leg changed."""
    written = requests.read(body, SamplingFields)
    if intent.ask is None:
        return written
    asked = requests.convert(intent.ask.decode_fields, SamplingFields)
    there = intent.ask.decode_fields.keys() & set(SamplingFields.__struct_fields__)
    # A minimum of output that only this leg has means nothing: one token is made, and thrown away.
    without_minimum = msgspec.structs.replace(written, min_tokens=None, min_completion_tokens=None)
    return msgspec.structs.replace(without_minimum, **{name: getattr(asked, name) for name in there})


def _handed_off(sampling: SamplingParams) -> SamplingParams:
    """P's part: one token, which is thrown away, and nothing may end the request before it."""
    return replace(sampling, n=1, max_tokens=1, min_tokens=0, ignore_stops=True)


def _options(answer: AnswerFields, num_logprobs: int | None, *, shows_prompt: bool) -> AnswerOptions:
    usage = answer.stream_options
    return AnswerOptions(
        stream=answer.stream is True,
        include_usage=usage is not None and (usage.include_usage or usage.continuous_usage_stats),
        continuous_usage=usage is not None and usage.continuous_usage_stats,
        timeline=answer.timeline,
        token_ids=answer.return_token_ids is True,
        tokens_as_ids=answer.return_tokens_as_token_ids is True,
        logprobs=num_logprobs,
        prompt_logprobs=shows_prompt,
    )


def _refuse_completion_fields(fields: CompletionFields) -> None:
    if fields.suffix:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if fields.prompt_embeds is not None:
        raise InvalidRequest("prompt_embeds are not supported", param="prompt_embeds")


def _refuse_chat_fields(fields: ChatFields) -> None:
    unsupported = {
        "chat_template": fields.chat_template is not None,
        "functions": fields.functions is not None,
        "function_call": fields.function_call is not None,
        "audio": fields.audio is not None,
        "modalities": fields.modalities not in (None, ("text",)),
        "echo": fields.echo is True,
    }
    for name, is_asked in unsupported.items():
        if is_asked:
            raise InvalidRequest(f"{name} is not supported", param=name)


def _refuse_remote_prompt_logprobs(intent: KvIntent, prompt_logprobs: int | None) -> None:
    """A prompt that P computed has its log probabilities there."""
    if intent.reference is not None and prompt_logprobs is not None:
        message = "the prompt's log probabilities are known to the engine that computed it only"
        raise InvalidRequest(message, param="prompt_logprobs")
