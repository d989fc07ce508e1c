"""What each leg's body says: pure functions from the client's fields to three bodies (journey rows 3a, 3b, 5).

Owns: the table of edits of DESIGN §3. Everything that is not named here travels byte for byte.
Does not know: HTTP, engines, retries.
"""

from dataclasses import dataclass

import msgspec

from proxy.call import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    CONSTRAINT_FIELDS,
    KV_PARAMS,
    Fields,
    forces_tool,
    keeps_own_calls,
    render,
)
from proxy.prompt_logprobs import are_wanted, echoes_logprobs, without

_ONE = b"1"
_ONE_TOKEN = {"max_tokens": _ONE, "temperature": b"0", "stream": b"true"}
_PREFILL_DROPS = ("stream_options", "min_tokens", "min_completion_tokens", "best_of")
# What a prefill leg changes or drops, but P can check on D's behalf.
_LOGPROBS = ("logprobs", "top_logprobs")
_LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens", "min_completion_tokens")
_CHECKED_BY_P = (*_LENGTHS, *_LOGPROBS, "n", "best_of", "stream", "stream_options")
_STOPS = ("stop", "stop_token_ids")
_PREPARE_KEEPS = ("model", *CONSTRAINT_FIELDS)
_PREPARE_KEEPS_WITH_TOOL = (*_PREPARE_KEEPS, "tools", "tool_choice", "parallel_tool_calls")

_PLACEHOLDERS = b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null'
ASK_FOR_KV = b'{"do_remote_decode":true,"do_remote_prefill":false,' + _PLACEHOLDERS + b"}"
ASK_FOR_KV_IGNORING_CONSTRAINT = ASK_FOR_KV[:-1] + b',"constraint":"ignore"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRules:
    """How legs are written for one deployment.

    Attributes:
        strip_constraint: take structured-output fields off the prefill leg.
        constraint_in_prompt: the chat template reads them, so they stay and the leg is marked instead.
        our_engines: P knows our fields: it checks stops but never ends on them, and checks the limits of the decode
            leg. A plain vLLM would end on a stop and hand nothing over.
    """

    strip_constraint: bool = True
    constraint_in_prompt: bool = False
    our_engines: bool = True


def prefill_body(fields: Fields, rules: LegRules) -> bytes:
    """The prefill leg: one token, no stream, no grammar work, KV kept for D."""
    edited = dict(fields)
    for name in _PREFILL_DROPS:
        edited.pop(name, None)
    if not echoes_logprobs(fields):
        for name in _LOGPROBS:
            edited.pop(name, None)
    edited["stream"] = b"false"
    edited["n"] = _ONE
    edited["max_tokens"] = _ONE
    if "max_completion_tokens" in edited:
        edited["max_completion_tokens"] = _ONE
    if not rules.our_engines:
        for name in _STOPS:
            edited.pop(name, None)
        edited["ignore_eos"] = b"true"
    edited[KV_PARAMS] = ASK_FOR_KV
    if rules.strip_constraint:
        _strip_constraint(edited, rules)
    if rules.our_engines:
        _send_decode_fields(edited, fields)
    return render(edited)


def _send_decode_fields(edited: dict[str, bytes | msgspec.Raw], fields: Fields) -> None:
    """What the client wrote where this leg says something else, so that P refuses what D would have to."""
    changed = {name: fields[name] for name in _CHECKED_BY_P if name in fields}
    if changed:
        edited[KV_PARAMS] = bytes(edited[KV_PARAMS])[:-1] + b',"decode_fields":' + render(changed) + b"}"


def _strip_constraint(edited: dict[str, bytes | msgspec.Raw], rules: LegRules) -> None:
    if not rules.constraint_in_prompt:
        for name in CONSTRAINT_FIELDS:
            edited.pop(name, None)
        if forces_tool(edited):
            del edited["tool_choice"]
    # Strict tools are prompt and constraint in one: they stay.
    if rules.constraint_in_prompt or (rules.our_engines and keeps_own_calls(edited)):
        edited[KV_PARAMS] = ASK_FOR_KV_IGNORING_CONSTRAINT


class DecodeBody:
    """The decode leg: what the client sent, and P's parameters verbatim; without them D computes the prompt itself.

    Log probabilities of a prompt that P computed are P's to give. What does not depend on P can be written while P is
    at work.

    Args:
        fields: the client's.
    """

    __slots__ = ("_fields", "_opening")

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._opening: bytes | None = None

    def open(self) -> None:
        """Write what is known before P has answered; once."""
        self._opened()

    def _opened(self) -> bytes:
        if self._opening is None:
            kept = without(self._fields) if are_wanted(self._fields) else self._fields
            self._opening = render(kept)[:-1] + (b"," if kept else b"")
        return self._opening

    def complete(self, kv_params: bytes | None) -> bytes:
        """The whole body."""
        if kv_params is None:
            return render(self._fields)
        return b'%b"%b":%b}' % (self._opened(), KV_PARAMS.encode(), kv_params)


def prepare_body(fields: Fields) -> bytes:
    """The prepare leg: what D's grammar depends on, and no prompt."""
    has_tools = forces_tool(fields) or keeps_own_calls(fields)
    keeps = _PREPARE_KEEPS_WITH_TOOL if has_tools else _PREPARE_KEEPS
    return render({name: fields[name] for name in keeps if name in fields})


def warm_up_leg(fields: Fields) -> tuple[str, bytes]:
    """The prepare leg for engines without `/prepare`: path and body that ask for one token under the same constraint.

    A completion, whose prompt is a token or two, whatever the model's template adds to a chat; only tools need a chat.
    """
    if fields.get("tools") is None:
        kept = {name: fields[name] for name in _PREPARE_KEEPS if name in fields}
        return COMPLETIONS_PATH, render({**kept, "prompt": b'"."', **_ONE_TOKEN})
    kept = {name: fields[name] for name in _PREPARE_KEEPS_WITH_TOOL if name in fields}
    return CHAT_PATH, render({**kept, "messages": b'[{"role":"user","content":"."}]', **_ONE_TOKEN})
