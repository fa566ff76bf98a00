# SPDX-License-Identifier: Apache-2.0
"""Finds out, before the GPU check starts, which GPU the machine has, and whether vLLM's kernels run on it."""

import importlib
from collections.abc import Mapping
from importlib import util
from typing import NamedTuple

from nemo_specrollout.doctor.environment import GIB, driver_lines
from nemo_specrollout.installed.versions import vllm_version

_LIBRARIES = ("vllm._C", "vllm._C_stable_libtorch")
"""vLLM's general kernels, by the names that its versions give them."""


class Machine(NamedTuple):
    """What is known of a machine and its GPU."""

    facts: Mapping[str, str]
    """Name, compute capability, memory and driver of the GPU, or empty without a GPU."""
    free_gib: float = 0.0
    gpu_problem: str = ""
    """A sentence that says why there is no GPU to use, or empty."""
    vllm_problem: str = ""
    """A sentence that says why no engine can run on the GPU, or empty."""
    serves_experts: bool = True
    """Whether vLLM has kernels for mixtures of experts."""


def look() -> Machine:
    """Looks at this machine and returns what it finds.

    It loads torch and vLLM and uses the GPU, so it should be called in a process that ends afterwards.
    """
    try:
        import torch
    except Exception as error:
        return Machine({}, gpu_problem=f"torch does not load: {_in_one_line(error)}.")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for a CPU"
        return Machine({}, gpu_problem=f"There is no CUDA GPU that torch can use; torch is {built}.")
    try:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        torch.ones(8, device="cuda").sum().item()  # fails if the driver is too old, or torch has no kernels for the GPU
    except Exception as error:
        return Machine({}, gpu_problem=f"torch cannot use the GPU: {_in_one_line(error)}.")
    capability = f"{properties.major}.{properties.minor}"
    facts = {
        "GPU": properties.name,
        "compute capability": capability,
        "GiB": f"{total / GIB:.1f}",
        "driver": next(iter(driver_lines()), "unknown").rsplit(", ", 1)[-1],
        "torch": torch.__version__,
    }
    problem = _vllm_problem(f"{properties.name}, compute capability {capability}")
    return Machine(facts, free / GIB, "", problem, hasattr(torch.ops._moe_C, "topk_softmax"))


def _vllm_problem(gpu: str) -> str:
    """Returns why vLLM cannot run on the GPU, or an empty string if one of its kernels runs."""
    if vllm_version() is None:
        return "vLLM is not installed."
    try:
        import torch

        for name in filter(util.find_spec, _LIBRARIES):  # vLLM itself only logs that a library does not load
            importlib.import_module(name)
        from vllm import _custom_ops

        rows = torch.ones(2, 64, device="cuda", dtype=torch.bfloat16)
        _custom_ops.rms_norm(torch.empty_like(rows), rows, rows[0].contiguous(), 1e-6)
        torch.cuda.synchronize()
    except Exception as error:
        if "no kernel image" in str(error):
            return f"This vLLM has no kernels for {gpu}."
        return f"vLLM does not load: {_in_one_line(error)}."
    return ""


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(".")
