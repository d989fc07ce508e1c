"""The page: stacked bars of where each cell's TTFT went, as one self-contained HTML file.

Owns: layout and colours. No script, no external resource; readable in light and dark.
"""

import html
from collections.abc import Sequence

from benchmarks.ttft.summary import STAGE_ORDER, Row

# One hue per owner of the time: P blue, grammar red, D green, the way in and out grey.
COLOURS = {
    "front": "#9aa0a6",
    "queue_p": "#bcd6f5",
    "grammar_p": "#b3261e",
    "prefill": "#3b7dd8",
    "handoff": "#8fb8ea",
    "grammar_d": "#e8710a",
    "queue_d": "#c9e7cf",
    "pull": "#57a773",
    "first": "#2e7d4f",
    "return": "#c4c7cc",
}
OTHER, OTHER_NAME = "#d7aefb", "not taken apart"
PREFILL = "prefill"

BAR_HEIGHT, GAP, PLOT_WIDTH, MARGIN, AXIS_HEIGHT = 22, 10, 640, 30, 26
VALUE_END, RATIO_END, PLOT_START = 165, 223, 235
"""Left of the bars: the cell's name from 0 on, milliseconds, ratio."""

NARROWEST_PX = 700
"""Below, drawings scroll instead of shrinking: their letters would be too small to read. What scrolls first into sight
is what each bar stands for."""

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#656d76;--line:#d0d7de;--paper:#ffffff}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--paper:#0d1117}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{max-width:1060px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin:2.2rem 0 .2rem}
h3{font-size:.95rem;margin:1.2rem 0 .3rem}p{color:var(--soft);margin:.2rem 0 1rem}
svg{display:block;min-width:__NARROWEST__px}svg line{stroke:var(--line)}
svg text{font:13px system-ui,sans-serif;font-variant-numeric:tabular-nums;fill:var(--ink)}
svg .soft{fill:var(--soft)}svg .free{stroke:var(--soft);stroke-dasharray:3 3}
svg .range{stroke:var(--ink)}svg .rim{stroke:var(--paper);stroke-width:3px;opacity:.6}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.85rem;white-space:nowrap}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{position:sticky;left:0;background:var(--paper)}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
.key{position:sticky;top:0;z-index:1;background:var(--paper);padding:.5rem 0}
.key{display:flex;flex-wrap:wrap;gap:.3rem 1rem;font-size:.85rem;color:var(--soft)}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.35rem;vertical-align:-1px}
code{font-size:.85rem;overflow-wrap:anywhere}
""".replace("__NARROWEST__", str(NARROWEST_PX))

Groups = Sequence[tuple[tuple[str, int], list[Row]]]


def render(rows: Sequence[Row], command: str, setting: str) -> str:
    """The whole document. `command` reproduces it; `setting` says where and when it was measured."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.cell.target, row.cell.prompt_words), []).append(row)
    # Targets of one prompt length side by side: those are compared.
    groups = sorted(found.items(), key=lambda group: group[0][1])
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>TTFT, taken apart</title><style>{STYLE}</style>"
        "<h1>Time to first token, taken apart</h1>"
        "<p>Median of each stage; bars end at the median TTFT the client saw, with its 95 % interval. "
        f"Dashed: free text. × is over free text. {html.escape(setting)}</p>{_key(rows)}"
        f"{_whole(groups)}{_without_prefill(groups)}"
        f"<h2>All numbers</h2><h3>TTFT, ms</h3>{_ttft_table(rows)}<h3>Stages, median ms</h3>{_stage_table(rows)}"
        f"<p style='margin-top:2rem'><code>{html.escape(command)}</code></p></html>"
    )


def _whole(groups: Groups) -> str:
    longest_ms = max((row.p50.high for _, rows in groups for row in rows), default=1.0)
    drawn = [_drawing(key, _Plot(rows, longest_ms, skipped="")) for key, rows in groups]
    return f"<h2>The whole TTFT</h2>{''.join(drawn)}"


def _without_prefill(groups: Groups) -> str:
    """The prefill dwarfs what a constraint adds: the rest, drawn large."""
    if not any(row.stages_ms.get(PREFILL) for _, rows in groups for row in rows):
        return ""
    longest_ms = max(_shown_ms(row, PREFILL) for _, rows in groups for row in rows)
    drawn = [_drawing(key, _Plot(rows, longest_ms, skipped=PREFILL)) for key, rows in groups]
    return f"<h2>Everything but the prefill</h2>{''.join(drawn)}"


def _drawing(key: tuple[str, int], plot: "_Plot") -> str:
    heading = f"{html.escape(key[0])}, prompts of {key[1]} words"
    return f"<h3>{heading}</h3><div class=wide>{plot.svg(heading)}</div>"


def _key(rows: Sequence[Row]) -> str:
    used = [name for name in STAGE_ORDER if any(row.stages_ms.get(name, 0) > 0 for row in rows)]
    others = sorted({name for row in rows for name, ms in row.stages_ms.items() if ms > 0} - set(COLOURS))
    colours = [(name, COLOURS[name]) for name in used] + [(name, OTHER) for name in others]
    if any(not any(row.stages_ms.values()) for row in rows):
        colours.append((OTHER_NAME, OTHER))
    items = [f"<span><i style='background:{colour}'></i>{html.escape(name)}</span>" for name, colour in colours]
    return f"<div class=key>{''.join(items)}</div>"


def _shown_ms(row: Row, skipped: str) -> float:
    """Length of a row's bar without the stage `skipped`; medians of stages do not quite sum to the median TTFT."""
    return row.p50.value if not skipped else sum(ms for name, ms in row.stages_ms.items() if name != skipped)


class _Plot:
    """Bars of one group.

    Args:
        rows: one bar each.
        longest_ms: what the full width stands for.
        skipped: a stage that is left out; then there is no interval and no ratio, which are of the whole.
    """

    def __init__(self, rows: Sequence[Row], longest_ms: float, *, skipped: str) -> None:
        self._rows = rows
        self._longest_ms = longest_ms
        self._scale = PLOT_WIDTH / longest_ms
        self._skipped = skipped

    def svg(self, label: str) -> str:
        """The drawing; `label` is HTML and says what it shows."""
        axis_y = len(self._rows) * (BAR_HEIGHT + GAP)
        width, height = PLOT_START + PLOT_WIDTH + MARGIN, axis_y + AXIS_HEIGHT
        bars = [self._bar(row, number * (BAR_HEIGHT + GAP)) for number, row in enumerate(self._rows)]
        step = _nice_step(self._longest_ms)
        ticks = [self._tick(step * number, axis_y) for number in range(6)]
        return (
            f"<svg viewBox='0 0 {width} {height}' width='100%' role=img aria-label='{label}'>"
            f"<line x1={PLOT_START} x2={PLOT_START + PLOT_WIDTH} y1={axis_y} y2={axis_y} />"
            f"{''.join(ticks)}{''.join(bars)}{self._free_line(axis_y)}</svg>"
        )

    def _x(self, value_ms: float) -> float:
        return PLOT_START + value_ms * self._scale

    def _free_line(self, axis_y: float) -> str:
        free = next((row for row in self._rows if row.cell.kind == "free"), None)
        if free is None:
            return ""
        x = self._x(_shown_ms(free, self._skipped))
        return f"<line class=free x1={x:.1f} x2={x:.1f} y1=0 y2={axis_y} />"

    def _bar(self, row: Row, y: float) -> str:
        parts = [self._texts(row, y), *self._stages(row, y, _shown_ms(row, self._skipped))]
        if not self._skipped:
            low, high, at = self._x(row.p50.low), self._x(row.p50.high), y + BAR_HEIGHT / 2
            place = f"x1={low:.1f} x2={high:.1f} y1={at} y2={at}"
            parts.append(f"<line class=rim {place} /><line class=range {place} />")
        return "".join(parts)

    def _texts(self, row: Row, y: float) -> str:
        ratio = f"×{row.to_free.value:.2f}" if row.to_free and not self._skipped else ""
        middle, value = y + BAR_HEIGHT * 0.7, f"{_shown_ms(row, self._skipped):.0f} ms"
        return (
            f"<text y={middle}>{html.escape(row.cell.name)}</text>"
            f"<text x={VALUE_END} y={middle} text-anchor=end>{value}</text>"
            f"<text class=soft x={RATIO_END} y={middle} text-anchor=end>{ratio}</text>"
        )

    def _stages(self, row: Row, y: float, length_ms: float) -> list[str]:
        stages = {name: ms for name, ms in row.stages_ms.items() if name != self._skipped}
        total_ms = sum(stages.values())
        if not total_ms:
            size = f"width={length_ms * self._scale:.1f} height={BAR_HEIGHT}"
            return [f"<rect x={PLOT_START} y={y} {size} fill='{OTHER}' rx=2 />"]
        parts, start_ms = [], 0.0
        for name, median_ms in stages.items():
            drawn_ms = median_ms * length_ms / total_ms
            size = f"width={drawn_ms * self._scale:.1f} height={BAR_HEIGHT}"
            title = f"<title>{html.escape(name)} {median_ms:.1f} ms</title>"
            place = f"x={self._x(start_ms):.1f} y={y}"
            parts.append(f"<rect {place} {size} fill='{COLOURS.get(name, OTHER)}'>{title}</rect>")
            start_ms += drawn_ms
        return parts

    def _tick(self, value_ms: float, y: float) -> str:
        x = self._x(value_ms)
        if x > PLOT_START + PLOT_WIDTH:
            return ""
        label = f"<text class=soft x={x:.1f} y={y + 18} text-anchor=middle>{value_ms:g} ms</text>"
        return f"<line x1={x:.1f} x2={x:.1f} y1={y} y2={y + 4} />{label}"


def _nice_step(longest_ms: float) -> float:
    for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000):
        if longest_ms / step <= 5:
            return step
    return 10000


def _ttft_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        ratio = f"{row.to_free.value:.3f} ({row.to_free.low:.3f}-{row.to_free.high:.3f})" if row.to_free else ""
        numbers = [f"{row.p50.value:.1f} ({row.p50.low:.0f}-{row.p50.high:.0f})"]
        numbers += [f"{row.p90.value:.1f}", f"{row.p99.value:.1f}", ratio]
        lines.append([*_names(row), str(row.num_samples), str(row.num_refused), *numbers])
    return _table(["cell", "target", "words", "n", "refused", "p50 (95 %)", "p90", "p99", "× free (95 %)"], lines)


def _stage_table(rows: Sequence[Row]) -> str:
    stages = [name for name in STAGE_ORDER if any(name in row.stages_ms for row in rows)]
    lines = [[*_names(row), *(_in_ms(row.stages_ms.get(name)) for name in stages)] for row in rows]
    return _table(["cell", "target", "words", *stages], lines)


def _in_ms(value_ms: float | None) -> str:
    """Nothing where nobody told it: that is not the same as 0."""
    return "" if value_ms is None else f"{value_ms:.1f}"


def _names(row: Row) -> list[str]:
    return [row.cell.name, row.cell.target, str(row.cell.prompt_words)]


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"
