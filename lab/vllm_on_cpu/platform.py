# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with what the V2 model runner needs: bodies for the Triton kernels, and asynchronous scheduling."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class CpuPlatformForV2(CpuPlatform):
    """The platform that the plugin names (`plugin.py`)."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Keeps the setting of asynchronous scheduling, which vLLM's method would switch off."""
        asynchronous = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Registers the bodies of the kernels. Each worker calls this hook of vLLM."""
        from lab.vllm_on_cpu import kernels

        kernels.register()
