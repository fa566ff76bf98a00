# SPDX-License-Identifier: Apache-2.0
"""Runs one of NeMo-RL's scripts, without changing its file, with the block in effect."""

import importlib.util
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from nemo_specrollout.config.interpolation import escaped
from nemo_specrollout.config.nemo_rl_config import script_of
from nemo_specrollout.config.nemo_rl_rules import PROMPT_FILES
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.nemo_rl.installation import install

_SETUPS = ("setup", "setup_single_controller")
"""Names of the set-up functions that NeMo-RL's scripts call."""


def run(tree: Mapping[str, Any], script_path: Path | None = None) -> None:
    """Runs NeMo-RL's script for the resolved config `tree`, or the script at `script_path`.

    Raises ConfigError if it cannot start.
    """
    import nemo_rl

    checkout = Path(str(nemo_rl.__file__)).parent.parent
    script = _script(checkout / (script_path or script_of(tree)))
    for name in _SETUPS:
        if hasattr(script, name):
            setattr(script, name, partial(_install_and_set_up, getattr(script, name)))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(yaml.safe_dump(escaped(_with_prompt_files(tree, checkout))), encoding="utf-8")
        sys.argv = [str(script.__file__), "--config", str(config)]
        script.main()


def _script(path: Path) -> ModuleType:
    """Loads the script at `path` as a module. Raises ConfigError if it does not call NeMo-RL's set-up."""
    if not path.is_file():
        raise ConfigError(
            f"NeMo-RL's script {path} does not exist; run from a NeMo-RL checkout (its container has one in /opt/nemo-rl)"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--script: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not any(hasattr(module, name) for name in _SETUPS):
        raise ConfigError(
            f"--script: {path} has no function {' or '.join(_SETUPS)}, so specrollout could not take effect; name a script "
            "that calls NeMo-RL's set-up"
        )
    return module


def _install_and_set_up(native: Any, master_config: Any, *args: Any, **kwargs: Any) -> Any:
    install(master_config)
    return native(master_config, *args, **kwargs)


def _with_prompt_files(node: Any, checkout: Path, key: str = "") -> Any:
    """Returns a config with absolute paths for the prompt files that exist only in NeMo-RL's checkout."""
    if isinstance(node, Mapping):
        return {name: _with_prompt_files(value, checkout, name) for name, value in node.items()}
    is_found = key in PROMPT_FILES and isinstance(node, str) and not Path(node).is_file()
    return str(checkout / node) if is_found and (checkout / node).is_file() else node
