"""TTFT taken apart: what both engines report, fitted into the proxy's own interval (DESIGN §3).

Owns: the stages of a request and their arithmetic; they add up to the proxy's TTFT exactly.
Does not know: HTTP, metrics. Clocks of different processes are never subtracted: engines report durations only.

    received     first leg     last prefill leg   decode leg sent           first byte out
       |--front------|----retry------|--- P's leg ------|------ D's leg ----------|
                                     front queue_p prefill handoff
                                                        grammar_d queue_d pull first return [decode]

An answer in one piece leaves after its last token: what D spent after the first one is `decode`, no part of the TTFT.
"""

from collections.abc import Mapping

import msgspec

from proxy.phase import PhaseTrack, ProxyPhase

STAGES = (
    "front",
    "retry",
    "queue_p",
    "grammar_p",
    "prefill",
    "handoff",
    "grammar_d",
    "queue_d",
    "pull",
    "first",
    "return",
)
"""In the order in which they happen. `retry` is time lost on legs that failed; the others are named in DESIGN §3."""

DECODE = "decode"

# What an engine calls a stage → what it is in the life of the request; the rest of the leg is the residual.
_P_STAGES = {
    "front": "front",
    "grammar": "grammar_p",
    "queue": "queue_p",
    "schedule": "queue_p",
    "compute": "prefill",
    "handoff": "handoff",
    "answer": "handoff",
}
_D_STAGES = {
    "front": "handoff",
    "grammar": "grammar_d",
    "queue": "queue_d",
    "schedule": "queue_d",
    "pull": "pull",
    "compute": "first",
    "answer": "return",
}
_P_RESIDUAL = "handoff"
_D_RESIDUAL = "return"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """One request until its first byte leaves the proxy.

    Attributes:
        ttft_s: from the request's arrival to its first byte leaving, without `decode_s`; None for an answer in one
            piece by an engine that does not say when its first token was there.
        stages_s: stage → seconds; the values sum to `ttft_s`.
        decode_s: what D spent after the first token of an answer in one piece (all of its leg where it does not say);
            None for streams.
    """

    ttft_s: float | None
    stages_s: Mapping[str, float]
    decode_s: float | None = None

    @property
    def total_s(self) -> float:
        """From the request's arrival to its first byte leaving, everything counted."""
        return sum(self.stages_s.values()) + (self.decode_s or 0.0)

    def shown_s(self) -> dict[str, float]:
        """Stages that took any time, `decode` among them; they sum to `total_s`."""
        return {name: value for name, value in {**self.stages_s, DECODE: self.decode_s or 0.0}.items() if value > 0}


def take_apart(
    track: PhaseTrack, prefill_s: Mapping[str, float], decode_s: Mapping[str, float], *, is_stream: bool
) -> Breakdown:
    """Fit both reports into the track of a request that has reached STREAMING.

    Args:
        track: when its phases began.
        prefill_s: P's stages, empty when there was no prefill leg or it reported nothing.
        decode_s: D's stages.
        is_stream: an answer in one piece arrives long after its first token; D's report then says how long (`decode`).
    """
    received_s = track.first_s[ProxyPhase.RECEIVED]
    first_byte_s = track.last_s[ProxyPhase.STREAMING]
    decode_sent_s = track.last_s[ProxyPhase.HANDED_OFF]
    first_decode_s = track.first_s[ProxyPhase.HANDED_OFF]
    leg_s = first_byte_s - decode_sent_s
    after_first_s = 0.0 if is_stream else _after_first_token_s(leg_s, decode_s)
    stages_s = dict.fromkeys(STAGES, 0.0)
    if ProxyPhase.PREFILLING in track.first_s:
        stages_s["front"] = track.first_s[ProxyPhase.PREFILLING] - received_s
        stages_s["retry"] = track.last_s[ProxyPhase.PREFILLING] - track.first_s[ProxyPhase.PREFILLING]
        _fit(stages_s, first_decode_s - track.last_s[ProxyPhase.PREFILLING], prefill_s, _P_STAGES, _P_RESIDUAL)
    else:
        stages_s["front"] = first_decode_s - received_s
    stages_s["retry"] += decode_sent_s - first_decode_s
    _fit(stages_s, leg_s - after_first_s, decode_s, _D_STAGES, _D_RESIDUAL)
    return Breakdown(
        ttft_s=first_byte_s - received_s - after_first_s if is_stream or decode_s else None,
        stages_s=stages_s,
        decode_s=None if is_stream else after_first_s,
    )


def _after_first_token_s(leg_s: float, reported_s: Mapping[str, float]) -> float:
    """How much of D's leg came after its first token; without a word about it, all that D did not account for."""
    to_first_token_s = sum(max(0.0, value) for name, value in reported_s.items() if name in _D_STAGES)
    said_s = reported_s.get(DECODE, leg_s - to_first_token_s)
    return min(max(0.0, said_s), leg_s)


def _fit(
    stages_s: dict[str, float], leg_s: float, reported_s: Mapping[str, float], names: Mapping[str, str], residual: str
) -> None:
    """Spread one leg over its stages; a report longer than the leg (rounding, a stopped clock) is shrunk to fit."""
    known_s = {name: max(0.0, value) for name, value in reported_s.items() if name in names}
    total_s = sum(known_s.values())
    scale = min(1.0, leg_s / total_s) if total_s > 0 else 1.0
    for name, value in known_s.items():
        stages_s[names[name]] += value * scale
    stages_s[residual] += leg_s - total_s * scale


def to_json(breakdown: Breakdown, notes: Mapping[str, object]) -> bytes:
    """The `timeline` member of an answer: milliseconds per stage, the TTFT, and `notes` about the way it took.

    Stages of a stream sum to `ttft_ms`; those of an answer in one piece to `total_ms`, without `decode` to `ttft_ms`.
    """
    members: dict[str, object] = {"ttft_ms": None if breakdown.ttft_s is None else _ms(breakdown.ttft_s)}
    stages_s = breakdown.stages_s
    if breakdown.decode_s is not None:
        members["total_ms"] = _ms(breakdown.total_s)
        stages_s = {**stages_s, DECODE: breakdown.decode_s}
    stages_ms = {name: _ms(value) for name, value in stages_s.items()}
    return msgspec.json.encode({**members, "stages_ms": stages_ms, **notes})


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
