"""Spans of one journey: the request, its legs, and inside each leg the stages that the engine reported.

Owns: turning phases and reports into spans. An engine's stages are durations; they are laid end to end into the middle
of their leg, what the leg took beyond them (HTTP on both ways) half before and half after. Engines that trace by
themselves make these spans, exactly placed, and get no report here.
Does not know: how spans are sent.
"""

from collections.abc import Iterator, Mapping

from common.tracing.context import TraceContext, new_span_id
from common.tracing.span import Span, Value
from proxy.phase import PhaseTrack, ProxyPhase


def journey_spans(
    context: TraceContext,
    name: str,
    track: PhaseTrack,
    reports_s: tuple[Mapping[str, float], Mapping[str, float]],
    attributes: Mapping[str, Value],
) -> list[Span]:
    """All spans of a journey that is over.

    Args:
        context: of the request.
        name: of the request's span.
        track: its phases.
        reports_s: stages reported by P and by D, empty where nothing was.
        attributes: of the request's span.
    """
    first_s, last_s = track.first_s, track.last_s
    end_s = max(last_s.values())
    is_error = track.phase is ProxyPhase.FAILED
    spans = [
        Span(
            context=context,
            span_id=context.span_id,
            parent_id=context.parent_id,
            name=name,
            start_s=first_s[ProxyPhase.RECEIVED],
            end_s=end_s,
            is_server=True,
            is_error=is_error,
            attributes=attributes,
        )
    ]
    decode_s = last_s.get(ProxyPhase.HANDED_OFF)
    if (prefill_s := last_s.get(ProxyPhase.PREFILLING)) is not None:
        until_s = first_s.get(ProxyPhase.HANDED_OFF, end_s)
        spans += _leg(context, "prefill", (prefill_s, until_s), (until_s, reports_s[0]))
    if decode_s is not None:
        until_s = last_s.get(ProxyPhase.STREAMING, end_s)
        spans += _leg(context, "decode", (decode_s, end_s), (until_s, reports_s[1]))
    return spans


def _leg(
    context: TraceContext, name: str, times_s: tuple[float, float], report: tuple[float, Mapping[str, float]]
) -> Iterator[Span]:
    """A leg's span and its stages; `report` is when the first answer came, and what the engine did until then."""
    start_s, end_s = times_s
    answered_s, stages_s = report
    span_id = context.leg_span_ids[name]
    yield Span(context=context, span_id=span_id, parent_id=context.span_id, name=name, start_s=start_s, end_s=end_s)
    total_s = sum(stages_s.values())
    scale = min(1.0, (answered_s - start_s) / total_s) if total_s > 0 else 1.0
    at_s = start_s + max(0.0, answered_s - start_s - total_s * scale) / 2
    for stage, duration_s in stages_s.items():
        until_s = at_s + duration_s * scale
        yield Span(
            context=context,
            span_id=new_span_id(),
            parent_id=span_id,
            name=f"{name}.{stage}",
            start_s=at_s,
            end_s=until_s,
        )
        at_s = until_s
