# SPDX-License-Identifier: Apache-2.0
"""Judges replayed rows: the policy's own, the policy's own but for rounding, or not the policy's. Pure numbers and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.audit.replay import RowReplay
from nemo_specrollout.audit.rows import Array

ROUNDING = {"float32": 8 * 2.0**-23, "bfloat16": 2 * 2.0**-7, "float16": 4 * 2.0**-10}
"""Largest difference of scores that rounding explains, as a share of the position's largest logit, by the run's dtype.

Measured as docs/guides/audit.md says. Engine and audit add the same numbers in different orders.
"""
_SHOWN_ROWS = 8


@dataclass(frozen=True)
class RowVerdict:
    """Judgement of one row."""

    step: int
    number: int
    """Number of the row among the rows of its step."""
    num_tokens: int
    num_differ: int
    """Tokens that the policy would not have sampled."""
    largest_gap: float
    """By how much the policy's score of such a token was below the best one, at most."""
    first_foreign: int | None
    """Number of the first token that rounding does not explain; None if there is none."""
    why: str = ""
    """What differs there, in words."""

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
class Audit:
    """Judgement of a run's rows."""

    rows: Sequence[RowVerdict]
    skipped: Sequence[Skipped]
    dtype: str
    logprob_differences: Array
    """Absolute differences of the log-probs of all tokens, in nats."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def foreign(self) -> list[RowVerdict]:
        """Rows that are not the policy's."""
        return [row for row in self.rows if not row.is_policys]

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if not self.rows:
            return "no row could be audited"
        if self.foreign:
            return _foreign_sentence(self.foreign)
        num_differ = sum(row.num_differ for row in self.rows)
        if not num_differ:
            return f"all {len(self.rows)} rows are the policy's own samples"
        gap = max(row.largest_gap for row in self.rows)
        verb = "differs" if num_differ == 1 else "differ"
        return (
            f"{num_differ:,} of {self.num_tokens:,} tokens {verb}, each where the policy's best score is at most {gap:.2g} "
            f"above it: rounding of {self.dtype}"
        )


def judge(number: int, replayed: RowReplay, dtype: str) -> RowVerdict:
    """Judges a row, `number` among the rows of its step, of a run whose engine computes in `dtype`."""
    bounds_T = ROUNDING[dtype] * replayed.largest_logits
    is_other_T = replayed.gaps > bounds_T
    differences_T = replayed.logprob_differences
    is_off_T = differences_T > bounds_T if differences_T.size else np.zeros_like(is_other_T)
    foreign_T = np.flatnonzero(is_other_T | is_off_T)
    differing = replayed.gaps[replayed.differs]
    first = int(foreign_T[0]) if foreign_T.size else None
    return RowVerdict(
        step=replayed.row.step,
        number=number,
        num_tokens=len(replayed.gaps),
        num_differ=int(replayed.differs.sum()),
        largest_gap=float(differing.max(initial=0.0)),
        first_foreign=first,
        why="" if first is None else _why(replayed, first, bool(is_other_T[first])),
    )


def _why(replayed: RowReplay, number: int, is_other: bool) -> str:
    recorded = replayed.row.token_ids[number]
    if is_other:
        gap = replayed.gaps[number]
        how = f"by a score that is {gap:.2g} higher" if np.isfinite(gap) else "and excludes the recorded one"
        return f"the policy samples token {replayed.token_ids[number]} instead of {recorded}, {how}"
    return f"the log-prob of token {recorded} differs by {replayed.logprob_differences[number]:.2g}"


def _foreign_sentence(foreign: Sequence[RowVerdict]) -> str:
    named = ", ".join(f"{row.number} of step {row.step}" for row in foreign[:_SHOWN_ROWS])
    more = f" and {len(foreign) - _SHOWN_ROWS} more" if len(foreign) > _SHOWN_ROWS else ""
    first = foreign[0]
    one = len(foreign) == 1
    return (
        f"row{'' if one else 's'} {named}{more} {'is' if one else 'are'} not this policy's: in row {first.number} of step "
        f"{first.step}, {first.why}, at position {first.first_foreign} of the response"
    )
