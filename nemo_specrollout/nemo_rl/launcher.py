# SPDX-License-Identifier: Apache-2.0
"""Runs one of NeMo-RL's own scripts, unedited, and calls `install` before the script's set-up."""

import functools
import importlib.util
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import nemo_rl
import yaml

from nemo_specrollout.config.nemo_rl_config import script_of
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.nemo_rl.installation import install

_SETUPS = ("setup", "setup_single_controller")
"""Names under which NeMo-RL's scripts call its set-up."""
_PROMPT_FILES = ("prompt_file", "system_prompt_file")
"""Keys of NeMo-RL's configs that name files relative to its checkout."""


def run(tree: Mapping[str, Any], script_path: Path | None = None) -> None:
    """Runs the resolved config `tree` with the script of NeMo-RL that it belongs to, or with the script `script_path`.

    Raises ConfigError if the run cannot start.
    """
    script = _script(_checkout() / (script_path or script_of(tree)))
    for name in _entries(script):
        setattr(script, name, _installing(getattr(script, name)))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(yaml.safe_dump(_with_prompt_files(dict(tree))), encoding="utf-8")
        sys.argv = [str(script.__file__), "--config", str(config)]
        script.main()


def _entries(script: ModuleType) -> list[str]:
    """Returns the names under which `script` calls NeMo-RL's set-up."""
    return [name for name in _SETUPS if callable(getattr(script, name, None))]


def _installing(native: Any) -> Any:
    @functools.wraps(native)
    def setup(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        install(master_config)
        return native(master_config, *args, **kwargs)

    return setup


def _checkout() -> Path:
    """Returns the checkout of the installed NeMo-RL."""
    assert nemo_rl.__file__ is not None
    return Path(nemo_rl.__file__).parent.parent


def _with_prompt_files(tree: Any) -> Any:
    """Returns the config with absolute paths for prompt files that are found in NeMo-RL's checkout."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        key: _in_checkout(value) if key in _PROMPT_FILES and isinstance(value, str) else _with_prompt_files(value)
        for key, value in tree.items()
    }


def _in_checkout(name: str) -> str:
    path = _checkout() / name
    return str(path) if path.is_file() and not Path(name).is_file() else name


def _script(path: Path) -> ModuleType:
    """Loads the script at `path` as a module. Raises ConfigError if it never calls a set-up of NeMo-RL."""
    if not path.is_file():
        raise ConfigError(
            f"NeMo-RL's script {path} does not exist; run from a NeMo-RL checkout (its container has one in /opt/nemo-rl)"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--script: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not _entries(module):
        raise ConfigError(
            f"--script: {path} has no function {' or '.join(_SETUPS)}, so specrollout could not take effect; name a script "
            "that calls NeMo-RL's set-up"
        )
    return module
