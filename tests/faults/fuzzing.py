# SPDX-License-Identifier: Apache-2.0
"""Helpers of the fuzz tests: run a command in this process, check its refusal, and mutate its inputs."""

import gzip
import io
import re
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lab.cli.main import COMMANDS as LAB_COMMANDS
from lab.cli.main import main as lab
from nemo_specrollout.cli.main import main as product

TRIED: Counter[tuple[str, int]] = Counter()
"""Cases by kind and exit code, for the table of docs/developing/reliability.md."""
_LONGEST_SENTENCE = 1500
_PROGRAM = "(nemo-specrollout|specrollout-lab)"


def outcome(kind: str, *arguments: str) -> tuple[int, str]:
    """Runs a command, the laboratory's if it has one of this name; returns its exit code and stderr.

    Only the exceptions of argparse are caught.
    """
    main = lab if arguments[0] in {command.name for command in LAB_COMMANDS} else product
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as error:  # argparse: usage, then a sentence
            code = int(error.code or 0)
    TRIED[kind, code] += 1
    return code, err.getvalue()


def assert_refused_or_fine(kind: str, *arguments: str) -> bool:
    """Returns whether the command succeeded. Asserts that it ended with exit code 2 and a message if not."""
    code, said = outcome(kind, *arguments)
    assert "Traceback" not in said, said
    if code == 0:
        return True
    assert code == 2, (code, said)
    sentences = [line for line in said.splitlines() if re.match(_PROGRAM + ": ", line)]
    assert sentences or re.search(f"usage: {_PROGRAM}", said), said
    for sentence in sentences:
        assert len(sentence) <= _LONGEST_SENTENCE, sentence
        assert re.fullmatch(rf"{_PROGRAM}: (\S.*: \S.*|(config file|override|logger).*)", sentence), sentence
    return False


def files_below(folder: Path) -> dict[str, int]:
    """Returns the sizes of all files below `folder`, which a refused command must not change."""
    return {str(path.relative_to(folder)): path.lstat().st_size for path in sorted(folder.rglob("*"))}


# Values that users write, by intent or by accident.
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.integers(), st.floats(), st.text(max_size=12),
    st.sampled_from([
        "", " ", "null", "1e400", "-0", "0x1", "~", "nan", ".inf", "a/b", "/", "..", "/proc/nope", "\0", "é", "${x}", "'", "|",
        "%", "${oc.env:HOME}", "step_addition", "eagle3", "auto", "*", "&a", "!!int x", "{", "[", "@", "\t",
    ]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | SCALARS.map(str), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths_of(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all blocks, list entries and values."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [p for key, value in children for p in ((*path, key), *paths_of(value, (*path, key)))]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy of `tree` with `value` at `path`."""
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def without(tree: Any, path: tuple[Any, ...]) -> Any:
    """Returns a copy of `tree` without the value at `path`."""
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(copy[path[0]], path[1:])
    return copy


@st.composite
def mutated(draw: st.DrawFn, tree: Any, values: st.SearchStrategy[Any] = VALUES) -> Any:
    """Draws a copy of `tree` with one to three values replaced, removed or added."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_of(tree) or [()]))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if kind == "replace" or not path:
            tree = replaced(tree, path, draw(values))
        elif kind == "remove":
            tree = without(tree, path)
        else:
            parent = path[:-1]
            block: Any = tree
            for key in parent:
                block = block[key]
            if isinstance(block, dict):
                tree = replaced(tree, parent, {**block, draw(st.text(min_size=1, max_size=9)): draw(values)})
    return tree


def flipped(content: bytes, data: st.DataObject) -> bytes:
    """Draws a copy of `content` that is cut short, or has some bytes changed or inserted."""
    kind = data.draw(st.sampled_from(["cut", "change", "insert", "empty", "other"]))
    if kind == "empty":
        return b""
    if kind == "other":
        return data.draw(st.binary(max_size=200))
    at = data.draw(st.integers(0, max(len(content) - 1, 0)))
    if kind == "cut":
        return content[:at]
    new = data.draw(st.binary(min_size=1, max_size=4))
    return content[:at] + new + content[at + (len(new) if kind == "change" else 0) :]


def odd_contents(good: bytes) -> dict[str, bytes]:
    """Returns what a text file with the content `good` may hold after editors, other programs and crashes, by name."""
    text, middle = good.decode("latin-1"), len(good) // 2
    values = ["null", "true", "1", "1.5", '"x"', "[]", "{}", "[1]", "NaN", "1e400", "9" * 5000, '"\\ud800"']
    values += ['{"\\ud800": 1}', "{'a': 1}", '{"a": 1, "a": 2}', f"[{10**400}]"]
    return {
        "as it is": good,
        "empty": b"",
        "blank lines": b"\n \n\r\n",
        "a byte-order mark": b"\xef\xbb\xbf" + good,
        "UTF-16": text.encode("utf-16"),
        "UTF-16 without its mark": text.encode("utf-16-le"),
        "CRLF": good.replace(b"\n", b"\r\n"),
        "CR": good.replace(b"\n", b"\r"),
        "NUL bytes": b"\0" * 100,
        "NUL bytes at the end": good + b"\0" * 100,
        "bytes that are no UTF-8": good[:middle] + b"\xe9\xff" + good[middle:],
        "terminal codes": good + b"\x1b[31m\x07\n",
        "gzip": gzip.compress(good, mtime=0),
        "Parquet": b"PAR1" + bytes(range(256)) + b"PAR1",
        "pickle": b"\x80\x04\x95" + bytes(range(256)),
        "half of it": good[:middle],
        "no last character": good.rstrip()[:-1],
        "no end of line": good.rstrip(b"\n"),
        "a line separator of Unicode": good + "\u2028\n".encode(),
        **{f"the value {value[:20]}": f"{value}\n".encode() for value in values},
        **{
            f"{what}, {depth} levels deep": (begin + depth * opening + "1" + depth * closing + end).encode()
            for what, opening, closing, begin, end in (
                ("lists", "[", "]", "", "\n"),
                ("lists in a key", "[", "]", '{"x":', "}\n"),
                ("objects", '{"x":', "}", "", "\n"),
            )
            for depth in (300, 900, 3000, 100_000)
        },
    }
