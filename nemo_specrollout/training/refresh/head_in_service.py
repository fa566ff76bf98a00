# SPDX-License-Identifier: Apache-2.0
"""The head in service, and how it is replaced: trained when the trigger says so, and judged before it serves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_specrollout.config.draft_refresh import MIXED_LOSS, DraftRefreshConfig
from nemo_specrollout.scheduling.heads.publish_gate import MIN_SAMPLES, PublishGate
from nemo_specrollout.scheduling.heads.refresh_rate import RefreshRate
from nemo_specrollout.scheduling.heads.refresh_schedule import RefreshSchedule, StepFacts
from nemo_specrollout.scheduling.heads.refresh_trigger import RefreshDecision
from nemo_specrollout.training.features.features import SequenceFeatures
from nemo_specrollout.training.head.head import DraftHead
from nemo_specrollout.training.head.trainer import BATCH_TOKENS, Budget, TrainingSettings, default_learning_rate
from nemo_specrollout.training.refresh.refresh_round import Refresh, gain_of, num_prompts, refresh_head


@dataclass(frozen=True)
class RefreshData:
    """Features that a refresh learns from, and features that judge it."""

    training: Sequence[SequenceFeatures]
    held_out: Sequence[SequenceFeatures]

    @property
    def lacking(self) -> str | None:
        """Returns what is still missing for a refresh, as text for the log; None if nothing is.

        The gate cannot judge a head by fewer prompts, so the refresh waits for them.
        """
        if not self.training:
            return "no sequence to learn from was captured so far"
        if (count := num_prompts(self.held_out)) < MIN_SAMPLES:
            return f"{count} held-out prompts were captured so far; {MIN_SAMPLES} are needed to judge a head"
        return None


class HeadInService:
    """Owns the head in service, and the trigger, learning rate and gate of its refreshes. Knows no files and no engines.

    Example: `decision = service.decide(facts)`; if it says refresh, `service.teach(tensors)`, then
    `service.refresh(data, service.settings())`. A candidate that passed the gate is `service.head` from then on.
    """

    def __init__(
        self,
        head: DraftHead,
        config: DraftRefreshConfig,
        *,
        num_drafts: int,
        temperature: float = 1.0,
        in_background: bool = False,
    ) -> None:
        self.head = head
        self._promising: DraftHead | None = None
        """A candidate that the gate refused, though it looked better: the next refresh begins there."""
        self._config, self._num_drafts, self._temperature = config, num_drafts, temperature
        self._schedule, self._rate = RefreshSchedule(config, in_background), RefreshRate()
        self._gate = PublishGate(config.confidence, config.tolerance)

    def decide(self, facts: StepFacts) -> RefreshDecision:
        """Returns whether to refresh, and why. Asked once an RL step."""
        return self._schedule.after_step(facts)

    def teach(self, policy_tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets the policy's LM head and embedding, by which heads learn and are judged."""
        for head in (self.head, self._promising):
            if head is not None:
                head.set_policy_weights(policy_tensors)

    def settings(self) -> TrainingSettings:
        """Returns the trainer's settings for the next refresh. The usual learning rate is a third of a new head's."""
        usual = default_learning_rate(self.head.model.hidden_size) / 3
        return TrainingSettings(
            loss=MIXED_LOSS if self._config.loss == "tv+kl_div" else self._config.loss,
            learning_rate=self._config.learning_rate or usual * self._rate.share,
            schedule="constant",
            warmup_steps=4,
            ttt_steps=self._config.ttt_steps,
            batch_tokens=self._config.tokens_per_batch or BATCH_TOKENS[self.head.device.type],
        )

    def refresh(self, data: RefreshData, settings: TrainingSettings, budget: Budget | None = None) -> Refresh:
        """Trains a candidate and judges it; learns from the result when to refresh next, and at what learning rate.

        Args:
            data: Of which nothing is lacking.
            settings: The trainer's, from `settings()`.
            budget: How long to train. By default as long as the schedule allows.
        """
        refresh = refresh_head(
            self.head, self._promising or self.head, data.training, data.held_out, settings,
            budget or Budget(seconds=self._schedule.budget_s()), self._gate,
            num_drafts=self._num_drafts, temperature=self._temperature,
        )  # fmt: skip
        self._schedule.refreshed(refresh.seconds, gain_of(refresh))
        self._rate.judged(refresh.difference, refresh.published)
        self._promising = refresh.candidate if refresh.is_promising else None
        if refresh.published:
            self.head = refresh.candidate
        return refresh
