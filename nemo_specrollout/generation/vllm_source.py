# SPDX-License-Identifier: Apache-2.0
"""The names that a version of vLLM defines, and the members of its classes, from its source without importing it."""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from nemo_specrollout.config.versions import version_numbers

Function = ast.FunctionDef | ast.AsyncFunctionDef


def installed_source() -> Path | None:
    """Returns the folder that holds the installed package `vllm`; None if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent.parent


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """Returns the syntax tree of a file, and caches it."""
    return ast.parse(file.read_text(encoding="utf-8"))


def names_of(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the names that statements define, also in branches, with their definitions."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((a.asname or a.name).split(".")[0], node) for a in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((t.id, node) for target in targets for t in ast.walk(target) if isinstance(t, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from names_of([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])


class VllmSource:
    """The source of one version of vLLM, in the package `vllm` in `folder`.

    Example: `VllmSource(folder).find("vllm.v1.worker.gpu.sample.gumbel.gumbel_sample")`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        """The three numbers of vLLM's version. Raises ValueError if the source does not tell them."""
        text = (self.folder / "vllm" / "_version.py").read_text(encoding="utf-8")
        numbers = [version_numbers(found) for found in re.findall(r"version = '([^']+)'", text)]
        if not numbers or numbers[-1] is None:
            raise ValueError(f"{self.folder}/vllm/_version.py names no version")
        return numbers[-1]

    def file_of(self, module: str) -> Path | None:
        """Returns the file of a dotted module; None if there is none."""
        path = self.folder / module.replace(".", "/")
        return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)

    def find(self, name: str) -> tuple[str, ast.stmt | None] | None:
        """Returns the module that defines a dotted name, and the definition; None if no module does. Follows imports."""
        module, _, attribute = name.rpartition(".")
        if self.file_of(name) is not None:
            return name, None
        file = self.file_of(module)
        if file is None:
            return None
        tree = tree_of(file)
        node = dict(names_of(tree.body)).get(attribute)
        if node is None:  # vllm/__init__.py loads some names lazily
            lazy = [v for v in ast.walk(tree) if isinstance(v, ast.Constant) and v.value == attribute]
            return (module, None) if lazy else None
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            real = next(a.name for a in node.names if (a.asname or a.name) == attribute)
            return self.find(f"{node.module}.{real}")
        return module, node

    def members(self, class_name: str) -> dict[str, ast.stmt]:
        """Returns methods and attributes of a class and its bases, including attributes that methods assign."""
        found = self.find(class_name)
        module, node = found or ("", None)
        if not isinstance(node, ast.ClassDef):
            return {}
        merged: dict[str, ast.stmt] = {}
        for base in reversed(node.bases):
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                merged |= self.members(f"{module}.{name.id}")
        for inner in ast.walk(node):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and ast.unparse(inner.value) == "self"
            ):
                merged[inner.attr] = node
        return merged | dict(names_of(node.body))
