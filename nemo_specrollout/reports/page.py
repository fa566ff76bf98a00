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
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px }
.card, section { background: #fff; border: 1px solid #d8dee4; border-radius: 8px }
.card { padding: 12px 14px } .card p { margin: 0; font-size: 12.5px; line-height: 1.35; color: #57606a }
.card .value { font-size: 18px; font-weight: 600; line-height: 1.4; letter-spacing: -0.02em; color: #24292f }
.card .value { white-space: nowrap }
.card.good .value { color: #0072b2 }
.card.bad { background: #fff1ee; border-color: #cf222e } .card.bad .value, .alarms { color: #b3141f }
section { margin-top: 14px; padding: 16px 18px; min-width: 0 }
section p { margin: 0 0 10px; color: #57606a; font-size: 13.5px }
.said { color: #57606a; font-size: 13.5px; padding-left: 20px }
section.alarms { border-color: #cf222e } .alarms ul { margin: 4px 0 0; padding-left: 20px }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 14px }
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
@media (max-width: 720px) { .pair { grid-template-columns: 1fr } }
"""

IsBad = Callable[[Record, str], bool]


def page(title: str, status: str, parts: Iterable[str]) -> str:
    """Returns a whole page: one file without script or outside resource. `parts` are HTML."""
    body = "\n".join(parts)
    return PAGE.substitute(title=escape(title), css=CSS, status=escape(status), body=body)


def cards(of: Iterable[str]) -> str:
    """Returns a row of cards."""
    return f'<div class="cards">{"".join(of)}</div>'


def card(title: str, value: str, note: str, kind: str = "") -> str:
    """Returns a card with a value and a note. `kind` is "good", "bad" or empty."""
    title, value, note = escape(title), escape(value), escape(note)
    return f'<div class="card {kind}"><p>{title}</p><p class="value">{value}</p><p>{note}</p></div>'


def alarm_list(alarms: Iterable[tuple[Any, str]]) -> str:
    """Returns the section of alarms, each a step and a sentence, or nothing if there are none."""
    items = "".join(f"<li>step {escape(str(step))}: {escape(text)}</li>" for step, text in alarms)
    return f'<section class="alarms"><h2>Alarms</h2><ul>{items}</ul></section>' if items else ""


def chart(title: str, svg: str, how_to_read: str) -> str:
    """Returns a section with a chart. An empty `svg` is shown as "not recorded"."""
    label = escape(title)
    drawing = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f"<section><h2>{label}</h2><p>{escape(how_to_read)}</p>{drawing or '<p><em>not recorded</em></p>'}</section>"


def pair(*sections: str) -> str:
    """Returns sections side by side, two in a row."""
    return f'<div class="pair">{"".join(sections)}</div>'


def head_section(section: str, refreshes: Iterable[tuple[Any, Record]], last: str) -> str:
    """Returns the chart `section` of a draft head with the decision at each refresh, and the trigger's last decision."""
    items = "".join(
        f"<li>step {escape(str(step))}: {escape(str(r.get('decision', '')))}; gate: {escape(str(r.get('gate', NONE)))}</li>"
        for step, r in refreshes
    )
    said = f'<details><summary>Refreshes</summary><ul class="said">{items}</ul></details>' if items else ""
    return f"{section.removesuffix('</section>')}{said}<p>Last word of the trigger: {escape(last)}</p></section>"


def table(
    title: str, columns: Mapping[str, tuple[str, str]], steps: Sequence[Record], is_bad: IsBad = lambda *_: False
) -> str:
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


def folded(summary: str, text: str, or_else: str) -> str:
    """Returns a section that opens to `text`, or to `or_else` if there is no text."""
    content = f"<pre>{escape(text)}</pre>" if text else f"<p>{escape(or_else)}</p>"
    return f"<section><details><summary>{escape(summary)}</summary>{content}</details></section>"


def facts(title: str, of: Mapping[str, Any], or_else: str) -> str:
    """Returns a list of names and values, or `or_else` if there are none."""
    items = "".join(f"<dt>{escape(str(k))}</dt><dd><code>{escape(str(v))}</code></dd>" for k, v in of.items())
    return f"<section><h2>{escape(title)}</h2><dl>{items or f'<dt>{escape(or_else)}</dt>'}</dl></section>"
