# SPDX-License-Identifier: Apache-2.0
"""Online refresh in a local run: the head learns between two steps, in the trainer's process, when that pays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.refresh import MIXED_LOSS, DraftRefreshConfig
from nemo_specrollout.config.run import RunConfig
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.local.statistics import RolloutStats
from nemo_specrollout.scheduling.publish_gate import PublishGate
from nemo_specrollout.scheduling.refresh_schedule import RefreshSchedule, StepFacts
from nemo_specrollout.scheduling.refresh_trigger import DecodeCosts, RefreshDecision
from nemo_specrollout.training.feature_store import FeatureStore
from nemo_specrollout.training.head import DraftHead, load_head, save_head
from nemo_specrollout.training.head_card import write_card
from nemo_specrollout.training.offline_refresh import source_of
from nemo_specrollout.training.refresh import Refresh, gain_of, refresh_head
from nemo_specrollout.training.rollout_files import tokenizer_hash
from nemo_specrollout.training.trainer import BATCH_TOKENS, Budget, TrainingSettings, default_learning_rate

# Tokens of the newest features that a refresh learns from, and those that judge it, at most.
TRAINING_TOKENS, HELD_OUT_TOKENS = 60_000, 6_000
POLICY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


class LocalRefresher:
    """Owns the head in service, its features and the heads made in this run; publishes into the engine.

    Folder `heads/` of the run directory: `features/`, `step_N/` for each head that passed the gate, `refused/` for the last
    that did not, `published.json`, which names the head in service: a resumed run goes on with it.
    """

    def __init__(self, config: RunConfig, engine: RolloutEngine, run: Path) -> None:
        block = config.policy.generation.specrollout
        assert block.draft_refresh is not None and block.head is not None
        self._config, self._block, self._engine = config, block.draft_refresh, engine
        self._policy_folder = Path(config.policy.model_name)
        self._folder = run / "heads"
        self._num_drafts = block.num_speculative_tokens
        self._schedule = RefreshSchedule(self._block)
        self._gate = PublishGate(self._block.confidence, self._block.tolerance)
        self._head = self._load_head(Path(block.head))
        source = source_of(self._head, self._policy_folder, tokenizer_hash(self._policy_folder))
        self._store = FeatureStore(
            self._folder / "features", self._block.store_bytes, source, self._block.held_out_share
        )
        self._start: DraftHead | None = None
        self._policy_tensors: dict[str, torch.Tensor] = {}

    def policy_moves(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Called before the policy of `version` is trained on: its LM head is the teacher of what was just captured."""
        self._policy_tensors = {name: t for name, t in tensors if name in POLICY_TENSORS}
        write_atomically(teacher_file(self._folder, version), safetensors_bytes(self._policy_tensors))

    def after_step(self, step: int, stats: RolloutStats, step_s: float) -> dict[str, Any]:
        """Stores what was captured, and refreshes if the trigger says so; what happened, for `metrics.jsonl`."""
        for features in self._engine.take_features():
            if features.first_position == 0 and features.num_tokens > features.prompt_length:
                self._store.append(features)
        self._store.flush()
        decision = self._schedule.after_step(self._facts(step, stats, step_s))
        record: dict[str, Any] = {"decision": decision.reason, "gain_s": decision.gain_s}
        if decision.refresh:
            record |= self._refresh(step, decision)
        return record

    def close(self) -> None:
        """Lets another process use the features."""
        self._store.close()

    def _facts(self, step: int, stats: RolloutStats, step_s: float) -> StepFacts:
        costs = DecodeCosts.measured(stats.seconds, stats.plain_estimate_s, stats.num_tokens, stats.num_request_steps)
        to_come = self._config.grpo.max_num_steps - step - 1
        return StepFacts(stats.acceptance_length, stats.num_tokens, step_s, to_come, costs)

    def _refresh(self, step: int, decision: RefreshDecision) -> dict[str, Any]:
        training = list(self._store.sequences(held_out=False, max_tokens=TRAINING_TOKENS))
        held_out = list(self._store.sequences(held_out=True, max_tokens=HELD_OUT_TOKENS))
        if not training or not held_out:
            return {"decision": "skipped: nothing was captured yet", "published": False}
        for head in (self._head, self._start):
            if head is not None:
                head.set_policy_weights(self._policy_tensors)
        settings = settings_of(self._block, self._head)
        refresh = refresh_head(
            self._head, self._start or self._head, training, held_out, settings, Budget(seconds=self._schedule.budget_s()),
            self._gate,
            num_drafts=self._num_drafts, temperature=self._config.policy.generation.temperature,
        )  # fmt: skip
        folder = self._folder / (f"step_{step}" if refresh.published else "refused")
        save_head(refresh.candidate, folder)
        data = {"hash": self._store.data_hash(), "sequences": len(training), "held_out": len(held_out)}
        write_card(folder, self._policy_folder, refresh, settings, policy_version=step + 1, data=data)
        self._conclude(refresh, folder)
        return {
            "decision": decision.reason,
            "gain_s": decision.gain_s,
            "gate": refresh.reason,
            "published": refresh.published,
            "refresh_s": refresh.seconds,
            "head": str(folder.relative_to(self._folder)) if refresh.published else None,
        }

    def _conclude(self, refresh: Refresh, folder: Path) -> None:
        """Puts a head that passed into service, and learns from how it went. A promising one that did not pass is where the
        next refresh begins."""
        self._start = refresh.candidate if refresh.is_promising else None
        gain = gain_of(refresh)
        self._schedule.refreshed(refresh.seconds, gain)
        if gain is None or refresh.judgement is None:
            return
        self._engine.load_head(folder, refresh.judgement.after.expected_length, self._num_drafts)
        write_atomically(self._folder / "published.json", json.dumps({"head": folder.name}) + "\n")
        self._head = refresh.candidate

    def _load_head(self, configured: Path) -> DraftHead:
        """The head that this run published last, or the configured one; the engine has the latter."""
        published = self._folder / "published.json"
        if not published.is_file():
            return load_head(configured, self._policy_folder)
        folder = self._folder / json.loads(published.read_text())["head"]
        self._engine.load_head(folder)
        return load_head(folder, self._policy_folder)


def teacher_file(heads: Path, version: int) -> Path:
    """Where the LM head of the policy of `version` is kept: features of that version are read with it."""
    folder = heads / "teachers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"policy_{version}.safetensors"


def settings_of(block: DraftRefreshConfig, head: DraftHead) -> TrainingSettings:
    """The trainer's settings, from the block's. A head that is refreshed learns at a third of a new one's rate."""
    return TrainingSettings(
        loss=MIXED_LOSS if block.loss == "tv+kl_div" else block.loss,
        learning_rate=block.learning_rate or default_learning_rate(head.model.hidden_size) / 3,
        schedule="constant",
        warmup_steps=4,
        ttt_steps=block.ttt_steps,
        batch_tokens=block.tokens_per_batch or BATCH_TOKENS[head.device.type],
    )
