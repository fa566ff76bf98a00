# SPDX-License-Identifier: Apache-2.0
"""Refreshes the draft head while the run goes on. An actor trains the head, and the driver supervises this actor.

The driver never waits for the training of a head. No failure of a refresh ends the run, because the engines keep the head that
they have.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVarTuple

import ray

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.heads.decisions.refresh_schedule import StepFacts
from nemo_specrollout.heads.features.feature_store import FeatureReader
from nemo_specrollout.heads.files.head_folder import HeadFolder, PublishedHead, RefreshRecord
from nemo_specrollout.nemo_rl.ray_calls import ActorFailed, ActorLink, EngineClient, failure_text
from nemo_specrollout.nemo_rl.step_log import StepLog

Arguments = TypeVarTuple("Arguments")
MAX_RESTARTS = 1


@ray.remote(max_restarts=0, num_cpus=1)
class SpecrolloutHeadTrainer:
    """Actor that owns the head in service and the schedule of its refreshes. It serves one call at a time."""

    def __init__(self, block: SpecrolloutConfig, policy: str, heads: str, temperature: float) -> None:
        """`policy` is a Hugging Face folder or a name on the Hub. `heads` is the path of the run's `HeadFolder`."""
        from nemo_specrollout.heads.refresh.online_refresh import OnlineRefresh  # imports torch

        assert block.draft_refresh is not None and block.head is not None
        self._folder = HeadFolder(Path(heads))
        self._online = OnlineRefresh(
            block,
            _local_folder(policy),
            _local_folder(block.head),
            self._folder,
            temperature=temperature,
            in_background=True,
        )

    def source(self) -> dict[str, Any]:
        """Returns the `FeatureSource` of the head as plain values. It says which features of the policy the head needs."""
        return asdict(self._online.source)

    def after_steps(self, version: int, facts: Sequence[StepFacts]) -> RefreshRecord:
        """Decides for each training step in `facts` whether a refresh is due after it. Only the last decision counts.

        Refreshes the head if it says so, which takes long. Returns a record of the refresh, or of why there was none.
        `version` is the policy version that computed the newest features.
        """
        from safetensors.torch import load_file

        decision = [self._online.decide(fact) for fact in facts][-1]
        if not decision.refresh:
            return RefreshRecord(decision.reason, decision.gain_s)
        stores = [FeatureReader(index.parent) for index in self._folder.features().glob("engine_*/index.json")]
        teacher = load_file(self._folder.teacher(version))
        return self._online.refresh(decision, version, stores, version, teacher)


def _local_folder(name: str) -> Path:
    """Returns the folder of a model. For a name on the Hugging Face Hub, this is the cache that the engines have filled."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))


class HeadRefresh:
    """The driver's part of the refresh of a draft head.

    It owns the trainer actor, the facts about training steps that wait for the trainer, and the record of which head the
    engines have.

    The trainer's first answer is the `FeatureSource` of the head, and all others are `RefreshRecord`s. The engines load a
    published head at the next refit. Until then, steps still run with the old head. The trainer learns only the seconds of
    these steps.
    """

    def __init__(
        self,
        block: SpecrolloutConfig,
        folder: HeadFolder,
        start: Callable[[], ActorLink],
        engines: EngineClient,
        log: StepLog,
    ) -> None:
        assert block.draft_refresh is not None
        self._config = block.draft_refresh
        self._num_drafts = block.num_speculative_tokens
        self._folder = folder
        self._start = start
        self._engines = engines
        self._log = log
        self._has_head = [block.of_engine(engine).head is not None for engine in range(engines.num_engines)]
        self._num_failures = 0
        self._unsent: list[StepFacts] = []
        self._owed_s = 0.0
        """Seconds of steps that still ran with an old head. They are reported with the first step of the new head."""
        self._source: dict[str, Any] | None = None
        self._in_service: PublishedHead | None = None
        self._to_load = folder.published()
        self._record: RefreshRecord | None = None
        # A trainer on a GPU starts after all processes of NeMo-RL, because it gets a GPU that these leave.
        self._starts_later = bool(self._config.trainer_gpus)
        self._trainer = None if self._starts_later else start()

    def policy_updated(self, version: int) -> None:
        """Prepares the engines for policy version `version`. Call it after a refit, before the first request of this version.

        The policy's LM head and embedding are saved as the teacher, with which a head is trained on the rollouts of this
        version. The latest head is loaded into the engines.
        """
        if self._starts_later:
            self._starts_later = False
            self._trainer = self._start()
        self._read_answer()
        if self._trainer is not None:
            self._folder.forget_old(version)
            # All engines have the same weights, so only the first one saves them.
            self._tell(WorkerCalls.specrollout_save_teacher, [(str(self._folder.teacher(version)),)])
        head = self._to_load
        self._to_load = None
        if head is not None:
            self._in_service = head
            arguments = (str(head.folder), head.policy_version, head.expected_length, self._num_drafts)
            self._tell(WorkerCalls.specrollout_load_head, [arguments if has else None for has in self._has_head])

    def after_step(self, version: int, facts: StepFacts | None) -> dict[str, float]:
        """Reports a finished step to the trainer if it is idle. Returns metrics of the heads since the last call.

        `version` is the policy version of the step's rollouts. `facts` is None if there were no rollouts.
        """
        self._read_answer()
        if self._source is not None:
            share = {"max_bytes": self._config.store_bytes // len(self._has_head), "source": self._source}
            share["held_out_share"] = self._config.held_out_share
            places = [{"folder": str(self._folder.features(i)), **share} for i in range(len(self._has_head))]
            self._tell(WorkerCalls.specrollout_store_features, [(place,) for place in places])
        if facts is not None and self._to_load is not None:
            self._owed_s += facts.seconds
        elif facts is not None:
            self._unsent.append(replace(facts, seconds=facts.seconds + self._owed_s))
            self._owed_s = 0.0
        if self._trainer is not None and self._source is not None and self._trainer.is_idle and self._unsent:
            self._trainer.call("after_steps", version, self._unsent)
            self._unsent = []
        return {"refresh_failures": float(self._num_failures), **self._take_record()}

    def close(self) -> None:
        trainer = self._trainer
        self._trainer = None
        self._source = None
        if trainer is not None:
            trainer.close()

    def _read_answer(self) -> None:
        if self._trainer is None:
            return
        try:
            answer = self._trainer.answer()
        except ActorFailed as error:
            self._trainer_failed(str(error))
            return
        if isinstance(answer, dict):
            self._source = answer
        elif answer is not None:
            self._record = answer
            self._find_published()

    def _find_published(self) -> None:
        """Arranges that the engines load the head in `published.json`, unless they already have it.

        Even a head that an earlier run has published must be loaded, because the trainer compares its next candidate with it.
        """
        published = self._folder.published()
        if published != self._in_service:
            self._to_load = published
            self._owed_s += sum(facts.seconds for facts in self._unsent)
            self._unsent = []

    def _trainer_failed(self, reason: str) -> None:
        self.close()
        self._num_failures += 1
        if self._num_failures > MAX_RESTARTS:
            end = f"failed again ({reason}); the head stays as it is for the rest of the run"
        else:
            end = f"failed ({reason}); it is started again, once"
            self._find_published()
            self._trainer = self._start()
        self._log.alarms.append(f"the draft head's trainer {end}")

    def _tell(
        self, method: Callable[[WorkerCalls, *Arguments], object], arguments: Sequence[tuple[*Arguments] | None]
    ) -> None:
        """Calls a method of the engines' vLLM workers. If one of them returns an error or raises, the refreshes end."""
        try:
            errors = {error for error in self._engines.call_each(method, arguments) if error}
        except Exception as error:
            errors = {failure_text(error)}
        if errors and self._trainer is not None:
            self._num_failures += 1
            call = method.__name__.removeprefix("specrollout_")
            reason = f"an engine failed at {call}: {'; '.join(sorted(errors))}"
            self._log.alarms.append(f"draft heads are refreshed no more: {reason}")
        if errors:
            self.close()

    def _take_record(self) -> dict[str, float]:
        """Logs the record that has arrived, if there is one, and returns its metrics."""
        record = self._record
        self._record = None
        if record is None:
            return {}
        self._log.entries["draft_refresh"] = record.known()
        is_judged = record.gate is not None
        return {
            "heads_published": float(is_judged and bool(record.published)),
            "heads_refused": float(is_judged and not record.published),
            "refresh_s": record.refresh_s or 0.0,
        }


def start_head_refresh(
    block: SpecrolloutConfig, generation_config: Any, heads: str, engines: EngineClient, log: StepLog
) -> HeadRefresh:
    """Starts the refresh of the draft head for `engines`. `heads` is the path of the run's `HeadFolder`."""
    assert block.draft_refresh is not None
    start = partial(
        ActorLink,
        SpecrolloutHeadTrainer,
        block,
        generation_config["model_name"],
        heads,
        generation_config["temperature"],
        first_call="source",
        num_gpus=block.draft_refresh.trainer_gpus,
    )
    return HeadRefresh(block, HeadFolder(Path(heads)), start, engines, log)
