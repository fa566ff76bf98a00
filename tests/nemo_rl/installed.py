# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for NeMo-RL's own tests: they run with our `install` called."""

import os
from pathlib import Path

from nemo_rl.algorithms.grpo import MasterConfig

from nemo_specrollout.config.load import load_config
from nemo_specrollout.nemo_rl import install


def pytest_configure() -> None:
    """Before any test module is imported."""
    os.environ.setdefault("TINY", "/tmp")
    tree = load_config(Path(__file__).with_name("base.yaml"), ["policy.generation.specrollout.enabled=true"])
    assert install(MasterConfig(**tree))
