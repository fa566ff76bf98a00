# SPDX-License-Identifier: Apache-2.0
"""The driver's texts of coming steps while no engine works on them, and what updates have taught about them (`run_ahead`).

A plan tells an engine which requests of coming steps it may decode early, and lasts until the engine must stop with them.
This module needs no Ray, threads or engines, so the driver of a NeMo-RL run and that of a local run can both use it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from nemo_specrollout.config.block import RunAheadConfig
from nemo_specrollout.reports.ahead_records import flight_figures, kept_figures
from nemo_specrollout.reports.records import ahead_alarms, ahead_figures
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.decisions.steps_ahead import Flight, StepsAhead
from nemo_specrollout.run_ahead.early_requests import EarlyFigures, EarlyMade
from nemo_specrollout.run_ahead.early_texts import EarlyRow
from nemo_specrollout.run_ahead.text_store import TextStore
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead


@dataclass(frozen=True)
class AheadPlan:
    """What one engine may start early, and what it needs to know about updates of the weights."""

    rows: list[EarlyRow]
    """Requests of coming steps with their known texts, the nearest step first."""
    scale: float
    """How far an update moves the difference of two scores, in nats (`FlipModel`)."""
    kept: float
    """Share of the tokens made ahead that an update leaves right."""


class ComingTexts:
    """Owns the texts of coming steps, by the policy version of their step, while no engine works on them.

    `plans` tells what each engine may start, `keep` stores what engines have made when they end a plan, and `learn` is told
    how much of a step's texts was right.
    """

    LEARNED: ClassVar = ("_flips", "_depth")
    """Fields with which a later start of the run begins (`learned/state.py`)."""

    def __init__(self, config: RunAheadConfig, *, begins_again: bool = False) -> None:
        """`config` bounds the steps and the memory of the texts.

        `begins_again` means that the texts are those of engines' own requests, which start over when weights change. The
        engines keep such texts themselves, so this object only learns how much of them was right.
        """
        self._config = config
        self._begins_again = begins_again
        self._store = TextStore(config.text_bytes)
        self._flips = FlipModel()
        self._depth = StepsAhead()
        self._planned: dict[int, list[int]] = {}
        """Seeds of the requests of the latest plan, by the policy version of their step."""
        self._num_engines = 1
        """Number of engines in the latest plan, at least 1."""
        self._version: int | None = None
        """Policy version of the latest plan."""
        self._has_new_weights = True
        """Whether the latest plan is the first one of its version, so that known texts were made by older weights."""
        self._in_flight: list[int] = []
        """Number of tokens that texts had when the weights of that version arrived, for its own step and each later one."""
        self._effort = EarlyFigures()
        """Sum of what engines did for coming steps since the last step."""
        self._alarms: list[str] = []

    @property
    def chooses_steps(self) -> bool:
        """Whether the number of coming steps depends on measurements."""
        return isinstance(self._config.steps, str)

    @property
    def steps(self) -> int:
        """Number of coming steps that the next plan should have."""
        return self._depth.steps if isinstance(self._config.steps, str) else self._config.steps

    def of(self, version: int) -> dict[int, TextAhead]:
        """Returns the texts of the step of a policy version, by the seeds of their requests."""
        return self._store.of(version)

    def num_texts(self, version: int) -> int:
        """Returns how many requests of the step of a policy version have a text."""
        return self._store.num_texts(version)

    def forget_before(self, version: int) -> None:
        """Forgets the texts of steps before that of a policy version."""
        self._store.forget_before(version)

    def plans(self, version: int, steps: Sequence[Sequence[EarlyRow]], num_engines: int) -> list[AheadPlan]:
        """Returns what each engine may start early, in the order of the engines.

        Args:
            version: Policy version of the weights that the engines have.
            steps: Requests of each coming step, of which the first is that of `version` + 1.
            num_engines: Number of engines that get a plan, which is 0 while all are dead.
        """
        self._note_flights(version)
        by_version = dict(enumerate(steps, version + 1))
        self._planned = {later: [row.row.seed for row in rows] for later, rows in by_version.items()}
        self._num_engines = max(num_engines, 1)
        known = [self._with_texts(later, later - version, rows) for later, rows in by_version.items()]
        return [AheadPlan(rows, self._flips.scale, self._depth.kept) for rows in shares(known, num_engines)]

    def keep(self, made_E: Iterable[EarlyMade], *, is_interrupted: bool = False) -> None:
        """Stores what engines have made in the latest plan. Adds an alarm if even the next step's texts do not fit.

        `is_interrupted` means that the plan has ended before the weights change. Such a plan does not tell how many requests
        engines can start in the time of a step.
        """
        version_of = {seed: version for version, seeds in self._planned.items() for seed in seeds}
        for made in made_E:
            self._effort = self._effort.plus(made.figures)
            if self._has_new_weights:
                self._flips.observe_counts(made.flips.gaps_G, made.flips.num_flips, is_same_update=True)
            for seed, text in made.texts.items():
                self._store.put(version_of[seed], {seed: text})
        if lost := self._store.trim().get(min(self._planned, default=0)):
            self._alarms.append(
                f"{lost} texts of the next step did not fit into run_ahead.text_mib {self._config.text_mib}, so their "
                "requests begin without drafts: raise it"
            )
        if not is_interrupted:
            flights = [Flight(len(seeds), len(self.of(later))) for later, seeds in self._planned.items()]
            self._depth.observe_flights(flights)

    def learn(self, version: int, kept: KeptCounts) -> dict[str, float]:
        """Learns from `kept` how much of the texts of a policy version's step was right. Returns the step's metrics.

        The texts of this step must not have been forgotten yet.
        """
        if kept.num_texts:
            self._flips.observe_counts(kept.gaps_G, kept.num_flips)
            self._depth.observe_kept(kept.num_made, kept.num_right)
            self._alarms += ahead_alarms(kept.num_made, kept.num_right)
        effort = self._effort
        self._effort = EarlyFigures()
        num_made = kept.num_made if self._begins_again else self._store.num_tokens(version)
        return {
            **ahead_figures(num_made, kept.num_kept, kept.num_tokens, effort.alone_s / self._num_engines),
            **flight_figures([num_made] if self._begins_again else self._in_flight),
            **kept_figures(kept._asdict()),
            **effort.metrics(len(self._planned), self._num_engines),
        }

    def observe_price(self, verify_row_s: float, token_s: float) -> None:
        """Notes two measured times in seconds.

        `verify_row_s` is the time by which a verified row makes an engine step longer, and `token_s` is the mean time of a
        token in a rollout without drafts.
        """
        self._depth.observe_price(verify_row_s, token_s)

    def take_alarms(self) -> list[str]:
        """Returns the alarms since the last call."""
        alarms = self._alarms
        self._alarms = []
        return alarms

    def _note_flights(self, version: int) -> None:
        """Notes the length of the texts for the step whose weights have just arrived, and for the steps after it."""
        self._has_new_weights = version != self._version
        if self._has_new_weights:
            last = max(self._planned, default=version)
            self._version = version
            self._in_flight = [self._store.num_tokens(later) for later in range(version, last + 1)]

    def _with_texts(self, version: int, steps_ahead: int, rows: Sequence[EarlyRow]) -> list[EarlyRow]:
        known = self.of(version)
        return [replace(row, steps_ahead=steps_ahead, known=known.get(row.row.seed)) for row in rows]


def shares(steps: Sequence[Sequence[EarlyRow]], num_engines: int) -> list[list[EarlyRow]]:
    """Divides the requests of each step among the engines. Returns each engine's share, the nearest step first.

    Requests that follow each other mostly go to the same engine, because the samples of a prompt share its cached prefix.
    """
    dealt: list[list[EarlyRow]] = [[] for _ in range(num_engines)]
    for rows in steps:
        ends = [-(-len(rows) * i // max(num_engines, 1)) for i in range(num_engines + 1)]
        for share, (first, last) in zip(dealt, pairwise(ends), strict=True):
            share.extend(rows[first:last])
    return dealt
