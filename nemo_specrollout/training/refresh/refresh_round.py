# SPDX-License-Identifier: Apache-2.0
"""A refresh: a copy of the head in service learns from features, and is judged against it on prompts that neither saw."""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.sampling.seeds import content_hash
from nemo_specrollout.scheduling.heads.publish_gate import GateDecision, PublishGate
from nemo_specrollout.training.features.features import SequenceFeatures
from nemo_specrollout.training.head.acceptance import Acceptance, measure_acceptance
from nemo_specrollout.training.head.head import DraftHead
from nemo_specrollout.training.head.trainer import Budget, HeadTrainer, OnStep, TrainingResult, TrainingSettings

SMALLEST_LENGTH = 0.05


@dataclass(frozen=True)
class Judgement:
    """The gate's word, and the held-out acceptance that it rests on; `before` is None for a first head."""

    decision: GateDecision
    after: Acceptance
    before: Acceptance | None


@dataclass(frozen=True)
class Refresh:
    """A candidate, what became of it, and what it took. `training` is None if training failed; the decision says why."""

    candidate: DraftHead
    judgement: Judgement | None
    training: TrainingResult | None
    reason: str
    seconds: float

    @property
    def is_promising(self) -> bool:
        """Whether a refused candidate looks better than the head in service, though not surely so: to be trained further."""
        return not self.published and self.difference > 0.0

    @property
    def difference(self) -> float:
        """Held-out acceptance length of the candidate minus the head in service's. It is NaN if the gate did not measure it,
        and minus infinity if training failed."""
        return -math.inf if self.judgement is None else self.judgement.decision.difference

    @property
    def published(self) -> bool:
        return self.judgement is not None and self.judgement.decision.published


def gain_of(refresh: Refresh) -> float | None:
    """How many times as many draft tokens of a published head are right as of the one before; None of a refused one."""
    judgement = refresh.judgement
    if not refresh.published or judgement is None:
        return None
    before = 1.0 if judgement.before is None else judgement.before.expected_length
    return (judgement.after.expected_length - 1.0) / max(before - 1.0, SMALLEST_LENGTH)


def refresh_head(
    current: DraftHead,
    start: DraftHead,
    training: Sequence[SequenceFeatures],
    held_out: Sequence[SequenceFeatures],
    settings: TrainingSettings,
    budget: Budget,
    gate: PublishGate,
    *,
    num_drafts: int,
    temperature: float = 1.0,
    on_step: OnStep = lambda step, total, loss: None,
) -> Refresh:
    """Trains a copy of `start` and judges it against `current`, the head in service, which it usually is; both stay as they
    are. Never raises for a training that goes wrong."""
    started = time.perf_counter()
    trainer = HeadTrainer(copy.deepcopy(start), settings)
    try:
        trained = trainer.train(training, budget, on_step)
    except (FloatingPointError, ValueError) as error:
        reason = f"refused: training failed, {error}"
        return Refresh(trainer.head, None, None, reason, time.perf_counter() - started)
    judgement = judge(trainer.head, current, held_out, gate, num_drafts, temperature)
    return Refresh(trainer.head, judgement, trained, judgement.decision.reason, time.perf_counter() - started)


def judge(
    candidate: DraftHead,
    current: DraftHead | None,
    held_out: Sequence[SequenceFeatures],
    gate: PublishGate,
    num_drafts: int,
    temperature: float = 1.0,
) -> Judgement:
    """Compares two heads, sequence by sequence; the samples of one prompt count as one."""
    after = measure_acceptance(candidate, held_out, num_drafts, temperature)
    before = None if current is None else measure_acceptance(current, held_out, num_drafts, temperature)
    counted = [i for i, s in enumerate(after.sequences) if s.count_K[0] > 0]
    decision = gate.decide(
        _lengths(after, counted),
        None if before is None else _lengths(before, counted),
        np.array([after.sequences[i].count_K[0] for i in counted], float),
        np.array([_prompt_hash(held_out[i]) for i in counted], np.uint64),
    )
    return Judgement(decision, after, before)


def num_prompts(held_out: Sequence[SequenceFeatures]) -> int:
    """Counts the different prompts by which a head can be judged: of sequences with a token to draft."""
    return len({_prompt_hash(s) for s in held_out if s.num_draftable})


def _prompt_hash(features: SequenceFeatures) -> int:
    return content_hash(features.whole_prompt_P.tolist())


def _lengths(acceptance: Acceptance, counted: list[int]) -> np.ndarray:
    return np.array([acceptance.sequences[i].expected_length for i in counted])
