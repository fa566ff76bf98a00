# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build as an engine that NeMo-RL can refit."""

import os
from types import ModuleType
from typing import Any

import torch

from nemo_rl_cpu.cuda import OnCpu
from nemo_rl_cpu.refit import device_id

RENAMED = "NEMO_RL_CPU_SYNCHRONIZE_RENAMED"


def keep_weights_loadable(layer_utils: ModuleType) -> None:
    """The CPU build repacks each linear weight and drops the original; NeMo-RL loads into the original."""

    def plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = plain_linear  # type: ignore[attr-defined]


def mend_rejection_sampler(rejection_sampler: ModuleType) -> None:
    """The CPU build expands temperatures into a copy that it throws away (docs/upstream/vllm-cpu-expand-kernel.md)."""

    def expand(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=torch.zeros(1, dtype=torch.int64))
        return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expand  # type: ignore[attr-defined]


def refuse_sleep_mode(arg_utils: ModuleType) -> None:
    """NeMo-RL always asks for it, the CPU build has none."""
    post_init = arg_utils.EngineArgs.__post_init__

    def post_init_awake(self: Any) -> None:
        self.enable_sleep_mode = False
        post_init(self)

    arg_utils.EngineArgs.__post_init__ = post_init_awake


def never_sleep(llm: ModuleType) -> None:
    """The synchronous engine stays awake; NeMo-RL clears its prefix cache itself."""
    llm.LLM.sleep = llm.LLM.wake_up = lambda self, *args, **kwargs: None


def never_sleep_async(async_llm: ModuleType) -> None:
    """The asynchronous engine likewise."""

    async def stay_awake(self: Any, *args: Any, **kwargs: Any) -> None: ...

    async_llm.AsyncLLM.sleep = async_llm.AsyncLLM.wake_up = stay_awake


def patch_extension(vllm_backend: ModuleType) -> None:
    """NeMo-RL's worker extension: the device's name, no NUMA, a refit into CPU tensors.

    NeMo-RL alone starts with vLLM 0.32 only with docs/upstream/nemo-rl-synchronize-device.md, which `RENAMED` asks for.
    """
    extension = vllm_backend.VllmInternalWorkerExtension
    receive = extension.update_weights_from_collective

    def receive_on_cpu(self: Any) -> bool:
        with OnCpu():
            return receive(self)

    if os.environ.get(RENAMED):
        extension.synchronize_sparse_delta_refit = extension.synchronize_device
        del extension.synchronize_device
    extension.report_device_id = lambda self: device_id()
    extension.bind_numa = lambda self: False
    extension.update_weights_from_collective = receive_on_cpu
