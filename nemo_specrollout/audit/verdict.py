# SPDX-License-Identifier: Apache-2.0
"""Judges whether replayed rows are the policy's own, its own except for rounding, or not the policy's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nemo_specrollout.audit.replay import RowReplay
from nemo_specrollout.audit.rows import Array

_FACTOR = 8.0
"""Factor on the rounding error of the audit's own computation, up to which a difference counts as rounding.

The audit also computes every row in the engine's precision, and compares that with a finer one. Engine and audit add the same
numbers in different orders, so their errors are of similar size over many rows, but may be a few times larger or smaller in a
single one. docs/guides/audit.md says what was measured.
"""
_SHOWN_ROWS = 8


@dataclass(frozen=True)
class Difference:
    """A token that the policy would not have sampled."""

    number: int
    """Number of the token in the response, from 0."""
    recorded: int
    sampled: int
    """The policy's own token."""
    gap: float
    """Difference between the policy's best score and that of the recorded token, or inf if the parameters exclude it."""


@dataclass(frozen=True)
class RowVerdict:
    """Judgement of one row."""

    step: int
    number: int
    """Number of the row among the rows of its step, from 0."""
    num_tokens: int
    differences: tuple[Difference, ...]
    first_foreign: int | None
    """Number of the first token that rounding does not explain, or None if there is none."""
    why: str = ""
    """Description of what differs there, or empty."""
    whose: int | None = None
    """Another policy version of which the row is a sample, or None if none is known."""

    @property
    def is_policys(self) -> bool:
        """Whether every token is the policy's, or within rounding of it."""
        return self.first_foreign is None


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be audited."""

    step: int
    number: int
    reason: str


@dataclass(frozen=True)
class Rounding:
    """The largest differences that count as rounding in the rows of an audit, in nats."""

    logprob: float
    """Largest difference between the engine's and the audit's log-prob of a token."""
    score: float
    """Largest gap between the best score and that of the recorded token. It is smaller than `logprob`, because a token changes
    only at near-ties, which are rarer than large errors of a log-prob."""

    @classmethod
    def of(cls, replays: Iterable[RowReplay]) -> "Rounding":
        """Returns the largest differences that count as rounding in these rows, estimated from the audit's own rounding."""
        own = np.concatenate([np.zeros(1), *(replayed.own_rounding for replayed in replays)])
        largest = float(own.max())
        return cls(_FACTOR * largest, max(2 * largest, _FACTOR * float(np.quantile(own, 0.99))))


@dataclass(frozen=True)
class Audit:
    """Judgement of a run's rows."""

    rows: Sequence[RowVerdict]
    skipped: Sequence[Skipped]
    dtype: str
    """Precision of the engines."""
    rounding: Rounding
    logprob_differences: Array
    """Absolute difference of each token's log-prob between engine and audit, in nats, or NaN if the engine's is not known."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were computed again."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def foreign(self) -> list[RowVerdict]:
        """Rows that are not the policy's."""
        return [row for row in self.rows if not row.is_policys]

    @property
    def differences(self) -> list[Difference]:
        """All tokens that differ."""
        return [difference for row in self.rows for difference in row.differences]

    @property
    def logprob_quantiles(self) -> dict[str, float]:
        """Maximum, 99th percentile and median of the known `logprob_differences`, or nothing if none is known."""
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
        """The verdict in one sentence."""
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
        """Returns the judgement as JSON values."""
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
    """Returns the verdict on a row, given the differences that count as rounding."""
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
    """Returns a phrase about what differs from token `first` on, and what this says about weights, noise or text."""
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
