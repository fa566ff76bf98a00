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
        config.write_text(yaml.safe_dump(dict(tree)), encoding="utf-8")
        sys.argv = [str(script.__file__), "--config", str(config)]
        script.main()


def _script() -> ModuleType:
    """NeMo-RL's launcher, from the checkout that the installed package belongs to."""
    assert nemo_rl.__file__ is not None
    path = Path(nemo_rl.__file__).parent.parent / "examples" / "run_grpo.py"
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
