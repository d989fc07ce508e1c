"""TTFT taken apart: what both engines report, fitted into the proxy's own interval (DESIGN §3).

Owns: the stages of a request and their arithmetic; they add up to the proxy's TTFT exactly.
Does not know: HTTP, metrics. Clocks of different processes are never subtracted: engines report durations only.

    received     first leg     last prefill leg   decode leg sent           first byte out
       |--front------|----retry------|--- P's leg ------|------ D's leg ----------|
                                     front queue_p prefill handoff
                                                        grammar_d queue_d pull first return
"""

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """One request's TTFT.

    Attributes:
        ttft_s: from the request's arrival to its first byte leaving, in the proxy.
        stages_s: stage → seconds; the values sum to `ttft_s`.
    """

    ttft_s: float
    stages_s: Mapping[str, float]


def take_apart(
    track: PhaseTrack, prefill_s: Mapping[str, float], decode_s: Mapping[str, float], *, is_stream: bool
) -> Breakdown:
    """Fit both reports into the track of a request that has reached STREAMING.

    Args:
        track: when its phases began.
        prefill_s: P's stages, empty when there was no prefill leg or it reported nothing.
        decode_s: D's stages.
        is_stream: an answer in one piece arrives long after its first token; D's report, which ends there, then says
            when that was, and what came after is no part of the result.
    """
    received_s = track.first_s[ProxyPhase.RECEIVED]
    first_byte_s = track.last_s[ProxyPhase.STREAMING]
    decode_sent_s = track.last_s[ProxyPhase.HANDED_OFF]
    first_decode_s = track.first_s[ProxyPhase.HANDED_OFF]
    if not is_stream and decode_s:
        first_byte_s = min(first_byte_s, decode_sent_s + sum(decode_s.values()))
    stages_s = dict.fromkeys(STAGES, 0.0)
    if ProxyPhase.PREFILLING in track.first_s:
        stages_s["front"] = track.first_s[ProxyPhase.PREFILLING] - received_s
        stages_s["retry"] = track.last_s[ProxyPhase.PREFILLING] - track.first_s[ProxyPhase.PREFILLING]
        _fit(stages_s, first_decode_s - track.last_s[ProxyPhase.PREFILLING], prefill_s, _P_STAGES, _P_RESIDUAL)
    else:
        stages_s["front"] = first_decode_s - received_s
    stages_s["retry"] += decode_sent_s - first_decode_s
    _fit(stages_s, first_byte_s - decode_sent_s, decode_s, _D_STAGES, _D_RESIDUAL)
    return Breakdown(ttft_s=first_byte_s - received_s, stages_s=stages_s)


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
    """The `timeline` member of an answer: milliseconds per stage, their sum, and `notes` about the way it took."""
    stages_ms = {name: round(value * 1000, 3) for name, value in breakdown.stages_s.items()}
    return msgspec.json.encode({"ttft_ms": round(breakdown.ttft_s * 1000, 3), "stages_ms": stages_ms, **notes})
