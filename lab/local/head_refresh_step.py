# SPDX-License-Identifier: Apache-2.0
"""Refreshes the draft head of a local run between two steps, in the trainer's process, when that pays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes

from lab.local.run_config import RunConfig
from lab.local.statistics import RolloutStats
from lab.local.step_rollout import RolloutSource
from nemo_specrollout.heads.decisions.refresh_schedule import DecodeCosts, StepFacts, head_use
from nemo_specrollout.heads.features.feature_store import FeatureStore
from nemo_specrollout.heads.files.head_folder import HeadFolder, RefreshRecord
from nemo_specrollout.heads.refresh.online_refresh import OnlineRefresh
from nemo_specrollout.storage.files import write_atomically
from nemo_specrollout.storage.model_folder import EMBEDDING, LM_HEAD


class LocalRefresher:
    """Keeps the features that engines capture, refreshes the head with them, and loads published heads into the engines.

    All files are in the folder `heads/` of the run directory (`HeadFolder`). A resumed run continues with the published head.
    """

    def __init__(self, config: RunConfig, source: RolloutSource, run: Path) -> None:
        block = config.policy.generation.specrollout
        assert block.draft_refresh is not None and block.head is not None
        self._source = source
        self._num_drafts = block.num_speculative_tokens
        self._num_steps = config.grpo.max_num_steps
        self._folder = HeadFolder(run / "heads")
        self._online = OnlineRefresh(
            block,
            Path(config.policy.model_name),
            Path(block.head),
            self._folder,
            temperature=config.policy.generation.temperature,
        )
        published = self._folder.published()
        if published is not None:
            source.load_head(published.folder)
        refresh = block.draft_refresh
        self._records = config.logger.record_for_replay
        self._store = FeatureStore(
            self._folder.features(), refresh.store_bytes, self._online.source, refresh.held_out_share
        )
        self._policy_tensors: dict[str, torch.Tensor] = {}
        self._captured_s = 0.0
        self._head_version = 0 if published is None else published.policy_version or 0

    def policy_moves(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Keeps the policy's LM head as the teacher for the features that were just captured.

        Call it before the policy is trained.

        With `logger.record_for_replay`, the LM head of each policy version is also written to a file for `lab/heads/drift.py`.
        """
        self._policy_tensors = {name: t.cpu() for name, t in tensors if name in (EMBEDDING, LM_HEAD)}
        if self._records:
            write_atomically(self._folder.teacher(version), safetensors_bytes(self._policy_tensors))

    def after_step(self, step: int, stats: RolloutStats, step_s: float) -> dict[str, Any]:
        """Stores the captured features, and refreshes the head if that is due. Returns figures for the step's record.

        These are the record of the refresh, the head's age in steps (`head_age`), and the seconds of capturing (`capture_s`).
        """
        self._store.keep(self._source.take_features())
        before = self._captured_s
        self._captured_s = self._source.capture_seconds()
        figures = {"head_age": step - self._head_version, "capture_s": self._captured_s - before}
        if not stats.num_request_steps:  # the end of an asynchronous run
            return {**RefreshRecord("no engine has anything left to do", 0.0).known(), **figures}
        if self._records:
            return {**RefreshRecord("skipped: the run is recorded for a replay", 0.0).known(), **figures}
        decision = self._online.decide(self._facts(step, stats, step_s))
        if not decision.refresh:
            return {**RefreshRecord(decision.reason, decision.gain_s).known(), **figures}
        record = self._online.refresh(decision, step, [self._store], step + 1, self._policy_tensors)
        if record.published:
            self._source.load_head(self._folder.candidate(step, True), record.expected_length, self._num_drafts)
            self._head_version = step + 1
            self._folder.forget_old(step + 1)
        return {**record.known(), **figures}

    def close(self) -> None:
        """Releases the feature store for other processes."""
        self._store.close()

    def _facts(self, step: int, stats: RolloutStats, step_s: float) -> StepFacts:
        costs = DecodeCosts.measured(stats.seconds, stats.plain_estimate_s, stats.num_tokens, stats.num_request_steps)
        length, share = head_use(stats.proposed, stats.accepted, stats.num_request_steps)
        return StepFacts(length, stats.num_tokens, step_s, self._num_steps - step - 1, costs, share)
