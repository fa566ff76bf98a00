# SPDX-License-Identifier: Apache-2.0
"""Every name of NeMo-RL that this package replaces, overrides or calls. docs/reference/nemo-rl-patch-points.md says how
and why each is used.

`install` checks the names before anything starts. Support of another version of NeMo-RL begins here.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import NEMO_RL_NEEDED


@dataclass(frozen=True)
class PatchPoint:
    """A name of NeMo-RL that must exist."""

    module: str
    """Dotted path of the module."""
    name: str
    """Name in the module. A method has its class before a dot."""
    parameters: tuple[str, ...]
    """Parameters that the name must take."""
    where: str
    """File and lines at main of August 2026, from `nemo_rl/` or from `nemo_rl/models/generation/vllm/`."""


def _patch_points(table: Mapping[str, Mapping[str, str]]) -> tuple[PatchPoint, ...]:
    """Returns the patch points of a table: module -> name with its parameters -> `PatchPoint.where`."""
    found = []
    for module, names in table.items():
        for signature, where in names.items():
            name, _, parameters = signature.removesuffix(")").partition("(")
            found.append(PatchPoint(module, name, tuple(parameters.split(", ")) if parameters else (), where))
    return tuple(found)


PATCH_POINTS = _patch_points(
    {
        "nemo_rl.algorithms.grpo": {
            "VllmGeneration(cluster, config)": "algorithms/grpo.py:114, 1189",
            "refit_policy_generation(policy, policy_generation)": "algorithms/grpo.py:2316",
            "validate(policy_generation)": "algorithms/grpo.py:3822",
            "Logger(cfg)": "algorithms/grpo.py:544",
        },
        "nemo_rl.utils.logger": {
            "Logger.log_metrics(metrics, step, prefix, step_metric, step_finished)": "utils/logger.py:1035",
            "Logger.log_plot(figure, step, name)": "utils/logger.py:1208",
            "Logger.finish": "utils/logger.py:1064",
        },
        "nemo_rl.algorithms.async_utils": {
            "AsyncTrajectoryCollector": "algorithms/async_utils/trajectory_collector.py:76",
        },
        "nemo_rl.utils.checkpoint": {
            "CheckpointManager.get_latest_checkpoint_path": "utils/checkpoint.py:552",
        },
        "nemo_rl.models.generation.vllm.vllm_generation": {
            "resolve_generation_worker_cls(default_cls, config)": "vllm_generation.py:205",
            "VllmGeneration.generate(data, greedy)": "vllm_generation.py:640",
            "VllmGeneration.generate_async(data, greedy)": "vllm_generation.py:957",
            "VllmGeneration.snapshot_step_metrics": "vllm_generation.py:557",
            "VllmGeneration.get_step_metrics": "vllm_generation.py:573",
            "VllmGeneration.load_and_start": "vllm_generation.py:510",
            "VllmGeneration.finish_generation": "vllm_generation.py:1004",
            "VllmGeneration.shutdown": "vllm_generation.py:1031",
        },
        "nemo_rl.distributed.ray_actor_environment_registry": {
            "ACTOR_ENVIRONMENT_REGISTRY": "distributed/ray_actor_environment_registry.py:32",
            "get_actor_python_env(actor_class_fqn)": "distributed/ray_actor_environment_registry.py:67",
        },
        "nemo_rl.distributed.worker_group_utils": {
            "get_nsight_config_if_pattern_matches(worker_name)": "distributed/worker_group_utils.py:27",
        },
        "nemo_rl.distributed.worker_groups": {
            "RayWorkerGroup.run_single_worker_single_data(method_name, worker_idx)": "distributed/worker_groups.py:690",
            "RayWorkerGroup.dp_size": "distributed/worker_groups.py:686",
            "RayWorkerGroup.get_dp_leader_worker_idx(dp_shard_idx)": "distributed/worker_groups.py:424",
            "RayWorkerGroup._create_workers_from_bundle_indices(bundle_indices_list)": "distributed/worker_groups.py:545",
        },
        "nemo_rl.utils.venvs": {
            "create_local_venv_on_each_node(py_executable, venv_name)": "utils/venvs.py:151",
        },
        "nemo_rl.models.generation.vllm.vllm_worker": {
            "VllmGenerationWorkerImpl._create_engine(llm_kwargs)": "vllm_worker.py:814",
            "VllmGenerationWorkerImpl.generate(data, greedy)": "vllm_worker.py:850",
        },
        "nemo_rl.models.generation.vllm.vllm_worker_async": {
            "VllmAsyncGenerationWorkerImpl._create_engine(llm_kwargs)": "vllm_worker_async.py:165",
            "VllmAsyncGenerationWorkerImpl.generate_async(data, greedy)": "vllm_worker_async.py:999",
            "VllmAsyncGenerationWorkerImpl._setup_vllm_openai_api_server(app)": "vllm_worker_async.py:349",
        },
    }
)
"""Patch points of all runs."""

CONTROLLER_PATCH_POINTS = _patch_points(
    {
        "nemo_rl.experience.rollout_manager": {
            "AsyncRolloutImpl._run_single_rollout(input_sample, traj_idx)": "experience/rollout_manager.py:351, 417",
            "AsyncNemoGymRolloutImpl._build_inputs(input_sample)": "experience/rollout_manager.py:729, 819",
        },
        "nemo_rl.algorithms.single_controller_utils.setup": {
            "StatefulDataLoader": "algorithms/single_controller_utils/setup.py:33, 595",
            "VllmGeneration(cluster, config)": "algorithms/single_controller_utils/setup.py:90, 230",
            "create_weight_synchronizer(policy, generation)": "algorithms/single_controller_utils/setup.py:93, 769",
        },
        "nemo_rl.algorithms.single_controller": {
            "Logger(cfg)": "algorithms/single_controller.py:81, 164",
        },
        "nemo_rl.weight_sync.interfaces": {
            "WeightSynchronizer.sync_weights": "weight_sync/interfaces.py:62",
        },
        "nemo_rl.utils.checkpoint": {
            "CheckpointManager.load_training_info(checkpoint_path)": "utils/checkpoint.py:571",
        },
    }
)
"""Patch points of runs with a block `async_rl`."""

TRAINER_PATCH_POINTS = _patch_points(
    {
        "nemo_rl.algorithms.grpo_sync": {
            "refit_policy_generation(policy, policy_generation)": "algorithms/grpo_sync.py:60",
            "SyncRolloutActor": "algorithms/grpo_sync.py:81, 489",
        },
        "nemo_rl.algorithms.distillation": {
            "VllmGeneration(cluster, config)": "algorithms/distillation.py:68, 515, 583",
            "refit_policy_generation(policy, policy_generation)": "algorithms/distillation.py:736",
            "validate(policy_generation)": "algorithms/distillation.py:1175",
            "Logger(cfg)": "algorithms/distillation.py:78, 281",
        },
        "nemo_rl.algorithms.ppo": {
            "VllmGeneration(cluster, config)": "algorithms/ppo.py:88, 790",
            "refit_policy_generation(policy, policy_generation)": "algorithms/ppo.py:38",
            "validate(policy_generation)": "algorithms/ppo.py:3032",
            "Logger(cfg)": "algorithms/ppo.py:100, 414",
        },
    }
)
"""Patch points of the trainers beside GRPO's own. A run uses the points of its trainer's module."""

GYM_PATCH_POINTS = _patch_points(
    {"nemo_rl.experience.rollouts": {"_prepare_nemo_gym_rows(rows)": "experience/rollouts.py:2222"}}
)
"""Patch points of runs with NeMo-Gym and without the SingleController."""

ALL_PATCH_POINTS = (*PATCH_POINTS, *CONTROLLER_PATCH_POINTS, *TRAINER_PATCH_POINTS, *GYM_PATCH_POINTS)
"""Patch points in the driver, for all kinds of run."""

EXTENSION_PATCH_POINTS = _patch_points(
    {
        "nemo_rl.models.generation.vllm.vllm_backend": {
            "VllmInternalWorkerExtension._get_drafter_model": "vllm_backend.py:420",
            "VllmInternalWorkerExtension._mtp_drafter_refit_enabled": "vllm_backend.py:446",
            "VllmInternalWorkerExtension._load_draft_weights(draft_weights)": "vllm_backend.py:431",
            "VllmInternalWorkerExtension._weight_update_lifecycle(transport)": "vllm_backend.py:610",
        },
    }
)
"""Patch points in the engine's process. They are checked there, when our worker class is made."""


def check_patch_points(points: Sequence[PatchPoint]) -> None:
    """Raises ConfigError if NeMo-RL lacks one of `points`, or if one no longer takes its parameters."""
    changes = [f"{p.module}.{p.name} is {change}" for p in points if (change := change_of(p))]
    if changes:
        raise ConfigError(
            f"this NeMo-RL is not one that specrollout knows: {'; '.join(changes)}. Use "
            f"{NEMO_RL_NEEDED} (docs/reference/nemo-rl-patch-points.md), or set policy.generation.specrollout.enabled: false"
        )


def change_of(point: PatchPoint) -> str:
    """Returns what is different about a patch point in the installed NeMo-RL, or an empty string."""
    try:
        found: Any = importlib.import_module(point.module)
        for part in point.name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        return f"absent: no module {error.name}"
    except AttributeError as error:
        return f"absent ({error})"
    except Exception as error:  # an import may raise anything
        return f"absent: its import fails ({in_one_line(error)})"
    known = inspect.signature(found).parameters if point.parameters else {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return ""  # a decorator hides the parameters
    missing = [parameter for parameter in point.parameters if parameter not in known]
    return f"changed: it no longer takes {', '.join(missing)}" if missing else ""


def in_one_line(error: BaseException) -> str:
    """Returns an exception's type and the beginning of its message."""
    message = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
