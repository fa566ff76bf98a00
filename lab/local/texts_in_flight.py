# SPDX-License-Identifier: Apache-2.0
"""The texts of a local run's coming steps, which engines make early (`run_ahead`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from lab.local.engine import AheadRequest
from lab.local.run_config import RunConfig
from lab.local.step_rollout import Prompts, StepPrompts, StepRollout
from lab.simulation.dealing import in_shards
from nemo_specrollout.config.block import MOST_STEPS_AHEAD
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.reports.ahead_records import kept_figures, saved_figures
from nemo_specrollout.reports.records import ahead_alarms, ahead_figures
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.decisions.steps_ahead import Flight, StepsAhead
from nemo_specrollout.run_ahead.early_requests import EarlyFigures, EarlyMade
from nemo_specrollout.run_ahead.early_texts import EarlyRow
from nemo_specrollout.run_ahead.text_store import TextStore
from nemo_specrollout.run_ahead.texts import KeptCounts, compare


@dataclass(frozen=True)
class AheadPlan:
    """What an engine may begin early, and what is known of updates."""

    rows: Sequence[EarlyRow]
    scale: float
    """How far updates move differences of scores, in nats (`FlipModel`)."""
    kept: float
    """Share of what was made ahead that an update leaves right."""


class TextsInFlight:
    """Plans which requests engines may begin early. Owns their texts between two phases of an engine.

    A text is kept from the phase in which it was begun until its step has been rolled out. `run_ahead.text_mib` bounds the
    memory of all texts. A step of the run is the policy version of its requests.
    """

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        """`prompts` gives the prompts of any step of the run."""
        chosen = config.policy.generation.specrollout.run_ahead
        assert chosen is not None
        self._engine_seed = config.grpo.seed
        self._prompts = lru_cache(MOST_STEPS_AHEAD + 1)(prompts)  # a step's are asked for again while it comes nearer
        self._fixed = chosen.steps
        self._steps = range(0)
        self._store = TextStore(chosen.text_bytes)
        self._flips = FlipModel()
        self._depth = StepsAhead()
        self._planned: dict[int, list[int]] = {}
        """Seeds of the requests of the latest plan, by their steps."""
        self._effort = EarlyFigures()
        """What engines did for coming steps since the last step, added up."""
        self._alarms: list[dict[str, Any]] = []

    @property
    def num_steps(self) -> int:
        """Coming steps whose requests engines may begin."""
        return self._fixed if isinstance(self._fixed, int) else self._depth.steps

    def begin(self, steps: range) -> None:
        """Names the steps of the run. No request of another step is begun."""
        self._steps = steps

    def plans(self, step: int, num_engines: int) -> list[AheadPlan]:
        """Returns what each engine may begin while `step` is rolled out, the next step's requests first.

        A request whose text could not be drafts is left out. Each step is dealt out by itself, because its requests come
        before those of later steps. Samples of a prompt stay together, because they share its KV cache.
        """
        coming = range(step + 1, step + 1 + self.num_steps)
        rows = {later: self._rows(later, later - step) for later in takewhile(self._steps.__contains__, coming)}
        self._planned = {later: [row.row.seed for row in of_step] for later, of_step in rows.items()}
        dealt: list[list[EarlyRow]] = [[] for _ in range(num_engines)]
        for of_step in rows.values():
            for engine, row in zip(in_shards(len(of_step), num_engines).tolist(), of_step, strict=True):
                dealt[engine].append(row)
        return [AheadPlan(of_engine, self._flips.scale, self._depth.kept) for of_engine in dealt]

    def with_texts(self, step: int) -> StepPrompts:
        """Returns the prompts of a step, whose requests bring along what was made of them."""
        prompts = self._prompts(step)
        return replace(prompts, requests=[self._with_text(request) for request in prompts.requests])

    def keep(self, made_E: Sequence[EarlyMade]) -> None:
        """Takes what engines have made when they end a plan."""
        step_of = {seed: step for step, seeds in self._planned.items() for seed in seeds}
        for made in made_E:
            self._effort = self._effort.plus(made.figures)
            self._flips.observe_counts(made.flips.gaps_G, made.flips.num_flips, is_same_update=True)
            for seed, text in made.texts.items():
                self._store.put(step_of[seed], {seed: text})
        if forgotten := self._store.trim().get(min(self._planned, default=0)):
            sentence = f"{forgotten} texts of the next step did not fit into run_ahead.text_mib: raise it"
            self._alarms.append({"sentence": sentence})
        flights = [Flight(len(seeds), len(self._store.of(step))) for step, seeds in sorted(self._planned.items())]
        self._depth.observe_flights(flights)

    def compare(self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Learns from the responses of a step how much of its texts was right, and forgets the texts.

        Returns the step's metrics.
        """
        step = requests[0].policy_version
        texts = self._store.of(step)
        counts = KeptCounts()
        for request, rollout in zip(requests, rollouts, strict=True):
            text = texts.get(self._seed(request))
            if text is not None:
                counts = counts.plus(compare(text, rollout.token_ids))
        self._store.forget_before(step + 1)
        effort = self._effort
        self._effort = EarlyFigures()
        if counts.num_texts:
            self._flips.observe_counts(counts.gaps_G, counts.num_flips)
            self._depth.observe_kept(counts.num_made, counts.num_right)
            self._alarms += [{"sentence": said} for said in ahead_alarms(counts.num_made, counts.num_right)]
        return {
            **ahead_figures(counts.num_made, counts.num_kept, counts.num_tokens, effort.alone_s),
            **kept_figures(counts._asdict()),
            **effort.metrics(len(self._planned)),
        }

    def told(self, rollout: StepRollout, **figures: float) -> StepRollout:
        """Returns the rollout of a step with the metrics of its texts, after `compare` of its responses."""
        learned = self.compare(rollout.prompts.requests, rollout.rollouts)
        stats = rollout.stats
        if stats.plain_estimate_s is not None:
            seconds = {"plain_estimate_s": stats.plain_estimate_s, "rollout_s": stats.seconds}
            learned |= saved_figures(seconds, {name: {"accepted": n} for name, n in stats.accepted.items()})
        return replace(rollout, figures={**rollout.figures, **learned, **figures})

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call."""
        alarms = self._alarms
        self._alarms = []
        return alarms

    def _rows(self, step: int, steps_ahead: int) -> list[EarlyRow]:
        requests = [request for request in self._prompts(step).requests if request.speculate]
        seeds = map(self._seed, requests)
        return [
            EarlyRow(request.prompt_token_ids, AheadRequest(request, seed), steps_ahead, self._store.get(step, seed))
            for request, seed in zip(requests, seeds, strict=True)
        ]

    def _with_text(self, request: RolloutRequest) -> RolloutRequest:
        text = self._store.get(request.policy_version, self._seed(request))
        return request if text is None else replace(request, ahead=text.tokens, branches=text.branches)

    def _seed(self, request: RolloutRequest) -> int:
        return request.noise_seed(self._engine_seed)
