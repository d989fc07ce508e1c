"""Several prompts in one completions request: one journey each, one answer (journey rows 1 to 9, side by side).

Owns: taking the prompts apart, and putting choices, usage and streams together again.
Does not know: what happens on a journey.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from common.errors import InvalidRequest, UpstreamBroken
from common.openai import sse
from proxy.call import Call, Fields
from proxy.decode_leg import Started
from proxy.incoming import REQUEST_ID
from proxy.journey import Journey
from proxy.relay import HttpClient, payloads_of
from proxy.services import Services
from proxy.ttft import Breakdown

MAX_PROMPTS = 256
_COMPLETIONS = "/v1/completions"


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_usage = msgspec.json.Decoder(_Usage | None)
_index = msgspec.json.Decoder(int)


def prompts_of(call: Call) -> list[msgspec.Raw]:
    """The prompts, each as it was spelled, where there are several; else nothing.

    Raises:
        InvalidRequest: more than anybody should ask for at once.
    """
    prompt = call.fields.get("prompt")
    # Prompts may be long: their first characters tell whether to look closer. A list of numbers is one prompt.
    start = b"" if prompt is None else bytes(memoryview(prompt)[:64])
    if call.path != _COMPLETIONS or prompt is None or start[:1] != b"[" or start[1:].lstrip()[:1] not in (b'"', b"["):
        return []
    prompts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts in one request, not {len(prompts)}", param="prompt")
    return prompts if len(prompts) > 1 else []


class FanOut:
    """One request with several prompts.

    Args:
        call: the whole request.
        prompts: its prompts.
        services: collaborators of the process.
    """

    def __init__(self, call: Call, prompts: list[msgspec.Raw], services: Services) -> None:
        self._services = services
        self._client: HttpClient | None = None
        self._num_choices = _count(call.fields)
        idle_s = services.config.timeouts.stream_idle_s
        self._parts = [_Part(self, number, _call_for(call, number, raw), idle_s) for number, raw in enumerate(prompts)]
        self._all_began = asyncio.Event()
        self._num_began = 0
        self._slowest: Breakdown | None = None
        self._head: dict[str, msgspec.Raw] = {}
        self._usage: _Usage | None = None

    async def run(self, client: HttpClient) -> None:
        """Serve all prompts; one that fails before any byte has left fails the request, with its own answer.

        Raises:
            ExceptionGroup: holding whatever the journey of the failing prompt raised.
        """
        self._client = client
        async with asyncio.TaskGroup() as group:
            for part in self._parts:
                group.create_task(Journey(part.call, self._services).run(part))
        if client.is_streaming:
            if self._usage is not None:
                usage = {**self._head, "choices": [], "usage": self._usage}
                await client.write(sse.encode_event(msgspec.json.encode(usage)))
            client.end(sse.DONE)
        else:
            client.send_whole(self._merged(), self._breakdown())

    async def begin(self, part_breakdown: Breakdown, started: Started) -> None:
        """One part has its first byte; return when all have, with the response under way if it is a stream."""
        if self._slowest is None or part_breakdown.total_s > self._slowest.total_s:
            self._slowest = part_breakdown
        self._num_began += 1
        if self._num_began == len(self._parts):
            if started.is_stream:
                self._required_client().begin_stream(self._breakdown())
            self._all_began.set()
        await self._all_began.wait()

    async def pass_event(self, number: int, payload: bytes) -> None:
        """One event of one part's stream, with the numbers of its choices and the request's one id."""
        members = _members.decode(payload)
        if "error" in members:
            raise UpstreamBroken("the decode engine reported an error in mid-stream")
        choices = _choices.decode(members.get("choices", b"[]"))
        if not self._head:
            self._head = {name: members[name] for name in ("id", "object", "created", "model") if name in members}
        if not choices:
            self._add_usage(members)
            return
        self._renumber(choices, number)
        event = {**members, **self._head, "choices": choices}
        await self._required_client().write(sse.encode_event(msgspec.json.encode(event)))

    def _merged(self) -> bytes:
        bodies = [_members.decode(part.body) for part in self._parts]
        merged: list[dict[str, msgspec.Raw]] = []
        for number, body in enumerate(bodies):
            choices = _choices.decode(body.get("choices", b"[]"))
            self._renumber(choices, number)
            merged += choices
            self._add_usage(body)
        usage = {} if self._usage is None else {"usage": self._usage}
        return msgspec.json.encode({**bodies[0], "choices": merged, **usage})

    def _renumber(self, choices: list[dict[str, msgspec.Raw]], number: int) -> None:
        for choice in choices:
            own = _index.decode(choice.get("index", b"0"))
            choice["index"] = msgspec.Raw(str(number * self._num_choices + own).encode())

    def _add_usage(self, members: Mapping[str, msgspec.Raw]) -> None:
        more = _usage.decode(members.get("usage", b"null"))
        if more is None:
            return
        if self._usage is None:
            self._usage = more
            return
        self._usage.prompt_tokens += more.prompt_tokens
        self._usage.completion_tokens += more.completion_tokens
        self._usage.total_tokens += more.total_tokens
        if self._usage.prompt_tokens_details is not None and more.prompt_tokens_details is not None:
            self._usage.prompt_tokens_details.cached_tokens += more.prompt_tokens_details.cached_tokens

    def _breakdown(self) -> Breakdown:
        if self._slowest is None:
            raise RuntimeError("nothing has begun")
        return self._slowest

    def _required_client(self) -> HttpClient:
        if self._client is None:
            raise RuntimeError("not running")
        return self._client


class _Part:
    """The client of one prompt's journey: collects a whole answer, or hands events to the common stream."""

    def __init__(self, whole: FanOut, number: int, call: Call, idle_s: float) -> None:
        self._whole = whole
        self._idle_s = idle_s
        self._number = number
        self.call = call
        self.body = b""

    async def pass_on(self, started: Started, breakdown: Breakdown, notes: Mapping[str, object]) -> None:  # noqa: ARG002 - the port's signature
        """Take the answer of this prompt."""
        await self._whole.begin(breakdown, started)
        if not started.is_stream:
            self.body = started.first
            return
        async for payload in payloads_of(started, self._idle_s):
            await self._whole.pass_event(self._number, payload)


def _call_for(call: Call, number: int, prompt: msgspec.Raw) -> Call:
    request_id = f"{call.request_id}-{number}"
    return msgspec.structs.replace(
        call,
        fields={**call.fields, "prompt": prompt},
        headers={**call.headers, REQUEST_ID: request_id},
        request_id=request_id,
        num_body_bytes=len(bytes(prompt)),
    )


def _count(fields: Fields) -> int:
    """`n`; a value that is no count is the engines' to refuse."""
    try:
        return max(1, _index.decode(fields.get("n", b"1")))
    except msgspec.MsgspecError:
        return 1
