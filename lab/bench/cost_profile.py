# SPDX-License-Identifier: Apache-2.0
"""Measures the seconds of verifying and drafting on this CPU, for the placement planner.

`python -m lab.bench.cost_profile SPEC` measures with OMP_NUM_THREADS threads. Another number of threads needs another process,
because torch reads this number only once. Verifying is timed by plain decode steps. Such a step has as many requests as there
are rows to verify, because a draft token costs about as much as one more request (`step_model.py`).
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.local.run_sections import GenerationConfig
from nemo_specrollout.config.block import BLOCK_PATH, BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    DraftModelDrafterConfig,
    FolderDrafterConfig,
    RemoteDrafterConfig,
)
from nemo_specrollout.config.strict import ConfigError, bounded, build
from nemo_specrollout.doctor.diagnosis import end_with_parent
from nemo_specrollout.remote.drafter.drafter_spec import drafter_spec
from nemo_specrollout.remote.protocol.messages import Open

if TYPE_CHECKING:
    from lab.local.engine import RolloutEngine
    from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of requests for which engine steps are timed."""
COUPLED_K = 3
"""Draft tokens per request and engine step, if the policy's engine drafts itself."""
MEASUREMENTS = ("verify_s", "draft_s", "coupled_draft_s")
_WARM_UP = 4
"""Number of first engine steps that do not count, because prompts are read and kernels compile in them."""
_CONTEXT_SHARE = 0.25
"""Length of a timed request's prompt, as a share of the longest text (`max_model_len`)."""
_MAX_BURSTS = 8
"""The engine runs up to this many bursts of steps until enough of them are pure decode steps."""
_ROOM_ADVICE = "raise kv_cache_memory_bytes, or lower max_num_seqs, of its vllm_kwargs"


@dataclass(frozen=True)
class ProfileSpec:
    """What a process of this module has to measure."""

    policy: str
    """Hugging Face folder of the policy."""
    generation: GenerationConfig
    batches: tuple[int, ...] = bounded(low=1)
    """Numbers of requests for which engine steps are timed."""
    num_steps: int = bounded(low=1)
    """Number of engine steps to time for each number of requests."""

    @property
    def prompt(self) -> list[int]:
        """Returns the prompt of a timed request, with token ids that every vocabulary has."""
        return [2 + i % 50 for i in range(max(1, int(_CONTEXT_SHARE * self.generation.vllm_cfg.max_model_len)))]


def draft_model_of(block: SpecrolloutConfig) -> RemoteDrafterConfig:
    """Returns the block's drafter that has its own model, changed into a drafter of type `remote`.

    Raises ConfigError if the block has no such drafter, or if the folder of its model is missing.
    """
    models = (d for d in block.drafters if isinstance(d, RemoteDrafterConfig | DraftModelDrafterConfig))
    drafter = next(models, None)
    if drafter is None:
        raise ConfigError(
            f"{BLOCK_PATH}.drafters: {[d.type for d in block.drafters]}; add one of type remote or draft_model that names a "
            "draft model"
        )
    check_model(drafter)
    if isinstance(drafter, RemoteDrafterConfig):
        return drafter
    return RemoteDrafterConfig(model=drafter.model, sampling=drafter.sampling)


def check_model(drafter: DrafterConfig) -> None:
    """Raises ConfigError if the drafter names a model whose folder is missing."""
    if not isinstance(drafter, FolderDrafterConfig | RemoteDrafterConfig):
        return
    if not (Path(drafter.model) / "config.json").is_file():
        raise ConfigError(
            f"{BLOCK_PATH}.drafters: model {drafter.model} has no config.json; name a Hugging Face folder"
        )


def measure(spec: ProfileSpec, on_done: Callable[[str], object]) -> dict[str, list[float]]:
    """Measures what the planner needs.

    Returns for each of `MEASUREMENTS` a list with the seconds for each of the spec's batches. Calls `on_done` after each batch
    of each measurement, with words that say what was measured.
    """
    from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine

    drafter = draft_model_of(spec.generation.specrollout)
    in_engine = DraftModelDrafterConfig(model=drafter.model, sampling=drafter.sampling)
    budget = BudgetConfig("fixed", COUPLED_K)
    coupled = SpecrolloutConfig(num_speculative_tokens=COUPLED_K, drafters=(in_engine,), budget=budget)
    process = drafter_spec(drafter, asdict(spec.generation.vllm_cfg))

    def by_batch(what: str, seconds_of: Callable[[int], float]) -> list[float]:
        found = []
        for batch in spec.batches:
            found.append(seconds_of(batch))
            on_done(f"{what} for {batch}")
        return found

    with closing(_policy_engine(spec, SpecrolloutConfig(drafters=()))) as plain:
        verify_s = by_batch("verifying", lambda batch: statistics.median(_decode_steps(plain, spec, batch, "seconds")))
    kwargs = {"dtype": process.precision, **process.vllm_kwargs}
    with closing(DrafterEngine(Path(process.model), max(spec.batches), process.max_model_len, **kwargs)) as alone:
        draft_s = by_batch("drafting", lambda batch: _draft_s(alone, spec, batch))
    with closing(_policy_engine(spec, coupled)) as engine:
        coupled_s = by_batch("drafting in the policy's engine", lambda batch: _coupled_draft_s(engine, spec, batch))
    return dict(zip(MEASUREMENTS, (verify_s, draft_s, coupled_s), strict=True))


def _policy_engine(spec: ProfileSpec, block: SpecrolloutConfig) -> "RolloutEngine":
    """Returns a new engine of the policy with room for the largest batch."""
    from lab.local.engine import RolloutEngine

    kwargs = {k: v for k, v in spec.generation.vllm_kwargs.items() if k != "speculative_config"}
    generation = replace(spec.generation, vllm_kwargs=kwargs, specrollout=block)
    return RolloutEngine(Path(spec.policy), generation, seed=0, max_num_seqs=max(spec.batches))


def _coupled_draft_s(engine: "RolloutEngine", spec: ProfileSpec, batch: int) -> float:
    """Returns the seconds in which the policy's engine drafts one token for each of `batch` requests.

    A part of these seconds is spent on reading the text that the requests have gained since the last draft.
    """
    drafting_s = [s for s in _decode_steps(engine, spec, batch, "draft_s") if s > 0.0]
    if not drafting_s:
        raise ConfigError("profile: the policy's engine drafted nothing; its draft model does not fit it")
    return statistics.median(drafting_s) / COUPLED_K


def _decode_steps(engine: "RolloutEngine", spec: ProfileSpec, batch: int, column: str) -> list[float]:
    """Returns the values of a column of the engine's trace for pure decode steps with `batch` requests.

    The engine makes its steps in bursts, and the trace is read only between two bursts. Reading takes time, and the engine
    adds the time between two steps to the second one. Raises ConfigError if the engine never runs `batch` requests at once.
    """
    num_steps = spec.num_steps + _WARM_UP
    found: list[float] = []
    before = engine.counters()
    ids = _submit(engine, spec, batch, num_steps)
    for _ in range(_MAX_BURSTS):
        for _ in range(num_steps):
            finished = engine.step()
            ids = [i for i in ids if i not in finished] + _submit(engine, spec, len(finished), num_steps)
        assert before is not None  # the block is enabled
        stats = engine.stats(before.num_steps)
        assert stats is not None
        steps = [dict(zip(stats.trace.columns, row, strict=True)) for row in stats.trace.rows]
        found = [s[column] for s in steps if s["num_requests"] == batch and s["is_decode"]]
        if len(found) >= num_steps:
            break
    engine.abort(ids)
    if len(found) < num_steps:
        raise ConfigError(
            f"profile: the policy's engine never ran {batch} requests at once for {num_steps} steps; {_ROOM_ADVICE}"
        )
    return found[_WARM_UP:]


def _submit(engine: "RolloutEngine", spec: ProfileSpec, count: int, num_steps: int) -> list[str]:
    """Submits `count` requests and returns their ids.

    Each decodes until `num_steps` engine steps are timed, or until its text reaches the longest context.
    """
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    longest = spec.generation.vllm_cfg.max_model_len - len(spec.prompt) - 1
    length = min(longest, (num_steps + 2) * (COUPLED_K + 1))
    return engine.submit([RolloutRequest(spec.prompt, 0, i, exact_length=length) for i in range(count)], {})


def _draft_s(engine: "DrafterEngine", spec: ProfileSpec, batch: int) -> float:
    """Returns the seconds in which a remote drafter drafts one token for each of `batch` shadow sequences."""
    longest = engine.model.max_model_len
    text = np.array(spec.prompt, np.int32).tobytes()
    for shadow in range(batch):
        engine.open(shadow, Open(shadow, shadow, 1.0, 0, 1.0, longest, 1, text))
    seconds = _drafting_s(engine, batch, spec.num_steps + _WARM_UP, longest - len(spec.prompt) - 1)
    for shadow in range(batch):
        engine.close_shadow(shadow)
    if len(seconds) <= _WARM_UP:
        raise ConfigError(
            f"profile: the draft model's engine never drafted for {batch} requests at once; {_ROOM_ADVICE}"
        )
    return statistics.median(seconds[_WARM_UP:])


def _drafting_s(engine: "DrafterEngine", batch: int, num_steps: int, most_steps: int) -> list[float]:
    """Returns the seconds of each of `num_steps` engine steps that drafted for all of `batch` shadow sequences.

    The list is shorter if `most_steps` engine steps were not enough for that.
    """
    seconds: list[float] = []
    for _ in range(most_steps):
        started = time.perf_counter()
        rows = engine.draft(np.arange(batch))
        spent_s = time.perf_counter() - started
        if len(rows) == batch:
            seconds.append(spent_s)
        if len(seconds) == num_steps:
            break
    return seconds


def main(text: str) -> int:
    """Measures what the `ProfileSpec` in the JSON `text` says.

    Prints progress and result as JSON lines. Returns the exit code.
    """
    end_with_parent()
    try:
        measured = measure(
            build(ProfileSpec, json.loads(text), "profile"), lambda what: print(json.dumps({"done": what}), flush=True)
        )
    except ConfigError as error:
        print(str(error), file=sys.stderr)
        return 2
    print(json.dumps({"measured": measured}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
