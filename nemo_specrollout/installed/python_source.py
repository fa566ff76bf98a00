# SPDX-License-Identifier: Apache-2.0
"""Reads names, classes and signatures from the source code of a Python package without importing the package."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def installed_source(package: str) -> Path | None:
    """Returns the folder that contains the installed Python package `package`, or None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent.parent


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """Returns the syntax tree of a Python file. The result is cached."""
    return ast.parse(file.read_text(encoding="utf-8"))


def names_of(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the names that the statements in `body` define, each with its statement.

    Statements inside of `if`, `try` and `with` count too.
    """
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


class PythonSource:
    """The source code of one version of a Python package. `folder` is the folder that contains the package."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder = folder
        self.package = package

    def file_of(self, module: str) -> Path | None:
        """Returns the file of a module, given its dotted name, or None if there is no such file."""
        path = self.folder / module.replace(".", "/")
        return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)

    def find(self, name: str) -> tuple[str, ast.stmt | None] | None:
        """Returns the module that defines a dotted name, and the syntax tree of the definition.

        Imports within the package are followed to the definition. The syntax tree is None if the name is that of a module, or
        if a package loads the name lazily. The whole result is None if the package does not have the name.
        """
        module, _, attribute = name.rpartition(".")
        if self.file_of(name) is not None:
            return name, None
        file = self.file_of(module)
        if file is None:
            return None
        tree = tree_of(file)
        node = dict(names_of(tree.body)).get(attribute)
        if node is None:  # a package may load some names lazily, or take all names of its modules
            lazy = [v for v in ast.walk(tree) if isinstance(v, ast.Constant) and v.value == attribute]
            stars = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.level == 1 and n.names[0].name == "*"]
            found = (self.find(f"{module}.{n.module}.{attribute}") for n in stars if file.name == "__init__.py")
            return (module, None) if lazy else next(filter(None, found), None)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == self.package:
            real = next(a.name for a in node.names if (a.asname or a.name) == attribute)
            return self.find(f"{node.module}.{real}")
        return module, node

    def members(self, class_name: str) -> dict[str, ast.stmt]:
        """Returns the methods and attributes of a class and its base classes, by name, with their syntax trees.

        They include attributes that methods assign. The dictionary is empty if there is no such class.
        """
        found = self.find(class_name)
        module, node = found or ("", None)
        if not isinstance(node, ast.ClassDef):
            return {}
        merged: dict[str, ast.stmt] = {}
        for base in reversed(node.bases):
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                merged |= self.members(f"{module}.{name.id}")
        stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        merged |= {n.attr: node for n in stored if ast.unparse(n.value) == "self"}
        return merged | dict(names_of(node.body))

    def definition(self, name: str) -> tuple[bool, ast.stmt | None]:
        """Returns whether the package has the dotted name `name`, and the syntax tree of what has this name.

        The tree is None if the name does not exist, or if it is that of a module, for example. The name may also be that of a
        member of a class.
        """
        found = self.find(name)
        if found is not None:
            return True, found[1]
        owner, _, attribute = name.rpartition(".")
        node = self.members(owner).get(attribute)
        return node is not None, node

    def signature(self, name: str) -> "Signature | None":
        """Returns the signature of a function, or of the constructor of a class, given its dotted name.

        Returns None if the source code does not have it.
        """
        node = self.definition(name)[1]
        if isinstance(node, ast.ClassDef):
            node = self.members(name).get("__init__")
        return Signature.of(node) if isinstance(node, Function) else None


@dataclass(frozen=True)
class Signature:
    """The parameters of a function, without `self`, and the kind of its result."""

    parameters: tuple[str, ...]
    """Names of the parameters, without `*args` and `**kwargs`."""
    required: tuple[str, ...]
    """Names of the parameters that have no default."""
    result: str
    """Kind of the result: `value`, `nothing`, or `stream` for a generator. A coroutine has the prefix `async `."""

    @classmethod
    def of(cls, node: Function) -> "Signature":
        """Returns the signature of a function, given its syntax tree."""
        positional = [*node.args.posonlyargs, *node.args.args]
        defaults = [None] * (len(positional) - len(node.args.defaults)) + list(node.args.defaults)
        pairs = [
            *zip(positional, defaults, strict=True),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        named = [(a.arg, default) for a, default in pairs if a.arg not in ("self", "cls")]
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        required = tuple(name for name, default in named if default is None)
        return cls(tuple(name for name, _ in named), required, prefix + _result_of(node))


def _result_of(node: Function) -> str:
    """Returns the kind of a function's result, which is `stream` for a generator, `value` or `nothing`."""
    own = list(_own_nodes(node))
    if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in own):
        return "stream"
    returns = any(isinstance(n, ast.Return) and ast.unparse(n) not in ("return", "return None") for n in own)
    return "value" if returns else "nothing"


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the syntax nodes in the body of a function, except those in the bodies of inner functions and classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own_nodes(child)
