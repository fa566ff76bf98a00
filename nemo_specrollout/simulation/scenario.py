# SPDX-License-Identifier: Apache-2.0
"""Scenario: the strict, frozen schema of a simulation, and the scenarios that ship with the package.

Calibrated figures are in `calibration` and `costs`; `calibrated_from` names their source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError, bounded, build, choice, join
from nemo_specrollout.simulation.devices import device_named
from nemo_specrollout.simulation.roofline import Calibration
from nemo_specrollout.simulation.scenario_blocks import (
    BatchConfig,
    ClusterConfig,
    CostConfig,
    DraftingConfig,
    TrainingConfig,
)
from nemo_specrollout.simulation.transformer import model_named
from nemo_specrollout.simulation.workload import LengthConfig

MOST_REQUESTS = 2_000_000
"""Maximum number of simulated requests, which take about a kilobyte each."""
FOLDER = Path(__file__).parent / "scenarios"


@dataclass(frozen=True)
class Scenario:
    """A scenario. Example: `read_scenario("nvidia-8b-zero", ["drafting.k=5"])`."""

    title: str
    model: str
    """Name of a known model, or a folder with a config.json."""

    cluster: ClusterConfig
    batch: BatchConfig
    lengths: LengthConfig
    drafting: DraftingConfig
    source: str = ""
    """Source of the setting, and its assumptions."""

    calibrated_from: str = ""
    """Source of the calibrated figures."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    costs: CostConfig = field(default_factory=CostConfig)
    calibration: Calibration = field(default_factory=Calibration)
    precision: str = choice("bf16", "fp8", default="bf16")
    """Precision of the engines' weights and products."""

    kv_precision: str = choice("bf16", "fp8", default="bf16")
    """Precision of the KV cache."""

    seed: int = bounded(0, low=0)
    """Seed of random draws."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the scenario cannot run."""
        cluster, training = self.cluster, self.training
        if training.mode == "async" and not cluster.train_gpus:
            raise ConfigError(
                f"{join(path, 'cluster.train_gpus')}: 0; asynchronous training needs separate GPUs: set their "
                "number, or mode: sync"
            )
        if training.mode == "sync" and cluster.train_gpus:
            raise ConfigError(
                f"{join(path, 'cluster.train_gpus')}: {cluster.train_gpus}; in synchronous training all GPUs take turns: "
                "set it to 0, or mode: async"
            )
        num_requests = self.batch.num_requests * (training.num_steps if training.mode == "async" else 1)
        if num_requests > MOST_REQUESTS:
            raise ConfigError(
                f"{join(path, 'batch.num_prompts')}: {self.batch.num_prompts} of {self.batch.num_samples} samples make "
                f"{num_requests} requests to simulate; {MOST_REQUESTS} at most: lower one of them, or training.num_steps"
            )
        if self.costs.kind == "roofline":
            self._check_memory(path)

    def _check_memory(self, path: str) -> None:
        shape = model_named(self.model, join(path, "model"))
        device = device_named(self.cluster.device, join(path, "cluster.device"))
        device.flops(self.precision)
        weights = shape.params * (2 if self.precision == "bf16" else 1)
        if weights > 0.9 * device.hbm_bytes * self.cluster.gpus_per_engine:
            needed = -(-weights // int(0.9 * device.hbm_bytes))
            raise ConfigError(
                f"{join(path, 'cluster.gpus_per_engine')}: {self.cluster.gpus_per_engine}; the weights of {self.model} take "
                f"{weights / 1e9:.0f} GB in {self.precision}, a {device.name} has {device.hbm_bytes / 1e9:.0f}: "
                f"at least {needed}"
            )


def shipped() -> list[str]:
    """Returns the names of the scenarios that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_scenario(name: str, overrides: list[str]) -> Scenario:
    """Reads a scenario that ships with the package. Raises ConfigError."""
    return scenario_of(load_config(FOLDER / f"{name}.yaml", overrides))


def scenario_of(tree: Mapping[str, object], path: str = "") -> Scenario:
    """Builds a scenario from plain values at `path` of the user's config. Raises ConfigError."""
    return build(Scenario, tree, path)


def is_scenario(tree: Mapping[str, object]) -> bool:
    """Returns whether a config is a scenario rather than a run's config."""
    return "policy" not in tree
