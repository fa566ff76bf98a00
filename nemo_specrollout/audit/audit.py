# SPDX-License-Identifier: Apache-2.0
"""Audits a run. It chooses some of the recorded rows (samples), computes their tokens again, and judges the rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from nemo_specrollout.audit.noise import scheme_of
from nemo_specrollout.audit.recorded_run import Place, RecordedRun
from nemo_specrollout.audit.replay import RowReplay, replay
from nemo_specrollout.audit.rows import EngineFacts, RecordedRow
from nemo_specrollout.audit.verdict import Audit, Rounding, Skipped, judge
from nemo_specrollout.audit.weights import Weights
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports.records import in_ranges

OnRow = Callable[[int, int], None]
"""Callback for progress. It is called with the number of rows that have been computed, and the number of rows to compute."""


def choose(run: RecordedRun, weights: Weights, steps: Sequence[int], num_rows: int) -> list[Place]:
    """Returns the places of the rows to audit, `num_rows` rows of each of `steps`.

    The rows are spread evenly over a step. If a step has fewer rows, all of them are returned. If `steps` is empty, the rows
    come from the newest step for which the weights of all its policy versions are available. Raises ConfigError if the run
    lacks one of `steps`, or if no step can be audited.
    """
    unknown = [step for step in steps if step not in run.steps]
    if unknown:
        raise ConfigError(f"--steps: the run has no finished step {unknown[0]}; it has {in_ranges(list(run.steps))}")
    chosen = []
    for step in steps or _newest(run, weights):
        rows = run.steps[step]
        count = min(num_rows, len(rows))
        chosen += [rows[i * len(rows) // count] for i in range(count)]
    return chosen


def auditable_steps(run: RecordedRun, weights: Weights) -> list[int]:
    """Returns the steps that can be audited, because the weights of all policy versions that sampled in them are available."""
    versions = {step: {v for row in rows for v in row.versions} for step, rows in run.steps.items()}
    known = {version: weights.is_known(version) for version in set().union(*versions.values())}
    return [step for step, needed in versions.items() if needed and all(known[version] for version in needed)]


def _newest(run: RecordedRun, weights: Weights) -> list[int]:
    steps = auditable_steps(run, weights)
    if steps:
        return steps[-1:]
    last = list(run.steps)[-1]
    version = max((v for row in run.steps[last] for v in row.versions), default=0)
    try:
        weights.folder(version)
    except ValueError as error:
        raise ConfigError(
            f"RUN_DIR: no step's weights are at hand. Step {last} was sampled by policy {version}: {error}"
        ) from error
    raise ConfigError(
        "RUN_DIR: no step has all of its policies at hand; name one by --steps and its weights by --weights"
    )


def audit_rows(run: RecordedRun, weights: Weights, places: Sequence[Place], on_row: OnRow) -> Audit:
    """Computes the tokens of the rows at `places` again, judges the rows, and returns the audit.

    It computes the rows of one policy version one after another, so that it loads each version once. It judges all rows at the
    end, because it learns from all of them how large a difference can be explained by rounding.
    """
    replays = list[RowReplay]()
    skipped = list[Skipped]()
    engines = list[EngineFacts]()
    for done, place in enumerate(sorted(places, key=lambda place: place.versions), 1):
        outcome = _computed(run, weights, place)
        if isinstance(outcome, Skipped):
            skipped.append(outcome)
        else:
            replays.append(outcome)
            engines.append(run.engine_facts(place))
        on_row(done, len(places))
    rounding = Rounding.of(replays)
    verdicts = []
    for replayed, facts in zip(replays, engines, strict=True):
        verdict = judge(replayed, rounding)
        if not verdict.is_policys:
            verdict = replace(verdict, whose=_other_policy(replayed.row, weights, facts, rounding))
        verdicts.append(verdict)
    verdicts.sort(key=lambda verdict: (verdict.step, verdict.number))
    dtypes = ", ".join(sorted({facts.dtype for facts in engines}))
    return Audit(
        verdicts, skipped, dtypes, rounding, np.concatenate([np.zeros(0), *(r.logprob_differences for r in replays)])
    )


def _computed(run: RecordedRun, weights: Weights, place: Place) -> RowReplay | Skipped:
    """Computes the tokens of the row at `place` again. Returns the replay, or the reason why the row cannot be replayed."""
    row = run.read(place)
    if isinstance(row, Skipped):
        return row
    facts = run.engine_facts(place)
    try:
        _check_vocabulary(row, weights, facts.dtype)
    except ValueError as error:
        return Skipped(place.step, place.number, str(error))
    return _replayed(row, weights, facts)


def _replayed(row: RecordedRow, weights: Weights, facts: EngineFacts) -> RowReplay:
    fine = partial(weights.fine_model, facts.dtype)
    coarse = partial(weights.coarse_model, facts.dtype)
    return replay(row, fine, coarse, scheme_of(facts.vllm), raw_logprobs=facts.raw_logprobs)


def _check_vocabulary(row: RecordedRow, weights: Weights, dtype: str) -> None:
    """Raises ValueError if weights that sampled the row are missing, or if a token of the row is not in their vocabulary."""
    for version, _ in row.policy_spans:
        size = int(weights.coarse_model(dtype, version).config.get_text_config().vocab_size)
        largest = int(row.text.max())
        if largest >= size:
            raise ValueError(
                f"token {largest} is not among the {size:,} of {weights.folder(version)}; these weights are of another model"
            )


def _other_policy(row: RecordedRow, weights: Weights, facts: EngineFacts, rounding: Rounding) -> int | None:
    """Returns the policy version that sampled a row, if the recorded version did not, or None if it is not found.

    Only the versions just before and just after the recorded one are tried, if their weights are available. If the records
    name several versions for the row, none is tried.
    """
    if len(row.policy_spans) > 1:
        return None
    ((version, first),) = row.policy_spans
    for other in (version - 1, version + 1):
        if other < 0 or not weights.is_known(other):
            continue
        moved = replace(row, policy_spans=((other, first),))
        if judge(_replayed(moved, weights, facts), rounding).is_policys:
            return other
    return None
