# SPDX-License-Identifier: Apache-2.0
"""Judges whether recorded rows (samples) are what the policy samples, by comparing them with their replays.

A row is the policy's own sample if all of its tokens and log-probs are those of the replay, or differ only by rounding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nemo_specrollout.audit.replay import RowReplay
from nemo_specrollout.audit.rows import Array

_FACTOR = 8.0
"""Largest difference that counts as rounding, divided by the rounding error of the audit's own computation.

To measure this error, the audit computes every row both in the engine's precision and in a finer one. Engine and audit add the
same numbers in different orders. So over many rows their errors are of similar size, but in a single row the engine's may be a
few times larger. docs/guides/audit.md has the measurements.
"""
_SHOWN_ROWS = 8


@dataclass(frozen=True)
class Difference:
    """A position of a row where the policy samples another token than the recorded one."""

    number: int
    """Index of the token in the response, from 0."""
    recorded: int
    sampled: int
    """The token that the policy samples at this position."""
    gap: float
    """Best score minus the score of the recorded token, or inf if the sampling parameters exclude the recorded token."""


@dataclass(frozen=True)
class RowVerdict:
    """The judgement of one row."""

    step: int
    number: int
    """Number of the row among the rows of its step, from 0."""
    num_tokens: int
    differences: tuple[Difference, ...]
    first_foreign: int | None
    """Index in the response of the first position where token or log-prob differ by more than rounding, or None."""
    why: str = ""
    """Phrase that says what differs. It covers the tokens from `first_foreign` on, and is empty if `first_foreign` is None."""
    whose: int | None = None
    """Another policy version that sampled the row, or None if none is known."""

    @property
    def is_policys(self) -> bool:
        """Whether the row is the policy's own sample, because no token differs by more than rounding."""
        return self.first_foreign is None


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be audited, with the reason."""

    step: int
    number: int
    reason: str


@dataclass(frozen=True)
class Rounding:
    """The largest differences between engine and audit that still count as rounding, in nats."""

    logprob: float
    """Largest difference between the engine's and the audit's log-prob of a token."""
    score: float
    """Largest gap between the best score and the score of the recorded token. It is smaller than `logprob`. The reason is that
    rounding changes a token only where two scores are nearly equal, and this is rarer than a large error of a log-prob."""

    @classmethod
    def of(cls, replays: Iterable[RowReplay]) -> "Rounding":
        """Returns the largest differences that count as rounding, from the audit's own rounding errors in `replays`."""
        own = np.concatenate([np.zeros(1), *(replayed.own_rounding for replayed in replays)])
        largest = float(own.max())
        return cls(_FACTOR * largest, max(2 * largest, _FACTOR * float(np.quantile(own, 0.99))))


@dataclass(frozen=True)
class Audit:
    """The judgement of all audited rows of a run."""

    rows: Sequence[RowVerdict]
    skipped: Sequence[Skipped]
    dtype: str
    """Precision in which the engines computed. If their precisions differ, it is a list with commas."""
    rounding: Rounding
    logprob_differences: Array
    """Absolute difference between the engine's and the audit's log-prob of each token, in nats. It is NaN if the engine's is
    not known."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were computed again."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def foreign(self) -> list[RowVerdict]:
        """The rows that are not the policy's own samples."""
        return [row for row in self.rows if not row.is_policys]

    @property
    def differences(self) -> list[Difference]:
        """All tokens, of all rows, where the policy samples another token than the recorded one."""
        return [difference for row in self.rows for difference in row.differences]

    @property
    def logprob_quantiles(self) -> dict[str, float]:
        """The maximum, 99th percentile and median of `logprob_differences` without NaN. Empty if all of them are NaN."""
        known = self.logprob_differences[np.isfinite(self.logprob_differences)]
        if not known.size:
            return {}
        return {
            "largest": float(known.max()),
            "p99": float(np.quantile(known, 0.99)),
            "median": float(np.median(known)),
        }

    @property
    def sentence(self) -> str:
        """The verdict on the run in one sentence."""
        if not self.rows:
            return "no row could be audited"
        if self.foreign:
            return _foreign_sentence(self.foreign)
        differ = self.differences
        rows = "the row is the policy's own sample" if len(self.rows) == 1 else _all_own(len(self.rows))
        if not differ:
            return rows
        verb = "differs" if len(differ) == 1 else "differ"
        gap = max(difference.gap for difference in differ)
        return (
            f"{len(differ):,} of {self.num_tokens:,} tokens {verb}, {'each ' if len(differ) > 1 else ''}where the two best "
            f"scores are within {gap:.2g}: rounding of {self.dtype}"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the audit as JSON values, with the verdict, counts, quantiles, and each row's judgement."""
        return {
            "verdict": self.sentence,
            "rows": len(self.rows),
            "tokens": self.num_tokens,
            "rows_not_the_policys": len(self.foreign),
            "tokens_that_differ": len(self.differences),
            "dtype": self.dtype,
            "rounding_explains": asdict(self.rounding),
            "logprob_difference": self.logprob_quantiles,
            "by_row": [_row_as_json(row) for row in self.rows],
            "skipped": [asdict(row) for row in self.skipped],
        }


def judge(replayed: RowReplay, rounding: Rounding) -> RowVerdict:
    """Returns the verdict on one replayed row. Differences up to those in `rounding` count as rounding."""
    is_other_T = replayed.gaps > rounding.score
    is_off_T = replayed.logprob_differences > rounding.logprob
    foreign = np.flatnonzero(is_other_T | is_off_T)
    row = replayed.row
    differing = np.flatnonzero(replayed.differs).tolist()
    return RowVerdict(
        step=row.step,
        number=row.number,
        num_tokens=len(replayed.gaps),
        differences=tuple(
            Difference(i, int(row.token_ids[i]), int(replayed.token_ids[i]), float(replayed.gaps[i])) for i in differing
        ),
        first_foreign=int(foreign[0]) if foreign.size else None,
        why="" if not foreign.size else _why(replayed, int(foreign[0]), is_other_T, is_off_T),
    )


def _why(replayed: RowReplay, first: int, is_other_T: Array, is_off_T: Array) -> str:
    """Returns a phrase that says what differs in a row, and may name a likely cause.

    `first` is the index of the first token that differs by more than rounding. `is_other_T` is true where the policy samples
    another token than the recorded one, and `is_off_T` where the log-prob differs. Neither counts differences that are mere
    rounding.
    """
    if not is_off_T.any():
        if is_other_T.sum() > 1:
            count = f"{is_other_T.sum()} of {len(is_other_T)} tokens"
            return (
                f"the log-probs are right, but {count} are not those of the row's seed, from position {first} of the "
                "response on"
            )
        return _other_token(replayed, first)
    if is_off_T[first] and not is_other_T[first]:
        largest = np.nanmax(replayed.logprob_differences)
        return f"the log-probs differ from position {first} of the response on, by up to {largest:.2g}, as after other weights"
    return _other_token(replayed, first)


def _other_token(replayed: RowReplay, number: int) -> str:
    gap = replayed.gaps[number]
    how = (
        f"by a score that is {gap:.2g} higher"
        if np.isfinite(gap)
        else "because the parameters exclude the recorded one"
    )
    return (
        f"at position {number} of the response the policy samples token {replayed.token_ids[number]} instead of "
        f"{replayed.row.token_ids[number]}, {how}"
    )


def _all_own(num_rows: int) -> str:
    return f"all {num_rows:,} rows are the policy's own samples"


def _foreign_sentence(foreign: Sequence[RowVerdict]) -> str:
    by_step = dict[int, list[str]]()
    for row in foreign[:_SHOWN_ROWS]:
        by_step.setdefault(row.step, []).append(str(row.number))
    named = "; ".join(f"{_listed(numbers)} of step {step}" for step, numbers in by_step.items())
    more = f" and {len(foreign) - _SHOWN_ROWS} more" if len(foreign) > _SHOWN_ROWS else ""
    first = foreign[0]
    which = "" if len(foreign) == 1 else f"in row {first.number} of step {first.step}, "
    whose = "" if first.whose is None else f"; it is a sample of policy {first.whose}"
    return (
        f"row{'' if len(foreign) == 1 else 's'} {named}{more} {'is' if len(foreign) == 1 else 'are'} not this policy's: "
        f"{which}{first.why}{whose}"
    )


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _row_as_json(row: RowVerdict) -> Mapping[str, Any]:
    values = {name: value for name, value in asdict(row).items() if value not in (None, "", ())}
    for difference in values.get("differences", ()):
        if not np.isfinite(difference["gap"]):
            difference["gap"] = None
    return values
