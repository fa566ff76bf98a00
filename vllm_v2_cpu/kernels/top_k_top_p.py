# SPDX-License-Identifier: Apache-2.0
"""Body of the kernel that masks logits by top-k and top-p: vLLM's own sort of each row."""

import torch

from vllm_v2_cpu.kernels.kernel_launch import as_torch_kernel


def top_k_top_p(
    LOGITS: torch.Tensor,
    LOGITS_STRIDE_0: int,
    BUFFER: torch.Tensor,
    PERCENTILE_TO_STD_TABLE: torch.Tensor,
    NORMAL_CDF_TO_SIGMA_TABLE: torch.Tensor,
    K: torch.Tensor | None,
    P: torch.Tensor | None,
    BATCH_SIZE: int,
    VOCAB_SIZE: int,
    MASK_VALUE: float,
    BLOCK_SIZE: int,
    BLOCK_SIZE_TRUNC: int,
    TOPK_ENABLED: bool,
    TOPP_ENABLED: bool,
    SPLIT_COVERS_PONLY: bool,
) -> None:
    """Writes -inf to what each row of `LOGITS` leaves out. Each row is sorted alone, so no other row has a say."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    top_k, top_p = (K if TOPK_ENABLED else None), (P if TOPP_ENABLED else None)
    LOGITS.copy_(apply_top_k_top_p_pytorch(LOGITS, top_k, top_p, allow_cpu_sync=True))


KERNELS = {"vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel": as_torch_kernel(top_k_top_p)}
