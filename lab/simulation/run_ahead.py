# SPDX-License-Identifier: Apache-2.0
"""Simulates synchronous steps in which engines also decode early requests of coming steps (`run_ahead`).

Early requests run in free slots of the engines while a rollout drains, and in all slots while other GPUs train. Each update of
the weights changes the text of a response after a random number of tokens. The tokens before this position are verified under
the new weights, and the response is decoded from there on. So the tokens are the same as without `run_ahead`.

With `fastest_of_n` in the variant, engines also take over each other's stragglers (`rolling_tail.py`), with or without early
requests.

Shapes: R requests of all steps, E engines, r requests of a step.
"""

from dataclasses import dataclass

import numpy as np

from lab.simulation.dealing import in_shards
from lab.simulation.event_loop import RolloutResult, StepResult
from lab.simulation.rolling_engine import EarlyTerms, RollingEngine, TextsInFlight, early_prices
from lab.simulation.rolling_tail import RollingTail
from lab.simulation.scenario import AheadConfig
from lab.simulation.setting import Setting
from nemo_specrollout.config.block import MOST_STEPS_AHEAD
from nemo_specrollout.run_ahead.decisions.early_share import EarlyPrices
from nemo_specrollout.run_ahead.decisions.steps_ahead import Flight, StepsAhead

NUM_STEPS = 12
"""Number of simulated steps. Only the later half counts, because the first steps have no early texts."""
_SEED_OF_FLIPS = 2_000_003
"""Offset of the seed for the positions at which responses diverge."""
_NO_UPDATES = AheadConfig(tokens_to_flip=1.0, foreseen=0.0)
"""Config for a scenario without `run_ahead`. No early texts are made then, so its values have no effect."""


@dataclass(frozen=True)
class EarlyFigures:
    """Gains and costs of early requests, over the steps that count."""

    kept: float
    """Share of the tokens of early texts that were still right after an update."""
    ready: float
    """Share of a step's tokens that were right when its rollout began."""
    made: float
    """Number of tokens that were decoded or verified early, divided by the number of response tokens."""
    steps: float
    """Mean number of coming steps for which there were early texts."""
    delay: float
    """Share by which early requests make a rollout longer that runs beside them. The comparison is a rollout with the same
    early texts as drafts, but without early requests."""


@dataclass(frozen=True)
class RollingResult(StepResult):
    """Times of a step with early requests, and the gains and costs of these requests."""

    early: EarlyFigures = EarlyFigures(1.0, 0.0, 0.0, 0.0, 0.0)
    moves: float = 0.0
    """Number of requests of a step that moved to another engine."""


AUTO = -1
"""Value of `steps_ahead` with which the production code chooses the number before each rollout
(`run_ahead/decisions/steps_ahead.py`)."""


def rolling_steps(setting: Setting, steps_ahead: int, *, is_exact: bool = True) -> RollingResult:
    """Simulates synchronous steps one after another, with early requests of the next `steps_ahead` steps.

    With `AUTO` as `steps_ahead`, the production code chooses this number before each rollout. If the cluster has `train_gpus`,
    engines also decode early requests during training. Otherwise they share their GPUs with the trainer, and decode none in
    this time. Without `is_exact`, texts continue under new weights without verification, as in asynchronous training on one
    pool of GPUs. Samples are then up to `steps_ahead` updates off policy. Early requests then fill all free slots, even where
    they slow down the rollout.
    """
    return _Rolling(setting, steps_ahead, is_exact).result()


class _Rolling:
    """A run of simulated steps. Owns the early texts of all steps, and what the run has measured."""

    def __init__(self, setting: Setting, steps_ahead: int, is_exact: bool) -> None:
        scenario = setting.fleet.scenario
        self._setting = setting
        self._policy = StepsAhead()
        self._chooses = steps_ahead == AUTO
        self._most_ahead = MOST_STEPS_AHEAD if self._chooses else steps_ahead
        self._is_exact = is_exact
        self._ahead = scenario.training.run_ahead or _NO_UPDATES
        self._seed = scenario.seed + _SEED_OF_FLIPS
        self._requests = setting.requests(NUM_STEPS + self._most_ahead)
        num = len(self._requests.length_R)
        self._steps = np.arange(num).reshape(NUM_STEPS + self._most_ahead, -1)
        self._right_R = np.zeros(num)
        self._is_complete_R = np.zeros(num, bool)
        fleet = setting.fleet
        kind = setting.variant.speculation
        self._speculation = fleet.speculation(kind, 0)
        self._num_engines = fleet.num_engines(kind)
        self._engine_r = in_shards(self._steps.shape[1], self._num_engines)
        self._tail, self._tail_alone = self._new_tail(), self._new_tail()

    def result(self) -> RollingResult:
        """Simulates all steps, and returns means over the later half of them."""
        generated_s, alone_s, idle_s, kept, ready, made, num_ahead = np.zeros((7, NUM_STEPS))
        for step in range(NUM_STEPS):
            own = self._requests.part(self._steps[step])
            parts_s = self._setting.parts_s(own.num_tokens, len(own.length_R))
            kept[step] = self._update(step) if step else np.nan
            ready[step] = self._right_R[self._steps[step]].sum() / own.num_tokens
            num_ahead[step] = steps_ahead = self._steps_ahead(step)
            engines = self._engines(step, steps_ahead)
            generated_s[step] = _roll_out(engines, self._tail)
            alone_s[step] = _roll_out(self._engines(step, 0), self._tail_alone) if self._most_ahead else np.nan
            rollout = self._rollout(step, engines)
            idle_s[step] = generated_s[step] - rollout.busy_s / self._num_engines
            self._go_on(engines, float(generated_s[step]), parts_s)
            self._observe(step, steps_ahead)
            made[step] = sum(engine.num_early_tokens for engine in engines) / own.num_tokens
        late = slice(NUM_STEPS // 2, None)
        generate_s = float(generated_s[late].mean())
        parts_s = parts_s | {"generate": generate_s}
        figures = EarlyFigures(
            float(np.nanmean(kept[late])) if np.isfinite(kept[late]).any() else 1.0,
            float(ready[late].mean()),
            float(made[late].mean()),
            float(num_ahead[late].mean()),
            float(generated_s[late].sum() / alone_s[late].sum()) - 1.0 if self._most_ahead else 0.0,
        )
        idle_share = float(idle_s[late].mean()) / sum(parts_s.values())
        moves = self._tail.num_moves / NUM_STEPS if self._tail else 0.0
        return RollingResult(self._setting.variant.name, parts_s, generate_s, idle_share, rollout, figures, moves)

    def _new_tail(self) -> RollingTail | None:
        policy = self._setting.tail()
        return None if policy is None or self._num_engines == 1 else RollingTail(policy, self._requests)

    def _update(self, step: int) -> float:
        """Cuts the early texts where new weights change them. Returns the share of tokens that is left, or NaN without texts.

        If a branch already has the changed token, it continues the text, so that only the next change may cut it.
        """
        if not self._is_exact:
            return 1.0
        flying = self._steps[step : step + 1 + self._most_ahead].ravel()
        before_r = self._right_R[flying]
        coming = range(step, step + 1 + self._most_ahead)
        lasts_r = np.concatenate([self._lasts(step, number, self._right_R[self._steps[number]]) for number in coming])
        self._right_R[flying] = np.minimum(before_r, np.floor(lasts_r))
        own = self._steps[step]
        self._policy.observe_kept(int(before_r[: len(own)].sum()), int(self._right_R[own].sum()))
        return float(self._right_R[flying].sum() / before_r.sum()) if before_r.any() else np.nan

    def _lasts(self, update: int, number: int, length_r: np.ndarray) -> np.ndarray:
        """Returns after how many tokens an update changes each text of step `number`.

        The random numbers do not depend on how many steps have early texts, so that variants can be compared.
        """
        rng = np.random.default_rng((self._seed, update, number))
        lasts_r = np.zeros(len(length_r))
        is_going_r = np.ones(len(length_r), bool)
        while is_going_r.any():
            lasts_r += np.where(is_going_r, rng.exponential(self._ahead.tokens_to_flip, len(length_r)), 0.0)
            is_going_r &= (rng.random(len(length_r)) < self._ahead.foreseen) & (lasts_r < length_r)
        return lasts_r

    def _steps_ahead(self, step: int) -> int:
        """Returns how many coming steps may have early requests during `step`."""
        if not self._chooses:
            return self._most_ahead
        prices = self._prices(step)
        self._policy.observe_price(prices.verify_row_s, prices.plain.token_s)
        return self._policy.steps

    def _observe(self, step: int, steps_ahead: int) -> None:
        """Tells `StepsAhead` how many early texts each coming step has at the end of `step`."""
        coming = self._steps[step + 1 : step + 1 + steps_ahead]
        if len(coming):
            self._policy.observe_flights([Flight(len(r), int((self._right_R[r] > 0).sum())) for r in coming])

    def _engines(self, step: int, steps_ahead: int) -> list[RollingEngine]:
        """Returns the engines for `step`, with its own requests and those of the next `steps_ahead` steps.

        In an engine's list, requests of nearer steps come first, and within a step the requests with longer texts.
        """
        engines = []
        for index in range(self._num_engines):
            rows = [(ahead, self._steps[step + ahead][self._engine_r == index]) for ahead in range(steps_ahead + 1)]
            rows = [(ahead, r[np.argsort(-self._right_R[r], kind="stable")]) for ahead, r in rows]
            numbers_I = np.concatenate([r for _, r in rows])
            ahead_I = np.concatenate([np.full(len(r), ahead) for ahead, r in rows])
            engines.append(self._engine(index, numbers_I, ahead_I, step))
        return engines

    def _engine(self, index: int, numbers_I: np.ndarray, ahead_I: np.ndarray, step: int) -> RollingEngine:
        work = self._requests.part(numbers_I)
        right_I = self._right_R[numbers_I]
        texts = TextsInFlight.at_start(numbers_I, work, ahead_I, right_I, self._is_complete_R[numbers_I])
        if not self._is_exact:
            texts.done_I = right_I.copy()
            texts.end_I[~texts.is_open_I()] = 0.0
        return RollingEngine(
            index,
            self._speculation,
            self._setting.fleet.num_slots,
            texts,
            self._terms(step, int(ahead_I.max())) if self._is_exact else None,
        )

    def _terms(self, step: int, num_steps: int) -> EarlyTerms:
        return EarlyTerms(self._prices(step, num_steps), self._policy.kept, self._ahead.branches / 2)

    def _prices(self, step: int, num_steps: int = 1) -> EarlyPrices:
        """Returns the prices of early requests for `step`, computed from the response lengths of the step before it.

        The first step uses its own lengths. `num_steps` is the number of coming steps that have early requests.
        """
        last_r = self._steps[max(step - 1, 0)]
        length_L = self._requests.length_R[last_r][: -(-len(last_r) // self._num_engines)]
        prompt = self._requests.prompt_tokens
        return early_prices(self._speculation, self._setting.fleet.num_slots, prompt, length_L, max(num_steps, 1))

    def _go_on(self, engines: list[RollingEngine], generated_s: float, parts_s: dict[str, float]) -> None:
        """Lets engines decode early requests until the last engine ends its rollout and other GPUs have trained.

        Then stores the texts of these requests.
        """
        window_s = generated_s
        if self._setting.fleet.scenario.cluster.train_gpus:
            window_s += sum(parts_s.values()) - parts_s["refit"]
        for engine in engines:
            engine.run(window_s)
            texts = engine.texts
            is_behind_I = texts.is_verifying_I()
            right_I = np.maximum(texts.done_I, texts.known_I) if self._is_exact else texts.done_I
            self._right_R[texts.numbers_I] = right_I
            is_whole_I = right_I >= texts.work.length_R - 0.5
            self._is_complete_R[texts.numbers_I] = is_whole_I | (texts.is_complete_I & is_behind_I)

    def _rollout(self, step: int, engines: list[RollingEngine]) -> RolloutResult:
        """Returns the result of the rollout of a step's own requests."""
        end_R = np.zeros(self._steps.shape[1])
        for engine in engines:
            texts = engine.texts
            end_R[texts.numbers_I[texts.is_own_I] - self._steps[step][0]] = texts.end_I[texts.is_own_I]
        own = self._requests.part(self._steps[step])
        spans = tuple(span for engine in engines for span in engine.spans)
        num_tokens = sum(span.num_tokens for span in spans)
        return RolloutResult(end_R, own.length_R, spans, len(engines), num_tokens, 0.0)


def _roll_out(engines: list[RollingEngine], tail: RollingTail | None) -> float:
    """Runs engines until their own requests have ended. Returns the seconds until the last of them."""
    if tail is None:
        for engine in engines:
            engine.run()
    else:
        tail.roll_out(engines)
    own = [engine.texts.end_I[engine.texts.is_own_I] for engine in engines]
    return float(np.concatenate(own).max())
