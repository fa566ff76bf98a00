# SPDX-License-Identifier: Apache-2.0
"""Every name of NeMo-RL that this package replaces, overrides or calls (docs/reference/nemo-rl-patch-points.md has the lines).

`install` checks them all before anything starts. Support of another version of NeMo-RL begins here.
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.config.strict import ConfigError

_GENERATION = "nemo_rl.models.generation.vllm.vllm_generation"
_WORKER = "nemo_rl.models.generation.vllm.vllm_worker"
_ASYNC_WORKER = "nemo_rl.models.generation.vllm.vllm_worker_async"


@dataclass(frozen=True)
class PatchPoint:
    """`name` of `module`, a dotted path, must exist and take `parameters`. `where` is its file and line at main of
    August 2026."""

    module: str
    name: str
    parameters: tuple[str, ...]
    where: str
    why: str


PATCH_POINTS = (
    PatchPoint(
        "nemo_rl.algorithms.grpo",
        "VllmGeneration",
        ("cluster", "config"),
        "algorithms/grpo.py:114, 1189",
        "replaced: rows get seeds, steps get figures",
    ),
    PatchPoint(
        "nemo_rl.algorithms.grpo",
        "refit_policy_generation",
        ("policy", "policy_generation"),
        "algorithms/grpo.py:2316",
        "wrapped: a refit begins a policy version",
    ),
    PatchPoint(
        "nemo_rl.algorithms.grpo",
        "validate",
        ("policy_generation",),
        "algorithms/grpo.py:3822",
        "wrapped: validation has a stream of seeds of its own",
    ),
    PatchPoint(
        "nemo_rl.algorithms.grpo",
        "Logger",
        ("cfg",),
        "algorithms/grpo.py:544",
        "replaced: watches the log-prob gap, keeps metrics.jsonl",
    ),
    PatchPoint(
        "nemo_rl.utils.logger",
        "Logger.log_metrics",
        ("metrics", "step", "prefix", "step_metric", "step_finished"),
        "utils/logger.py:1035",
        "overridden",
    ),
    PatchPoint(
        "nemo_rl.utils.logger",
        "Logger.log_plot",
        ("figure", "step", "name"),
        "utils/logger.py:1208",
        "called: the picture of the run",
    ),
    PatchPoint(
        "nemo_rl.utils.logger", "Logger.finish", (), "utils/logger.py:1064", "overridden: the report is of all steps"
    ),
    PatchPoint(
        "nemo_rl.algorithms.async_utils",
        "AsyncTrajectoryCollector",
        (),
        "algorithms/async_utils/trajectory_collector.py:76",
        "replaced: tells its generation the policy version",
    ),
    PatchPoint(
        "nemo_rl.utils.checkpoint",
        "CheckpointManager.get_latest_checkpoint_path",
        (),
        "utils/checkpoint.py:552",
        "called: the version that a resumed run starts from",
    ),
    PatchPoint(
        _GENERATION,
        "resolve_generation_worker_cls",
        ("default_cls", "config"),
        "vllm_generation.py:205",
        "wrapped: names our Ray actors",
    ),
    PatchPoint(
        "nemo_rl.distributed.ray_actor_environment_registry",
        "ACTOR_ENVIRONMENT_REGISTRY",
        (),
        "distributed/ray_actor_environment_registry.py:32",
        "our actors run where NeMo-RL's do",
    ),
    PatchPoint(
        "nemo_rl.distributed.worker_group_utils",
        "get_nsight_config_if_pattern_matches",
        ("worker_name",),
        "distributed/worker_group_utils.py:27",
        "called: our actors are profiled as NeMo-RL's are",
    ),
    PatchPoint(_GENERATION, "VllmGeneration.generate", ("data", "greedy"), "vllm_generation.py:640", "overridden"),
    PatchPoint(
        _GENERATION, "VllmGeneration.generate_async", ("data", "greedy"), "vllm_generation.py:957", "overridden"
    ),
    PatchPoint(_GENERATION, "VllmGeneration.snapshot_step_metrics", (), "vllm_generation.py:557", "overridden"),
    PatchPoint(_GENERATION, "VllmGeneration.get_step_metrics", (), "vllm_generation.py:573", "overridden"),
    PatchPoint(
        _GENERATION,
        "VllmGeneration.load_and_start",
        (),
        "vllm_generation.py:510",
        "overridden: engines that are loaded later, as for NeMo-Gym, share requests from then on",
    ),
    PatchPoint(
        _GENERATION,
        "VllmGeneration.finish_generation",
        (),
        "vllm_generation.py:1004",
        "overridden: no race is under way when engines forget cached prefixes",
    ),
    PatchPoint(
        _GENERATION,
        "VllmGeneration.shutdown",
        (),
        "vllm_generation.py:1031",
        "overridden: the head's trainer and drafters end too",
    ),
    PatchPoint(
        "nemo_rl.distributed.worker_groups",
        "RayWorkerGroup.run_single_worker_single_data",
        ("method_name", "worker_idx"),
        "distributed/worker_groups.py:690",
        "called: each engine is told its own",
    ),
    PatchPoint(
        "nemo_rl.distributed.worker_groups",
        "RayWorkerGroup.get_dp_leader_worker_idx",
        ("dp_shard_idx",),
        "distributed/worker_groups.py:424",
        "called: which worker of an engine is asked",
    ),
    PatchPoint(
        "nemo_rl.distributed.worker_groups",
        "RayWorkerGroup._create_workers_from_bundle_indices",
        ("bundle_indices_list",),
        "distributed/worker_groups.py:545",
        "relied upon: RANK in an actor's environment says which engine it leads",
    ),
    PatchPoint(
        "nemo_rl.distributed.ray_actor_environment_registry",
        "get_actor_python_env",
        ("actor_class_fqn",),
        "distributed/ray_actor_environment_registry.py:67",
        "called: the head's trainer and drafters run where the engines do",
    ),
    PatchPoint(
        "nemo_rl.utils.venvs",
        "create_local_venv_on_each_node",
        ("py_executable", "venv_name"),
        "utils/venvs.py:151",
        "called: likewise",
    ),
    PatchPoint(
        _WORKER,
        "VllmGenerationWorkerImpl._create_engine",
        ("llm_kwargs",),
        "vllm_worker.py:814",
        "overridden: our vLLM worker, drafters and block",
    ),
    PatchPoint(
        _WORKER,
        "VllmGenerationWorkerImpl.generate",
        ("data", "greedy"),
        "vllm_worker.py:850",
        "overridden: seeds reach the engine, and an empty shard helps others",
    ),
    PatchPoint(
        _ASYNC_WORKER,
        "VllmAsyncGenerationWorkerImpl._create_engine",
        ("llm_kwargs",),
        "vllm_worker_async.py:165",
        "overridden",
    ),
    PatchPoint(
        _ASYNC_WORKER,
        "VllmAsyncGenerationWorkerImpl.generate_async",
        ("data", "greedy"),
        "vllm_worker_async.py:999",
        "overridden",
    ),
    PatchPoint(
        _ASYNC_WORKER,
        "VllmAsyncGenerationWorkerImpl._setup_vllm_openai_api_server",
        ("app",),
        "vllm_worker_async.py:349",
        "overridden: a seed may come in a header",
    ),
)

_CONTROLLER = "nemo_rl.algorithms.single_controller_utils.setup"
_ROLLOUTS = "nemo_rl.experience.rollout_manager"

# Of runs with a block `async_rl`.
CONTROLLER_PATCH_POINTS = (
    PatchPoint(
        _ROLLOUTS,
        "AsyncRolloutImpl._run_single_rollout",
        ("input_sample", "traj_idx"),
        "experience/rollout_manager.py:351, 417",
        "replaced, by a subclass: a rollout knows which sample it is",
    ),
    PatchPoint(
        _ROLLOUTS,
        "AsyncNemoGymRolloutImpl._build_inputs",
        ("input_sample",),
        "experience/rollout_manager.py:729, 819",
        "replaced, by a subclass: NeMo-Gym's rows bring seeds",
    ),
    PatchPoint(
        _CONTROLLER,
        "StatefulDataLoader",
        (),
        "algorithms/single_controller_utils/setup.py:33, 595",
        "replaced, by a subclass: a prompt knows its epoch",
    ),
    PatchPoint(
        _CONTROLLER,
        "VllmGeneration",
        ("cluster", "config"),
        "algorithms/single_controller_utils/setup.py:90, 230",
        "replaced: rows get seeds, steps get figures",
    ),
    PatchPoint(
        _CONTROLLER,
        "create_weight_synchronizer",
        ("policy", "generation"),
        "algorithms/single_controller_utils/setup.py:93, 769",
        "wrapped: a refit ends a step, and the engines are supervised where it is done",
    ),
    PatchPoint(
        "nemo_rl.algorithms.single_controller",
        "Logger",
        ("cfg",),
        "algorithms/single_controller.py:81, 164",
        "replaced: watches the log-prob gap, keeps metrics.jsonl",
    ),
    PatchPoint(
        "nemo_rl.weight_sync.interfaces",
        "WeightSynchronizer.sync_weights",
        (),
        "weight_sync/interfaces.py:62",
        "wrapped",
    ),
    PatchPoint(
        "nemo_rl.utils.checkpoint",
        "CheckpointManager.load_training_info",
        ("checkpoint_path",),
        "utils/checkpoint.py:571",
        "called: the epoch that a resumed run starts in",
    ),
)

# Of runs with `data_plane.enabled` and no `async_rl`.
DATA_PLANE_PATCH_POINTS = (
    PatchPoint(
        "nemo_rl.algorithms.grpo_sync",
        "SyncRolloutActor",
        (),
        "algorithms/grpo_sync.py:81, 489",
        "replaced, by a subclass: its generation is told what rows are for",
    ),
)

# Of runs with NeMo-Gym on another trainer than the SingleController.
GYM_PATCH_POINTS = (
    PatchPoint(
        "nemo_rl.experience.rollouts",
        "_prepare_nemo_gym_rows",
        ("rows",),
        "experience/rollouts.py:2222",
        "wrapped: NeMo-Gym's rows bring seeds",
    ),
)

ALL_PATCH_POINTS = (*PATCH_POINTS, *CONTROLLER_PATCH_POINTS, *DATA_PLANE_PATCH_POINTS, *GYM_PATCH_POINTS)
"""The patch points in the driver, for all kinds of run."""

# The engine's process is another: what is overridden there is checked there, when its worker class is made.
EXTENSION_PATCH_POINTS = (
    PatchPoint(
        "nemo_rl.models.generation.vllm.vllm_backend",
        "VllmInternalWorkerExtension._get_drafter_model",
        (),
        "vllm_backend.py:420",
        "overridden: the drafter of vLLM's V2 model runner is its speculator",
    ),
    PatchPoint(
        "nemo_rl.models.generation.vllm.vllm_backend",
        "VllmInternalWorkerExtension._mtp_drafter_refit_enabled",
        (),
        "vllm_backend.py:446",
        "called, and told by `_mtp_drafter_from_disk`: whether refits bring native heads",
    ),
    PatchPoint(
        "nemo_rl.models.generation.vllm.vllm_backend",
        "VllmInternalWorkerExtension._load_draft_weights",
        ("draft_weights",),
        "vllm_backend.py:431",
        "overridden: draft weights never enter the policy",
    ),
    PatchPoint(
        "nemo_rl.models.generation.vllm.vllm_backend",
        "VllmInternalWorkerExtension._weight_update_lifecycle",
        ("transport",),
        "vllm_backend.py:610",
        "overridden: every transport's update is counted and timed",
    ),
)


def check_patch_points(holds: tuple[PatchPoint, ...]) -> None:
    """Raises ConfigError that tells which of `holds` NeMo-RL no longer has as they were."""
    changes = [change for hold in holds for change in _changes(hold)]
    if changes:
        raise ConfigError(
            f"this NeMo-RL is not one that specrollout knows: {'; '.join(changes)}. Use main of "
            "August 2026 (docs/reference/nemo-rl-patch-points.md), or set policy.generation.specrollout.enabled: false"
        )


def _changes(hold: PatchPoint) -> Iterator[str]:
    try:
        found = found_of(hold)
    except Exception as error:  # whatever a module raises while it is imported
        yield f"{hold.module}.{hold.name} is gone ({type(error).__name__}: {error})"
        return
    for missing in lacking_parameters(hold, found):
        yield f"{hold.module}.{hold.name} no longer takes {missing!r}"


def found_of(hold: PatchPoint) -> Any:
    """What the hold names. Raises ImportError, AttributeError if it is not there, and what its module's import raises."""
    found: Any = importlib.import_module(hold.module)
    for part in hold.name.split("."):
        found = getattr(found, part)
    return found


def lacking_parameters(hold: PatchPoint, found: Any) -> list[str]:
    """The parameters that the hold needs, and that `found` does not take."""
    known = inspect.signature(found).parameters if hold.parameters else {}
    is_wrapped = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())  # by a decorator that hides them
    return [] if is_wrapped else [p for p in hold.parameters if p not in known]
