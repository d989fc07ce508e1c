"""Log probabilities of the prompt: P computes them, D never sees the prompt's logits, the client wants one answer.

Owns: who is asked for what, and joining P's part with D's choices (completions and chats, answers in one piece).
Does not know: legs, engines. Streams and answers without output are D's alone: `reason_against_prefill` in the journey.
"""

from collections.abc import Mapping

import msgspec

from common.errors import UpstreamBroken
from proxy.call import CHAT_PATH, NULL, Fields

_TRUE = b"true"
_FALSE = (NULL, b"false")
_PROMPT_LOGPROBS = "prompt_logprobs"


class _Logprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[msgspec.Raw]
    tokens: list[msgspec.Raw]
    top_logprobs: list[msgspec.Raw] | None = None


_Members = dict[str, msgspec.Raw]
_members = msgspec.json.Decoder(_Members)
_choices = msgspec.json.Decoder(list[_Members])
_text = msgspec.json.Decoder(str)
_logprobs = msgspec.json.Decoder(_Logprobs | None)


def echoes_logprobs(fields: Fields) -> bool:
    """Whether `echo` makes `logprobs` speak of the prompt, too."""
    has_logprobs = bytes(fields.get("logprobs", NULL)) not in _FALSE
    return has_logprobs and bytes(fields.get("echo", NULL)) == _TRUE


def are_wanted(fields: Fields) -> bool:
    """Whether the answer needs log probabilities of the prompt's own tokens."""
    return bytes(fields.get(_PROMPT_LOGPROBS, NULL)) != NULL or echoes_logprobs(fields)


def can_be_joined(fields: Fields) -> bool:
    """Whether P's part and D's part make one answer: not in streams, nor where no output is wanted at all."""
    is_stream = bytes(fields.get("stream", NULL)) == _TRUE
    return not is_stream and bytes(fields.get("max_tokens", NULL)) != b"0"


def without(fields: Fields) -> Fields:
    """D's fields: nothing that asks for the prompt's log probabilities."""
    dropped = {_PROMPT_LOGPROBS, "echo"} if echoes_logprobs(fields) else {_PROMPT_LOGPROBS}
    return {name: raw for name, raw in fields.items() if name not in dropped}


def join(path: str, fields: Fields, from_p: bytes, from_d: bytes) -> bytes:
    """D's answer with P's part in the place where one engine alone would have put it.

    Raises:
        UpstreamBroken: one of the answers is not what its request asked for.
    """
    try:
        p, d = _members.decode(from_p), _members.decode(from_d)
        if path == CHAT_PATH:
            return msgspec.json.encode({**d, _PROMPT_LOGPROBS: p.get(_PROMPT_LOGPROBS, msgspec.Raw(NULL))})
        (prompt,), choices = _choices.decode(p["choices"]), _choices.decode(d["choices"])
        if echoes_logprobs(fields):
            _prepend_echo(prompt, choices)
        if _PROMPT_LOGPROBS in prompt and bytes(fields.get(_PROMPT_LOGPROBS, NULL)) != NULL:
            choices[0][_PROMPT_LOGPROBS] = prompt[_PROMPT_LOGPROBS]
        return msgspec.json.encode({**d, "choices": choices})
    except (msgspec.MsgspecError, KeyError, ValueError, IndexError) as error:
        raise UpstreamBroken("the engines' answers do not fit together") from error


def _prepend_echo(prompt: Mapping[str, msgspec.Raw], choices: list[_Members]) -> None:
    """P's choice is the prompt and one token of its own, which nobody wants; the rest goes before every choice of D."""
    before = _logprobs.decode(prompt["logprobs"])
    if before is None:
        raise ValueError("no log probabilities")
    text = _text.decode(prompt["text"])[: before.text_offset[-1]]
    for choice in choices:
        own = _logprobs.decode(choice["logprobs"])
        if own is None:
            raise ValueError("no log probabilities")
        joined = _Logprobs(
            text_offset=before.text_offset[:-1] + [offset + len(text) for offset in own.text_offset],
            token_logprobs=before.token_logprobs[:-1] + own.token_logprobs,
            tokens=before.tokens[:-1] + own.tokens,
            top_logprobs=None
            if before.top_logprobs is None or own.top_logprobs is None
            else before.top_logprobs[:-1] + own.top_logprobs,
        )
        choice["text"] = msgspec.Raw(msgspec.json.encode(text + _text.decode(choice["text"])))
        choice["logprobs"] = msgspec.Raw(msgspec.json.encode(joined))
