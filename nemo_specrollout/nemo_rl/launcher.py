# SPDX-License-Identifier: Apache-2.0
"""Runs one of NeMo-RL's own scripts, unedited, with `install` called before its `setup`."""

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

from nemo_specrollout.config.nemo_rl_scripts import script_of
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.nemo_rl.installation import install

_SETUPS = ("setup", "setup_single_controller")
_PROMPT_FILES = ("prompt_file", "system_prompt_file")


def run(tree: Mapping[str, Any], script_path: Path | None = None) -> None:
    """Runs a resolved config as NeMo-RL starts it, by the script that it belongs to unless `script_path` names one.

    Raises ConfigError for what cannot start.
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
    """The names under which `script` calls NeMo-RL's set-up."""
    return [name for name in _SETUPS if callable(getattr(script, name, None))]


def _installing(native: Any) -> Any:
    @functools.wraps(native)
    def setup(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        install(master_config)
        return native(master_config, *args, **kwargs)

    return setup


def _checkout() -> Path:
    """The checkout that the installed package belongs to."""
    assert nemo_rl.__file__ is not None
    return Path(nemo_rl.__file__).parent.parent


def _with_prompt_files(tree: Any) -> Any:
    """Prompt files of NeMo-RL's own configs are named from its checkout; found there, they get their whole path."""
    if not isinstance(tree, Mapping):
        return tree
    found = {}
    for key, value in tree.items():
        is_file = key in _PROMPT_FILES and isinstance(value, str) and not Path(value).is_file()
        found[key] = (
            str(_checkout() / value) if is_file and (_checkout() / value).is_file() else _with_prompt_files(value)
        )
    return found


def _script(path: Path) -> ModuleType:
    """Returns the script at `path` as a module; it must call a set-up of NeMo-RL's, before which the block takes effect."""
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
            f"--script: {path} has no function {' or '.join(_SETUPS)}, before which specrollout could take effect"
        )
    return module
