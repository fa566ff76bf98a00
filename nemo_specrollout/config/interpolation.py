# SPDX-License-Identifier: Apache-2.0
"""Computes those values of a config that are expressions, such as ${mul:${policy.length}, 2} and ${oc.env:HF_HOME}."""

import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.resolvers import oc

# OmegaConf cannot inspect the signature of `max` itself.
_RESOLVERS = {"add": operator.add, "mul": operator.mul, "div": operator.truediv, "max": lambda *values: max(values)}
"""The functions that NeMo-RL's configs may use in expressions such as ${mul:${policy.max_total_sequence_length}, 2}."""
_NO_DEFAULT = "nemo_specrollout: no default"
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def register_resolvers() -> None:
    """Registers with OmegaConf the functions that NeMo-RL's configs may use, unless NeMo-RL itself has registered them."""
    with warnings.catch_warnings():
        # OmegaConf 2.4 renames this method to one that means something else in 2.3.
        warnings.simplefilter("ignore", UserWarning)
        for name, function in _RESOLVERS.items():
            if not OmegaConf.has_resolver(name):
                OmegaConf.register_new_resolver(name, function)


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Context in which ${oc.env:NAME} reads `variables` instead of this process's environment.

    If a variable is missing and the expression has no default, the value becomes the text `$NAME`. The context yields a
    mapping that collects these cases, from the path of the value to the name of the variable.
    """
    unknown = dict[str, str]()

    def read(name: str, default: Any = _NO_DEFAULT, *, _node_: Node) -> str | None:
        if name in variables:
            return variables[name]
        if default != _NO_DEFAULT:
            return None if default is None else str(default)
        unknown[str(_node_._get_full_key(None))] = name
        return f"${name}"

    _register_environment(read)
    try:
        yield unknown
    finally:
        _register_environment(oc.env)


def _register_environment(function: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        OmegaConf.register_new_resolver("oc.env", function, replace=True)


def resolved(tree: DictConfig) -> dict[str, Any]:
    """Returns a config as nested dictionaries with all of its expressions computed.

    Raises OmegaConf's errors, and RecursionError if values refer to each other in a circle.
    """
    return dict(OmegaConf.to_container(tree, resolve=True))  # type: ignore[arg-type]


def escaped(node: Any) -> Any:
    """Returns a computed config with each ${ in its texts escaped, so that OmegaConf will not take it for an expression."""
    if isinstance(node, Mapping):
        return {key: escaped(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [escaped(value) for value in node]
    return _escaped_text(node) if isinstance(node, str) else node


def _escaped_text(text: str) -> str:
    """Returns `text` with a backslash added before each ${.

    If there are backslashes directly before ${, they are doubled. Other backslashes have no special meaning, and so they stay.
    """
    return _INTERPOLATION.sub(lambda found: f"{found[1] * 2}\\${{", text)
