# SPDX-License-Identifier: Apache-2.0
"""Calls every override of a NeMo-RL function with an argument that it does not know, on the stand-in of `nemo_rl_standin.py`.

Prints a JSON object: for each function `passed on` if NeMo-RL's function got the argument and its result came back.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.nemo_rl import (
    engine_actors,
    generation,
    gym_prompts,
    installation,
    row_tasks,
    single_controller,
    vllm_workers,
)
from nemo_specrollout.nemo_rl.run_facts import RunFacts, put_run

PASSED = "passed on"
CONFIG: dict[str, Any] = {}
put_run(CONFIG, SpecrolloutConfig(), RunFacts(seed=1, first_version=0, last_version=1, heads="none"))
found: dict[str, str] = {}


def judge(name: str, result: Any, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Notes whether NeMo-RL's function `name`, the last one of `calls`, got the argument and returned `result`."""
    called, arguments = calls[-1]
    is_right = called == name and arguments["added"] == 1 and result == name
    if found.get(name, PASSED) == PASSED:  # several classes override some functions
        found[name] = PASSED if is_right else f"got {arguments}, and {result!r} came back"


def bare(cls: type, **attributes: Any) -> Any:
    """Returns an object of `cls` with these attributes, without calling its constructor."""
    made = object.__new__(cls)
    made.__dict__.update(attributes)
    return made


async def first_of(stream: Any) -> Any:
    return await anext(stream)


def native_calls(cls: type) -> list[tuple[str, dict[str, Any]]]:
    """Returns the calls that the stand-in's module below `cls` has recorded."""
    native = next(base for base in cls.__mro__ if base.__module__.partition(".")[0] == "nemo_rl")
    return inspect.getmodule(native).CALLS  # type: ignore[union-attr]


def check_generation() -> None:
    ours = generation.SpecrolloutGeneration
    made = bare(ours, _supervisor=None, _with_seeds=lambda data: data)
    calls = native_calls(ours)
    judge("generate", made.generate({}, False, added=1), calls)
    judge("generate_async", asyncio.run(first_of(made.generate_async({}, False, added=1))), calls)
    for name in (
        "load_and_start",
        "shutdown",
        "prepare_for_generation",
        "finish_generation",
        "snapshot_step_metrics",
    ):
        judge(name, getattr(made, name)(added=1), calls)


def check_metrics() -> None:
    """The figures of a step are NeMo-RL's and ours, so they are a new object."""
    ours = generation.SpecrolloutGeneration
    native = ours.__mro__[1]
    native.get_step_metrics = lambda self, added=None: {"added": added}  # type: ignore[attr-defined]
    made = bare(ours, _supervisor=None)
    found["get_step_metrics"] = PASSED if made.get_step_metrics(added=1) == {"added": 1} else "lost"


def check_actors() -> None:
    version = SimpleNamespace(begin_version=lambda version: None)
    collector = generation.SpecrolloutTrajectoryCollector.__ray_metadata__.modified_class
    made = bare(collector, policy_generation=SimpleNamespace(row_seeds=version))
    judge("set_weight_version", made.set_weight_version(3, added=1), native_calls(collector))
    actor = generation.SpecrolloutRolloutActor.__ray_metadata__.modified_class
    made = bare(actor, policy_generation=SimpleNamespace(row_seeds=version, first_version=0), _num_steps=0)
    result = made.rollout_to_tq(input_batch=None, first_iter=True, task_to_env_override=None, added=1)
    judge("rollout_to_tq", result, native_calls(actor))


def check_logger() -> None:
    ours = generation.SpecrolloutLogger
    made = bare(ours, _record=SimpleNamespace(finish_step=lambda: None), _report=SimpleNamespace(close=lambda: None))
    judge(
        "log_metrics",
        made.log_metrics({}, 1, "other", step_metric=None, step_finished=False, added=1),
        native_calls(ours),
    )
    judge("finish", made.finish(added=1), native_calls(ours))


def check_constructors() -> None:
    """NeMo-RL's constructors get the argument."""
    received: dict[str, Any] = {}

    def construct(self: Any, *args: Any, added: Any = None) -> None:
        received[type(self).__name__] = added

    for native in (single_controller.ControlledGeneration.__mro__[2], generation.SpecrolloutLogger.__mro__[2]):
        native.__init__ = construct  # type: ignore[misc]
    with suppress(AttributeError):  # what a real constructor has set is missing
        single_controller.ControlledGeneration("cluster", CONFIG, added=1)
    with TemporaryDirectory() as folder:
        facts = {"gap_alarms": list, "facts": {}, "last_step": 1}
        generation.SpecrolloutLogger({"log_dir": folder}, **facts, added=1)
    found["VllmGeneration"] = PASSED if received["ControlledGeneration"] == 1 else "lost"
    found["Logger"] = PASSED if received["SpecrolloutLogger"] == 1 else "lost"


def check_engine_actors() -> None:
    engine_actors.engine_arguments = lambda arguments, config, block: arguments
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    config = {**CONFIG, "vllm_cfg": sizes}
    for ours in (engine_actors.EngineActor, engine_actors.AsyncEngineActor):
        llm = SimpleNamespace(llm_engine=SimpleNamespace(add_request=None), collective_rpc=None)
        made = bare(ours, cfg=config, llm=llm)
        judge("_create_engine", made._create_engine({}, added=1), native_calls(ours))
    engine = bare(engine_actors.EngineActor)
    judge("generate", engine.generate({}, False, added=1), native_calls(type(engine)))
    judge("sleep", engine.sleep(added=1), native_calls(type(engine)))
    made = bare(engine_actors.AsyncEngineActor)
    judge("sleep_async", asyncio.run(made.sleep_async(added=1)), native_calls(type(made)))
    judge("generate_async", asyncio.run(first_of(made.generate_async({}, False, added=1))), native_calls(type(made)))
    app = SimpleNamespace(add_middleware=lambda middleware: None)
    judge("_setup_vllm_openai_api_server", made._setup_vllm_openai_api_server(app, added=1), native_calls(type(made)))


def check_controller() -> None:
    ours = single_controller.SeededRollouts
    prompt = {"message_log": [], "idx": 3, "task_name": "math"}
    judge("_run_single_rollout", asyncio.run(bare(ours)._run_single_rollout(prompt, 0, added=1)), native_calls(ours))
    gym = single_controller.SeededGymRollouts
    single_controller.gym_row_with_seed = lambda row, seed, draftless: row
    rows = bare(gym, _generation_config=CONFIG, _task_to_env={"nemo_gym": None})._build_inputs(prompt, added=1)
    judge("_build_inputs", "".join(rows), native_calls(gym))
    native = SimpleNamespace(sync_weights=lambda added=None: ("sync_weights", added))
    generation_ = SimpleNamespace(
        step_metrics=dict, new_weights=nothing, weights_updated=lambda: None, snapshot_step_metrics=lambda: None
    )
    synchronizer = single_controller.make_synchronizer(
        lambda generation, added: native if added else None, generation=generation_, added=1
    )
    synchronizer._supervises = True
    found["create_weight_synchronizer"] = PASSED if synchronizer._native is native else "lost"
    found["sync_weights"] = PASSED if synchronizer.sync_weights(added=1) == ("sync_weights", 1) else "lost"


@contextmanager
def nothing() -> Iterator[None]:
    yield


def check_extension() -> None:
    ours = vllm_workers.NemoRlWorker
    made = bare(ours, model_runner=SimpleNamespace(speculator=None), specrollout_weights_updated=lambda seconds: None)
    judge("_load_draft_weights", made._load_draft_weights([], added=1), native_calls(ours))
    with made._weight_update_lifecycle("ipc", added=1) as finalize:
        judge("_weight_update_lifecycle", finalize, native_calls(ours))


def check_shared_names() -> None:
    """A name that extension and worker share stays the worker's, and an unknown one is refused."""

    class Extension:
        synchronize_device = sleep = "the extension's"

    class Worker:
        synchronize_device = "vLLM's"

    class Asleep(Worker):
        sleep = "vLLM's"

    class Overrides: ...

    ours = vllm_workers.with_worker_names(type("Ours", (Overrides, Extension, Worker), {}))
    kept = ours.synchronize_device == "vLLM's" and ours.sleep == "the extension's"
    try:
        vllm_workers.with_worker_names(type("Ours", (Overrides, Extension, Asleep), {}))
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    found["with_worker_names"] = PASSED if kept and "both have sleep: this NeMo-RL does not fit" in refusal else refusal


def check_wrappers() -> None:
    generation_ = SimpleNamespace(new_weights=nothing, weights_updated=lambda: None, validation=nothing)
    echo: Callable[..., Any] = lambda *args, added=None, **kwargs: added  # noqa: E731

    async def later(*args: Any, added: Any) -> Any:
        return added

    wrapped = {
        "refit_policy_generation": partial(installation._refit_and_tell, echo, "policy", generation_),
        "validate": partial(installation._validate_apart, echo, generation_),
        "resolve_generation_worker_cls": partial(installation._our_engine_actor, echo, "default", {}),
        "_prepare_nemo_gym_rows": partial(generation.prepare_with_seeds, echo, []),
        "spinup_nemo_gym_actor": partial(gym_prompts.with_new_gym, echo),
        "run_async_nemo_gym_rollout": partial(gym_prompts.with_gym, echo),
        "generate_responses": partial(row_tasks.with_tasks, echo, "policy", "data", {}),
        "run_sample_multi_turn_rollout": lambda **more: asyncio.run(
            row_tasks.with_task(later, 0, {"task_name": "t"}, **more)
        ),
    }
    keeper = SimpleNamespace(gym_seeds=lambda rows: [])
    generation.SpecrolloutGeneration.latest = lambda: keeper  # type: ignore[assignment]
    for name, call in wrapped.items():
        found[name] = PASSED if call(added=1) == 1 else "lost"


for check in (check_generation, check_metrics, check_actors, check_logger, check_constructors, check_engine_actors,
              check_controller, check_extension, check_shared_names, check_wrappers):  # fmt: skip
    check()
print(json.dumps(found))
