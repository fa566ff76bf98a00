# SPDX-License-Identifier: Apache-2.0
"""Bodies for a CPU of the product's own Triton kernels. Each module has the functions of one module of kernels."""

from nemo_specrollout.sampling.platforms import Platform, register_platform

_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
_BODIES = {
    "nemo_specrollout.drafters.step_triton": "step",
    "nemo_specrollout.generation.drafting.draft_sampling_triton": "draft_sampling",
    "nemo_specrollout.generation.step.row_sampling_triton": "row_sampling",
    "nemo_specrollout.remote.verifier.draft_stream_triton": "draft_stream",
    "nemo_specrollout.sampling.equality_triton": "equality",
}


def register() -> None:
    """Lets engines and drafters of this process run on a CPU."""
    register_platform("cpu", Platform(_WORKER, {ours: f"{__name__}.{body}" for ours, body in _BODIES.items()}))
