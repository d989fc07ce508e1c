"""Answers of `/v1/chat/completions`: the events of a stream, or one body (journey row 9).

Owns: messages and deltas made of pieces, the same pieces for both. Does not know: HTTP, how pieces are found.
"""

import uuid
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from common.engine.outputs import PositionLogprobs
from common.openai.responses import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ConstraintCheck,
    PromptLogprobs,
)
from common.openai.stream import ChatChunk, ChatChunkChoice, ChatDelta, FunctionDelta, ToolCallDelta
from common.serving.generation import ChoiceDelta
from common.serving.job import ChatJob, ToolForm
from common.serving.logprobs import TokenSpelling, chat_logprobs, prompt_logprobs
from common.serving.served_model import ServedModel
from common.serving.shaping.pieces import ContentPiece, Piece, PlainShaper, ReasoningPiece, Shaper, ToolCallPiece
from common.serving.shaping.reasoning import ReasoningShaper
from common.serving.shaping.tool_calls import NamedToolShaper, RequiredToolShaper, TaggedToolShaper
from common.serving.tally import Tally, finish_word, timeline_report


def new_shaper(chat: ChatJob, model: ServedModel) -> Shaper:
    """The shaper of one choice, as the job and the model's parsers ask for."""
    shaper: Shaper = PlainShaper()
    if chat.tool_form is ToolForm.NAMED and chat.tool_name is not None:
        shaper = NamedToolShaper(chat.tool_name)
    elif chat.tool_form is ToolForm.REQUIRED:
        shaper = RequiredToolShaper()
    elif chat.tool_form is ToolForm.TAGGED and model.tools is not None:
        shaper = TaggedToolShaper(model.tools)
    if model.reasoning is not None:
        shaper = ReasoningShaper(model.reasoning, shaper, inside=chat.thinking_opened)
    return shaper


@dataclass(slots=True)
class _Choice:
    """One choice as it grows; the text parts are kept for the whole answer only."""

    shaper: Shaper
    called_tools: bool = False
    role_sent: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    constraint_check: ConstraintCheck | UnsetType = UNSET

    def pieces(self, delta: ChoiceDelta) -> list[Piece]:
        """What `delta` adds, after the shaper."""
        pieces = self.shaper.push(delta.text)
        if delta.finish is not None:
            pieces += self.shaper.flush()
        self.called_tools |= any(isinstance(piece, ToolCallPiece) for piece in pieces)
        return pieces


class _Choices:
    """All choices of one job."""

    def __init__(self, chat: ChatJob, model: ServedModel) -> None:
        self.chat = chat
        self.spelling = TokenSpelling(model.tokenizer, as_ids=chat.job.options.tokens_as_ids)
        self._model = model
        self._choices: dict[int, _Choice] = {}

    def of(self, delta: ChoiceDelta) -> _Choice:
        """The choice that `delta` belongs to, made with its first delta."""
        if delta.index not in self._choices:
            self._choices[delta.index] = _Choice(new_shaper(self.chat, self._model))
        return self._choices[delta.index]

    def in_order(self) -> list[tuple[int, _Choice]]:
        """Index and choice, ascending."""
        return sorted(self._choices.items())

    def logprobs(self, positions: list[PositionLogprobs]) -> ChatLogprobs | None:
        """Of these positions, where the client asked for them."""
        return chat_logprobs(positions, self.spelling) if self.chat.job.options.logprobs is not None else None

    def prompt_logprobs(self, delta: ChoiceDelta) -> PromptLogprobs | None:
        """The prompt's, where the client asked and `delta` brings them."""
        positions = delta.tokens.prompt_logprobs
        if positions is None or not self.chat.job.options.prompt_logprobs:
            return None
        return prompt_logprobs(positions, self.spelling)

    def prompt_token_ids(self) -> tuple[int, ...] | UnsetType:
        """The prompt's, where the client asked for ids."""
        job = self.chat.job
        return job.requests[0].prompt_token_ids if job.options.token_ids else UNSET


class ChatStream:
    """Events of a stream, as JSON."""

    def __init__(self, chat: ChatJob, model: ServedModel) -> None:
        self._chat = chat
        self._choices = _Choices(chat, model)
        self._tally = Tally(chat.job)
        self._encoder = msgspec.json.Encoder()

    def events(self, delta: ChoiceDelta) -> list[bytes]:
        """The role at a choice's beginning, then what the delta adds; none when nothing can be shown yet."""
        choice = self._choices.of(delta)
        events = [] if choice.role_sent else [self._role_event(delta)]
        choice.role_sent = True
        self._tally.add(delta)
        pieces = choice.pieces(delta)
        news = _delta_of(pieces, show_reasoning=self._chat.show_reasoning)
        shows_tokens = self._chat.job.options.logprobs is not None or self._chat.job.options.token_ids
        if news is None and delta.finish is None and not (shows_tokens and delta.token_ids):
            return events
        finished = delta.finish is not None
        events.append(
            self._encode(
                ChatChunkChoice(
                    index=delta.index,
                    delta=news or ChatDelta(),
                    logprobs=self._choices.logprobs(list(delta.logprobs)),
                    finish_reason=finish_word(delta.finish, called_tools=choice.called_tools),
                    stop_reason=delta.stop_reason if finished else UNSET,
                    token_ids=delta.token_ids if self._chat.job.options.token_ids else UNSET,
                    constraint_check=delta.constraint_check or UNSET,
                )
            )
        )
        return events

    def closing_events(self) -> list[bytes]:
        """Usage and timeline, where asked for, in one event without choices."""
        options = self._chat.job.options
        return [self._encode(None)] if options.include_usage or options.timeline else []

    def _role_event(self, delta: ChoiceDelta) -> bytes:
        choice = ChatChunkChoice(index=delta.index, delta=ChatDelta(role="assistant", content=""))
        return self._encode(choice, prompt=self._choices.prompt_logprobs(delta), opens=True)

    def _encode(
        self, choice: ChatChunkChoice | None, *, prompt: PromptLogprobs | None = None, opens: bool = False
    ) -> bytes:
        job = self._chat.job
        options = job.options
        shows_usage = options.include_usage and (choice is None or options.continuous_usage)
        return self._encoder.encode(
            ChatChunk(
                id=job.answer_id,
                created=job.created_s,
                model=job.model,
                choices=[choice] if choice is not None else [],
                usage=self._tally.usage() if shows_usage else (None if options.include_usage else UNSET),
                prompt_token_ids=self._choices.prompt_token_ids() if opens else UNSET,
                prompt_logprobs=UNSET if prompt is None else prompt,
                timeline=timeline_report(job.timeline) if options.timeline and choice is None else UNSET,
            )
        )


def _delta_of(pieces: list[Piece], *, show_reasoning: bool) -> ChatDelta | None:
    """One chunk's delta; None when there is nothing to show."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)) if show_reasoning else ""
    calls = [_call_delta(piece) for piece in pieces if isinstance(piece, ToolCallPiece)]
    if not (content or reasoning or calls):
        return None
    return ChatDelta(content=content or UNSET, reasoning_content=reasoning or UNSET, tool_calls=calls or UNSET)


def _call_delta(piece: ToolCallPiece) -> ToolCallDelta:
    if piece.name is None:
        return ToolCallDelta(index=piece.index, function=FunctionDelta(arguments=piece.arguments))
    function = FunctionDelta(name=piece.name, arguments=piece.arguments)
    return ToolCallDelta(index=piece.index, id=new_call_id(), type="function", function=function)


def new_call_id() -> str:
    """An id no other tool call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatWhole:
    """One body, grown delta by delta."""

    def __init__(self, chat: ChatJob, model: ServedModel) -> None:
        self._chat = chat
        self._choices = _Choices(chat, model)
        self._tally = Tally(chat.job)
        self._prompt_logprobs: PromptLogprobs | None = None
        self._handoff: dict[str, object] | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Take one delta in."""
        self._tally.add(delta)
        if delta.tokens.handoff is not None:
            self._handoff = delta.tokens.handoff.to_json()
        self._prompt_logprobs = self._prompt_logprobs or self._choices.prompt_logprobs(delta)
        choice = self._choices.of(delta)
        for piece in choice.pieces(delta):
            _take(choice, piece)
        if self._chat.job.options.logprobs is not None:
            choice.logprobs.extend(delta.logprobs)
        if self._chat.job.options.token_ids:
            choice.token_ids.extend(delta.token_ids)
        choice.finish_reason = finish_word(delta.finish, called_tools=choice.called_tools)
        choice.stop_reason = delta.stop_reason
        choice.constraint_check = delta.constraint_check or UNSET

    def body(self) -> bytes:
        """The JSON of everything added."""
        job = self._chat.job
        return msgspec.json.encode(
            ChatCompletion(
                id=job.answer_id,
                created=job.created_s,
                model=job.model,
                choices=[self._choice(index, choice) for index, choice in self._choices.in_order()],
                usage=self._tally.usage(),
                prompt_logprobs=self._prompt_logprobs,
                prompt_token_ids=self._choices.prompt_token_ids(),
                kv_transfer_params=self._handoff,
                timeline=timeline_report(job.timeline) if job.options.timeline else UNSET,
            )
        )

    def _choice(self, index: int, choice: _Choice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=_message(choice, show_reasoning=self._chat.show_reasoning),
            logprobs=self._choices.logprobs(choice.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=tuple(choice.token_ids) if self._chat.job.options.token_ids else UNSET,
            constraint_check=choice.constraint_check,
        )


def _take(choice: _Choice, piece: Piece) -> None:
    """Add one piece to the whole."""
    if isinstance(piece, ContentPiece):
        choice.content.append(piece.text)
    elif isinstance(piece, ReasoningPiece):
        choice.reasoning.append(piece.text)
    else:
        call = choice.calls.setdefault(piece.index, [piece.name or ""])
        call.append(piece.arguments)


def _message(choice: _Choice, *, show_reasoning: bool) -> ChatMessage:
    content = "".join(choice.content)
    calls = [
        CalledTool(id=new_call_id(), function=CalledFunction(name=name, arguments="".join(arguments)))
        for name, *arguments in choice.calls.values()
    ]
    return ChatMessage(
        content=None if calls and not content else content,
        reasoning_content="".join(choice.reasoning) or UNSET if show_reasoning else UNSET,
        tool_calls=calls or UNSET,
    )
