# SPDX-License-Identifier: Apache-2.0
"""Runs NeMo-RL's own `examples/run_grpo.py`, unedited, with `install` called before its `setup`."""

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

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.nemo_rl.install import install

_PROMPT_FILES = ("prompt_file", "system_prompt_file")


def run(tree: Mapping[str, Any]) -> None:
    """A GRPO run of a resolved config, as NeMo-RL starts it. Raises ConfigError for what cannot start."""
    script = _script()
    native = script.setup

    @functools.wraps(native)
    def setup(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        install(master_config)
        return native(master_config, *args, **kwargs)

    script.setup = setup  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(yaml.safe_dump(_with_prompt_files(dict(tree))), encoding="utf-8")
        sys.argv = [str(script.__file__), "--config", str(config)]
        script.main()


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


def _script() -> ModuleType:
    """NeMo-RL's launcher."""
    path = _checkout() / "examples" / "run_grpo.py"
    if not path.is_file():
        raise ConfigError(
            f"NeMo-RL's launcher {path} does not exist; run from a NeMo-RL checkout (its container has one in /opt/nemo-rl)"
        )
    spec = importlib.util.spec_from_file_location("run_grpo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_grpo"] = module
    spec.loader.exec_module(module)
    return module
