# SPDX-License-Identifier: Apache-2.0
"""Comparison of a candidate, which is a head that a refresh has trained, with the head in service, and its head card."""

import copy
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.heads.decisions.publish_gate import MIN_SAMPLES, GateDecision, PublishGate
from nemo_specrollout.heads.features.features import SequenceFeatures
from nemo_specrollout.heads.files.head_facts import check_head
from nemo_specrollout.heads.training.acceptance import Acceptance, measure_acceptance
from nemo_specrollout.heads.training.head import DraftHead
from nemo_specrollout.heads.training.trainer import Budget, HeadTrainer, TrainingProgress, TrainingSettings
from nemo_specrollout.installed.versions import installed_versions
from nemo_specrollout.sampling.seeds import content_hash
from nemo_specrollout.storage.files import write_atomically

MIN_GAIN = 0.05
"""Smallest number of accepted drafts per engine step by which `Refresh.gain` divides, so that the gain stays finite."""


@dataclass(frozen=True)
class RefreshData:
    """Features for one refresh."""

    training: Sequence[SequenceFeatures]
    """Sequences to learn from."""
    held_out: Sequence[SequenceFeatures]
    """Sequences of other prompts, with which heads are judged."""

    @property
    def lacking(self) -> str | None:
        """Description of data that is missing for training or for the gate, or None if nothing is missing."""
        if not self.training:
            return "no sequence to learn from was captured so far"
        if (count := num_prompts(self.held_out)) < MIN_SAMPLES:
            return f"{count} held-out prompts were captured so far; {MIN_SAMPLES} are needed to judge a head"
        return None


@dataclass(frozen=True)
class Judgement:
    """The gate's decision, with the held-out acceptance on which it is based."""

    decision: GateDecision
    after: Acceptance
    before: Acceptance | None
    """Acceptance of the head in service, or None if there is none."""


@dataclass(frozen=True)
class Refresh:
    """A candidate with its training and its judgement."""

    candidate: DraftHead
    judgement: Judgement | None
    """Comparison with the head in service, or None if training failed."""
    training: TrainingProgress
    """Totals of the training, up to its failure if it failed."""
    reason: str
    """Verdict of the gate, or why training failed."""
    seconds: float
    """Seconds of training, and of judging in an online refresh."""

    @property
    def published(self) -> bool:
        return self.judgement is not None and self.judgement.decision.published

    @property
    def difference(self) -> float:
        """The gate's difference in acceptance length, or minus infinity if training failed."""
        return -math.inf if self.judgement is None else self.judgement.decision.difference

    @property
    def expected_length(self) -> float | None:
        return None if self.judgement is None else self.judgement.after.expected_length

    @property
    def gain(self) -> float | None:
        """Accepted drafts per engine step of the new head, divided by those of the head before. None if it was refused."""
        judgement = self.judgement
        if not self.published or judgement is None:
            return None
        before = 1.0 if judgement.before is None else judgement.before.expected_length
        return (judgement.after.expected_length - 1.0) / max(before - 1.0, MIN_GAIN)


@dataclass(frozen=True)
class Judge:
    """Compares a candidate with the head in service."""

    gate: PublishGate
    num_drafts: int
    """Number of draft tokens of a request in an engine step, for which acceptance is measured."""
    temperature: float = 1.0

    def compare(
        self, candidate: DraftHead, current: DraftHead | None, held_out: Sequence[SequenceFeatures]
    ) -> Judgement:
        """Returns the judgement of `candidate` against `current`, which is None if no head is in service.

        The heads are compared on each sequence of `held_out`, and all sequences of one prompt count as one sample.
        """
        after = measure_acceptance(candidate, held_out, self.num_drafts, self.temperature)
        before = None if current is None else measure_acceptance(current, held_out, self.num_drafts, self.temperature)
        weights_N = after.count_NK[:, 0]
        counted = weights_N > 0
        prompts_N = np.array([_prompt_hash(features) for features in held_out], np.uint64)
        decision = self.gate.decide(
            after.expected_length_N[counted],
            None if before is None else before.expected_length_N[counted],
            weights_N[counted],
            prompts_N[counted],
        )
        return Judgement(decision, after, before)


def refresh_head(
    current: DraftHead, start: DraftHead, data: RefreshData, settings: TrainingSettings, budget: Budget, judge: Judge
) -> Refresh:
    """Trains a copy of `start`, and judges it against `current`, the head in service.

    `start` is either `current` or an earlier candidate that the gate refused although it seemed better. If training fails, the
    result is a refused candidate and not an error.
    """
    started = time.perf_counter()
    trainer = HeadTrainer(copy.deepcopy(start), settings)
    progress = trainer.progress
    judgement = None
    try:
        trainer.train(data.training, budget)
    except (FloatingPointError, ValueError) as error:
        reason = f"refused: training failed, {error}"
    else:
        judgement = judge.compare(trainer.head, current, data.held_out)
        reason = judgement.decision.reason
    return Refresh(trainer.head, judgement, progress, reason, time.perf_counter() - started)


def num_prompts(held_out: Sequence[SequenceFeatures]) -> int:
    """Returns the number of different prompts, without those whose sequences have no token that a head can draft."""
    return len({_prompt_hash(s) for s in held_out if s.num_draftable})


def write_card(
    folder: Path,
    policy_folder: Path,
    refresh: Refresh,
    settings: TrainingSettings,
    policy: Mapping[str, Any],
    data: Mapping[str, Any],
) -> None:
    """Checks the head in `folder` and writes its card, `head_card.json`. Raises ValueError if it does not fit the policy.

    `policy` and `data` are the card's entries about the policy (folder and version) and about the features (hash and counts).
    """
    check_head(folder, policy_folder)
    judgement = refresh.judgement
    card = {
        "policy": dict(policy),
        "data": dict(data),
        "training": {
            **asdict(settings),
            "steps": refresh.training.steps,
            "tokens_seen": refresh.training.tokens,
            "seconds": refresh.seconds,
        },
        "held_out": {
            "before": _card_figures(judgement.before) if judgement else None,
            "after": _card_figures(judgement.after) if judgement else None,
            "sequences": len(judgement.after.count_NK) if judgement else 0,
        },
        "gate": {"published": refresh.published, "reason": refresh.reason},
        "versions": installed_versions(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_atomically(folder / "head_card.json", json.dumps(card, indent=1) + "\n")


def _card_figures(acceptance: Acceptance | None) -> dict[str, Any] | None:
    if acceptance is None:
        return None
    return {
        "acceptance_length": round(acceptance.expected_length, 4),
        "acceptance_by_position": acceptance.acceptance_rate_K.round(4).tolist(),
    }


def _prompt_hash(features: SequenceFeatures) -> int:
    return content_hash(features.whole_prompt_P.tolist())
