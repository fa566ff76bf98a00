# SPDX-License-Identifier: Apache-2.0
"""Online refresh: a head that learns while the policy does. What a local run and NeMo-RL share."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.refresh import MIXED_LOSS, DraftRefreshConfig
from nemo_specrollout.scheduling.publish_gate import MIN_SAMPLES, PublishGate
from nemo_specrollout.scheduling.refresh_rate import RefreshRate
from nemo_specrollout.scheduling.refresh_schedule import RefreshSchedule, StepFacts
from nemo_specrollout.scheduling.refresh_trigger import RefreshDecision
from nemo_specrollout.training.feature_store import FeatureReader, FeatureSource, newest_sequences
from nemo_specrollout.training.head import DraftHead, load_head, save_head
from nemo_specrollout.training.head_card import write_card
from nemo_specrollout.training.head_folder import HeadFolder, PublishedHead, RefreshRecord
from nemo_specrollout.training.offline_refresh import source_of
from nemo_specrollout.training.refresh import Refresh, gain_of, num_prompts, refresh_head
from nemo_specrollout.training.rollout_files import tokenizer_hash
from nemo_specrollout.training.trainer import BATCH_TOKENS, Budget, TrainingSettings, default_learning_rate

# Tokens of the newest features that a refresh learns from, and those that judge it, at most.
TRAINING_TOKENS, HELD_OUT_TOKENS = 60_000, 6_000


class OnlineRefresh:
    """Owns the head in service, the schedule of refreshes and the gate; makes heads in `folder`, and publishes them there.

    Example: `decision = online.decide(facts)`; if it says refresh, `online.refresh(...)` trains, judges, and says what
    became of it. Loading a published head into engines is the caller's.
    """

    def __init__(
        self,
        block: SpecrolloutConfig,
        policy_folder: Path,
        folder: HeadFolder,
        *,
        configured_head: Path,
        temperature: float,
        device: torch.device | str = "cpu",
        in_background: bool = False,
    ) -> None:
        """Begins with the head that `folder` names, or else the configured one. Raises ValueError if it does not fit."""
        assert block.draft_refresh is not None
        self._config, self._num_drafts = block.draft_refresh, block.num_speculative_tokens
        self._policy_folder, self._folder, self._temperature = policy_folder, folder, temperature
        self._schedule, self._rate = RefreshSchedule(self._config, in_background), RefreshRate()
        self._gate = PublishGate(self._config.confidence, self._config.tolerance)
        published = folder.published()
        self.head = load_head(configured_head if published is None else published.folder, policy_folder, device)
        self._start: DraftHead | None = None

    @property
    def source(self) -> FeatureSource:
        """Whose features the head learns from."""
        return source_of(self.head, self._policy_folder, tokenizer_hash(self._policy_folder))

    def decide(self, facts: StepFacts) -> RefreshDecision:
        """Whether to refresh; asked once an RL step."""
        return self._schedule.after_step(facts)

    def refresh(
        self,
        decision: RefreshDecision,
        step: int,
        stores: Sequence[FeatureReader],
        policy_version: int,
        policy_tensors: Mapping[str, torch.Tensor],
    ) -> RefreshRecord:
        """Trains a head on the newest features and publishes it if it passes the gate. `policy_tensors`: LM head and embedding
        of the policy of `policy_version`, which is what the head is made for."""
        training = newest_sequences(stores, held_out=False, max_tokens=TRAINING_TOKENS)
        held_out = newest_sequences(stores, held_out=True, max_tokens=HELD_OUT_TOKENS)
        lacking = _lacking(len(training), num_prompts(held_out))
        if lacking is not None:
            return RefreshRecord(f"skipped: {lacking}", decision.gain_s, published=False)
        for head in (self.head, self._start):
            if head is not None:
                head.set_policy_weights(policy_tensors)
        settings = settings_of(self._config, self.head, self._rate.share)
        refresh = refresh_head(
            self.head, self._start or self.head, training, held_out, settings, Budget(seconds=self._schedule.budget_s()),
            self._gate, num_drafts=self._num_drafts, temperature=self._temperature,
        )  # fmt: skip
        folder = self._folder.candidate(step, refresh.published)
        save_head(refresh.candidate, folder)
        data = {"hash": _hash_of(stores), "sequences": len(training), "held_out": len(held_out)}
        write_card(folder, self._policy_folder, refresh, settings, policy_version=policy_version, data=data)
        published = self._conclude(refresh, PublishedHead(folder, policy_version, _length_of(refresh)))
        return RefreshRecord(
            decision=decision.reason,
            gain_s=decision.gain_s,
            gate=refresh.reason,
            published=refresh.published,
            refresh_s=refresh.seconds,
            head=None if published is None else published.folder.name,
            policy_version=policy_version,
            expected_length=_length_of(refresh),
        )

    def _conclude(self, refresh: Refresh, made: PublishedHead) -> PublishedHead | None:
        """Puts a head that passed into service, and learns from how it went. A promising one that did not pass is where the
        next refresh begins."""
        self._start = refresh.candidate if refresh.is_promising else None
        self._schedule.refreshed(refresh.seconds, gain_of(refresh))
        self._rate.judged(refresh.difference, refresh.published)
        if not refresh.published:
            return None
        self._folder.publish(made)
        self.head = refresh.candidate
        return made


def settings_of(block: DraftRefreshConfig, head: DraftHead, rate_share: float) -> TrainingSettings:
    """Returns the trainer's settings for a refresh.

    `rate_share`: share of the usual learning rate, used where the block sets no rate. The usual rate is a third of a new
    head's.
    """
    usual = default_learning_rate(head.model.hidden_size) / 3
    return TrainingSettings(
        loss=MIXED_LOSS if block.loss == "tv+kl_div" else block.loss,
        learning_rate=block.learning_rate or usual * rate_share,
        schedule="constant",
        warmup_steps=4,
        ttt_steps=block.ttt_steps,
        batch_tokens=block.tokens_per_batch or BATCH_TOKENS[head.device.type],
    )


def _lacking(num_training: int, num_held_out: int) -> str | None:
    """Returns what is still missing for a refresh, as text for the log; None if nothing is.

    The gate could not judge a head by fewer prompts, so the refresh waits for them.
    """
    if not num_training:
        return "no sequence to learn from was captured so far"
    if num_held_out < MIN_SAMPLES:
        return f"{num_held_out} held-out prompts were captured so far; {MIN_SAMPLES} are needed to judge a head"
    return None


def _length_of(refresh: Refresh) -> float | None:
    return None if refresh.judgement is None else refresh.judgement.after.expected_length


def _hash_of(stores: Sequence[FeatureReader]) -> str:
    """A store's own hash; of several, one of all."""
    hashes = [store.data_hash() for store in stores]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()
