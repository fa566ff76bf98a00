# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that trains a run's draft head beside it, and the driver's link to it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.nemo_rl.actor_environment import engine_environment
from nemo_specrollout.nemo_rl.head_refresh import TrainerFailed
from nemo_specrollout.scheduling.heads.refresh_schedule import StepFacts
from nemo_specrollout.training.features.feature_reader import FeatureReader
from nemo_specrollout.training.head.head_folder import HeadFolder, RefreshRecord


@dataclass(frozen=True)
class TrainerOrder:
    """What a trainer is told at its start, as plain values. `policy` is a Hugging Face folder, or a name on the hub."""

    block: dict[str, Any]
    policy: str
    folder: str
    temperature: float


class HeadTrainerImpl:
    """Owns the head in service and the schedule of its refreshes; one call at a time. Imports torch when it is started."""

    def __init__(self, order: TrainerOrder) -> None:
        from nemo_specrollout.training.refresh.online_refresh import OnlineRefresh

        block = build(SpecrolloutConfig, order.block, BLOCK_PATH)
        assert block.draft_refresh is not None and block.head is not None
        self._folder = HeadFolder(Path(order.folder))
        self._online = OnlineRefresh(
            block,
            _local_folder(order.policy),
            self._folder,
            configured_head=_local_folder(block.head),
            temperature=order.temperature,
            device="cuda" if block.draft_refresh.trainer_gpus else "cpu",
            in_background=True,
        )

    def source(self) -> dict[str, Any]:
        """Whose features the head learns from: `FeatureSource` as plain values."""
        return asdict(self._online.source)

    def after_steps(self, version: int, facts: Sequence[StepFacts]) -> RefreshRecord:
        """The record of the last of some steps. The policy of `version` computed the newest features."""
        from safetensors.torch import load_file

        decision = [self._online.decide(fact) for fact in facts][-1]
        if not decision.refresh:
            return RefreshRecord(decision.reason, decision.gain_s)
        stores = [FeatureReader(index.parent) for index in self._folder.features().glob("engine_*/index.json")]
        teacher = load_file(self._folder.teacher(version))
        return self._online.refresh(decision, version, stores, version, teacher)


@ray.remote(max_restarts=0, num_cpus=1)
class SpecrolloutHeadTrainer(HeadTrainerImpl):
    """The actor."""


class TrainerLink:
    """The driver's end: owns the actor and the one call that is under way. Dies with the driver."""

    def __init__(self, order: TrainerOrder) -> None:
        block = build(SpecrolloutConfig, order.block, BLOCK_PATH)
        assert block.draft_refresh is not None
        options = {"num_gpus": block.draft_refresh.trainer_gpus, "runtime_env": engine_environment()}
        actor: Any = SpecrolloutHeadTrainer
        self._actor = actor.options(**options).remote(order)
        self._call: Any = self._actor.source.remote()

    @property
    def is_idle(self) -> bool:
        return self._call is None

    def ask(self, version: int, facts: Sequence[StepFacts]) -> None:
        """Tells it of steps; its answer is a `RefreshRecord`, after the training if it decides for one."""
        self._call = self._actor.after_steps.remote(version, list(facts))

    def answer(self) -> RefreshRecord | dict[str, Any] | None:
        """What the call under way returned, if it has; None before that. Raises TrainerFailed."""
        if self._call is None or not ray.wait([self._call], timeout=0)[0]:
            return None
        call, self._call = self._call, None
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            sentence = str(error).strip().splitlines()[-1]
            raise TrainerFailed(sentence.partition(" Worker exit type")[0]) from error  # what follows are guesses

    def close(self) -> None:
        """Ends the actor, whatever it does."""
        ray.kill(self._actor)


def _local_folder(name: str) -> Path:
    """A folder, or what the cache has of a name on the Hugging Face hub; the engines have put it there."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
