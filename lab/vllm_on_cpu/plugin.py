# SPDX-License-Identifier: Apache-2.0
"""Plugin that gives vLLM another platform, which is a CPU on which the V2 model runner works.

vLLM imports this module in each of its processes, so the module itself imports little.
"""

import os

V2_ON_CPU = "NEMO_SPECROLLOUT_V2_ON_CPU"
"""Name of an environment variable. Its value "0" keeps vLLM's own platform."""
_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
"""Environment variables of a process with our platform. torch.compile is off, because it would take minutes on a CPU."""


class _ActiveDriver:
    """The driver that a Triton backend must have before vLLM allows the V2 model runner."""

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
    table, which vLLM reads next, and registers the platform with the product.
    """
    from vllm.platforms import vllm_version_matches_substr

    if os.environ.get(V2_ON_CPU) == "0" or not vllm_version_matches_substr("cpu"):
        return None
    from triton.backends import backends

    from lab.vllm_on_cpu import own_kernels

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    own_kernels.register()
    backends.setdefault("cpu", _Backend())
    return "lab.vllm_on_cpu.platform.CpuPlatformForV2"
