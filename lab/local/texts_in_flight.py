# SPDX-License-Identifier: Apache-2.0
"""The texts of a local run's coming steps, which engines make early (`run_ahead`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.local.run_config import RunConfig
from lab.local.step_rollout import Prompts, StepPrompts
from lab.simulation.dealing import in_shards
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.reports.records import ahead_alarms, ahead_figures
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.decisions.steps_ahead import Flight, StepsAhead
from nemo_specrollout.run_ahead.early_texts import EarlyRow
from nemo_specrollout.run_ahead.rolling_engine import EarlyMade
from nemo_specrollout.run_ahead.texts import TextAhead, TextsAhead


@dataclass(frozen=True)
class AheadRequest:
    """A request of a coming step, as an engine gets it to decode it early."""

    request: RolloutRequest
    seed: int
    """Key of its noise."""


class TextsInFlight:
    """Plans which requests engines may begin early. Owns their texts between two phases of an engine.

    A text is kept from the phase in which it was begun until its step has been rolled out. So at most the texts of
    `num_steps` coming steps and of the present one are in memory.
    """

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        """`prompts` gives the prompts of any step of the run."""
        self._config = config
        self._prompts = prompts
        self._steps = range(0)
        self._texts: dict[int, TextAhead] = {}
        self._flips = FlipModel()
        chosen = config.policy.generation.specrollout.run_ahead
        assert chosen is not None
        self._fixed = chosen.steps
        self._policy = StepsAhead()
        self._planned: list[list[int]] = []
        """Seeds of the requests that engines were last allowed to begin, for each coming step."""
        self._made_s = 0.0
        self._alarms: list[dict[str, Any]] = []

    @property
    def num_steps(self) -> int:
        """Coming steps whose requests engines may begin."""
        return self._fixed if isinstance(self._fixed, int) else self._policy.steps

    @property
    def scale(self) -> float:
        """How far the last updates have moved differences of scores, in nats (`FlipModel`)."""
        return self._flips.scale

    @property
    def kept(self) -> float:
        """Share of what was made ahead that an update leaves right."""
        return self._policy.kept

    def begin(self, steps: range) -> None:
        """Names the steps of the run. No request of another step is begun."""
        self._steps = steps

    def shards(self, step: int, num_engines: int) -> list[list[EarlyRow]]:
        """Returns the requests that each engine may begin while `step` is rolled out, the next step's first.

        A request whose text could not be drafts is left out. Each step is dealt out by itself, because its requests come
        before those of later steps. Samples of one prompt stay together, because they share the KV cache of the prompt.
        """
        shards: list[list[EarlyRow]] = [[] for _ in range(num_engines)]
        self._planned = []
        for ahead in range(1, self.num_steps + 1):
            if step + ahead not in self._steps:
                break
            requests = [r for r in self._prompts(step + ahead).requests if r.speculate]
            for engine, request in zip(in_shards(len(requests), num_engines).tolist(), requests, strict=True):
                shards[engine].append(self._row(request, ahead))
            self._planned.append(list(map(self._seed, requests)))
        return shards

    def with_texts(self, step: int) -> StepPrompts:
        """Returns the prompts of a step, whose requests bring along what was made of them."""
        prompts = self._prompts(step)
        return replace(prompts, requests=[self._with_text(request) for request in prompts.requests])

    def keep(self, made_E: Sequence[EarlyMade]) -> None:
        """Takes what engines have made when they end a plan."""
        for made in made_E:
            self._texts |= made.texts
        self._made_s += max((made.figures.alone_s for made in made_E), default=0.0)
        flights = [Flight(len(seeds), sum(seed in self._texts for seed in seeds)) for seeds in self._planned]
        self._policy.observe_flights(flights)

    def compare(self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Learns from the responses of a step how much of its texts was right, and forgets the texts.

        Returns the step's metrics.
        """
        texts = TextsAhead()
        seeds = list(map(self._seed, requests))
        texts.replace({seed: self._texts.pop(seed) for seed in seeds if seed in self._texts})
        for seed, rollout in zip(seeds, rollouts, strict=True):
            texts.compare(seed, rollout.token_ids)
        counts = texts.take_kept()
        seconds = self._made_s
        self._made_s = 0.0
        if not counts.num_texts:
            return {}
        self._flips.observe_counts(counts.gaps_G, counts.num_flips)
        self._policy.observe_kept(counts.num_made, counts.num_right)
        self._alarms += [{"sentence": sentence} for sentence in ahead_alarms(counts.num_made, counts.num_kept)]
        return ahead_figures(counts.num_made, counts.num_kept, counts.num_tokens, seconds)

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call."""
        alarms = self._alarms
        self._alarms = []
        return alarms

    def _row(self, request: RolloutRequest, steps_ahead: int) -> EarlyRow:
        seed = self._seed(request)
        return EarlyRow(request.prompt_token_ids, AheadRequest(request, seed), steps_ahead, self._texts.get(seed))

    def _with_text(self, request: RolloutRequest) -> RolloutRequest:
        text = self._texts.get(self._seed(request))
        return request if text is None else replace(request, ahead=text.tokens, branches=text.branches)

    def _seed(self, request: RolloutRequest) -> int:
        return request.noise_seed(self._config.grpo.seed)
