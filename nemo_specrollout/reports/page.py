# SPDX-License-Identifier: Apache-2.0
"""Parts of report pages: cards, charts, tables and lists, with their style. Every text is escaped here."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from nemo_specrollout.reports.records import Record, number

NONE = "\N{EN DASH}"

PAGE = Template("""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>$title</title>
<style>$css</style></head>
<body><main>
<h1>$title</h1>
<p class="status">$status</p>
$body
</main></body>
</html>
""")

CSS = """
:root { color-scheme: light }
body { margin: 0; background: #f6f8fa; color: #24292f;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
main { max-width: 936px; margin: 0 auto; padding: 28px 24px 48px }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 16px; margin: 0 0 2px }
.status { color: #57606a; margin: 2px 0 18px }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px }
.card, section { background: #fff; border: 1px solid #d8dee4; border-radius: 8px }
.card { padding: 12px 14px } .card p { margin: 0; font-size: 12.5px; line-height: 1.35; color: #57606a }
.card .value { font-size: 18px; font-weight: 600; line-height: 1.4; letter-spacing: -0.02em; color: #24292f }
.card .value { white-space: nowrap }
.card.good .value { color: #0072b2 }
.card.bad { background: #fff1ee; border-color: #cf222e } .card.bad .value, .alarms { color: #b3141f }
section { margin-top: 14px; padding: 16px 18px; min-width: 0 }
section p { margin: 0 0 10px; color: #57606a; font-size: 13.5px }
ul { margin: 4px 0 0; padding-left: 20px; font-size: 13.5px } section.alarms { border-color: #cf222e }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 0 14px } .wide { grid-column: 1 / -1 }
svg { display: block; width: 100%; height: auto } svg text { font-family: inherit !important }
.scroll { overflow: auto; max-height: 520px }
table { border-collapse: collapse; width: 100%; white-space: nowrap }
th, td { font-size: 12.5px; font-variant-numeric: tabular-nums }
th { position: sticky; top: 0; background: #fff; color: #57606a; font-weight: 600; vertical-align: bottom }
th, td { text-align: right; padding: 3px 0 3px 10px; border-bottom: 1px solid #eaeef2 } td.bad { color: #b3141f }
pre, code { font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }
pre { background: #f6f8fa; padding: 10px 12px; margin: 6px 0; overflow-x: auto }
summary { cursor: pointer; font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 6px 0 0; font-size: 13.5px }
dt { color: #57606a } dd { margin: 0; overflow-wrap: anywhere }
@media (max-width: 720px) { .charts { grid-template-columns: 1fr } }
"""

IsBad = Callable[[Record, str], bool]


def page(title: str, status: str, parts: Iterable[str]) -> str:
    """Returns a whole page: one file without script or outside resource. `parts` are HTML."""
    body = "\n".join(parts)
    return PAGE.substitute(title=escape(title), css=CSS, status=escape(status), body=body)


def cards(of: Iterable[str]) -> str:
    return f'<div class="cards">{"".join(of)}</div>'


def card(title: str, value: str, note: str, kind: str = "") -> str:
    """Returns a card with a value and a note. `kind` is "good", "bad" or empty."""
    title, value, note = escape(title), escape(value), escape(note)
    return f'<div class="card {kind}"><p>{title}</p><p class="value">{value}</p><p>{note}</p></div>'


def step_list(title: str, of: Iterable[tuple[Any, str]], kind: str = "") -> str:
    """Returns a section with a sentence for some steps, or nothing if there are none. `kind` is "alarms" or empty."""
    items = "".join(f"<li>step {escape(str(step))}: {escape(text)}</li>" for step, text in of)
    return f'<section class="{kind}"><h2>{escape(title)}</h2><ul>{items}</ul></section>' if items else ""


def charts(of: Iterable[tuple[str, str, str, bool]]) -> str:
    """Returns sections of charts, two in a row. Each is a title, an SVG, an explanation and whether it fills a row."""
    return f'<div class="charts">{"".join(chart(*shown) for shown in of)}</div>'


def chart(title: str, svg: str, how_to_read: str, is_wide: bool = True) -> str:
    label, kind = escape(title), "wide" if is_wide else ""
    drawing = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f'<section class="{kind}"><h2>{label}</h2><p>{escape(how_to_read)}</p>{drawing}</section>'


def table(title: str, columns: Mapping[str, tuple[str, str]], steps: Sequence[Record], is_bad: IsBad) -> str:
    """Returns a table with a row for each step. `columns` maps headings (HTML) to a key of the step and a format."""
    head = "".join(f"<th>{heading}</th>" for heading in columns)
    rows = "".join(f"<tr>{''.join(_cell(step, *column, is_bad) for column in columns.values())}</tr>" for step in steps)
    return (
        f'<section><h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _cell(step: Record, key: str, spec: str, is_bad: IsBad) -> str:
    bad = ' class="bad"' if is_bad(step, key) else ""
    return f"<td{bad}>{in_digits(number(step, key), spec)}</td>"


def in_digits(value: float, spec: str, unit: str = "") -> str:
    """Returns a number in its format, with its unit, or a dash for NaN."""
    if not math.isfinite(value):
        return NONE
    return format(int(value) if spec.endswith("d") else value, spec) + unit


def folded(summary: str, text: str) -> str:
    """Returns a section that opens to `text`."""
    return f"<section><details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details></section>"


def facts(title: str, of: Mapping[str, Any]) -> str:
    items = "".join(f"<dt>{escape(str(k))}</dt><dd><code>{escape(str(v))}</code></dd>" for k, v in of.items())
    return f"<section><h2>{escape(title)}</h2><dl>{items}</dl></section>"
