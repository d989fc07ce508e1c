"""Responses events out of the chunks of a chat stream.

Owns: the order and numbering of events, and the items they build up. Does not know: HTTP, SSE cutting.

    created ─ in_progress ─ { output_item.added ─ … deltas … ─ output_item.done }* ─ completed | incomplete
"""

from collections.abc import Mapping
from uuid import uuid4

import msgspec

from common.errors import UpstreamBroken
from common.openai.error_body import error_answer
from proxy.responses.answer import (
    ChatAnswer,
    Message,
    ResponseObject,
    ToolCall,
    call_item,
    chat_answer,
    message_item,
    reasoning_item,
    text_part,
)


class EventStream:
    """Feed chunks, get events, ready to be written.

    Args:
        echoed: the request's fields that the response object repeats.
    """

    def __init__(self, echoed: Mapping[str, msgspec.Raw]) -> None:
        self._response = ResponseObject(echoed)
        self._number = 0
        self._item: _OpenItem | None = None
        self._finish_reason: str | None = None
        self._begun = False

    def chunk(self, payload: bytes) -> bytes:
        """Events of one chunk.

        Raises:
            UpstreamBroken: no chunk of a chat, or an error in its place.
        """
        try:
            chat = chat_answer.decode(payload)
        except msgspec.MsgspecError as error:
            raise UpstreamBroken("the decode engine's stream makes no sense") from error
        if chat.error is not None:
            raise UpstreamBroken("the decode engine reported an error in mid-stream")
        events = self._begin(chat)
        if chat.usage is not None:
            self._response.usage = chat.usage
        for choice in chat.choices[:1]:
            events += self._message(choice.delta or Message())
            self._finish_reason = choice.finish_reason or self._finish_reason
        return b"".join(events)

    def end(self) -> bytes:
        """Closing events: the open item's, and the whole response."""
        self._response.finish(self._finish_reason)
        events = self._close_item(self._response.status)
        events.append(self._event(f"response.{self._response.status}", response=self._response.to_json()))
        return b"".join(events)

    def error(self, error: Exception) -> bytes:
        """The event that ends a stream which cannot be completed."""
        body = msgspec.json.decode(error_answer(error).body)["error"]
        return self._event("error", code=body["code"], message=body["message"], param=body["param"])

    def _begin(self, chat: ChatAnswer) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        self._response.take_head(chat)
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response.to_json()) for name in names]

    def _message(self, delta: Message) -> list[bytes]:
        events: list[bytes] = []
        if delta.thought:
            events += self._grow("reasoning", delta.thought)
        if delta.content:
            events += self._grow("message", delta.content)
        for call in delta.tool_calls or ():
            events += self._grow_call(call)
        return events

    def _grow(self, kind: str, text: str) -> list[bytes]:
        events = []
        if self._item is None or self._item.kind != kind:
            events = self._close_item("completed")
            events += self._open(_OpenItem(kind, len(self._response.output)))
        item = self._require_item()
        item.text += text
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        extra: dict[str, object] = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(name, **item.place(), content_index=0, delta=text, **extra)]

    def _grow_call(self, call: ToolCall) -> list[bytes]:
        events = []
        item = self._item
        if item is None or item.kind != "call" or item.call.index != call.index:
            events = self._close_item("completed")
            item = _OpenItem("call", len(self._response.output), call)
            item.text = call.function.arguments or ""
            call.function.arguments = None
            events += self._open(item)
            piece = item.text
        else:
            piece = call.function.arguments or ""
            item.text += piece
        if piece:
            events.append(self._event("response.function_call_arguments.delta", **item.place(), delta=piece))
        return events

    def _open(self, item: "_OpenItem") -> list[bytes]:
        self._item = item
        place = item.place()
        events = [self._event("response.output_item.added", output_index=item.index, item=item.to_json("in_progress"))]
        if item.kind == "message":
            events.append(self._event("response.content_part.added", **place, content_index=0, part=text_part("")))
        return events

    def _close_item(self, status: str) -> list[bytes]:
        item, self._item = self._item, None
        if item is None:
            return []
        whole, place = item.to_json(status), item.place()
        self._response.output.append(whole)
        events = []
        if item.kind == "message":
            events.append(
                self._event("response.output_text.done", **place, content_index=0, text=item.text, logprobs=[])
            )
            events.append(
                self._event("response.content_part.done", **place, content_index=0, part=text_part(item.text))
            )
        elif item.kind == "reasoning":
            events.append(self._event("response.reasoning_text.done", **place, content_index=0, text=item.text))
        else:
            name = item.call.function.name or ""
            events.append(self._event("response.function_call_arguments.done", **place, name=name, arguments=item.text))
        events.append(self._event("response.output_item.done", output_index=item.index, item=whole))
        return events

    def _require_item(self) -> "_OpenItem":
        if self._item is None:
            raise RuntimeError("no item is open")
        return self._item

    def _event(self, type_: str, **members: object) -> bytes:
        data = msgspec.json.encode({"type": type_, "sequence_number": self._number, **members})
        self._number += 1
        return b"event: " + type_.encode() + b"\ndata: " + data + b"\n\n"


class _OpenItem:
    """The output item that grows now."""

    def __init__(self, kind: str, index: int, call: ToolCall | None = None) -> None:
        prefix = {"message": "msg", "reasoning": "rs", "call": "fc"}[kind]
        self.kind = kind
        self.index = index
        self.id = f"{prefix}_{uuid4().hex}"
        self.text = ""
        self.call = call or ToolCall()
        self.call.id = self.call.id or f"call_{uuid4().hex}"

    def place(self) -> dict[str, object]:
        """How its events name it."""
        return {"item_id": self.id, "output_index": self.index}

    def to_json(self, status: str) -> dict[str, object]:
        """The item as it stands."""
        text = "" if status == "in_progress" else self.text
        if self.kind == "message":
            return message_item(text, self.id, status)
        if self.kind == "reasoning":
            return reasoning_item(text, self.id, status)
        self.call.function.arguments = text
        return call_item(self.call, self.id, status)
