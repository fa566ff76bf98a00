# SPDX-License-Identifier: Apache-2.0
"""The placement planner, which ranks all ways to place verifiers and drafters on devices by predicted speed.

It follows Algorithm 1 of SpecActor (arXiv 2511.16193), but models our streamed pipeline instead of lock-step windows. It also
considers engines without drafts and engines that draft themselves. It takes into account that drafts make the verifier's
engine step longer.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lab.placement.cost_tables import CostCurve, CostTables
from lab.placement.pipeline import SteadyState, StreamedRates, coupled_tokens, steady_state
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig, DraftModelDrafterConfig, RemoteDrafterConfig
from nemo_specrollout.config.strict import ConfigError

PLAIN, COUPLED, DECOUPLED = "plain", "coupled", "decoupled"
VERIFIER, DRAFTER = "verifier", "drafter"
LONGEST_WINDOW = 32
"""Largest number of draft tokens that a drafter may be ahead in an option. A larger window gains nothing
(`test_placement.py`)."""
_DENSE = 8
"""All draft lengths up to this one are tried."""
_SPARSE = (10, 12, 16, 24, 32, 48, 64)
"""Draft lengths beyond `_DENSE` that are tried."""
_AS_GOOD = 0.995
"""The planner chooses the smallest window with at least this share of the longest window's speed, because a smaller window
wastes fewer drafts."""
_HELD_UP = 1.1
"""A group's drafter counts as its bottleneck if the group would make more than this many times its tokens per second with an
infinitely fast drafter."""
_NO_TIME = 1e-9
"""Factor on the time of drafting that makes a drafter infinitely fast."""


@dataclass(frozen=True)
class Option:
    """A placement and its predicted speed. A group is one verifier, its drafter if it has one, and their requests."""

    mode: str
    """`plain`, `coupled` (the verifier's engine drafts itself) or `decoupled` (a separate drafter)."""
    verifier_size: int
    """Number of threads or GPUs of a verifier."""
    drafter_size: int
    """Number of threads or GPUs of a separate drafter, or 0 without one."""
    num_groups: int
    """Number of groups that work at the same time."""
    batch: int
    """Number of requests of the largest group."""
    k: int
    """Largest number of draft tokens of a request in an engine step."""
    window: int
    """Largest number of draft tokens that a drafter may be ahead. It is k if the mode is coupled."""
    state: SteadyState
    """The steady state of a group. Its step time includes the time of coupled drafting, and its rates are those of one
    request."""
    bottleneck: str
    """`drafter` or `verifier`. In a decoupled group, the drafter is the bottleneck if an infinitely fast one would give a
    tenth more tokens per second. In a coupled engine, the bottleneck is the part that takes more of the engine step."""
    tokens_per_s: float
    """Tokens per second of all requests, if all groups are as fast as the largest one."""
    speedup: float = 1.0
    """Speed relative to the best plain option on the same devices."""

    @property
    def group_tokens_per_s(self) -> float:
        """Tokens per second of the largest group."""
        return self.batch * self.state.tokens_per_s

    @property
    def num_rows(self) -> float:
        """Mean number of rows of a verifier's engine step.

        If it is beyond the measured rows, the step's time is extrapolated.
        """
        return self.batch * (1 + self.state.rates.num_submitted)

    def in_words(self, unit: str) -> str:
        """Returns a description of the option for the middle of a sentence. `unit` is "thread" or "GPU"."""
        groups = "" if self.num_groups == 1 else f"{self.num_groups} groups, each "
        verifier = counted(self.verifier_size, unit)
        if self.mode == PLAIN:
            return f"{groups}no drafts, a verifier on {verifier}"
        if self.mode == COUPLED:
            return f"{groups}drafting in the verifier's engine on {verifier}, {self.k} per engine step"
        return (
            f"{groups}a verifier on {verifier} beside a drafter on {counted(self.drafter_size, unit)}, up to {self.k} "
            f"drafts per engine step and {self.window} ahead"
        )


@dataclass(frozen=True)
class Placement:
    """The result of the planner, which is all options with the best one first."""

    options: tuple[Option, ...]

    @property
    def best(self) -> Option:
        """Returns the fastest option."""
        return self.options[0]

    @property
    def plain(self) -> Option:
        """The fastest option without drafts."""
        return next(o for o in self.options if o.mode == PLAIN)

    @property
    def layouts(self) -> tuple[Option, ...]:
        """The fastest option for each mode, verifier size and drafter size, with the fastest of all first."""
        first: dict[tuple[str, int, int], Option] = {}
        for option in self.options:
            first.setdefault((option.mode, option.verifier_size, option.drafter_size), option)
        return tuple(first.values())


def counted(number: int, unit: str) -> str:
    """Returns a number with its unit, such as "2 threads"."""
    return f"{number} {unit}{'' if number == 1 else 's'}"


def place(
    tables: CostTables,
    num_requests: int,
    num_devices: int,
    acceptance: float,
    max_k: int,
    max_groups: int | None = None,
) -> Placement:
    """Ranks all ways to roll out `num_requests` requests on `num_devices` devices.

    `acceptance` is the probability that a draft token is right if all before it are. `max_k` limits the number of draft
    tokens, and `max_groups` the number of verifiers. Raises ConfigError if even the smallest verifier that was measured needs
    more devices.
    """
    search = _Search(tables, num_requests, num_devices, acceptance, max_k, max_groups)
    options = [*search.coupled(), *search.decoupled()]
    best_plain = max((o.tokens_per_s for o in options if o.mode == PLAIN), default=None)
    if best_plain is None:
        smallest = min(curve.size for curve in tables.verify_s)
        raise ConfigError(
            f"devices: {num_devices}; the smallest verifier that was measured has {smallest}: give at least as many"
        )
    ranked = sorted(options, key=lambda o: -o.tokens_per_s)
    return Placement(tuple(replace(o, speedup=o.tokens_per_s / best_plain) for o in ranked))


@dataclass(frozen=True)
class _Search:
    """Makes all options for a number of requests and devices."""

    tables: CostTables
    num_requests: int
    num_devices: int
    p: float
    max_k: int
    max_groups: int | None

    def coupled(self) -> Iterator[Option]:
        """Yields the options with engines that do not draft, and with engines that draft themselves."""
        for verifier in self.tables.verify_s:
            if num_groups := self._num_groups(verifier.size):
                yield self._one_engine(verifier, None, num_groups, 0)
                for drafting in _of_size(self.tables.coupled_draft_s, verifier.size):
                    yield from (self._one_engine(verifier, drafting, num_groups, k) for k in self._ks())

    def decoupled(self) -> Iterator[Option]:
        """Yields the options in which each verifier has a separate drafter."""
        for verifier, drafter in itertools.product(self.tables.verify_s, self.tables.draft_s):
            if num_groups := self._num_groups(verifier.size + drafter.size):
                for k in self._ks():
                    yield self._pair(verifier, drafter, num_groups, k)

    def _ks(self) -> list[int]:
        sparse = [k for k in _SPARSE if k < self.max_k]
        return sorted({*range(1, min(self.max_k, _DENSE) + 1), *sparse, self.max_k} - {0})

    def _num_groups(self, size: int) -> int:
        return min(self.num_devices // size, self.num_requests, self.max_groups or self.num_requests)

    def _one_engine(self, verifier: CostCurve, drafting: CostCurve | None, num_groups: int, k: int) -> Option:
        """Returns the option in which each verifier drafts itself at the costs `drafting`, or does not draft if it is None."""
        batch = math.ceil(self.num_requests / num_groups)
        verify_s = verifier.at(batch * (k + 1))
        draft_s = k * drafting.at(batch) if drafting is not None else 0.0
        state = SteadyState(verify_s + draft_s, StreamedRates(coupled_tokens(self.p, k), k, 1.0 if k else 0.0))
        return Option(
            mode=PLAIN if drafting is None else COUPLED,
            verifier_size=verifier.size,
            drafter_size=0,
            num_groups=num_groups,
            batch=batch,
            k=k,
            window=k,
            state=state,
            bottleneck=DRAFTER if draft_s > verify_s else VERIFIER,
            tokens_per_s=self.num_requests * state.tokens_per_s,
        )

    def _pair(self, verifier: CostCurve, drafter: CostCurve, num_groups: int, k: int) -> Option:
        """Returns the option in which each verifier has a separate drafter. Its window is as small as `_AS_GOOD` allows."""
        batch = math.ceil(self.num_requests / num_groups)

        def steady(window: int, drafter_factor: float = 1.0) -> SteadyState:
            return steady_state(self.p, k, window, drafter_factor * drafter.at(batch), verifier.at, batch)

        longest = max(k, LONGEST_WINDOW)
        window = k
        enough = _AS_GOOD * steady(longest).tokens_per_s
        while window < longest and steady(window).tokens_per_s < enough:
            window = min(2 * window, longest)
        state = steady(window)
        is_held_up = steady(window, _NO_TIME).tokens_per_s > _HELD_UP * state.tokens_per_s
        return Option(
            mode=DECOUPLED,
            verifier_size=verifier.size,
            drafter_size=drafter.size,
            num_groups=num_groups,
            batch=batch,
            k=k,
            window=window,
            state=state,
            bottleneck=DRAFTER if is_held_up else VERIFIER,
            tokens_per_s=self.num_requests * state.tokens_per_s,
        )


def choose(block: SpecrolloutConfig, tables: CostTables, num_requests: int, threads: int, cores: int) -> Option:
    """Returns the fastest option for a run with `num_requests` requests at a time, on a machine with `cores` cores.

    Only verifiers with the `threads` threads of the policy's process are considered, or all if none of this size was measured.
    Raises ConfigError if even the smallest of these needs more cores.
    """
    assert block.remote is not None
    own = replace(
        tables,
        verify_s=_of_size(tables.verify_s, threads) or tables.verify_s,
        coupled_draft_s=_of_size(tables.coupled_draft_s, threads) if block.model_drafter is None else (),
        draft_s=_of_size(tables.draft_s, 1),  # A drafter process has one thread.
    )
    return place(own, num_requests, cores, block.remote.acceptance, block.num_speculative_tokens, max_groups=1).best


def placed(block: SpecrolloutConfig, option: Option) -> SpecrolloutConfig:
    """Returns a copy of the block in which its remote drafter is placed as `option` says.

    The drafter stays remote, becomes a draft model in the policy's engine, or is left out.
    """
    remote = block.remote
    assert remote is not None
    where: list[DrafterConfig] = []
    if option.mode == DECOUPLED:
        where = [replace(remote, placement="as_written", profile=None, most_ahead=max(option.window, option.k))]
    elif option.mode == COUPLED:
        where = [DraftModelDrafterConfig(model=remote.model, sampling=remote.sampling)]
    others = [d for d in block.drafters if not isinstance(d, RemoteDrafterConfig)]
    return replace(block, drafters=(*others, *where))


def _of_size(curves: tuple[CostCurve, ...], size: int) -> tuple[CostCurve, ...]:
    return tuple(curve for curve in curves if curve.size == size)
