# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of the GPU check to a JSON file, as tables to the terminal, and as tables to docs/benchmarks/gpu.md."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lab.gpu.items import ITEMS
from nemo_specrollout.installed.versions import checkout_commit, installed_versions
from nemo_specrollout.storage.files import write_atomically

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu.md"
BEGIN, END = "<!-- figures of gpu_check -->", "<!-- end of figures -->"
MAX_ROWS, MAX_ROWS_OF_PAGE = 60, 16
"""Largest number of rows of a table in the terminal, and of a table on the page. Longer tables are only in the JSON file."""
SETTINGS = "engines"
"""Title of the tables with engine settings, which are in the JSON file but not on the page."""
Result = Mapping[str, Any]
"""What is known of an item. The keys are `outcome` (done, failed, stopped or skipped), `seconds`, `reason`, `problems`,
`predictions` and `tables`."""


class Table(NamedTuple):
    """A table of text with a title."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Report:
    """The results of items on one machine and one commit. Owns the file that they are written to.

    If the file already has results of the same machine and commit, they are kept, so that items may run in several calls.
    """

    def __init__(self, file: Path, machine: Mapping[str, str], is_rehearsal: bool) -> None:
        """Reads the file if it has results of the same machine and commit."""
        self._file = file
        facts = {
            "machine": dict(machine),
            "is_rehearsal": is_rehearsal,
            "commit": checkout_commit(),
            "versions": dict(installed_versions()),
        }
        known = read(file) or {}
        is_same = {name: known.get(name) for name in facts} == facts
        self.items: dict[str, Result] = known["items"] if is_same else {}
        self._facts = {"date": time.strftime("%Y-%m-%d"), **facts}

    def add(self, name: str, result: Result) -> None:
        """Adds an item's result and writes the file."""
        self.items[name] = result
        write_atomically(self._file, json.dumps({**self._facts, "items": self.items}, indent=1))


def read(file: Path) -> dict[str, Any] | None:
    """Returns the contents of a report's file, or None if there is no file or it is not JSON."""
    with suppress(OSError, ValueError):
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return None


def merged(files: Sequence[Path]) -> dict[str, Any] | None:
    """Returns the reports in several files as one report, or None if no file has a report.

    Raises ValueError if the reports differ in machine, commit or versions.
    """
    reports = [report for file in files if (report := read(file)) is not None]
    if not reports:
        return None
    for report in reports[1:]:
        for name in ("machine", "is_rehearsal", "commit", "versions"):
            if report[name] != reports[0][name]:
                raise ValueError(f"the reports differ in {name}: {reports[0][name]} and {report[name]}")
    return {**reports[-1], "items": {name: result for report in reports for name, result in report["items"].items()}}


def summary(items: Mapping[str, Result]) -> Table:
    """Returns a table with a row for each item of the check."""
    rows = []
    for name, item in ITEMS.items():
        result = items.get(name, {"outcome": "not run"})
        took = f"{result['seconds']:.0f}" if "seconds" in result else "-"
        said = [result.get("reason", ""), *result.get("problems", [])]
        rows.append([name, item.purpose, f"{item.seconds:g}", result["outcome"], took, "; ".join(filter(None, said))])
    return Table("", ["item", "what", "expected, s", "outcome", "s", "remarks"], rows)


def tables(result: Result, max_rows: int = MAX_ROWS) -> Iterator[Table]:
    """Yields the tables with an item's figures. Leaves out those with more than `max_rows` rows."""
    for title, rows in result.get("tables", {}).items():
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        if len(rows) <= max_rows:
            yield Table(
                title, ["", *columns], [[n, *(number(row.get(c, "")) for c in columns)] for n, row in rows.items()]
            )


def number(value: Any) -> str:
    """Returns a figure as text. A float gets four significant digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def as_text(table: Table) -> str:
    """Returns a table as text with aligned columns for the terminal."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"[{table.title}]"] * bool(table.title) + text)


def as_markdown(table: Table) -> str:
    """Returns a table in Markdown."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
    return f"{table.title}:\n\n{body}" if table.title else body


def figures_of(report: Mapping[str, Any] | None) -> str:
    """Returns the text for the page between its two markers, in Markdown. `report` is None if no report exists."""
    if report is None:
        return f"Not run on any GPU yet.\n\n{as_markdown(summary({}))}"
    kind = "A rehearsal on a CPU: these figures mean nothing." if report["is_rehearsal"] else ""
    facts = {**report["machine"], "date": report["date"], "commit": report["commit"], **report["versions"]}
    parts = [kind, ", ".join(f"{name} {value}" for name, value in facts.items()) + "."]
    parts.append(as_markdown(summary(report["items"])))
    for name in ITEMS:
        found = tables(report["items"].get(name, {}), MAX_ROWS_OF_PAGE)
        shown = [table for table in found if table.title != SETTINGS]
        parts += [f"### {name}"] * bool(shown) + [as_markdown(table) for table in shown]
    return "\n\n".join(filter(None, parts))


def write_page(report: Mapping[str, Any] | None, page: Path = PAGE) -> None:
    """Writes the figures of a report into the page, in place of the figures that the page has.

    Raises ValueError if the page lacks the markers.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} needs the lines {BEGIN} and {END}")
    write_atomically(page, f"{before}{BEGIN}\n{figures_of(report)}\n{END}{after}")
