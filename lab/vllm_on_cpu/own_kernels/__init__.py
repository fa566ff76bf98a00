# SPDX-License-Identifier: Apache-2.0
"""CPU functions in place of the Triton kernels of the product (`nemo_specrollout`). They are called bodies.

Each module has the functions of one module of kernels.
"""

from nemo_specrollout.sampling.platforms import KernelModule, Platform, register_platform

_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
_BODIES = {
    KernelModule.STEP: "step",
    KernelModule.AHEAD: "ahead",
    KernelModule.DRAFT_SAMPLING: "draft_sampling",
    KernelModule.ROW_SAMPLING: "row_sampling",
    KernelModule.DRAFT_STREAM: "draft_stream",
    KernelModule.EQUALITY: "equality",
}
PLATFORM = Platform(_WORKER, {ours: f"{__name__}.{body}" for ours, body in _BODIES.items()})
"""vLLM's worker class for engines on a CPU, and the kernels that they run."""


def register() -> None:
    """Lets engines and drafters of this process run on a CPU."""
    register_platform("cpu", PLATFORM)
