# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what NeMo-RL needs of CUDA, put in place as its modules are imported. For tests.

One file for each thing that stands in: `typing_names` (Python 3.13), `cuda` (torch.cuda, devices), `refit` (weights
between processes), `vllm_engine` (the CPU build), `interpreter` (Triton's, for the kernels of older versions of vLLM),
`actors` (Ray), `megatron` and `transformer_engine`. `record` writes down
rollouts, and `weights` how far they move. Of ours there are `wild_tail` and `random_budgets`, for scenarios that ask for them.
"""

from nemo_rl_cpu import typing_names
from nemo_rl_cpu.imports import AFTER, BEFORE, install

MEGATRON_WORKERS = (
    "nemo_rl.models.policy.workers.megatron_policy_worker",
    "nemo_rl.models.value.workers.megatron_value_worker",
)


def register() -> None:
    """Makes the names of Python 3.13's typing known and arms the import hooks."""
    typing_names.install()
    BEFORE.update({worker: "nemo_rl_cpu.transformer_engine:stand_in" for worker in MEGATRON_WORKERS})
    AFTER.update(
        {
            "nemo_rl": "nemo_rl_cpu.cuda:patch_calls",
            "nemo_rl.utils.nvml": "nemo_rl_cpu.refit:patch_nvml",
            "nemo_rl.models.policy.utils": "nemo_rl_cpu.refit:patch_ipc",
            "nemo_rl.distributed.stateless_process_group": "nemo_rl_cpu.refit:patch_collective",
            "nemo_rl.utils.packed_tensor": "nemo_rl_cpu.refit:patch_packing",
            "nemo_rl.models.generation.vllm.vllm_backend": (
                "nemo_rl_cpu.vllm_engine:patch_extension",
                "nemo_rl_cpu.weights:measure_updates",
            ),
            "nemo_rl.models.policy.workers.dtensor_policy_worker": "nemo_rl_cpu.actors:will_train_dtensor",
            **dict.fromkeys(MEGATRON_WORKERS, "nemo_rl_cpu.actors:will_train_megatron"),
            "nemo_rl.distributed.numa_utils": "nemo_rl_cpu.actors:patch_numa",
            "nemo_rl.distributed.virtual_cluster": "nemo_rl_cpu.actors:patch_ray",
            "nemo_rl.distributed.ray_actor_environment_registry": "nemo_rl_cpu.actors:patch_environments",
            "nemo_rl.data_plane.adapters.transfer_queue": "nemo_rl_cpu.actors:patch_data_plane",
            "nemo_rl.experience.rollout_manager": "nemo_rl_cpu.record:record_groups",
            "nemo_rl.models.generation.vllm.vllm_generation": "nemo_rl_cpu.record:record_batches",
            "nemo_specrollout.stragglers.exchange": "nemo_rl_cpu.wild_tail:go_wild",
            "nemo_specrollout.speculation.policy": "nemo_rl_cpu.random_budgets:draw",
            "vllm.v1.worker.gpu": "nemo_rl_cpu.interpreter:complete",
            "vllm.v1.worker.cpu.shm": "nemo_rl_cpu.cuda:complete_placeholders",
            "vllm.engine.arg_utils": "nemo_rl_cpu.vllm_engine:refuse_sleep_mode",
            "vllm.entrypoints.llm": "nemo_rl_cpu.vllm_engine:never_sleep",
            "vllm.v1.engine.async_llm": "nemo_rl_cpu.vllm_engine:never_sleep_async",
            "vllm.model_executor.layers.utils": "nemo_rl_cpu.vllm_engine:keep_weights_loadable",
            "vllm.v1.sample.rejection_sampler": "nemo_rl_cpu.vllm_engine:mend_rejection_sampler",
        }
    )
    install()
