# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for NeMo-RL's own tests: they run with our `install` called, on the config that a variable names."""

import os
from pathlib import Path
from typing import Any

from nemo_specrollout.config.load import load_config
from nemo_specrollout.nemo_rl import install

CONFIG = "NEMO_RL_CPU_INSTALLED"


def pytest_configure() -> None:
    """Before any test module is imported."""
    os.environ.setdefault("TINY", "/tmp")
    name = os.environ.get(CONFIG, "base.yaml")
    tree = load_config(Path(__file__).with_name(name), ["policy.generation.specrollout.enabled=true"])
    assert install(_master_config(tree))


def _master_config(tree: dict[str, Any]) -> Any:
    if "async_rl" in tree:
        from nemo_rl.algorithms.single_controller_utils import MasterConfig as ControllerConfig

        return ControllerConfig(**tree)
    from nemo_rl.algorithms.grpo import MasterConfig

    return MasterConfig(**tree)
