# SPDX-License-Identifier: Apache-2.0
"""Parts of report pages as HTML, such as cards, charts and tables. `page.html.template` has the style.

The functions escape their texts, except where they say that an argument is HTML.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from nemo_specrollout.reports.records import Record, number

NONE = "\N{EN DASH}"

_PAGE = Template(Path(__file__).with_name("page.html.template").read_text(encoding="utf-8"))
IsBad = Callable[[Record, str], bool]


def page(title: str, status: str, parts: Iterable[str]) -> str:
    """Returns a whole page as one file without scripts or external resources. `parts` are HTML."""
    return _PAGE.substitute(title=escape(title), status=escape(status), body="\n".join(parts))


def grid(kind: str, parts: Iterable[str]) -> str:
    """Returns HTML that shows cards or charts side by side in rows. `kind` is "cards" or "charts"."""
    return f'<div class="{kind}">{"".join(parts)}</div>'


def card(title: str, value: str, note: str, kind: str = "") -> str:
    """Returns the HTML of a card with a title, a value and a note. `kind` is "good", "bad" or empty."""
    title = escape(title)
    value = escape(value)
    note = escape(note)
    return f'<div class="card {kind}"><p>{title}</p><p class="value">{value}</p><p>{note}</p></div>'


def step_list(title: str, of: Iterable[tuple[Any, str]], kind: str = "") -> str:
    """Returns a section as HTML that lists steps with a sentence for each, or "" if there are no steps.

    `of` has pairs of a step and its sentence. `kind` is "alarms" or empty.
    """
    items = "".join(f"<li>step {escape(str(step))}: {escape(text)}</li>" for step, text in of)
    return f'<section class="{kind}"><h2>{escape(title)}</h2><ul>{items}</ul></section>' if items else ""


def chart(title: str, svg: str, how_to_read: str, is_wide: bool = True) -> str:
    """Returns a section with a chart and a text that says how to read it.

    The chart is as wide as the page if `is_wide` is true, and half as wide otherwise.
    """
    label = escape(title)
    kind = "wide" if is_wide else ""
    drawing = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f'<section class="{kind}"><h2>{label}</h2><p>{escape(how_to_read)}</p>{drawing}</section>'


def table(title: str, columns: Mapping[str, tuple[str, str]], steps: Sequence[Record], is_bad: IsBad) -> str:
    """Returns a table with a row for each step. `columns` maps each heading (HTML) to a key of the step and a number format.

    Cells for which `is_bad` is true are marked.
    """
    head = "".join(f"<th>{heading}</th>" for heading in columns)
    rows = "".join(f"<tr>{''.join(_cell(step, *column, is_bad) for column in columns.values())}</tr>" for step in steps)
    return (
        f'<section><h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def text_table(
    title: str,
    how_to_read: str,
    headings: Sequence[str],
    rows: Sequence[tuple[Sequence[str], bool]],
    notes: Sequence[str] = (),
) -> str:
    """Returns a section with a table of texts, and below it the sentences of `notes`.

    `headings` are HTML. Each of `rows` has the texts of its cells, and whether they are marked as bad.
    """
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = ""
    for cells, is_bad in rows:
        kind = ' class="bad"' if is_bad else ""
        body += f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for cell in cells)}</tr>"
    below = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<section><h2>{escape(title)}</h2><p>{escape(how_to_read)}</p><div class="scroll"><table class="texts">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{f'<ul>{below}</ul>' if below else ''}</section>"
    )


def _cell(step: Record, key: str, spec: str, is_bad: IsBad) -> str:
    bad = ' class="bad"' if is_bad(step, key) else ""
    return f"<td{bad}>{in_digits(number(step, key), spec)}</td>"


def in_digits(value: float, spec: str, unit: str = "") -> str:
    """Returns a number in the format `spec` with its unit, or a dash for NaN and infinity."""
    if not math.isfinite(value):
        return NONE
    return format(int(value) if spec.endswith("d") else value, spec) + unit


def folded(summary: str, text: str) -> str:
    """Returns a section that shows only `summary` until the reader opens it and sees `text` too."""
    return f"<section><details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details></section>"


def facts(title: str, of: Mapping[str, Any]) -> str:
    items = "".join(f"<dt>{escape(str(k))}</dt><dd><code>{escape(str(v))}</code></dd>" for k, v in of.items())
    return f"<section><h2>{escape(title)}</h2><dl>{items}</dl></section>"
