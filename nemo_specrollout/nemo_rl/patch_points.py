# SPDX-License-Identifier: Apache-2.0
"""Every name of NeMo-RL that this package replaces, overrides or calls. docs/reference/nemo-rl-patch-points.md says how
and why each is used.

`install` checks the names before anything starts. Support of another version of NeMo-RL begins here.
"""

import importlib
import inspect
from collections.abc import Sequence
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


def _patch_points(*lines: str) -> tuple[PatchPoint, ...]:
    """Returns the patch points of lines with a module below `nemo_rl`, a name, and the parameters that are needed."""
    found = []
    for line in lines:
        module, _, signature = line.partition(": ")
        name, _, parameters = signature.removesuffix(")").partition("(")
        found.append(PatchPoint(f"nemo_rl.{module}", name, tuple(parameters.split(", ")) if parameters else ()))
    return tuple(found)


PATCH_POINTS = _patch_points(
    "algorithms.grpo: VllmGeneration(cluster, config)",
    "algorithms.grpo: refit_policy_generation(policy, policy_generation)",
    "algorithms.grpo: validate(policy_generation)",
    "algorithms.grpo: Logger(cfg)",
    "utils.logger: Logger.log_metrics(metrics, step, prefix, step_metric, step_finished)",
    "utils.logger: Logger.log_plot(figure, step, name)",
    "utils.logger: Logger.finish",
    "algorithms.async_utils: AsyncTrajectoryCollector",
    "utils.checkpoint: CheckpointManager.get_latest_checkpoint_path",
    "models.generation.vllm.vllm_generation: resolve_generation_worker_cls(default_cls, config)",
    "models.generation.vllm.vllm_generation: VllmGeneration.generate(data, greedy)",
    "models.generation.vllm.vllm_generation: VllmGeneration.generate_async(data, greedy)",
    "models.generation.vllm.vllm_generation: VllmGeneration.snapshot_step_metrics",
    "models.generation.vllm.vllm_generation: VllmGeneration.get_step_metrics",
    "models.generation.vllm.vllm_generation: VllmGeneration.load_and_start",
    "models.generation.vllm.vllm_generation: VllmGeneration.finish_generation",
    "models.generation.vllm.vllm_generation: VllmGeneration.shutdown",
    "distributed.ray_actor_environment_registry: ACTOR_ENVIRONMENT_REGISTRY",
    "distributed.ray_actor_environment_registry: get_actor_python_env(actor_class_fqn)",
    "distributed.worker_group_utils: get_nsight_config_if_pattern_matches(worker_name)",
    "distributed.worker_groups: RayWorkerGroup.run_single_worker_single_data(method_name, worker_idx)",
    "distributed.worker_groups: RayWorkerGroup.dp_size",
    "distributed.worker_groups: RayWorkerGroup.get_dp_leader_worker_idx(dp_shard_idx)",
    "distributed.worker_groups: RayWorkerGroup._create_workers_from_bundle_indices(bundle_indices_list)",
    "utils.venvs: create_local_venv_on_each_node(py_executable, venv_name)",
    "models.generation.vllm.vllm_worker: VllmGenerationWorkerImpl._create_engine(llm_kwargs)",
    "models.generation.vllm.vllm_worker: VllmGenerationWorkerImpl.generate(data, greedy)",
    "models.generation.vllm.vllm_worker_async: VllmAsyncGenerationWorkerImpl._create_engine(llm_kwargs)",
    "models.generation.vllm.vllm_worker_async: VllmAsyncGenerationWorkerImpl.generate_async(data, greedy)",
    "models.generation.vllm.vllm_worker_async: VllmAsyncGenerationWorkerImpl._setup_vllm_openai_api_server(app)",
)
"""Patch points of all runs."""

CONTROLLER_PATCH_POINTS = _patch_points(
    "experience.rollout_manager: AsyncRolloutImpl._run_single_rollout(input_sample, traj_idx)",
    "experience.rollout_manager: AsyncNemoGymRolloutImpl._build_inputs(input_sample)",
    "algorithms.single_controller_utils.setup: StatefulDataLoader",
    "algorithms.single_controller_utils.setup: VllmGeneration(cluster, config)",
    "algorithms.single_controller_utils.setup: create_weight_synchronizer(policy, generation)",
    "algorithms.single_controller: Logger(cfg)",
    "weight_sync.interfaces: WeightSynchronizer.sync_weights",
    "utils.checkpoint: CheckpointManager.load_training_info(checkpoint_path)",
)
"""Patch points of runs with a block `async_rl`."""

TRAINER_PATCH_POINTS = _patch_points(
    "algorithms.grpo_sync: refit_policy_generation(policy, policy_generation)",
    "algorithms.grpo_sync: SyncRolloutActor",
    "algorithms.distillation: VllmGeneration(cluster, config)",
    "algorithms.distillation: refit_policy_generation(policy, policy_generation)",
    "algorithms.distillation: validate(policy_generation)",
    "algorithms.distillation: Logger(cfg)",
    "algorithms.ppo: VllmGeneration(cluster, config)",
    "algorithms.ppo: refit_policy_generation(policy, policy_generation)",
    "algorithms.ppo: validate(policy_generation)",
    "algorithms.ppo: Logger(cfg)",
)
"""Patch points of the trainers beside GRPO's own. A run uses the points of its trainer's module."""

GYM_PATCH_POINTS = _patch_points("experience.rollouts: _prepare_nemo_gym_rows(rows)")
"""Patch points of runs with NeMo-Gym and without the SingleController."""

ALL_PATCH_POINTS = (*PATCH_POINTS, *CONTROLLER_PATCH_POINTS, *TRAINER_PATCH_POINTS, *GYM_PATCH_POINTS)
"""Patch points in the driver, for all kinds of run."""

EXTENSION_PATCH_POINTS = _patch_points(
    "models.generation.vllm.vllm_backend: VllmInternalWorkerExtension._get_drafter_model",
    "models.generation.vllm.vllm_backend: VllmInternalWorkerExtension._mtp_drafter_refit_enabled",
    "models.generation.vllm.vllm_backend: VllmInternalWorkerExtension._load_draft_weights(draft_weights)",
    "models.generation.vllm.vllm_backend: VllmInternalWorkerExtension._weight_update_lifecycle(transport)",
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
