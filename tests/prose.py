# SPDX-License-Identifier: Apache-2.0
"""Finds prose that breaks the house rules (CONTRIBUTING.md, "Language"): openings, sentence length, words."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_WORDS = 25
"""The longest sentence, in words. A code span, a link or a number counts as one word."""

BANNED = re.compile(
    r"\b(nobody|whoever|whom|whosoever|so many|so much|anew|that of|those of|ere|lest|thereof|therein|whereof|for ever|"
    r"else than|what is more|who does not|it is this that)\b",
    re.IGNORECASE,
)
# A subordinate clause or a bare preposition tells a reader what the subject is only after it was decoded.
BAD_OPENING = re.compile(
    r"(what|who|whose|whom|which|why|how|where|when|as|of|that|those|these|they|them|it|he|so|to whom|in whose|by whom)\b",
    re.IGNORECASE,
)
_CODE_SPAN = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])[\"*)]*\s+|\n\s*\n|\n\s*[-*|#] ?|\n\s*\d+\. ")
_ABBREVIATION = re.compile(r"\b(e\.g\.|i\.e\.|etc\.|vs\.|cf\.|et al\.|No\.|Sec\.|Fig\.)")


@dataclass(frozen=True)
class Finding:
    """One break of a rule."""

    line: int
    rule: str
    text: str


def docstrings(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yields line, text and whether it opens a function, for each docstring and each string that documents a field."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_property = any("property" in ast.unparse(d) for d in getattr(node, "decorator_list", []))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property
        for child in body:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value, is_function


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each block of comment lines."""
    start, lines = 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ").strip()
            if lines and token.start[0] == start + len(lines):
                lines.append(text)
                continue
            if lines:
                yield start, "\n".join(lines)
            start, lines = token.start[0], [text]
    if lines:
        yield start, "\n".join(lines)


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a text. A colon or a semicolon ends one; an indented or fenced block is not prose."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = "\n".join(line for line in text.split("\n") if not line.startswith(("    ", "|", "\t")))
    text = _ABBREVIATION.sub(
        lambda match: match.group().replace(".", ""), _LINK.sub(r"\1", _CODE_SPAN.sub("CODE", text))
    )
    for sentence in _SENTENCE_END.split(text):
        if sentence.strip():
            yield " ".join(sentence.split())


def findings_of_text(line: int, text: str) -> Iterator[Finding]:
    """Yields what breaks the rules on words and on the length of sentences."""
    for sentence in sentences(text):
        if len(re.findall(r"[\w'./-]+", sentence)) > MAX_WORDS:
            yield Finding(line, f"more than {MAX_WORDS} words", sentence)
        for match in BANNED.finditer(sentence):
            yield Finding(line, f"says {match.group()!r}", sentence)


def findings_of_source(path: Path) -> list[Finding]:
    """Returns what breaks a rule in the docstrings and comments of a Python file."""
    source, found = path.read_text(), []
    for line, text, is_function in docstrings(source):
        opening = BAD_OPENING.match(text) or (is_function and re.match("whether", text, re.IGNORECASE))
        if opening:
            found.append(Finding(line, f"opens with {opening.group()!r}", text.split("\n")[0]))
        body = re.sub(r"(?m)^ {4,12}(?=\S)", "", text)
        found.extend(findings_of_text(line, body))
    for line, text in comments(source):
        if not text.startswith(("SPDX", "noqa", "type:", "fmt:", "!")):
            found.extend(findings_of_text(line, text))
    return found


def findings_of_page(path: Path) -> list[Finding]:
    """Returns what breaks a rule in a Markdown page. Rows of tables are read for words only: cells need no sentences."""
    text = re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
    rows = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.startswith("|")]
    found = [Finding(i, f"says {match.group()!r}", row) for i, row in rows for match in BANNED.finditer(row)]
    return [*findings_of_text(1, re.sub(r"(?m)^(#+ .*)$", r"\1.\n", text)), *found]
