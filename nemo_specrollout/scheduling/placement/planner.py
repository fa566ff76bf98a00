# SPDX-License-Identifier: Apache-2.0
"""Where to verify and where to draft: every way to place engines on the devices, by the tokens a second that it promises.

As Algorithm 1 of SpecActor (arXiv 2511.16193), but with our pipeline instead of lock-step windows, with engines that do not
speculate and engines that draft themselves among the ways, and with drafts that make the verifier's step longer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.scheduling.placement.cost_tables import CostCurve, CostTables, sizes_of
from nemo_specrollout.scheduling.placement.pipeline import SettledStep, coupled_tokens, settle

PLAIN, COUPLED, DECOUPLED = "plain", "coupled", "decoupled"
VERIFIER, DRAFTER = "verifier", "drafter"
LONGEST_WINDOW = 32
"""Draft tokens ahead beyond which nothing is gained (`test_placement.py`)."""
# Every k up to the first, then those of the list: from there on one more token changes next to nothing.
_DENSE, _SPARSE = 8, (10, 12, 16, 24, 32, 48, 64)
# The smallest window is taken that does so much of what the longest does: what is drafted ahead in vain is the less.
_AS_GOOD = 0.995
# A drafter is what holds a pair up if one that takes no time would let it make so much more.
_HELD_UP, _NO_TIME = 1.1, 1e-9


@dataclass(frozen=True)
class Option:
    """A way to place engines, and what it promises. A group is one verifier, its drafter if it has one, and their requests."""

    mode: str
    """`plain`, `coupled` (the verifier's engine drafts itself) or `decoupled`."""

    verifier_size: int
    """Threads or GPUs of a verifier."""

    drafter_size: int
    """Threads or GPUs of a drafter; 0 without one of its own."""

    num_groups: int
    """Groups, side by side."""

    batch: int
    """Requests of the largest group."""

    k: int
    """Most draft tokens of a request in a step."""

    window: int
    """Draft tokens that a drafter may be ahead; k where it is coupled."""

    step_s: float
    """Seconds of a step, coupled drafting included."""

    tokens_per_step: float
    """Tokens that a request emits in a step."""

    num_submitted: float
    """Draft tokens of a request in a step, on average."""

    occupancy: float
    """Share of a request's steps that have a draft."""

    bottleneck: str
    """Of a pair: `drafter`, if one that takes no time would bring a tenth more tokens a second; else `verifier`. Of an engine
    that drafts itself: what takes more of its step."""

    tokens_per_s: float
    """Of all requests together, at the pace of the largest group."""

    speedup: float = 1.0
    """Over the best plain option on the same devices."""

    @property
    def group_tokens_per_s(self) -> float:
        """Of the largest group."""
        return self.batch * self.tokens_per_step / self.step_s

    @property
    def num_rows(self) -> float:
        """Rows of a verifier's step, on average: more than were measured is a guess."""
        return self.batch * (1 + self.num_submitted)

    def in_words(self, unit: str) -> str:
        """The middle of a sentence; `unit` is what sizes count."""
        groups = "" if self.num_groups == 1 else f"{self.num_groups} groups, each "
        verifier = counted(self.verifier_size, unit)
        if self.mode == PLAIN:
            return f"{groups}no drafts, a verifier on {verifier}"
        if self.mode == COUPLED:
            return f"{groups}drafting in the verifier's engine on {verifier}, {self.k} a step"
        return (
            f"{groups}a verifier on {verifier} beside a drafter on {counted(self.drafter_size, unit)}, up to {self.k} "
            f"drafts a step and {self.window} ahead"
        )

    @property
    def layout(self) -> tuple[str, int, int]:
        """Which engines there are, whatever is drafted: mode, size of a verifier, size of a drafter."""
        return self.mode, self.verifier_size, self.drafter_size


@dataclass(frozen=True)
class Placement:
    """Every option, the best first."""

    options: tuple[Option, ...]

    @property
    def best(self) -> Option:
        return self.options[0]

    @property
    def plain(self) -> Option:
        """The best without drafts."""
        return next(o for o in self.options if o.mode == PLAIN)

    @property
    def layouts(self) -> tuple[Option, ...]:
        """The best option of each layout, the best layout first."""
        first: dict[tuple[str, int, int], Option] = {}
        for option in self.options:
            first.setdefault(option.layout, option)
        return tuple(first.values())


def counted(number: int, unit: str) -> str:
    """E.g. 2 threads."""
    return f"{number} {unit}{'' if number == 1 else 's'}"


def place(
    tables: CostTables,
    num_requests: int,
    num_devices: int,
    acceptance: float,
    max_k: int,
    max_groups: int | None = None,
) -> Placement:
    """All ways to roll `num_requests` out on `num_devices`, if a draft token is right with probability `acceptance`.

    `max_groups` is how many verifiers there may be. Raises ConfigError if the devices are too few for any that was measured.
    """
    search = _Search(tables, num_requests, num_devices, acceptance, max_k, max_groups)
    plain = list(search.plain())
    if not plain:
        smallest = min(sizes_of(tables.verify_s))
        raise ConfigError(
            f"devices: {num_devices}; the smallest verifier that was measured has {smallest}: give at least as many"
        )
    options = [*plain, *search.coupled(), *search.decoupled()]
    best_plain = max(o.tokens_per_s for o in plain)
    ranked = sorted(options, key=lambda o: -o.tokens_per_s)
    return Placement(tuple(replace(o, speedup=o.tokens_per_s / best_plain) for o in ranked))


@dataclass(frozen=True)
class _Search:
    tables: CostTables
    num_requests: int
    num_devices: int
    p: float
    max_k: int
    max_groups: int | None

    def plain(self) -> Iterator[Option]:
        for verifier in self.tables.verify_s:
            if num_groups := self._num_groups(verifier.size):
                step_s = verifier.at(self._batch(num_groups))
                yield self._option(PLAIN, verifier.size, 0, num_groups, 0, 0, step_s, 1.0, 0.0, 0.0, VERIFIER)

    def coupled(self) -> Iterator[Option]:
        drafting = {curve.size: curve for curve in self.tables.coupled_draft_s}
        for verifier in self.tables.verify_s:
            num_groups = self._num_groups(verifier.size)
            if num_groups and verifier.size in drafting:
                for k in self._ks:
                    yield self._coupled(verifier, drafting[verifier.size], num_groups, k)

    def decoupled(self) -> Iterator[Option]:
        for verifier in self.tables.verify_s:
            for drafter in self.tables.draft_s:
                if num_groups := self._num_groups(verifier.size + drafter.size):
                    for k in self._ks:
                        yield self._decoupled(verifier, drafter, num_groups, k)

    @cached_property
    def _ks(self) -> list[int]:
        sparse = [k for k in _SPARSE if k < self.max_k]
        return sorted({*range(1, min(self.max_k, _DENSE) + 1), *sparse, self.max_k} - {0})

    def _num_groups(self, size: int) -> int:
        limits = [self.num_devices // size, self.num_requests]
        return min([*limits, self.max_groups] if self.max_groups is not None else limits)

    def _batch(self, num_groups: int) -> int:
        return math.ceil(self.num_requests / num_groups)

    def _coupled(self, verifier: CostCurve, drafter: CostCurve, num_groups: int, k: int) -> Option:
        batch = self._batch(num_groups)
        verify_s, draft_s = verifier.at(batch * (k + 1)), k * drafter.at(batch)
        slower = DRAFTER if draft_s > verify_s else VERIFIER
        tokens = coupled_tokens(self.p, k)
        return self._option(COUPLED, verifier.size, 0, num_groups, k, k, verify_s + draft_s, tokens, k, 1.0, slower)

    def _decoupled(self, verifier: CostCurve, drafter: CostCurve, num_groups: int, k: int) -> Option:
        pair = _Pair(verifier, drafter, self._batch(num_groups), self.p, k)
        window, settled = pair.with_small_window()
        rates = settled.rates
        return self._option(
            DECOUPLED, verifier.size, drafter.size, num_groups, k, window, settled.step_s, rates.num_tokens,
            rates.num_submitted, rates.occupancy, pair.bottleneck(window),
        )  # fmt: skip

    def _option(
        self, mode: str, verifier_size: int, drafter_size: int, num_groups: int, k: int, window: int, step_s: float,
        tokens_per_step: float, num_submitted: float, occupancy: float, bottleneck: str,
    ) -> Option:  # fmt: skip
        return Option(
            mode, verifier_size, drafter_size, num_groups, self._batch(num_groups), k, window, step_s, tokens_per_step,
            num_submitted, occupancy, bottleneck, self.num_requests * tokens_per_step / step_s,
        )  # fmt: skip


@dataclass(frozen=True)
class _Pair:
    """A verifier and its drafter, with a number of requests."""

    verifier: CostCurve
    drafter: CostCurve
    batch: int
    p: float
    k: int

    def with_small_window(self) -> tuple[int, SettledStep]:
        """The smallest window that does nearly what the longest does: k, or twice, four times as much and so on."""
        longest = max(self.k, LONGEST_WINDOW)
        window, enough = self.k, _AS_GOOD * _rate(self._settled(longest))
        while window < longest and _rate(self._settled(window)) < enough:
            window = min(2 * window, longest)
        return window, self._settled(window)

    def bottleneck(self, window: int) -> str:
        """Who holds the other up."""
        is_held_up = _rate(self._settled(window, _NO_TIME)) > _HELD_UP * _rate(self._settled(window))
        return DRAFTER if is_held_up else VERIFIER

    def _settled(self, window: int, drafter_factor: float = 1.0) -> SettledStep:
        draft_s = drafter_factor * self.drafter.at(self.batch)
        return settle(self.p, self.k, window, draft_s, self.verifier.at, self.batch)


def _rate(settled: SettledStep) -> float:
    return settled.rates.num_tokens / settled.step_s
