"""The page says what it shows, and says nothing that nobody measured."""

import re

from benchmarks.ttft import page
from benchmarks.ttft.cells import Cell
from benchmarks.ttft.measure import Sample
from benchmarks.ttft.summary import summarise

STAGES = {"front": 1.0, "prefill": 20.0, "return": 2.0}


def rendered(*targets: tuple[str, dict[str, float]]) -> str:
    cells = {Cell(name, "free", 30, False): [Sample(23.0, 0.0, stages)] * 3 for name, stages in targets}
    return page.render(summarise(cells), "pd-bench ttft", "2026-01-01")


def key_of(text: str) -> list[str]:
    (key,) = re.findall(r"<div class=key>(.*?)</div>", text)
    return re.findall(r"</i>([^<]*)<", key)


def test_every_colour_that_is_drawn_has_a_name() -> None:
    assert key_of(rendered(("ours", STAGES))) == ["front", "prefill", "return"]
    assert key_of(rendered(("ours", {**STAGES, "new": 3.0}))) == ["front", "prefill", "return", "new"]
    assert key_of(rendered(("ours", STAGES), ("relay", {}))) == ["front", "prefill", "return", page.OTHER_NAME]


def test_a_stage_that_a_server_does_not_tell_is_no_zero() -> None:
    row = "<td>free</td><td>%s</td><td>30</td>"
    text = rendered(("ours", {**STAGES, "front": 0.0}), ("relay", {}))
    assert row % "ours" + "<td>0.0</td><td>20.0</td><td>2.0</td>" in text
    assert row % "relay" + "<td></td><td></td><td></td>" in text


def test_a_drawing_says_what_it_shows_and_in_which_unit() -> None:
    for drawing in re.findall(r"<svg.*?</svg>", rendered(("ours", STAGES))):
        assert "aria-label='ours, prompts of 30 words'" in drawing
        assert all(label.endswith(" ms") for label in re.findall(r"text-anchor=middle>([^<]*)<", drawing))
        assert ">free</text>" in drawing


def test_a_narrow_screen_scrolls_drawings_and_tables_instead_of_shrinking_them() -> None:
    text = rendered(("ours", STAGES))
    assert f"min-width:{page.NARROWEST_PX}px" in text
    assert text.count("<div class=wide>") == text.count("<svg") + text.count("<table")
