# SPDX-License-Identifier: Apache-2.0
"""Measures what verifying and drafting cost on this CPU, for the placement planner. `python -m ...cost_profile SPEC` measures
with the threads that OMP_NUM_THREADS names: torch takes their number once, when it is loaded.

The policy's engine takes plain decode steps: a draft row costs about what a row of a request does (`step_time.py`).
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_specrollout.config.block import BLOCK_PATH, BudgetConfig, DrafterConfig, SpecrolloutConfig
from nemo_specrollout.config.run_config import GenerationConfig
from nemo_specrollout.config.strict import ConfigError, bounded, build
from nemo_specrollout.remote.verifier.drafter_pool import drafter_spec
from nemo_specrollout.remote.verifier.json_child import end_with_parent

if TYPE_CHECKING:
    from nemo_specrollout.generation.engine import RolloutEngine
    from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Requests of the steps that are timed."""
COUPLED_K = 3
"""Draft tokens a step where the policy's engine drafts itself."""
MEASUREMENTS = ("verify_s", "draft_s", "coupled_draft_s")
# Steps that are not counted: prompts are read, kernels compile. The share of the context that a timed request fills at first.
_WARM_UP, _CONTEXT_SHARE = 4, 0.25
# Bursts of steps in which the wanted ones must have come.
_MOST_BURSTS = 8
_ROOM = "raise kv_cache_memory_bytes, or lower max_num_seqs, of its vllm_kwargs"


@dataclass(frozen=True)
class ProfileSpec:
    """All that a process is told that measures."""

    policy: str
    generation: GenerationConfig
    batches: tuple[int, ...] = bounded(low=1)
    num_steps: int = bounded(low=1)

    def wire(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_wire(cls, text: str) -> "ProfileSpec":
        """The inverse of `wire`."""
        return build(cls, json.loads(text), "profile")

    @property
    def context(self) -> int:
        """Tokens of a timed request's prompt."""
        return max(1, int(_CONTEXT_SHARE * self.generation.vllm_cfg.max_model_len))


def draft_model_of(block: SpecrolloutConfig) -> DrafterConfig:
    """The drafter that is a small model of its own. Raises ConfigError if there is none, or its folder is not there."""
    drafter = next((d for d in block.drafters if d.type in ("remote", "draft_model")), None)
    if drafter is None or drafter.model is None:
        raise ConfigError(
            f"{BLOCK_PATH}.drafters: {[d.type for d in block.drafters]}; add one of type remote or draft_model that names a "
            "draft model"
        )
    check_model(drafter)
    return drafter


def check_model(drafter: DrafterConfig) -> None:
    """Raises ConfigError if the drafter has a model whose folder is not here."""
    if drafter.model is not None and not (Path(drafter.model) / "config.json").is_file():
        raise ConfigError(
            f"{BLOCK_PATH}.drafters: model {drafter.model} has no config.json; name a Hugging Face folder"
        )


def measure(spec: ProfileSpec, on_done: Callable[[str], object]) -> dict[str, list[float]]:
    """Seconds, for each of `MEASUREMENTS`, in the order of the batches; `on_done` is told what was measured."""
    drafter = draft_model_of(spec.generation.specrollout)
    measured: dict[str, list[float]] = {}
    with _policy_engine(spec, SpecrolloutConfig(drafters=())) as engine:
        measured["verify_s"] = [_verify_s(engine, spec, b) for b in _told(spec, "verifying", on_done)]
    with _drafter_engine(spec, drafter) as drafter_engine:
        measured["draft_s"] = [_draft_s(drafter_engine, spec, b) for b in _told(spec, "drafting", on_done)]
    with _policy_engine(spec, _coupled_block(drafter)) as engine:
        measured["coupled_draft_s"] = [
            _coupled_draft_s(engine, spec, b) for b in _told(spec, "drafting in the policy's engine", on_done)
        ]
    return measured


def _told(spec: ProfileSpec, what: str, on_done: Callable[[str], object]) -> Iterator[int]:
    for batch in spec.batches:
        yield batch
        on_done(f"{what} for {batch}")


@contextmanager
def _policy_engine(spec: ProfileSpec, block: SpecrolloutConfig) -> Iterator["RolloutEngine"]:
    """An engine of the policy with room for the largest batch."""
    from nemo_specrollout.generation.engine import RolloutEngine

    kwargs = {k: v for k, v in spec.generation.vllm_kwargs.items() if k != "speculative_config"}
    generation = replace(spec.generation, vllm_kwargs=kwargs, specrollout=block)
    engine = RolloutEngine(Path(spec.policy), generation, seed=0, max_num_seqs=max(spec.batches))
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def _drafter_engine(spec: ProfileSpec, drafter: DrafterConfig) -> Iterator["DrafterEngine"]:
    """An engine of the draft model, as a drafter process has one."""
    from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine

    known = drafter_spec(drafter, spec.generation.vllm_cfg)
    engine = DrafterEngine(
        Path(known.model), max(spec.batches), known.max_model_len, dtype=known.precision, **known.vllm_kwargs
    )
    try:
        yield engine
    finally:
        engine.close()


def _coupled_block(drafter: DrafterConfig) -> SpecrolloutConfig:
    in_engine = DrafterConfig("draft_model", model=drafter.model, sampling=drafter.sampling)
    return SpecrolloutConfig(
        num_speculative_tokens=COUPLED_K, drafters=(in_engine,), budget=BudgetConfig("fixed", COUPLED_K)
    )


def _verify_s(engine: "RolloutEngine", spec: ProfileSpec, batch: int) -> float:
    """Seconds of a plain decode step."""
    return statistics.median(_decode_steps(engine, spec, batch)["seconds"])


def _coupled_draft_s(engine: "RolloutEngine", spec: ProfileSpec, batch: int) -> float:
    """Seconds of one draft token for each request; what the draft model reads first is shared out among them."""
    drafting_s = [s for s in _decode_steps(engine, spec, batch)["draft_s"] if s > 0.0]
    if not drafting_s:
        raise ConfigError("profile: the policy's engine drafted nothing; its draft model does not fit it")
    return statistics.median(drafting_s) / COUPLED_K


def _decode_steps(engine: "RolloutEngine", spec: ProfileSpec, batch: int) -> dict[str, list[float]]:
    """The engine's own record of pure decode steps of `batch` requests, by column.

    It is read between bursts of steps, for what is done between two steps counts for the second. Raises ConfigError if so
    many requests do not run side by side.
    """
    first, num_steps = _report(engine)["num_steps"], spec.num_steps + _WARM_UP
    ids = _submit(engine, spec, batch, num_steps)
    for _ in range(_MOST_BURSTS):
        for _ in range(num_steps):
            finished = engine.step()
            ids = [i for i in ids if i not in finished] + _submit(engine, spec, len(finished), num_steps)
        columns, steps = _steps_of(engine, first, batch)
        if len(steps) >= num_steps:
            break
    engine.abort(ids)
    if len(steps) < num_steps:
        raise ConfigError(
            f"profile: the policy's engine never ran {batch} requests at once for {num_steps} steps; {_ROOM}"
        )
    return dict(zip(columns, map(list, zip(*steps[_WARM_UP:], strict=True)), strict=True))


def _submit(engine: "RolloutEngine", spec: ProfileSpec, count: int, num_steps: int) -> list[str]:
    """Requests that last as long as the timing, if the context is long enough."""
    from nemo_specrollout.generation.engine import RolloutRequest

    room = spec.generation.vllm_cfg.max_model_len - spec.context - 1
    length = min(room, (num_steps + 2) * (COUPLED_K + 1))
    prompt = _prompt(spec)
    return engine.submit([RolloutRequest(prompt, 0, i, exact_length=length) for i in range(count)], {})


def _prompt(spec: ProfileSpec) -> list[int]:
    """Ids that every vocabulary has."""
    return [2 + i % 50 for i in range(spec.context)]


def _steps_of(engine: "RolloutEngine", first: int, batch: int) -> tuple[list[str], list[list[float]]]:
    """The columns of the engine's record, and its pure decode steps of `batch` requests since step `first`."""
    trace = _report(engine, first)["trace"]
    requests, is_decode = (trace["columns"].index(name) for name in ("num_requests", "is_decode"))
    return trace["columns"], [row for row in trace["rows"] if row[requests] == batch and row[is_decode]]


def _report(engine: "RolloutEngine", first: int = 0) -> dict[str, Any]:
    report = engine.report(first)
    assert report is not None  # the block is enabled
    return report


def _draft_s(engine: "DrafterEngine", spec: ProfileSpec, batch: int) -> float:
    """Seconds in which a drafter makes one token for each of `batch` shadows."""
    from nemo_specrollout.remote.protocol.orders import ShadowOpening

    text = np.array(_prompt(spec), np.int32)
    for shadow in range(batch):
        engine.open(ShadowOpening(shadow, shadow, 1.0, 0, 1.0, text))
    seconds = _drafting_s(engine, batch, spec.num_steps + _WARM_UP, engine.model.max_model_len - spec.context - 1)
    for shadow in range(batch):
        engine.close_shadow(shadow)
    if len(seconds) <= _WARM_UP:
        raise ConfigError(f"profile: the draft model's engine never drafted for {batch} requests at once; {_ROOM}")
    return statistics.median(seconds[_WARM_UP:])


def _drafting_s(engine: "DrafterEngine", batch: int, num_steps: int, room: int) -> list[float]:
    """Seconds a token, of each of `num_steps` steps that drafted for all shadows; fewer, if their texts have no room for
    more than `room` tokens."""
    seconds: list[float] = []
    for _ in range(room):
        started = time.perf_counter()
        drafted = engine.draft(np.arange(batch))
        spent_s = time.perf_counter() - started
        if len(drafted.shadows_M) == batch:
            seconds.append(spent_s)
        if len(seconds) == num_steps:
            break
    return seconds


def main(text: str) -> int:
    """Measures by the spec in `text`; a line of JSON on stdout for each thing measured, and one with all. Returns the exit
    code."""
    end_with_parent()
    try:
        measured = measure(ProfileSpec.from_wire(text), lambda what: print(json.dumps({"done": what}), flush=True))
    except ConfigError as error:
        print(str(error), file=sys.stderr)
        return 2
    print(json.dumps({"measured": measured}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
