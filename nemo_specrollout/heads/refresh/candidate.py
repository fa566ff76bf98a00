# SPDX-License-Identifier: Apache-2.0
"""Compares a candidate with the head in service, and writes its head card.

A candidate is a draft head that a refresh has trained and that is not published yet. The head in service is the one with which
the engines draft now. The head card is a file beside a head that describes its training and its acceptance.
"""

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
"""Minimum of accepted draft tokens per engine step by which `Refresh.gain` is divided. It keeps the gain finite."""


@dataclass(frozen=True)
class RefreshData:
    """Features with which one refresh trains and judges a head."""

    training: Sequence[SequenceFeatures]
    """Sequences on which the head is trained."""
    held_out: Sequence[SequenceFeatures]
    """Sequences of other prompts, on which heads are judged."""

    @property
    def lacking(self) -> str | None:
        """Sentence that says which data is missing for training or for the publish gate, or None if there is enough."""
        if not self.training:
            return "no sequence to learn from was captured so far"
        if (count := num_prompts(self.held_out)) < MIN_SAMPLES:
            return f"{count} held-out prompts were captured so far; {MIN_SAMPLES} are needed to judge a head"
        return None


@dataclass(frozen=True)
class Judgement:
    """The publish gate's decision about a candidate, with the acceptance on held-out sequences on which it is based."""

    decision: GateDecision
    after: Acceptance
    """Acceptance of the candidate."""
    before: Acceptance | None
    """Acceptance of the head in service, or None if there is no such head."""


@dataclass(frozen=True)
class Refresh:
    """The result of a refresh, which is the candidate, figures of its training, and a comparison with the head in service."""

    candidate: DraftHead
    judgement: Judgement | None
    """Comparison with the head in service, or None if training failed."""
    training: TrainingProgress
    """Number of steps and tokens of the training, and its seconds. If the training failed, these are the figures at that
    moment."""
    reason: str
    """Sentence with the publish gate's verdict, or with the reason why training failed."""
    seconds: float
    """Seconds that the training took. In an online refresh they include the seconds of judging the candidate."""

    @property
    def published(self) -> bool:
        return self.judgement is not None and self.judgement.decision.published

    @property
    def difference(self) -> float:
        """Mean acceptance length of the candidate minus that of the head in service (`GateDecision.difference`).

        It is minus infinity if training failed.
        """
        return -math.inf if self.judgement is None else self.judgement.decision.difference

    @property
    def expected_length(self) -> float | None:
        return None if self.judgement is None else self.judgement.after.expected_length

    @property
    def gain(self) -> float | None:
        """Accepted draft tokens per engine step with the candidate, as a multiple of those with the head in service until now.

        The gain is None if the candidate was refused.
        """
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
    """Number of draft tokens per request and engine step for which acceptance is measured."""
    temperature: float = 1.0

    def compare(
        self, candidate: DraftHead, current: DraftHead | None, held_out: Sequence[SequenceFeatures]
    ) -> Judgement:
        """Compares `candidate` with `current`, which is the head in service, and returns the publish gate's decision.

        `current` is None if no head is in service. The acceptance of both heads is measured on each sequence of `held_out`.
        Sequences of the same prompt count as one sample.
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
    """Trains a copy of `start`, compares it with `current`, which is the head in service, and returns the result.

    `start` is either `current` or an earlier candidate that the publish gate refused although it seemed better. If training
    fails, no error is raised, and the candidate counts as refused.
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
    """Returns the number of different prompts in `held_out`.

    A prompt counts only if one of its sequences has a token that a head can draft.
    """
    return len({_prompt_hash(s) for s in held_out if s.num_draftable})


def write_card(
    folder: Path,
    policy_folder: Path,
    refresh: Refresh,
    settings: TrainingSettings,
    policy: Mapping[str, Any],
    data: Mapping[str, Any],
) -> None:
    """Checks the head in `folder` and writes its head card, which is the file `head_card.json`.

    `policy` and `data` are the card's entries about the policy (folder and version) and about the features (hash and counts).
    Raises ValueError if the head does not fit the policy.
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
