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
OTHER = "#d7aefb"

BAR_HEIGHT, GAP, LABEL_WIDTH, PLOT_WIDTH, VALUE_WIDTH = 22, 10, 190, 640, 150

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#656d76;--line:#d0d7de;--paper:#ffffff}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--paper:#0d1117}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{max-width:1060px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2rem}p{color:var(--soft);margin:.2rem 0 1rem}
svg text{font:13px system-ui,sans-serif;fill:var(--ink)}svg .soft{fill:var(--soft)}svg line{stroke:var(--line)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88rem}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
.key{display:flex;flex-wrap:wrap;gap:.3rem 1rem;font-size:.85rem;color:var(--soft)}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.35rem;vertical-align:-1px}
code{font-size:.85rem}
"""


def render(rows: Sequence[Row], command: str, setting: str) -> str:
    """The whole document. `command` reproduces it; `setting` says where and when it was measured."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell.target, row.cell.prompt_words), []).append(row)
    longest_ms = max((row.p50.value for row in rows), default=1.0)
    # Targets of one prompt length side by side: those are compared.
    by_words = sorted(groups.items(), key=lambda group: group[0][1])
    parts = [_group(target, words, members, longest_ms) for (target, words), members in by_words]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>TTFT, taken apart</title><style>{STYLE}</style>"
        "<h1>Time to first token, taken apart</h1>"
        f"<p>Median of each stage; bars end at the median TTFT the client saw. {html.escape(setting)}</p>{_key(rows)}"
        f"{''.join(parts)}<h2>All numbers</h2>{_table(rows)}<p><code>{html.escape(command)}</code></p></html>"
    )


def _key(rows: Sequence[Row]) -> str:
    used = [name for name in STAGE_ORDER if any(row.stages_ms.get(name, 0) > 0 for row in rows)]
    items = [f"<span><i style='background:{COLOURS[name]}'></i>{name}</span>" for name in used]
    return f"<div class=key>{''.join(items)}</div>"


def _group(target: str, words: int, rows: Sequence[Row], longest_ms: float) -> str:
    height = len(rows) * (BAR_HEIGHT + GAP) + 26
    width = LABEL_WIDTH + PLOT_WIDTH + VALUE_WIDTH
    scale = PLOT_WIDTH / longest_ms
    bars = [_bar(row, number * (BAR_HEIGHT + GAP), scale) for number, row in enumerate(rows)]
    axis_y = height - 22
    ticks = [_tick(_nice_step(longest_ms) * number, axis_y, scale) for number in range(6)]
    drawn = "".join(tick for tick in ticks if tick)
    return (
        f"<h2>{html.escape(target)}, prompts of {words} words</h2>"
        f"<svg viewBox='0 0 {width} {height}' width='100%' role=img aria-label='stages of {html.escape(target)}'>"
        f"<line x1={LABEL_WIDTH} x2={LABEL_WIDTH + PLOT_WIDTH} y1={axis_y} y2={axis_y} />{drawn}{''.join(bars)}</svg>"
    )


def _bar(row: Row, y: float, scale: float) -> str:
    x: float = LABEL_WIDTH
    middle = y + BAR_HEIGHT * 0.7
    total_ms = sum(row.stages_ms.values())
    # Medians of stages do not quite sum to the median of the sum; the bar's length is the latter.
    fit = row.p50.value / total_ms if total_ms else 0.0
    parts = [f"<text x={LABEL_WIDTH - 10} y={middle} text-anchor=end>{html.escape(row.cell.name)}</text>"]
    if not total_ms:
        parts.append(f"<rect x={x} y={y} width={row.p50.value * scale:.1f} height={BAR_HEIGHT} fill='{OTHER}' rx=2 />")
    for name, median_ms in row.stages_ms.items():
        width = median_ms * fit * scale
        colour = COLOURS.get(name, OTHER)
        title = f"<title>{html.escape(name)} {median_ms:.1f} ms</title>"
        parts.append(f"<rect x={x:.1f} y={y} width={width:.1f} height={BAR_HEIGHT} fill='{colour}'>{title}</rect>")
        x += width
    ratio = f"  ×{row.to_free.value:.2f}" if row.to_free else ""
    end = LABEL_WIDTH + row.p50.value * scale + 8
    parts.append(f"<text x={end:.1f} y={middle}>{row.p50.value:.0f} ms<tspan class=soft>{ratio}</tspan></text>")
    return "".join(parts)


def _nice_step(longest_ms: float) -> float:
    for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000):
        if longest_ms / step <= 5:
            return step
    return 10000


def _tick(value_ms: float, y: float, scale: float) -> str:
    x = LABEL_WIDTH + value_ms * scale
    if x > LABEL_WIDTH + PLOT_WIDTH:
        return ""
    label = f"<text class=soft x={x:.1f} y={y + 18} text-anchor=middle>{value_ms:g}</text>"
    return f"<line x1={x:.1f} x2={x:.1f} y1={y} y2={y + 4} />{label}"


def _table(rows: Sequence[Row]) -> str:
    stages = [name for name in STAGE_ORDER if any(name in row.stages_ms for row in rows)]
    heads = ["cell", "target", "words", "n", "refused", "p50", "95 %", "p90", "p99", "× free", *stages]
    lines = []
    for row in rows:
        ratio = f"{row.to_free.value:.3f} ({row.to_free.low:.2f}-{row.to_free.high:.2f})" if row.to_free else ""
        interval = f"{row.p50.low:.0f}-{row.p50.high:.0f}"
        cells = [row.cell.name, row.cell.target, row.cell.prompt_words, row.num_samples, row.num_refused]
        cells += [f"{row.p50.value:.1f}", interval, f"{row.p90.value:.1f}", f"{row.p99.value:.1f}", ratio]
        cells += [f"{row.stages_ms.get(name, 0):.1f}" for name in stages]
        lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<div style='overflow-x:auto'><table><tr>{head}</tr>{''.join(lines)}</table></div>"
