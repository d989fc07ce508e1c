import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import ManualClock
from proxy.phase import PhaseTrack, ProxyPhase
from proxy.ttft import STAGES, take_apart, to_json

SECONDS = st.floats(0, 10, allow_subnormal=False)
ENGINE = st.dictionaries(
    st.sampled_from(
        ["front", "grammar", "queue", "schedule", "pull", "compute", "handoff", "answer", "decode", "strange"]
    ),
    SECONDS,
)
WAY = [ProxyPhase.ROUTED, ProxyPhase.PREFILLING, ProxyPhase.HANDED_OFF, ProxyPhase.STREAMING]


def track(*steps: tuple[ProxyPhase, float]) -> PhaseTrack:
    clock = ManualClock(100.0)
    result = PhaseTrack(clock, clock.now_s())
    for phase, seconds in steps:
        clock.advance(seconds)
        result.move_to(phase)
    return result


@given(st.lists(SECONDS, min_size=4, max_size=4), ENGINE, ENGINE, st.booleans(), st.booleans())
def test_the_stages_always_add_up_to_the_ttft(
    durations: list[float], prefill_s: dict[str, float], decode_s: dict[str, float], is_stream: bool, skips_p: bool
) -> None:
    steps = [s for s in zip(WAY, durations, strict=True) if not (skips_p and s[0] is ProxyPhase.PREFILLING)]
    breakdown = take_apart(track(*steps), {} if skips_p else prefill_s, decode_s, is_stream=is_stream)
    total_s = sum(seconds for _, seconds in steps)
    assert breakdown.total_s == pytest.approx(total_s, abs=1e-9)
    assert sum(breakdown.shown_s().values()) == pytest.approx(total_s, abs=1e-9)
    if breakdown.ttft_s is not None:
        assert sum(breakdown.stages_s.values()) == pytest.approx(breakdown.ttft_s, abs=1e-9)
    assert (breakdown.ttft_s is None) == (not is_stream and not decode_s)
    assert (breakdown.decode_s is None) == is_stream
    assert all(value >= -1e-9 for value in breakdown.stages_s.values())
    assert tuple(breakdown.stages_s) == STAGES


def test_what_an_engine_did_not_account_for_is_handoff_on_p_and_return_on_d() -> None:
    way = track(*zip(WAY, [0.5, 0.5, 3.0, 4.0], strict=True))
    breakdown = take_apart(
        way, {"queue": 0.5, "compute": 2.0}, {"grammar": 0.5, "pull": 1.0, "compute": 0.5}, is_stream=True
    )
    shown = {name: value for name, value in breakdown.stages_s.items() if value}
    assert shown == {
        "front": 1.0,
        "queue_p": 0.5,
        "prefill": 2.0,
        "handoff": 0.5,
        "grammar_d": 0.5,
        "pull": 1.0,
        "first": 0.5,
        "return": 2.0,
    }
    assert breakdown.ttft_s == 8.0


def test_time_lost_on_failed_legs_is_a_stage_of_its_own() -> None:
    way = track(
        (ProxyPhase.ROUTED, 0),
        (ProxyPhase.PREFILLING, 1),
        (ProxyPhase.PREFILLING, 2),
        (ProxyPhase.HANDED_OFF, 3),
        (ProxyPhase.HANDED_OFF, 4),
        (ProxyPhase.STREAMING, 5),
    )
    breakdown = take_apart(way, {"compute": 3.0}, {"compute": 5.0}, is_stream=True)
    assert {n: v for n, v in breakdown.stages_s.items() if v} == {"front": 1, "retry": 6, "prefill": 3, "first": 5}


D_REPORT = {"pull": 0.5, "compute": 1.0, "answer": 0.25}
WHOLE_WAY = list(zip(WAY, [0, 0, 1.0, 10.0], strict=True))


def test_generating_the_rest_of_an_answer_in_one_piece_is_no_part_of_its_ttft_and_the_way_back_is() -> None:
    breakdown = take_apart(track(*WHOLE_WAY), {}, {**D_REPORT, "decode": 8.0}, is_stream=False)
    assert breakdown.ttft_s == pytest.approx(3.0)
    assert breakdown.stages_s["return"] == pytest.approx(0.25 + 0.25)
    assert (breakdown.decode_s, breakdown.total_s) == (8.0, pytest.approx(11.0))


def test_an_engine_that_reports_stages_but_no_decoding_leaves_all_the_rest_to_it() -> None:
    breakdown = take_apart(track(*WHOLE_WAY), {}, D_REPORT, is_stream=False)
    assert breakdown.ttft_s == pytest.approx(2.75)
    assert breakdown.decode_s == pytest.approx(8.25)


def test_the_ttft_of_an_answer_in_one_piece_is_unknown_where_the_engine_says_nothing() -> None:
    breakdown = take_apart(track(*WHOLE_WAY), {}, {}, is_stream=False)
    assert (breakdown.ttft_s, breakdown.decode_s, breakdown.total_s) == (None, 10.0, 11.0)


def test_the_timeline_of_an_answer_in_one_piece_shows_both_times_and_that_of_a_stream_one() -> None:
    report = {**D_REPORT, "decode": 8.0}
    whole = msgspec.json.decode(to_json(take_apart(track(*WHOLE_WAY), {}, report, is_stream=False), {"kind": "free"}))
    assert (whole["ttft_ms"], whole["total_ms"], whole["kind"]) == (3000.0, 11000.0, "free")
    assert sum(whole["stages_ms"].values()) == whole["total_ms"]
    assert sum(whole["stages_ms"].values()) - whole["stages_ms"]["decode"] == whole["ttft_ms"]
    stream = msgspec.json.decode(to_json(take_apart(track(*WHOLE_WAY), {}, report, is_stream=True), {}))
    assert set(stream) == {"ttft_ms", "stages_ms"}
    assert tuple(stream["stages_ms"]) == STAGES
