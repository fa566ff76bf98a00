# SPDX-License-Identifier: Apache-2.0
"""Online refresh, which trains the draft head again while RL trains the policy. Local runs and runs of NeMo-RL use it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nemo_specrollout.config.block import MIXED_LOSS, SpecrolloutConfig
from nemo_specrollout.heads.decisions.publish_gate import PublishGate
from nemo_specrollout.heads.decisions.refresh_schedule import RefreshDecision, RefreshRate, RefreshSchedule, StepFacts
from nemo_specrollout.heads.features.feature_store import FeatureReader, FeatureSource, data_hash, newest_sequences
from nemo_specrollout.heads.files.head_folder import HeadFolder, PublishedHead, RefreshRecord
from nemo_specrollout.heads.refresh.candidate import Judge, Refresh, RefreshData, refresh_head, write_card
from nemo_specrollout.heads.training.head import DraftHead, load_eagle3_head, save_head
from nemo_specrollout.heads.training.trainer import BATCH_TOKENS, Budget, TrainingSettings, default_learning_rate
from nemo_specrollout.storage.model_folder import tokenizer_fingerprint

TRAINING_TOKENS = 60_000
"""Maximum number of tokens on which a refresh trains a candidate."""
HELD_OUT_TOKENS = 6_000
"""Maximum number of held-out tokens on which a candidate is judged."""


class OnlineRefresh:
    """Owns the head that a run has in service, and decides when to train a new one, how, and whether to publish it.

    After each RL step, call `decide`. If it decides for a refresh, call `refresh`, which trains and judges a candidate. If the
    candidate passes the publish gate, it is published in `folder` and becomes `head`. The caller then has to load it into the
    engines.
    """

    def __init__(
        self,
        block: SpecrolloutConfig,
        policy_folder: Path,
        first_head: Path,
        folder: HeadFolder,
        *,
        temperature: float,
        in_background: bool = False,
    ) -> None:
        """Starts with the head that was last published in `folder`, or with `first_head` if there is none.

        `temperature` is the sampling temperature of the rollouts. With `in_background`, the run goes on while a refresh
        trains. Raises ValueError if the head does not fit the policy.
        """
        assert block.draft_refresh is not None
        self._config = config = block.draft_refresh
        self._policy_folder = policy_folder
        self._folder = folder
        published = folder.published()
        device = "cuda" if config.trainer_gpus else "cpu"
        self.head = load_eagle3_head(first_head if published is None else published.folder, policy_folder, device)
        self._promising: DraftHead | None = None
        """Refused candidate that seemed better than the head in service, or None. The next refresh continues its training."""
        gate = PublishGate(config.confidence, config.tolerance)
        self._judge = Judge(gate, block.num_speculative_tokens, temperature)
        self._schedule = RefreshSchedule(config, in_background)
        self._rate = RefreshRate()

    def decide(self, facts: StepFacts) -> RefreshDecision:
        """Returns the decision whether to refresh the head now. Call it once in each RL step."""
        return self._schedule.after_step(facts)

    def set_policy_weights(self, policy_tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies the policy's current LM head and embedding into the draft heads.

        Training and judging need them, because they compare the draft tokens of a head with the policy's logits.
        """
        for head in (self.head, self._promising):
            if head is not None:
                head.set_policy_weights(policy_tensors)

    def settings(self) -> TrainingSettings:
        """Returns the trainer's settings for the next refresh.

        If the config sets no learning rate, a third of the default for a new head is taken, and less after candidates that
        were worse than the head in service.
        """
        base = default_learning_rate(self.head.model.hidden_size) / 3
        return TrainingSettings(
            loss=MIXED_LOSS if self._config.loss == "tv+kl_div" else self._config.loss,
            learning_rate=self._config.learning_rate or base * self._rate.share,
            schedule="constant",
            warmup_steps=4,
            ttt_steps=self._config.ttt_steps,
            batch_tokens=self._config.tokens_per_batch or BATCH_TOKENS[self.head.device.type],
        )

    def train(self, data: RefreshData, settings: TrainingSettings, budget: Budget | None = None) -> Refresh:
        """Trains and judges a candidate, and adapts the schedule of refreshes and the learning rate to the result.

        `data` must be enough for both, which means that `data.lacking` is None. `budget` is the length of the training. If it
        is None, the schedule decides how many seconds the training may take.
        """
        budget = budget or Budget(seconds=self._schedule.budget_s())
        refresh = refresh_head(self.head, self._promising or self.head, data, settings, budget, self._judge)
        self._schedule.refreshed(refresh.seconds, refresh.gain)
        self._rate.judged(refresh.difference, refresh.published)
        is_promising = not refresh.published and refresh.difference > 0.0
        self._promising = refresh.candidate if is_promising else None
        if refresh.published:
            self.head = refresh.candidate
        return refresh

    @property
    def source(self) -> FeatureSource:
        """Description of the features from which the head learns.

        It names the policy that computes them, and the layers whose inputs the head reads.
        """
        return source_of(self.head, self._policy_folder)

    def refresh(
        self,
        decision: RefreshDecision,
        step: int,
        stores: Sequence[FeatureReader],
        policy_version: int,
        policy_tensors: Mapping[str, torch.Tensor],
    ) -> RefreshRecord:
        """Trains a head on the newest features of all engines, and publishes it if it passes the publish gate.

        `decision` is what `decide` has returned, and `step` is the RL step that has ended. `policy_tensors` are the LM head
        and the embedding of `policy_version`. Returns a record of the outcome. If there are too few features, nothing is
        trained, and the record says so.
        """
        data = RefreshData(
            newest_sequences(stores, held_out=False, max_tokens=TRAINING_TOKENS),
            newest_sequences(stores, held_out=True, max_tokens=HELD_OUT_TOKENS),
        )
        if (lacking := data.lacking) is not None:
            return RefreshRecord(f"skipped: {lacking}", decision.gain_s, published=False)
        self.set_policy_weights(policy_tensors)
        settings = self.settings()
        refresh = self.train(data, settings)
        folder = self._folder.candidate(step, refresh.published)
        save_head(refresh.candidate, folder)
        policy = {"folder": str(self._policy_folder), "version": policy_version}
        everything = [*data.training, *data.held_out]
        counts = {"hash": data_hash(everything), "sequences": len(data.training), "held_out": len(data.held_out)}
        write_card(folder, self._policy_folder, refresh, settings, policy, counts)
        if refresh.published:
            self._folder.publish(PublishedHead(folder, policy_version, refresh.expected_length))
        return RefreshRecord(
            decision=decision.reason,
            gain_s=decision.gain_s,
            gate=refresh.reason,
            published=refresh.published,
            refresh_s=refresh.seconds,
            head=folder.name if refresh.published else None,
            policy_version=policy_version,
            expected_length=refresh.expected_length,
        )


def source_of(head: DraftHead, policy_folder: Path) -> FeatureSource:
    """Returns a description of the features from which `head` learns.

    It names the policy that computes the features, and the layers whose inputs the head reads.
    """
    model = head.model
    tokenizer = tokenizer_fingerprint(policy_folder)
    return FeatureSource(str(policy_folder), tokenizer, model.verifier_vocab_size, model.hidden_size, head.layer_ids)
