# SPDX-License-Identifier: Apache-2.0
"""Every name of NeMo-RL that this package replaces, overrides, calls or stores to. docs/reference/nemo-rl-patch-points.md
says how and why each is used.

`install` checks the names before anything starts. Support of another version of NeMo-RL begins here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.installed.python_source import PythonSource, Signature, installed_source
from nemo_specrollout.installed.versions import NEMO_RL_NEEDED

NEMO_RL = "nemo_rl"
EXTENSIONS = tuple(
    f"{NEMO_RL}.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension{suffix}"
    for suffix in ("", "WithCheckpointEngine")
)
SHARED_NAMES = ("synchronize_device",)
"""Names that both an extension and vLLM's worker may have. vLLM calls its own, and both wait for the device."""


class Use(StrEnum):
    PASSED_ON = "passed on"
    """Replaced or overridden: our code passes on all arguments and the result."""
    CALLED = "calls"
    STORED = "stores"
    """Assigned, so that NeMo-RL reads our value."""


@dataclass(frozen=True)
class PatchPoint:
    """A name of NeMo-RL that must exist."""

    module: str
    name: str
    """Name in the module. A method has its class before a dot."""
    use: Use
    needed: tuple[str, ...] = ()
    """Parameters that the name must take."""
    known: tuple[str, ...] = ()
    """More parameters that it takes in the NeMo-RL for which the package was written."""
    result: str = "nothing"
    """Its result there, as in `Signature.result`."""


def _patch_points(*lines: str) -> tuple[PatchPoint, ...]:
    """Returns the patch points of lines `MODULES: [USE] NAME[(NEEDED; KNOWN)][ -> RESULT]`, with modules below `nemo_rl`."""
    found = []
    for line in lines:
        modules, _, rest = line.partition(": ")
        rest, _, result = rest.partition(" -> ")
        name, _, parameters = rest.removesuffix(")").partition("(")
        use, _, name = name.rpartition(" ")
        needed, known = (tuple(p for p in part.split(", ") if p) for part in f"{parameters};".split(";")[:2])
        known = tuple(p.strip() for p in known)
        for module in modules.split(", "):
            whole, how = f"{NEMO_RL}.{module}", Use(use or "passed on")
            found.append(PatchPoint(whole, name, how, needed, known, result or "nothing"))
    return tuple(found)


PATCH_POINTS = _patch_points(
    "algorithms.grpo: VllmGeneration(cluster, config; name_prefix, workers_per_node, defer_model_load)",
    "algorithms.grpo: refit_policy_generation(policy, policy_generation; colocated_inference, _refit_buffer_size_gb, "
    "timer, kv_scales) -> value",
    "algorithms.grpo: validate(policy_generation; val_dataloader, tokenizer, val_task_to_env, step, master_config, "
    "logger, processor) -> value",
    "algorithms.grpo: Logger(cfg)",
    "utils.logger: Logger.log_metrics(metrics, step, prefix, step_metric, step_finished)",
    "utils.logger: calls Logger.log_plot(figure, step, name)",
    "utils.logger: Logger.finish",
    "algorithms.async_utils: AsyncTrajectoryCollector(; policy_generation, tokenizer, task_to_env, master_config, "
    "replay_buffer, start_step, teacher_worker_groups, alias_to_group_alias, on_policy_distillation_cfg, "
    "next_nemo_gym_task_index, processor)",
    "utils.checkpoint: calls CheckpointManager.get_latest_checkpoint_path -> value",
    "models.generation.vllm.vllm_generation: resolve_generation_worker_cls(default_cls, config) -> value",
    "models.generation.vllm.vllm_generation: VllmGeneration.generate(data, greedy) -> value",
    "models.generation.vllm.vllm_generation: VllmGeneration.generate_async(data, greedy) -> async stream",
    "models.generation.vllm.vllm_generation: VllmGeneration.snapshot_step_metrics",
    "models.generation.vllm.vllm_generation: VllmGeneration.get_step_metrics -> value",
    "models.generation.vllm.vllm_generation: VllmGeneration.load_and_start",
    "models.generation.vllm.vllm_generation: VllmGeneration.finish_generation -> value",
    "models.generation.vllm.vllm_generation: VllmGeneration.shutdown -> value",
    "distributed.ray_actor_environment_registry: stores ACTOR_ENVIRONMENT_REGISTRY",
    "distributed.ray_actor_environment_registry: calls get_actor_python_env(actor_class_fqn) -> value",
    "distributed.worker_group_utils: calls get_nsight_config_if_pattern_matches(worker_name) -> value",
    "distributed.worker_groups: calls RayWorkerGroup.run_single_worker_single_data(method_name, worker_idx) -> value",
    "distributed.worker_groups: calls RayWorkerGroup.dp_size -> value",
    "distributed.worker_groups: calls RayWorkerGroup.get_dp_leader_worker_idx(dp_shard_idx) -> value",
    "distributed.worker_groups: RayWorkerGroup._create_workers_from_bundle_indices(bundle_indices_list; "
    "remote_worker_builder, env_vars)",
    "utils.venvs: calls create_local_venv_on_each_node(py_executable, venv_name) -> value",
    "models.generation.vllm.vllm_worker: VllmGenerationWorkerImpl._create_engine(llm_kwargs)",
    "models.generation.vllm.vllm_worker: VllmGenerationWorkerImpl.generate(data, greedy) -> value",
    "models.generation.vllm.vllm_worker_async: VllmAsyncGenerationWorkerImpl._create_engine(llm_kwargs)",
    "models.generation.vllm.vllm_worker_async: VllmAsyncGenerationWorkerImpl.generate_async(data, greedy) -> async stream",
    "models.generation.vllm.vllm_worker_async: VllmAsyncGenerationWorkerImpl._setup_vllm_openai_api_server(app) -> value",
    "algorithms.async_utils: AsyncTrajectoryCollector.set_weight_version(version)",
)
"""Patch points of all runs."""

CONTROLLER_PATCH_POINTS = _patch_points(
    "experience.rollout_manager: AsyncRolloutImpl._run_single_rollout(input_sample, traj_idx) -> async value",
    "experience.rollout_manager: AsyncNemoGymRolloutImpl._build_inputs(input_sample) -> value",
    "algorithms.single_controller_utils.setup: StatefulDataLoader",
    "algorithms.single_controller_utils.setup: VllmGeneration(cluster, config; name_prefix, workers_per_node, "
    "defer_model_load)",
    "algorithms.single_controller_utils.setup: create_weight_synchronizer(policy, generation; generation_backend, "
    "colocated, train_cluster, inference_cluster, refit_buffer_size_gb) -> value",
    "algorithms.single_controller: Logger(cfg)",
    "weight_sync.interfaces: WeightSynchronizer.sync_weights(; timer, kv_scales)",
    "utils.checkpoint: calls CheckpointManager.load_training_info(checkpoint_path) -> value",
)
"""Patch points of runs with a block `async_rl`."""

TRAINER_PATCH_POINTS = _patch_points(
    "algorithms.grpo_sync, algorithms.distillation, algorithms.ppo: refit_policy_generation(policy, policy_generation; "
    "colocated_inference, _refit_buffer_size_gb, timer, kv_scales) -> value",
    "algorithms.grpo_sync: SyncRolloutActor(; policy_generation, tokenizer, task_to_env, master_config, dp_cfg)",
    "algorithms.distillation, algorithms.ppo: VllmGeneration(cluster, config; name_prefix, workers_per_node, "
    "defer_model_load)",
    "algorithms.distillation, algorithms.ppo: validate(policy_generation; val_dataloader, tokenizer, val_task_to_env, "
    "step, master_config, logger) -> value",
    "algorithms.distillation, algorithms.ppo: Logger(cfg)",
    "experience.sync_rollout_actor: SyncRolloutActor.rollout_to_tq(first_iter, task_to_env_override; input_batch, "
    "partition_id, group_size, finish_generation, carry_keys) -> value",
)
"""Patch points of the trainers beside GRPO's own. A run uses the points of its trainer's module."""

GYM_PATCH_POINTS = _patch_points(
    "experience.rollouts: _prepare_nemo_gym_rows(rows; generation_config, sampling_params)",
)
"""Patch points of runs with NeMo-Gym and without the SingleController."""

EXTENSION_PATCH_POINTS = _patch_points(
    "models.generation.vllm.vllm_backend: VllmInternalWorkerExtension._get_drafter_model -> value",
    "models.generation.vllm.vllm_backend: calls VllmInternalWorkerExtension._mtp_drafter_refit_enabled -> value",
    "models.generation.vllm.vllm_backend: VllmInternalWorkerExtension._load_draft_weights(draft_weights)",
    "models.generation.vllm.vllm_backend: VllmInternalWorkerExtension._weight_update_lifecycle(transport) -> stream",
    "models.generation.vllm.vllm_backend: stores VllmInternalWorkerExtension._mtp_drafter_from_disk",
)
"""Patch points in the engine's process. They are checked there, when our worker class is made."""

ALL_PATCH_POINTS = (*PATCH_POINTS, *CONTROLLER_PATCH_POINTS, *TRAINER_PATCH_POINTS, *GYM_PATCH_POINTS)
"""Patch points in the driver, for all kinds of run."""


@dataclass(frozen=True)
class Change:
    """A difference between a patch point and a NeMo-RL."""

    text: str
    is_harmless: bool = False
    """Whether this package works with the change. It does where it passes on all arguments and the result."""


def changes_of(point: PatchPoint, source: PythonSource) -> list[Change]:
    """Returns what is different about a patch point in the NeMo-RL of `source`."""
    name = f"{point.module}.{point.name}"
    exists, _ = source.definition(name)
    if not exists:
        return [Change("absent")]
    found = source.signature(name)
    if found is None or point.use is Use.STORED:
        return [Change("changed: it is not a function any more")] if point.needed else []
    return [*_parameter_changes(point, found), *_result_changes(point, found)]


def _parameter_changes(point: PatchPoint, found: Signature) -> list[Change]:
    missing = [p for p in point.needed if p not in found.parameters]
    added = [p for p in found.parameters if p not in point.needed + point.known]
    changes = [Change(f"changed: it no longer takes {', '.join(missing)}")] if missing else []
    if point.use is Use.CALLED:
        new = [p for p in added if p in found.required]
        changes += [Change(f"changed: it needs {', '.join(new)} now")] if new else []
    elif added:
        changes.append(Change(f"it also takes {', '.join(added)}: passed on", is_harmless=True))
    return changes


def _result_changes(point: PatchPoint, found: Signature) -> list[Change]:
    was, now = point.result, found.result
    if was == now:
        return []
    if {was, now} == {"nothing", "value"} and point.use is Use.PASSED_ON:
        return [Change(f"its result is {'a value' if now == 'value' else now} now: passed on", is_harmless=True)]
    is_unused = point.use is Use.CALLED and was == "nothing" and now == "value"
    return [] if is_unused else [Change(f"changed: its result is {now}, not {was}")]


def check_patch_points(points: Sequence[PatchPoint], source: PythonSource | None = None) -> None:
    """Raises ConfigError if NeMo-RL (None: the installed one) lacks one of `points`, or has it in another form."""
    if source is None:
        folder = installed_source(NEMO_RL)
        if folder is None:
            raise ConfigError("NeMo-RL is not in this Python environment")
        source = PythonSource(folder, NEMO_RL)
    changes = [
        f"{p.module}.{p.name} is {change.text}"
        for p in points
        for change in changes_of(p, source)
        if not change.is_harmless
    ]
    if changes:
        raise ConfigError(
            f"this NeMo-RL is not one that specrollout knows: {'; '.join(changes)}. Use "
            f"{NEMO_RL_NEEDED} (docs/reference/nemo-rl-patch-points.md), or set policy.generation.specrollout.enabled: false"
        )


def unknown_shared_names(nemo_rl: PythonSource, vllm: PythonSource) -> list[str]:
    """Returns the names that NeMo-RL's worker extensions share with vLLM's worker, except `SHARED_NAMES`."""
    extension = set().union(*(nemo_rl.members(name) for name in EXTENSIONS))
    shared = extension & set(vllm.members("vllm.v1.worker.gpu_worker.Worker"))
    return sorted(name for name in shared.difference(SHARED_NAMES) if not name.startswith("__"))
