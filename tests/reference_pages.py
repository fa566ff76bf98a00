# SPDX-License-Identifier: Apache-2.0
"""Writes the generated parts of the pages in docs/reference from the code: `make reference`.

A part stands between the comments `<!-- generated: NAME -->` and `<!-- end of NAME -->`, and all else of a page is written
by hand. tests/test_reference_pages.py fails if a page differs from what this writes.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lab.cli.main import PROGRAM as LAB
from nemo_specrollout.cli.command_line import CONFIG, OVERRIDES, Command, Flag, Program
from nemo_specrollout.cli.main import PROGRAM as PRODUCT
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DRAFTERS, RemoteDrafterConfig
from nemo_specrollout.reports.metric_table import METRICS, SAMPLE, SUMMARY, Metric

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
Field = dataclasses.Field[Any]
Parts = dict[str, str]
"""Text of each generated part of a page, by its name."""
KINDS: Mapping[Any, str] = {
    bool: "`true`, `false`",
    str: "a text",
    str | None: "a text",
    tuple[str, ...]: "a list of texts",
    tuple[tuple[str, ...], ...]: "a list of lists",
}
"""Words for the types of fields."""
COMMENT_COLUMN = 42
"""Column at which comments of the YAML block begin."""


# The block


def block_parts() -> Parts:
    """Returns the parts of block.md: the YAML block of all defaults, and a table for each of its sections."""
    fields = dataclasses.fields(SpecrolloutConfig)
    sections = {field.name: cls for field in fields if (cls := section_of(SpecrolloutConfig, field)) is not None}
    own = [field for field in dataclasses.fields(RemoteDrafterConfig) if field.name != "type"]
    return {
        "defaults": "\n".join(["```yaml", *default_lines(), "```"]),
        "fields": field_table(SpecrolloutConfig, fields),
        "drafters": drafter_table(),
        "fields of drafters": drafter_field_table(),
        "fields of remote": field_table(RemoteDrafterConfig, own),
        **{name: field_table(cls, dataclasses.fields(cls)) for name, cls in sections.items()},
    }


def section_of(cls: type, field: Field) -> type | None:
    """Returns the dataclass of a field that is a block of its own, also if it may be null; None for any other field."""
    hint = typing.get_type_hints(cls)[field.name]
    kinds = typing.get_args(hint) or (hint,)
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None) if field.name != "drafters" else None


def texts_below_fields(cls: type) -> dict[str, str]:
    """Returns the docstring that stands below each field of a dataclass and its bases, on one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for node, below in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
                found[node.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found


def default_lines() -> list[str]:
    """Returns the lines of the YAML block: every field with its default, and the first sentence about it as a comment."""
    lines = ["policy:", "  generation:", "    specrollout:"]
    block = SpecrolloutConfig()
    texts = texts_below_fields(SpecrolloutConfig)
    for field in dataclasses.fields(block):
        value, indent = getattr(block, field.name), " " * 6
        if field.name == "drafters":
            lines.append(commented(f"{indent}drafters:", texts["drafters"]))
            lines += [f"{indent}  - {{type: {drafter.type}}}" for drafter in value]
        elif dataclasses.is_dataclass(value):
            lines.append(commented(f"{indent}{field.name}:", texts[field.name]))
            below = texts_below_fields(type(value))
            own = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
            lines += [commented(f"{indent}  {name}: {in_yaml(default)}", below[name]) for name, default in own]
        else:
            lines.append(commented(f"{indent}{field.name}: {in_yaml(value)}", texts[field.name]))
    return lines


def commented(line: str, text: str) -> str:
    """Returns a line of YAML with the first sentence of a text as its comment."""
    sentence = text.partition(". ")[0].rstrip(".").replace("`", "")
    return f"{line:{COMMENT_COLUMN}}# {sentence}"


def in_yaml(value: Any) -> str:
    """Returns a default as it is written in YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def field_table(cls: type, fields: Iterable[Field]) -> str:
    """Returns a table of fields: name, default, values, and the text below the field."""
    return table("field | default | values | meaning", (cells(cls, field) for field in fields))


def cells(cls: type, field: Field) -> tuple[str, str, str, str]:
    return f"`{field.name}`", default_of(cls, field), values_of(cls, field), texts_below_fields(cls)[field.name]


def default_of(cls: type, field: Field) -> str:
    """Returns the cell of a field's default."""
    if field.name == "drafters":
        return "`suffix`, `ngram`"
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "as below" if dataclasses.is_dataclass(value) else f"`{in_yaml(value)}`"


def values_of(cls: type, field: Field) -> str:
    """Returns the cell of the values that a field may have."""
    hint = typing.get_type_hints(cls)[field.name]
    kinds = typing.get_args(hint) or (hint,)
    or_null = ", or `null`" if type(None) in kinds else ""
    if section_of(cls, field) is not None:
        return f"a [block](#{field.name}){or_null}"
    if kinds[0] in (int, float) and "bounds" in field.metadata:
        return ("whole number, " if kinds[0] is int else "number, ") + bounds_of(field) + or_null
    return (options_of(field) or KINDS.get(hint, "a block")) + or_null


def options_of(field: Field) -> str:
    """Returns the values of a field that names each of them; empty for any other field."""
    if field.name == "drafters":
        return "a list of [drafters](#drafters)"
    if "options" in field.metadata:
        return ", ".join(f"`{option}`" for option in field.metadata["options"])
    if (numbers := field.metadata.get("auto")) is not None:
        return f"`auto`, or {numbers[0]} to {numbers[-1]}"
    return ""


def bounds_of(field: Field) -> str:
    bounds = {kind: f"{bound:.10g}" for kind, bound in field.metadata["bounds"].items()}
    if set(bounds) == {"at least", "at most"}:
        return f"{bounds['at least']} to {bounds['at most']}"
    return " and ".join(f"{kind} {bound}" for kind, bound in bounds.items())


def drafter_table() -> str:
    """Returns the table of all types of drafters: what they do, by the docstrings of their classes, and their fields."""
    rows = []
    for name, cls in DRAFTERS.items():
        about = " ".join((inspect.getdoc(cls) or "").split()).removeprefix(f"`{name}`: ")
        own = [f"`{field.name}`" for field in dataclasses.fields(cls) if field.name != "type"]
        rows.append(
            (f"`{name}`", sentence(about), "[below](#fields-of-remote)" if name == "remote" else ", ".join(own))
        )
    return table("type | what it does | its fields", rows)


def drafter_field_table() -> str:
    """Returns the table of the fields of all drafters but `remote`, each once."""
    rows: dict[str, tuple[str, ...]] = {}
    for cls in DRAFTERS.values():
        for field in dataclasses.fields(cls):
            if field.name != "type" and cls is not RemoteDrafterConfig:
                rows.setdefault(field.name, cells(cls, field))
    return table("field | default | values | meaning", rows.values())


# Commands


def command_parts() -> Parts:
    """Returns the parts of commands.md: a table of each program's commands, and each command with its usage and flags."""
    programs = (PRODUCT, LAB)
    tables = {program.name: command_table(program) for program in programs}
    return tables | {f"{p.name} {c.name}": about_command(p, c) for p in programs for c in p.commands}


def command_table(program: Program) -> str:
    rows = [(f"[`{c.name}`](#{program.name}-{c.name})", sentence(c.text)) for c in program.commands]
    return table("command | what it does", rows)


def about_command(program: Program, command: Command) -> str:
    """Returns the sentence about a command, its usage, and the table of its flags. CONFIG and key=value are on every page."""
    usage = textwrap.wrap(
        " ".join([program.name, command.name, *map(usage_of, by_place(command.flags))]),
        width=118, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
    rows = [
        (f"`{naming(flag)}`", sentence(flag[1]["help"])) for flag in command.flags if flag not in (CONFIG, OVERRIDES)
    ]
    flags = ["", table("argument | meaning", rows)] if rows else []
    return "\n".join([sentence(command.text), "", "```", *(line.replace("\0", " ") for line in usage), "```", *flags])


def by_place(flags: Sequence[Flag]) -> list[Flag]:
    """Returns flags in the order of the usage: names such as CONFIG first, and key=value last."""
    return sorted(flags, key=lambda flag: 2 if flag[0] == OVERRIDES[0] else flag[0].startswith("-"))


def naming(flag: Flag) -> str:
    """Returns a flag with the name of its value."""
    name, options = flag
    metavar = options.get("metavar", "")
    return f"{name} {metavar}".strip() if name.startswith("-") else metavar


def usage_of(flag: Flag) -> str:
    """Returns a flag as it stands in the usage, with NUL in the place of its spaces, where no line may break."""
    name, options = flag
    repeats = options.get("nargs") in ("*", "+") or options.get("action") == "append"
    is_optional = not options.get("required") if name.startswith("-") else options.get("nargs") in ("*", "?")
    text = naming(flag) + (" ..." if repeats else "")
    return (f"[{text}]" if is_optional else text).replace(" ", "\0")


# Metrics


def metric_parts() -> Parts:
    """Returns the parts of metrics.md: a table for each subject, for samples, and for the whole run."""
    return {name: metric_table(metrics) for name, metrics in {**METRICS, "samples": SAMPLE, "summary": SUMMARY}.items()}


def metric_table(metrics: Iterable[Metric]) -> str:
    return table("name | unit | recorded by | meaning", ((f"`{m.name}`", m.unit, m.runs, m.meaning) for m in metrics))


# Pages

PAGES: Mapping[str, Callable[[], Parts]] = {
    "block.md": block_parts,
    "commands.md": command_parts,
    "metrics.md": metric_parts,
}
"""The pages with generated parts, by their names in docs/reference."""


def sentence(text: str) -> str:
    """Returns a phrase as a sentence."""
    return text[:1].upper() + text[1:] + "." * (not text.endswith("."))


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of Markdown. A file of docs that a cell names becomes a link."""
    num_columns = head.count("|") + 1
    lines = [f"| {head} |", "|---" * num_columns + "|"]
    for row in rows:
        escaped = (re.sub(r"docs/([\w./-]+\.md)(#[\w-]+)?", linked, cell).replace("|", r"\|") for cell in row)
        lines.append("| " + " | ".join(escaped) + " |")
    return "\n".join(line.replace("|  |", "| |") for line in lines)


def linked(found: re.Match[str]) -> str:
    """Returns the link for a file of docs, as seen from docs/reference."""
    path, anchor = found[1], found[2] or ""
    return f"[{path.removesuffix('.md')}]({f'../{path}'.removeprefix('../reference/')}{anchor})"


def rewritten(text: str, parts: Parts) -> str:
    """Returns a page with its generated parts as they should be. Raises ValueError if it has not exactly these parts."""
    named = re.findall(r"<!-- generated: (.+?) -->", text)
    if sorted(named) != sorted(parts):
        raise ValueError(f"the page has the parts {sorted(named)}, and {sorted(parts)} are generated")
    for name, part in parts.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        if end not in rest:
            raise ValueError(f"the part {name} has no end; write {end}")
        text = f"{before}{begin}\n\n{part}\n\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Rewrites the generated parts of all pages."""
    for name, parts in PAGES.items():
        path = REFERENCE / name
        path.write_text(rewritten(path.read_text(), parts()))


if __name__ == "__main__":
    main()
