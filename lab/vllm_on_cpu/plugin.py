# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform plugin of this package: on request, a CPU on which the V2 model runner works. Its imports are light."""

import os

V2_ON_CPU = "NEMO_SPECROLLOUT_V2_ON_CPU"
"""Environment variable that requests the platform with "1". Otherwise vLLM's own platform stays as it is."""


class _ActiveDriver:
    """The driver that vLLM wants of a Triton backend before it allows the V2 model runner."""

    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    """A Triton backend in name only. It compiles nothing, because each kernel has a body in `kernels`."""

    driver = _ActiveDriver
    compiler = None


def platform() -> str | None:
    """Returns the name of our platform class, or None for vLLM's own.

    vLLM calls this hook in each process before it chooses the platform. The hook also enters a "cpu" backend into Triton's
    table, which vLLM reads next.
    """
    from vllm.platforms import vllm_version_matches_substr

    if os.environ.get(V2_ON_CPU) != "1" or not vllm_version_matches_substr("cpu"):
        return None
    from triton.backends import backends

    backends.setdefault("cpu", _Backend())
    return "lab.vllm_on_cpu.platform.CpuPlatformForV2"
