# SPDX-License-Identifier: Apache-2.0
"""The texts of a local run's coming steps, which engines make early (`run_ahead`)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from lab.local.engine import AheadRequest
from lab.local.run_config import RunConfig
from lab.local.step_rollout import Prompts, StepPrompts, StepRollout
from nemo_specrollout.config.block import MOST_STEPS_AHEAD
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.reports.ahead_records import saved_figures
from nemo_specrollout.run_ahead.coming_texts import AheadPlan, ComingTexts
from nemo_specrollout.run_ahead.early_requests import EarlyMade
from nemo_specrollout.run_ahead.early_texts import EarlyRow
from nemo_specrollout.run_ahead.kept_updates import KeptUpdates
from nemo_specrollout.run_ahead.texts import TextsAhead


class TextsInFlight:
    """Plans which requests engines may start early. Owns their texts between two phases of an engine.

    A text is kept from the phase in which it was started until its step has been rolled out. A step of the run is the policy
    version of its requests.
    """

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        """`prompts` gives the prompts of any step of the run."""
        chosen = config.policy.generation.specrollout.run_ahead
        assert chosen is not None
        self._engine_seed = config.grpo.seed
        self._prompts = lru_cache(MOST_STEPS_AHEAD + 1)(prompts)  # the same step is requested repeatedly
        self._steps = range(0)
        self._coming = ComingTexts(chosen)
        learned = config.policy.generation.specrollout.learned
        self._kept = KeptUpdates(self._coming, learned, config.policy.model_name)

    def begin(self, steps: range) -> None:
        """Sets the steps of the run, because no others are started. A resumed run begins with what it has kept."""
        self._steps = steps
        self._kept.begin(resumes=steps.start > 0)

    def plans(self, step: int, num_engines: int) -> list[AheadPlan]:
        """Returns what each engine may start while `step` is rolled out, the next step's requests first.

        Requests whose texts could not be drafts are left out. Each step is divided among the engines separately, because its
        requests come before those of later steps. Samples of a prompt stay together, because they share its KV cache.
        """
        coming = range(step + 1, step + 1 + self._coming.steps)
        rows = [self._rows(later) for later in takewhile(self._steps.__contains__, coming)]
        return self._coming.plans(step, rows, num_engines)

    def with_texts(self, step: int) -> StepPrompts:
        """Returns the prompts of a step, whose requests bring along the texts that were made for them."""
        prompts = self._prompts(step)
        texts = self._coming.of(step)
        found = [(request, texts.get(self._seed(request))) for request in prompts.requests]
        requests = [r if text is None else replace(r, ahead=text.tokens, branches=text.branches) for r, text in found]
        return replace(prompts, requests=requests)

    def keep(self, made_E: Sequence[EarlyMade]) -> None:
        """Stores what engines have made when they end a plan."""
        self._coming.keep(made_E)

    def compare(self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Learns from the responses of a step how much of its texts was right, and forgets the texts.

        Returns the step's metrics.
        """
        step = requests[0].policy_version
        texts = TextsAhead()
        texts.replace(self._coming.of(step))
        for request, rollout in zip(requests, rollouts, strict=True):
            texts.compare(self._seed(request), rollout.token_ids)
        learned = self._coming.learn(step, texts.take_kept())
        self._coming.forget_before(step + 1)
        self._kept.keep()
        return learned

    def told(self, rollout: StepRollout, **figures: float) -> StepRollout:
        """Returns the rollout of a step with the metrics of its texts. Call it after `compare`."""
        learned = self.compare(rollout.prompts.requests, rollout.rollouts)
        stats = rollout.stats
        if stats.plain_estimate_s is not None:
            seconds = {"plain_estimate_s": stats.plain_estimate_s, "rollout_s": stats.seconds}
            learned |= saved_figures(seconds, {name: {"accepted": n} for name, n in stats.accepted.items()})
        return replace(rollout, figures={**rollout.figures, **learned, **figures})

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call."""
        return [{"sentence": sentence} for sentence in self._coming.take_alarms() + self._kept.take_alarms()]

    def _rows(self, step: int) -> list[EarlyRow]:
        requests = [request for request in self._prompts(step).requests if request.speculate]
        return [EarlyRow(r.prompt_token_ids, AheadRequest(r, self._seed(r))) for r in requests]

    def _seed(self, request: RolloutRequest) -> int:
        return request.noise_seed(self._engine_seed)
