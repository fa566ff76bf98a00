# SPDX-License-Identifier: Apache-2.0
"""Reads overrides of the command line, such as `key=value` and `~key`, with Hydra's own parser, as NeMo-RL does.

Another parser would read some values differently. For example, a YAML parser reads `on` as true, and 10:00:00:00 as a number.
Hydra is imported only if there is an override to read.
"""

import re
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_specrollout.config.merging import UNREADABLE, clash, problem
from nemo_specrollout.config.strict import ConfigError, nearest

_SHOWN = 120
_AT_THE_TOP = ("defaults", "_override_")
"""Keys that have a meaning only in a file, so that an override cannot set them."""
_KEY = re.compile(r"[\w$-]+([./][\w$-]+)*", re.ASCII)
_FORMS = (
    "write a list as [1, 2], a block as {a: 1}, and a text with other characters in quotes of its own, as in "
    """'logger.wandb.name="a=b, c"'"""
)
"""What the user should do if Hydra's parser refuses a value."""


@dataclass(frozen=True)
class Override:
    """An override of the command line, which changes one key of a config."""

    text: str
    """The override as the user wrote it."""
    kind: str
    """What the override does: `=` sets a key, `+` adds a missing key, `++` sets or adds a key, and `~` removes a key."""
    key: str
    """The key that is changed, as names that are separated by dots."""
    value: Any
    """The new value. The kind `~` removes a key, and then this is the value that the key must have, or None for any value."""

    @property
    def where(self) -> str:
        """The words with which a message to the user about this override begins."""
        return _where(self.text)

    def apply(self, tree: DictConfig) -> None:
        """Changes the config `tree` as this override says. Unlike in NeMo-RL, an override of a new key needs no `+`.

        Raises ConfigError if the override does not fit the config.
        """
        try:
            self._apply(tree)
        except TypeError as error:
            was = OmegaConf.to_container(tree, resolve=False)
            now = self.value
            for name in reversed(self.key.split(".")):
                now = {name: now}
            raise ConfigError(f"{self.where}: {clash(was, now) or problem(error)}") from error
        except ConfigError:
            raise
        except UNREADABLE as error:
            raise ConfigError(f"{self.where}: {problem(error)}") from error

    def _apply(self, tree: DictConfig) -> None:
        if self.kind == "~":
            self._remove(tree)
            return
        is_there = self.kind == "+" and OmegaConf.select(tree, self.key, throw_on_missing=False) is not None
        if is_there and not isinstance(self.value, dict | list):
            raise ConfigError(f"{self.where}: the config has {self.key} already; write {self.text[1:]} without the +")
        OmegaConf.update(tree, self.key, self.value, merge=True, force_add=True)

    def _remove(self, tree: DictConfig) -> None:
        above, _, name = self.key.rpartition(".")
        block = OmegaConf.select(tree, above) if above else tree
        if not isinstance(block, DictConfig):
            raise ConfigError(f"{self.where}: {above or 'it'} is no block of keys, so no key of it can be removed")
        present = OmegaConf.select(tree, self.key, throw_on_missing=False)
        if present is None:
            names = [str(key) for key in block if key != name]
            raise ConfigError(f"{self.where}: {self.key} is absent or null{nearest(name, names, most_listed=0)}")
        if self.value is not None and self.value != present:
            raise ConfigError(f"{self.where}: {self.key} is {present!r}, not {self.value!r}; write ~{self.key}")
        del block[name]


def key_of(text: str) -> str:
    """Returns the key in the text of an override, without a `+` or `~` before it."""
    return text.partition("=")[0].lstrip("+~")


def parse_override(text: str) -> Override:
    """Reads an override of the command line from `text`, as NeMo-RL would.

    Raises ConfigError if `text` is not an override of one key with one value. Raises ModuleNotFoundError if Hydra is missing.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    where = _where(text)
    _check_key(text, where)
    try:
        parsed = OverridesParser.create().parse_override(text)
        value = parsed.value()
    except (HydraException, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: Hydra, by which NeMo-RL reads it, says: {_reason(error)}; {_FORMS}") from error
    if parsed.is_sweep_override():
        raise ConfigError(f"{where}: it gives several values; {_FORMS}")
    kind = next(kind for kind in ("~", "++", "+", "") if text.startswith(kind)) or "="
    return Override(text, kind, parsed.key_or_group, value)


def _check_key(text: str, where: str) -> None:
    """Raises ConfigError if the key of the override `text` has one of the usual mistakes.

    Hydra's own errors about these mistakes are hard to understand. `where` is the beginning of the message.
    """
    key = key_of(text)
    if not key.strip() or not ("=" in text or text.startswith("~")):
        raise ConfigError(f"{where}: expected key=value, e.g. grpo.max_num_steps=3, or ~key")
    if "[" in key:
        raise ConfigError(f"{where}: an entry of a list is written with a dot, as in data.0=x; or give the whole list")
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"{where}: {key[:_SHOWN]!r} is not a key; write names with dots, e.g. grpo.max_num_steps")
    if key.split(".")[0] in _AT_THE_TOP:
        raise ConfigError(f"{where}: {key!r} belongs at the top of a file; write a config that has it")


def _where(text: str) -> str:
    return f"override {text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'!r}"


def _reason(error: Exception) -> str:
    """Returns the line of an error message of Hydra that says what is wrong."""
    lines = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See https"))]
    line = " ".join(next((line for line in lines if line.strip(" ^")), type(error).__name__).split())
    return line[:_SHOWN]
