# SPDX-License-Identifier: Apache-2.0
"""Texts that engines of a local run make ahead for coming steps (`run_ahead`)."""

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
    """Plans which requests of coming steps the engines may start early. Owns the texts while no engine works on them.

    A text is kept until its training step has been rolled out. The policy version of a step's requests is the number of the
    step.
    """

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        """Keeps no texts at first. `prompts` returns the problems and requests of any step of the run."""
        chosen = config.policy.generation.specrollout.run_ahead
        assert chosen is not None
        self._engine_seed = config.grpo.seed
        self._prompts = lru_cache(MOST_STEPS_AHEAD + 1)(prompts)  # the same step is requested repeatedly
        self._steps = range(0)
        self._coming = ComingTexts(chosen)
        learned = config.policy.generation.specrollout.learned
        self._kept = KeptUpdates(self._coming, learned, config.policy.model_name)

    def begin(self, steps: range) -> None:
        """Sets the steps of the run. No text is made for other steps.

        A resumed run begins with what an earlier start has kept.
        """
        self._steps = steps
        self._kept.begin(resumes=steps.start > 0)

    def plans(self, step: int, num_engines: int) -> list[AheadPlan]:
        """Returns a plan for each engine, with the requests that the engine may start while `step` is rolled out.

        The requests of the next step come first. So the requests of each step are divided among all engines, and all engines
        work on the next step before any later one. Samples of a prompt go to the same engine, because they share the KV cache
        of the prompt. Requests whose texts could not be used as drafts are left out.
        """
        coming = range(step + 1, step + 1 + self._coming.steps)
        rows = [self._rows(later) for later in takewhile(self._steps.__contains__, coming)]
        return self._coming.plans(step, rows, num_engines)

    def with_texts(self, step: int) -> StepPrompts:
        """Returns the problems and requests of a step. The requests have the texts that were made for them, as drafts."""
        prompts = self._prompts(step)
        texts = self._coming.of(step)
        found = [(request, texts.get(self._seed(request))) for request in prompts.requests]
        requests = [r if text is None else replace(r, ahead=text.tokens, branches=text.branches) for r, text in found]
        return replace(prompts, requests=requests)

    def keep(self, made_E: Sequence[EarlyMade]) -> None:
        """Stores the texts that each engine has made under its last plan. Call it when the engines have ended that plan."""
        self._coming.keep(made_E)

    def compare(self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Compares the responses of a step with the texts that were made for them, and learns how much of the texts was right.

        Returns the metrics of the texts, and forgets the texts.
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
        """Returns the rollout of a step with the metrics of its texts and with `figures`. This calls `compare`."""
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
