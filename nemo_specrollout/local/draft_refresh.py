# SPDX-License-Identifier: Apache-2.0
"""Online refresh in a local run: the head learns between two steps, in the trainer's process, when that pays."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.refresh import DraftRefreshConfig
from nemo_specrollout.config.run import RunConfig
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.local.statistics import RolloutStats
from nemo_specrollout.scheduling.publish_gate import PublishGate
from nemo_specrollout.scheduling.refresh_trigger import (
    DecodeCosts,
    RefreshDecision,
    RefreshObservation,
    RefreshOutlook,
    build_trigger,
)
from nemo_specrollout.training.feature_store import FeatureSource, FeatureStore
from nemo_specrollout.training.head import DraftHead, load_head, save_head
from nemo_specrollout.training.head_card import write_card
from nemo_specrollout.training.refresh import Refresh, refresh_head
from nemo_specrollout.training.trainer import Budget, TrainingSettings

# Tokens of the newest features that a refresh learns from, and those that judge it, at most.
TRAINING_TOKENS, HELD_OUT_TOKENS = 60_000, 12_000
FIRST_REFRESH_S = 8.0
SMOOTHING = 0.5
POLICY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass
class _Progress:
    """What the trigger needs to know of the run so far."""

    acceptance_length: float = 0.0
    published_length: float | None = None
    steps_since_refresh: int = 0
    run_s: float = 0.0
    waited_s: float = 0.0


class LocalRefresher:
    """Owns the head in service, its features and the heads made in this run; publishes into the engine.

    Folder `heads/` of the run directory: `features/`, `step_N/` for each head that passed the gate, `refused/` for the last
    that did not, `published.json`, which names the head in service: a resumed run goes on with it.
    """

    def __init__(self, config: RunConfig, engine: RolloutEngine, run: Path) -> None:
        block = config.policy.generation.specrollout
        assert block.draft_refresh is not None and block.model_drafter is not None
        self._config, self._block, self._engine = config, block.draft_refresh, engine
        self._policy_folder = Path(config.policy.model_name)
        self._folder = run / "heads"
        self._num_drafts = block.num_speculative_tokens
        self._trigger = build_trigger(self._block)
        self._gate = PublishGate(self._block.confidence, self._block.tolerance)
        self._outlook = RefreshOutlook(self._block.max_train_seconds or FIRST_REFRESH_S)
        self._progress = _Progress()
        self._head = self._load_head(Path(str(block.model_drafter.model)))
        self._store = FeatureStore(
            self._folder / "features", self._block.store_bytes, self._source(), self._block.held_out_share
        )
        self._policy_tensors: dict[str, torch.Tensor] = {}

    def policy_moves(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Called before the policy is trained: its LM head is the teacher of what the engine has just captured."""
        self._policy_tensors = {name: t for name, t in tensors if name in POLICY_TENSORS}

    def after_step(self, step: int, stats: RolloutStats, step_s: float) -> dict[str, Any]:
        """Stores what was captured, and refreshes if the trigger says so; what happened, for `metrics.jsonl`."""
        for features in self._engine.take_features():
            if features.first_position == 0 and features.num_tokens > features.prompt_length:
                self._store.append(features)
        self._store.flush()
        self._note(stats, step_s)
        decision = self._trigger.decide(self._observation(step, stats))
        record: dict[str, Any] = {"decision": decision.reason, "gain_s": decision.gain_s}
        if decision.refresh:
            record |= self._refresh(step, decision)
        return record

    def close(self) -> None:
        """Lets another process use the features."""
        self._store.close()

    def _note(self, stats: RolloutStats, step_s: float) -> None:
        progress, length = self._progress, stats.acceptance_length
        first = progress.acceptance_length == 0.0
        progress.acceptance_length = length if first else _blend(progress.acceptance_length, length)
        if progress.published_length is None:
            progress.published_length = progress.acceptance_length = length
        progress.steps_since_refresh += 1
        progress.run_s += step_s

    def _observation(self, step: int, stats: RolloutStats) -> RefreshObservation:
        progress = self._progress
        plain_s = (stats.plain_estimate_s or stats.seconds) / stats.num_tokens
        return RefreshObservation(
            acceptance_length=progress.acceptance_length,
            published_length=progress.published_length or progress.acceptance_length,
            tokens_per_step=stats.num_tokens,
            steps_to_come=self._config.grpo.max_num_steps - step - 1,
            steps_since_refresh=progress.steps_since_refresh,
            costs=DecodeCosts(plain_s, stats.seconds / stats.num_request_steps),
            outlook=self._outlook,
            run_s=progress.run_s,
            waited_s=progress.waited_s,
        )

    def _refresh(self, step: int, decision: RefreshDecision) -> dict[str, Any]:
        training = list(self._store.sequences(held_out=False, max_tokens=TRAINING_TOKENS))
        held_out = list(self._store.sequences(held_out=True, max_tokens=HELD_OUT_TOKENS))
        if not training or not held_out:
            return {"decision": "skipped: nothing was captured yet", "published": False}
        self._head.set_policy_weights(self._policy_tensors)
        settings = settings_of(self._block)
        refresh = refresh_head(
            self._head, training, held_out, settings, self._budget(), self._gate,
            num_drafts=self._num_drafts, temperature=self._config.policy.generation.temperature,
        )  # fmt: skip
        self._progress.waited_s += refresh.seconds
        self._progress.run_s += refresh.seconds
        self._progress.steps_since_refresh = 0
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
        """Puts a head that passed into service, and learns from how it went."""
        progress = self._progress
        if not refresh.published or refresh.judgement is None or refresh.judgement.before is None:
            self._outlook = self._outlook.after_rejection(refresh.seconds)
            return
        expected = refresh.judgement.after.expected_length
        self._engine.load_head(folder, expected, self._num_drafts)
        write_atomically(self._folder / "published.json", json.dumps({"head": folder.name}) + "\n")
        self._head = refresh.candidate
        won = expected / refresh.judgement.before.expected_length
        before = progress.acceptance_length
        after = 1.0 + (before - 1.0) * won
        self._outlook = self._outlook.after_publish(before, progress.published_length or before, after, refresh.seconds)
        progress.acceptance_length, progress.published_length = 0.0, None

    def _budget(self) -> Budget:
        progress = self._progress
        share = self._block.max_time_share
        left = (share * progress.run_s - progress.waited_s) / (1.0 - share) if share < 1.0 else float("inf")
        wanted = self._block.max_train_seconds or FIRST_REFRESH_S
        return Budget(seconds=max(0.5, min(wanted, left)))

    def _load_head(self, configured: Path) -> DraftHead:
        """The head that this run published last, or the configured one; the engine has the latter."""
        published = self._folder / "published.json"
        if not published.is_file():
            return load_head(configured, self._policy_folder)
        folder = self._folder / json.loads(published.read_text())["head"]
        self._engine.load_head(folder)
        return load_head(folder, self._policy_folder)

    def _source(self) -> FeatureSource:
        from nemo_specrollout.training.rollout_files import tokenizer_hash

        model = self._head.model
        return FeatureSource(
            str(self._policy_folder), tokenizer_hash(self._policy_folder), model.verifier_vocab_size,
            model.hidden_size, self._head.layer_ids,
        )  # fmt: skip


def settings_of(block: DraftRefreshConfig) -> TrainingSettings:
    """The trainer's settings, from the block's."""
    loss: Mapping[str, str] = {"tv+kl_div": '{"tv": 0.5, "kl_div": 0.5}'}
    return TrainingSettings(
        loss=loss.get(block.loss, block.loss),
        learning_rate=block.learning_rate,
        schedule="constant",
        warmup_steps=4,
        ttt_steps=block.ttt_steps,
        batch_tokens=block.tokens_per_batch,
    )


def _blend(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)
