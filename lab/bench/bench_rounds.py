# SPDX-License-Identifier: Apache-2.0
"""Lets engines roll out the same requests in turns, so that other load on the machine affects all of them equally."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.progress import Progress

from lab.bench.bench_rows import PLAIN, BenchRow
from lab.bench.huge_pages import use_huge_pages
from lab.bench.running_bins import BinnedRollout, BinnedStats
from lab.local.engine import RolloutEngine
from lab.local.run_config import RunConfig
from lab.local.statistics import count_equal
from nemo_specrollout.generation.engine.requests import RolloutRequest

# Turns of an entrant in a round, each as long as its last round suggests, so that all finish at about the same time.
# The first steps of a turn find cold caches, unlike those of an engine that runs alone. So turns have a shortest length.
TURNS = 40
MIN_TURN_S = 0.2


@dataclass
class Entrant:
    """A row of the bench, with its engine and the measurements of its rounds.

    Its tokens are compared with plain decoding's.
    """

    row: BenchRow
    engine: RolloutEngine
    turn_s: float = MIN_TURN_S
    rounds: list[BinnedStats] = field(default_factory=list)
    tokens_equal: int = 0
    tokens_total: int = 0

    def take(self) -> "Entrant":
        """Returns a copy with the measurements so far, and starts over without measurements."""
        measured = replace(self)
        self.rounds = []
        self.tokens_equal = 0
        self.tokens_total = 0
        return measured

    def took(self, found: BinnedStats, plain: BinnedStats, *, keep: bool) -> None:
        """Notes the seconds of a round, `found`, from which the length of the turns in the next round follows.

        With `keep`, also adds the round to the measurements, and compares its tokens with those of `plain`.
        """
        self.turn_s = max(MIN_TURN_S, found.stats.seconds / TURNS)
        if keep:
            self.rounds.append(found)
            equal, total = count_equal(found.rollouts, plain.rollouts)
            self.tokens_equal += equal
            self.tokens_total += total


@contextmanager
def started(config: RunConfig, rows: Sequence[BenchRow]) -> Iterator[list[Entrant]]:
    """Yields an entrant with a new engine for each row, and closes the engines at the end.

    Their memory is in huge pages, if the kernel has some, so that no row is faster because its engine started later.
    """
    model = Path(config.policy.model_name)
    entrants = []
    try:
        with Progress() as bar:
            for row in bar.track(rows, description="starting engines"):
                entrants.append(Entrant(row, RolloutEngine(model, row.generation, config.grpo.seed)))
        use_huge_pages()
        yield entrants
    finally:
        for entrant in entrants:
            entrant.engine.close()


def play_round(
    entrants: Sequence[Entrant], requests: Sequence[RolloutRequest], *, keep: bool, at_a_time: int | None = None
) -> None:
    """Lets all entrants roll out the same requests once, in short turns.

    `at_a_time` is the largest number of requests of an entrant that run at once, or None for all. If `keep` is false, the
    round only warms up.
    """
    under_way = {e.row.name: BinnedRollout(e.engine, requests, at_a_time) for e in entrants}
    while not all(rollout.is_done for rollout in under_way.values()):
        for entrant in entrants:
            rollout = under_way[entrant.row.name]
            if not rollout.is_done:
                rollout.advance(entrant.turn_s)
    found = {name: rollout.result() for name, rollout in under_way.items()}
    for entrant in entrants:
        entrant.took(found[entrant.row.name], found[PLAIN], keep=keep)


def named(name: str, entrants: Sequence[Entrant]) -> Entrant | None:
    """Returns the entrant whose row has this name, or None if there is none."""
    return next((e for e in entrants if e.row.name == name), None)


def group_with(name: str, groups: Sequence[Sequence[Entrant]]) -> Sequence[Entrant]:
    """Returns the group with an entrant of this name, or the first group if there is no such entrant."""
    return next((group for group in groups if named(name, group) is not None), groups[0])
