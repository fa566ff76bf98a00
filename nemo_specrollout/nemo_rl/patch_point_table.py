# SPDX-License-Identifier: Apache-2.0
"""All names of NeMo-RL that this package replaces, overrides, calls or assigns, grouped by kind of run.

`PatchPoint` says what the fields mean. docs/reference/nemo-rl-patch-points.md says how and why each name is used.
"""

from nemo_specrollout.nemo_rl.patch_points import PatchPoint, Use

GRPO = "nemo_rl.algorithms.grpo"
GRPO_SYNC = "nemo_rl.algorithms.grpo_sync"
DISTILLATION = "nemo_rl.algorithms.distillation"
PPO = "nemo_rl.algorithms.ppo"
CONTROLLER_SETUP = "nemo_rl.algorithms.single_controller_utils.setup"
VLLM_GENERATION = "nemo_rl.models.generation.vllm.vllm_generation"
VLLM_WORKER = "nemo_rl.models.generation.vllm.vllm_worker"
VLLM_WORKER_ASYNC = "nemo_rl.models.generation.vllm.vllm_worker_async"
VLLM_BACKEND = "nemo_rl.models.generation.vllm.vllm_backend"
WORKER_GROUPS = "nemo_rl.distributed.worker_groups"
ACTOR_ENVIRONMENTS = "nemo_rl.distributed.ray_actor_environment_registry"
LOGGER = "nemo_rl.utils.logger"
CHECKPOINT = "nemo_rl.utils.checkpoint"
ASYNC_UTILS = "nemo_rl.algorithms.async_utils"
ROLLOUTS = "nemo_rl.experience.rollouts"
ROLLOUT_MANAGER = "nemo_rl.experience.rollout_manager"

POINTS_OF_ALL_RUNS = (
    PatchPoint(
        GRPO,
        "VllmGeneration",
        needed=("cluster", "config"),
        known=("name_prefix", "workers_per_node", "defer_model_load"),
    ),
    PatchPoint(
        GRPO,
        "refit_policy_generation",
        needed=("policy", "policy_generation"),
        known=("colocated_inference", "_refit_buffer_size_gb", "timer", "kv_scales"),
        result="value",
    ),
    PatchPoint(
        GRPO,
        "validate",
        needed=("policy_generation",),
        known=("val_dataloader", "tokenizer", "val_task_to_env", "step", "master_config", "logger", "processor"),
        result="value",
    ),
    PatchPoint(GRPO, "Logger", needed=("cfg",)),
    PatchPoint(LOGGER, "Logger.log_metrics", needed=("metrics", "step", "prefix", "step_metric", "step_finished")),
    PatchPoint(LOGGER, "Logger.log_plot", use=Use.CALLED, needed=("figure", "step", "name")),
    PatchPoint(LOGGER, "Logger.finish"),
    PatchPoint(
        ASYNC_UTILS,
        "AsyncTrajectoryCollector",
        known=(
            "policy_generation",
            "tokenizer",
            "task_to_env",
            "master_config",
            "replay_buffer",
            "start_step",
            "teacher_worker_groups",
            "alias_to_group_alias",
            "on_policy_distillation_cfg",
            "next_nemo_gym_task_index",
            "processor",
        ),
    ),
    PatchPoint(ASYNC_UTILS, "AsyncTrajectoryCollector.set_weight_version", needed=("version",)),
    PatchPoint(CHECKPOINT, "CheckpointManager.get_latest_checkpoint_path", use=Use.CALLED, result="value"),
    PatchPoint(VLLM_GENERATION, "resolve_generation_worker_cls", needed=("default_cls", "config"), result="value"),
    PatchPoint(VLLM_GENERATION, "VllmGeneration.generate", needed=("data", "greedy"), result="value"),
    PatchPoint(VLLM_GENERATION, "VllmGeneration.generate_async", needed=("data", "greedy"), result="async stream"),
    PatchPoint(VLLM_GENERATION, "VllmGeneration.snapshot_step_metrics"),
    PatchPoint(VLLM_GENERATION, "VllmGeneration.get_step_metrics", result="value"),
    PatchPoint(VLLM_GENERATION, "VllmGeneration.load_and_start"),
    PatchPoint(VLLM_GENERATION, "VllmGeneration.finish_generation", result="value"),
    PatchPoint(VLLM_GENERATION, "VllmGeneration.shutdown", result="value"),
    PatchPoint(ACTOR_ENVIRONMENTS, "ACTOR_ENVIRONMENT_REGISTRY", use=Use.STORED),
    PatchPoint(ACTOR_ENVIRONMENTS, "get_actor_python_env", use=Use.CALLED, needed=("actor_class_fqn",), result="value"),
    PatchPoint(
        "nemo_rl.distributed.worker_group_utils",
        "get_nsight_config_if_pattern_matches",
        use=Use.CALLED,
        needed=("worker_name",),
        result="value",
    ),
    PatchPoint(
        WORKER_GROUPS,
        "RayWorkerGroup.run_single_worker_single_data",
        use=Use.CALLED,
        needed=("method_name", "worker_idx"),
        result="value",
    ),
    PatchPoint(WORKER_GROUPS, "RayWorkerGroup.dp_size", use=Use.CALLED, result="value"),
    PatchPoint(
        WORKER_GROUPS,
        "RayWorkerGroup.get_dp_leader_worker_idx",
        use=Use.CALLED,
        needed=("dp_shard_idx",),
        result="value",
    ),
    PatchPoint(
        WORKER_GROUPS,
        "RayWorkerGroup._create_workers_from_bundle_indices",
        needed=("bundle_indices_list",),
        known=("remote_worker_builder", "env_vars"),
    ),
    PatchPoint(
        "nemo_rl.utils.venvs",
        "create_local_venv_on_each_node",
        use=Use.CALLED,
        needed=("py_executable", "venv_name"),
        result="value",
    ),
    PatchPoint(VLLM_WORKER, "VllmGenerationWorkerImpl._create_engine", needed=("llm_kwargs",)),
    PatchPoint(VLLM_WORKER, "VllmGenerationWorkerImpl.generate", needed=("data", "greedy"), result="value"),
    PatchPoint(VLLM_WORKER_ASYNC, "VllmAsyncGenerationWorkerImpl._create_engine", needed=("llm_kwargs",)),
    PatchPoint(
        VLLM_WORKER_ASYNC,
        "VllmAsyncGenerationWorkerImpl.generate_async",
        needed=("data", "greedy"),
        result="async stream",
    ),
    PatchPoint(
        VLLM_WORKER_ASYNC,
        "VllmAsyncGenerationWorkerImpl._setup_vllm_openai_api_server",
        needed=("app",),
        result="value",
    ),
    PatchPoint(VLLM_WORKER_ASYNC, "VllmAsyncGenerationWorkerImpl.reset_prefix_cache_async", result="async nothing"),
)
"""Patch points of all runs."""
POINTS_OF_CONTROLLER = (
    PatchPoint(
        ROLLOUT_MANAGER,
        "AsyncRolloutImpl._run_single_rollout",
        needed=("input_sample", "traj_idx"),
        result="async value",
    ),
    PatchPoint(ROLLOUT_MANAGER, "AsyncNemoGymRolloutImpl._build_inputs", needed=("input_sample",), result="value"),
    PatchPoint(CONTROLLER_SETUP, "StatefulDataLoader"),
    PatchPoint(
        CONTROLLER_SETUP,
        "VllmGeneration",
        needed=("cluster", "config"),
        known=("name_prefix", "workers_per_node", "defer_model_load"),
    ),
    PatchPoint(
        CONTROLLER_SETUP,
        "create_weight_synchronizer",
        needed=("policy", "generation"),
        known=("generation_backend", "colocated", "train_cluster", "inference_cluster", "refit_buffer_size_gb"),
        result="value",
    ),
    PatchPoint("nemo_rl.algorithms.single_controller", "Logger", needed=("cfg",)),
    PatchPoint("nemo_rl.weight_sync.interfaces", "WeightSynchronizer.sync_weights", known=("timer", "kv_scales")),
    PatchPoint(
        CHECKPOINT, "CheckpointManager.load_training_info", use=Use.CALLED, needed=("checkpoint_path",), result="value"
    ),
)
"""Patch points of runs with a block `async_rl`, which NeMo-RL's SingleController runs."""
POINTS_OF_TRAINERS = (
    *(
        PatchPoint(
            module,
            "refit_policy_generation",
            needed=("policy", "policy_generation"),
            known=("colocated_inference", "_refit_buffer_size_gb", "timer", "kv_scales"),
            result="value",
        )
        for module in (GRPO_SYNC, DISTILLATION, PPO)
    ),
    PatchPoint(
        GRPO_SYNC,
        "SyncRolloutActor",
        known=("policy_generation", "tokenizer", "task_to_env", "master_config", "dp_cfg"),
    ),
    *(
        PatchPoint(
            module,
            "VllmGeneration",
            needed=("cluster", "config"),
            known=("name_prefix", "workers_per_node", "defer_model_load"),
        )
        for module in (DISTILLATION, PPO)
    ),
    *(
        PatchPoint(
            module,
            "validate",
            needed=("policy_generation",),
            known=("val_dataloader", "tokenizer", "val_task_to_env", "step", "master_config", "logger"),
            result="value",
        )
        for module in (DISTILLATION, PPO)
    ),
    *(PatchPoint(module, "Logger", needed=("cfg",)) for module in (DISTILLATION, PPO)),
    PatchPoint(
        "nemo_rl.experience.sync_rollout_actor",
        "SyncRolloutActor.rollout_to_tq",
        needed=("first_iter", "task_to_env_override"),
        known=("input_batch", "partition_id", "group_size", "finish_generation", "carry_keys"),
        result="value",
    ),
)
"""Patch points in the modules of the trainers, besides those of all runs. A run uses only those of its own trainer."""
POINTS_OF_ROLLOUTS = (
    PatchPoint(
        ROLLOUTS,
        "run_async_nemo_gym_rollout",
        needed=("task_to_env",),
        known=(
            "policy_generation",
            "input_batch",
            "tokenizer",
            "generation_config",
            "num_generations",
            "log_full_result_tables",
            "max_seq_len",
            "max_rollout_turns",
            "greedy",
            "effort_config",
            "reward_penalty_config",
            "thinking_tags",
            "mask_env_flagged_samples",
            "returns_entire_batch",
            "sampling_params",
            "deduplicate_multimodal_data",
            "debug_payload_metrics",
        ),
        result="async stream",
    ),
    PatchPoint(ROLLOUTS, "_prepare_nemo_gym_rows", needed=("rows",), known=("generation_config", "sampling_params")),
    PatchPoint(
        ROLLOUTS,
        "generate_responses",
        needed=("policy_generation", "generation_input_data", "batch"),
        known=("tokenizer", "input_lengths", "include_logprobs", "greedy"),
        result="value",
    ),
    PatchPoint(
        ROLLOUTS,
        "run_sample_multi_turn_rollout",
        needed=("sample_idx", "initial_sample_state"),
        known=(
            "policy_generation",
            "tokenizer",
            "task_to_env",
            "max_seq_len",
            "max_rollout_turns",
            "greedy",
            "deduplicate_multimodal_data",
        ),
        result="async value",
    ),
)
"""Patch points of runs without the SingleController."""
POINTS_OF_LOADERS = tuple(PatchPoint(module, "StatefulDataLoader") for module in (GRPO, DISTILLATION, PPO))
"""Patch points of runs with `run_ahead`, which replace the data loader in the module of the run's trainer."""
POINTS_OF_GYM = (
    PatchPoint(
        GRPO,
        "spinup_nemo_gym_actor",
        known=(
            "env_configs",
            "base_urls",
            "model_name",
            "tokenizer",
            "enable_router_replay",
            "routed_experts_dtype",
            "use_fastokens",
        ),
        result="value",
    ),
)
"""Patch points of runs with `run_ahead` and NeMo-Gym, without the SingleController."""
POINTS_OF_RUN_AHEAD = (
    PatchPoint(VLLM_GENERATION, "VllmGeneration.prepare_for_generation", result="value"),
    PatchPoint(VLLM_WORKER, "VllmGenerationWorkerImpl.sleep"),
    PatchPoint(VLLM_WORKER_ASYNC, "VllmAsyncGenerationWorkerImpl.sleep_async", result="async nothing"),
    PatchPoint(
        VLLM_WORKER,
        "BaseVllmGenerationWorker._build_sampling_params",
        use=Use.CALLED,
        needed=("greedy", "stop_strings", "max_new_tokens"),
        result="value",
    ),
)
"""Patch points of runs with `run_ahead`."""
WORKER_POINTS = (
    PatchPoint(VLLM_BACKEND, "VllmInternalWorkerExtension._get_drafter_model", result="value"),
    PatchPoint(VLLM_BACKEND, "VllmInternalWorkerExtension._mtp_drafter_refit_enabled", use=Use.CALLED, result="value"),
    PatchPoint(VLLM_BACKEND, "VllmInternalWorkerExtension._load_draft_weights", needed=("draft_weights",)),
    PatchPoint(
        VLLM_BACKEND, "VllmInternalWorkerExtension._weight_update_lifecycle", needed=("transport",), result="stream"
    ),
    PatchPoint(VLLM_BACKEND, "VllmInternalWorkerExtension._mtp_drafter_from_disk", use=Use.STORED),
)
"""Patch points in the process of a vLLM worker. They are checked there, when this package's worker class is defined."""
DRIVER_POINTS = (
    *POINTS_OF_ALL_RUNS,
    *POINTS_OF_CONTROLLER,
    *POINTS_OF_TRAINERS,
    *POINTS_OF_ROLLOUTS,
    *POINTS_OF_LOADERS,
    *POINTS_OF_GYM,
    *POINTS_OF_RUN_AHEAD,
)
"""Patch points in the driver and in NeMo-RL's actors, for all kinds of run."""
