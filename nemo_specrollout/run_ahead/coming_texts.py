# SPDX-License-Identifier: Apache-2.0
"""The driver's texts for coming steps while no engine works on them, and what it has learned about how updates change texts.

A plan tells an engine which requests of coming steps it may decode early. It lasts until the engine must stop decoding them.
This module needs no Ray, threads or engines. So the driver of a NeMo-RL run and that of a local run can both use it.
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
    """Tells one engine which requests of coming steps it may decode early, and how much an update is expected to change."""

    rows: list[EarlyRow]
    """Requests of coming steps with their known texts, the nearest step first."""
    scale: float
    """How far a weight update is expected to move the difference between the scores of two tokens, in nats (`FlipModel`)."""
    kept: float
    """Share of the tokens of a text made ahead that a weight update is expected to leave unchanged."""


class ComingTexts:
    """Owns the texts for coming steps while no engine works on them, by the policy version of their step.

    `plans` says what each engine may decode early. `keep` stores what the engines have decoded when they end their plans.
    `learn` gets counts of how much of the texts for a step agreed with its responses.
    """

    LEARNED: ClassVar = ("_flips", "_depth")
    """Fields that a later start of the run takes over (`learned/state.py`)."""

    def __init__(self, config: RunAheadConfig, *, begins_again: bool = False) -> None:
        """`config` limits the number of coming steps and the memory of their texts.

        `begins_again` says whether the engines' own requests start over when the weights change. If so, there are no requests
        of coming steps. The texts are then what the own requests had decoded before the change, and the engines keep them.
        This object then only learns how much of these texts agreed with the later responses.
        """
        self._config = config
        self._begins_again = begins_again
        self._store = TextStore(config.text_bytes)
        self._flips = FlipModel()
        self._depth = StepsAhead()
        self._planned: dict[int, list[int]] = {}
        """Seeds of the requests of the latest plan, by the policy version of their step."""
        self._num_engines = 1
        """Number of engines that got the latest plan, at least 1."""
        self._version: int | None = None
        """Policy version that the engines had in the latest plan."""
        self._has_new_weights = True
        """Whether the latest plan is the first one with its policy version. If so, older weights have made all texts that it
        knows."""
        self._in_flight: list[int] = []
        """Number of tokens that texts had when the weights of policy version `_version` arrived. The first number is for the
        step of this version, and the others are for the steps after it."""
        self._effort = EarlyFigures()
        """Sum of what engines have done for coming steps since the metrics of the last step."""
        self._alarms: list[str] = []

    @property
    def chooses_steps(self) -> bool:
        """Whether the number of coming steps that get texts is chosen from measurements, instead of fixed by the config."""
        return isinstance(self._config.steps, str)

    @property
    def steps(self) -> int:
        """Number of coming steps for which the next plan should have requests."""
        return self._depth.steps if isinstance(self._config.steps, str) else self._config.steps

    def of(self, version: int) -> dict[int, TextAhead]:
        """Returns the texts for the step with policy version `version`, by the seeds of their requests."""
        return self._store.of(version)

    def num_texts(self, version: int) -> int:
        """Returns how many requests of the step with policy version `version` have a text."""
        return self._store.num_texts(version)

    def forget_before(self, version: int) -> None:
        """Forgets the texts for all steps before the one with policy version `version`."""
        self._store.forget_before(version)

    def plans(self, version: int, steps: Sequence[Sequence[EarlyRow]], num_engines: int) -> list[AheadPlan]:
        """Returns a plan for each engine, which says what the engine may decode early.

        Args:
            version: Policy version of the weights that the engines have.
            steps: Requests of each coming step. The first step is that of `version` + 1.
            num_engines: Number of engines that get a plan, which is 0 while all are dead.
        """
        self._note_flights(version)
        by_version = dict(enumerate(steps, version + 1))
        self._planned = {later: [row.row.seed for row in rows] for later, rows in by_version.items()}
        self._num_engines = max(num_engines, 1)
        known = [self._with_texts(later, later - version, rows) for later, rows in by_version.items()]
        return [AheadPlan(rows, self._flips.scale, self._depth.kept) for rows in shares(known, num_engines)]

    def keep(self, made_E: Iterable[EarlyMade], *, is_interrupted: bool = False) -> None:
        """Stores what engines have made in the latest plan.

        Adds an alarm if texts for the next step do not fit into the memory.

        `is_interrupted` means that the plan has ended before the weights change. Such a plan does not show how many requests
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
        """Learns how much of the texts for one step agreed with its responses. Returns the metrics of this step.

        `version` is the policy version of the step, whose texts must not have been forgotten yet. `kept` has the counts.
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
        """Learns two measured times in seconds, which decide how many coming steps are planned.

        `verify_row_s` is the time by which a verified row makes an engine step longer. `token_s` is the mean time of a token
        in a rollout without drafts.
        """
        self._depth.observe_price(verify_row_s, token_s)

    def take_alarms(self) -> list[str]:
        """Returns the alarms since the last call."""
        alarms = self._alarms
        self._alarms = []
        return alarms

    def _note_flights(self, version: int) -> None:
        """Notes how many tokens texts have, if new weights have arrived.

        These are the texts for the step of the new weights and for the steps after it.
        """
        self._has_new_weights = version != self._version
        if self._has_new_weights:
            last = max(self._planned, default=version)
            self._version = version
            self._in_flight = [self._store.num_tokens(later) for later in range(version, last + 1)]

    def _with_texts(self, version: int, steps_ahead: int, rows: Sequence[EarlyRow]) -> list[EarlyRow]:
        known = self.of(version)
        return [replace(row, steps_ahead=steps_ahead, known=known.get(row.row.seed)) for row in rows]


def shares(steps: Sequence[Sequence[EarlyRow]], num_engines: int) -> list[list[EarlyRow]]:
    """Divides the requests of each step among the engines. Returns the share of each engine, the nearest step first.

    Most requests that follow each other go to the same engine, because the samples of a prompt share its cached prefix.
    """
    dealt: list[list[EarlyRow]] = [[] for _ in range(num_engines)]
    for rows in steps:
        ends = [-(-len(rows) * i // max(num_engines, 1)) for i in range(num_engines + 1)]
        for share, (first, last) in zip(dealt, pairwise(ends), strict=True):
            share.extend(rows[first:last])
    return dealt
