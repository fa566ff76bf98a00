# SPDX-License-Identifier: Apache-2.0
"""install_cases.py BASE.yaml: what `install` does to NeMo-RL's real modules and config, as a line of JSON."""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_rl.algorithms import async_utils, grpo
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.models.generation.vllm import vllm_generation

from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.nemo_rl import install, uninstall

BLOCK = "policy.generation.specrollout"
NAMES = [
    (grpo, "VllmGeneration"),
    (grpo, "Logger"),
    (grpo, "validate"),
    (grpo, "refit_policy_generation"),
    (async_utils, "AsyncTrajectoryCollector"),
    (vllm_generation, "resolve_generation_worker_cls"),
]


def config(base: Path, *overrides: str) -> MasterConfig:
    return MasterConfig(**load_config(base, list(overrides)))


def names() -> list[Any]:
    return [getattr(module, name) for module, name in NAMES]


def refusal(made: MasterConfig) -> str:
    try:
        install(made)
    except ConfigError as error:
        return str(error)
    return "none"


def pythonpath_after(made: MasterConfig, folder: str) -> list[str]:
    """Returns PYTHONPATH after `install`, if this package was not on it before; $LOG_DIR stands for `folder`."""
    os.environ["PYTHONPATH"] = "/elsewhere"
    install(made)
    uninstall()
    return os.environ["PYTHONPATH"].replace(folder, "$LOG_DIR").split(os.pathsep)


def main(base: Path) -> None:
    native = names()
    off = config(base, f"{BLOCK}.enabled=false")
    before = off.model_dump()
    found: dict[str, Any] = {"off_returns": install(off), "off_config_same": off.model_dump() == before}
    found["off_names_same"] = names() == native
    on = config(base, f"{BLOCK}.enabled=true")
    found["on_returns"] = install(on)
    found["on_replaced"] = [new is not old for new, old in zip(names(), native, strict=True)]
    found["on_facts"] = on.policy["generation"]["specrollout_run"]
    uninstall()
    found["undone"] = names() == native
    found["bad_option"] = refusal(config(base, f"{BLOCK}.enabled=true", "policy.generation.quant_cfg=NVFP4"))
    found["bad_key"] = refusal(config(base, f"{BLOCK}.budjet=1"))
    with TemporaryDirectory() as folder:
        found["pythonpath"] = pythonpath_after(
            config(base, f"{BLOCK}.enabled=true", f"logger.log_dir={folder}"), folder
        )
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
