# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform plugin of this package: on request, a CPU on which the V2 model runner runs. Imports nothing heavy."""

import os

V2_ON_CPU = "NEMO_SPECROLLOUT_V2_ON_CPU"
"""The environment variable that asks for it. Without it vLLM's own platform stays, exactly as it is."""


class _NoDriver:
    """What vLLM asks of a Triton backend before it allows the V2 model runner: a driver that is active."""

    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    """A Triton backend in name: it compiles nothing, for each kernel has a body in `kernels`."""

    driver = _NoDriver
    compiler = None


def platform() -> str | None:
    """vLLM's hook, called in each process before the platform is chosen: the platform class, or None for vLLM's own.

    Also enters a "cpu" backend into Triton's table, which vLLM reads right after this call.
    """
    from vllm.platforms import vllm_version_matches_substr

    if os.environ.get(V2_ON_CPU) != "1" or not vllm_version_matches_substr("cpu"):
        return None
    from triton.backends import backends

    backends.setdefault("cpu", _Backend())
    return "vllm_v2_cpu.platform.CpuPlatformForV2"
