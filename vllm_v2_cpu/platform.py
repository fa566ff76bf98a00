# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform, with what its V2 model runner needs there: bodies for the Triton kernels, asynchronous scheduling."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class CpuPlatformForV2(CpuPlatform):
    """Named by the platform plugin (`plugin.py`)."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's, which would switch asynchronous scheduling off."""
        asynchronous = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM's hook for kernel bodies, called by each worker."""
        from vllm_v2_cpu import kernels

        kernels.register()
