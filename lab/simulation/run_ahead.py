# SPDX-License-Identifier: Apache-2.0
"""Simulated synchronous steps whose engines draft the next step's responses while they would be idle (`run_ahead`).

An engine is idle in the tail of a rollout, and while other GPUs train. The new weights sample another token than the old ones
after a number of tokens that is drawn for each response. All tokens before are verified, most drafts at a time; then a
response goes on as without `run_ahead`.

Shapes: R requests, E engines.
"""

import numpy as np

from lab.simulation.dealing import in_shards
from lab.simulation.event_loop import Rollout, StepResult
from lab.simulation.setting import Setting
from lab.simulation.workload import Workload

NUM_STEPS = 6
"""Simulated steps. The first has no texts, and does not count."""
_SEED_OF_FLIPS = 2_000_003
"""Offset of the seed for the positions at which responses part."""


def synchronous_steps(setting: Setting, *, runs_ahead: bool) -> StepResult:
    """Simulates synchronous steps one after the other. Returns the last, with the means of all but the first.

    With `train_gpus` in the cluster, engines have nothing to do while the policy trains. Otherwise they share its GPUs.
    """
    scenario = setting.fleet.scenario
    ahead = scenario.training.run_ahead
    rng = np.random.default_rng(scenario.seed + _SEED_OF_FLIPS)
    tokens_to_flip = 0.0 if ahead is None else ahead.tokens_to_flip
    requests = setting.requests(NUM_STEPS)
    steps = np.arange(len(requests.length_R)).reshape(NUM_STEPS, -1)
    known_R = np.zeros(steps.shape[1])
    generated_s = []
    idle_s = []
    for step, own_R in enumerate(steps):
        work = requests.part(own_R)
        rollout = setting.rollout(work)
        _start(rollout, known_R)
        rollout.run()
        result = rollout.result()
        parts_s = setting.parts_s(work.num_tokens, len(own_R))
        train_s = sum(parts_s.values())
        generated_s.append(result.seconds)
        idle_s.append(result.idle_share * result.seconds)
        if runs_ahead and step + 1 < NUM_STEPS:
            tail_E = result.seconds - np.array([e.spans[-1].end_s for e in rollout.engines])
            window_E = tail_E + (train_s if scenario.cluster.train_gpus else 0.0)
            made_R = _made_ahead(setting, requests.part(steps[step + 1]), window_E)
            flip_R = rng.exponential(tokens_to_flip, len(made_R))
            known_R = np.minimum(made_R, flip_R.astype(np.int64))
    generate_s = float(np.mean(generated_s[1:]))
    parts_s = parts_s | {"generate": generate_s}
    return StepResult(
        setting.variant.name, parts_s, generate_s, float(np.mean(idle_s[1:])) / sum(parts_s.values()), result
    )


def _start(rollout: Rollout, known_R: np.ndarray) -> None:
    num_requests = len(known_R)
    rollout.known_R = known_R
    rollout.start(np.arange(num_requests), in_shards(num_requests, len(rollout.engines)))


def _made_ahead(setting: Setting, work: Workload, window_E: np.ndarray) -> np.ndarray:
    """Returns the tokens of each request that engines make in the seconds that each of them has, float64 [R]."""
    rollout = setting.rollout(work)
    rollout.tail = None
    longest_s = float(window_E.max())
    for engine, window_s in zip(rollout.engines, window_E.tolist(), strict=True):
        engine.begin_s = longest_s - window_s
    _start(rollout, np.zeros(len(work.length_R)))
    rollout.run(longest_s)
    made_R = np.where(np.isfinite(rollout.end_R), work.length_R, 0.0)
    for engine in rollout.engines:
        made_R[engine.requests_B] = engine.tokens_at(longest_s)
    return made_R
