# SPDX-License-Identifier: Apache-2.0
"""Section "gpu": whether our kernels compute on this GPU what they should. As a script, the process that launches them."""

from collections.abc import Iterator
from typing import Any

from nemo_specrollout.doctor.diagnosis import Diagnosis, Outcome, Section, Tell, answer, run_child

GPU = Section("gpu")
TIMEOUT_S = 180.0
"""Seconds for compiling and comparing the kernels."""
_SEND = "Send us the file of --json FILE: tokens stay right, but speed or drafts suffer."


def diagnose_gpu() -> Iterator[Diagnosis]:
    """Yields diagnoses of our kernels on the first GPU, and what measures the rest."""
    yield from kernels(run_child(__name__, None, TIMEOUT_S))


def kernels(outcome: Outcome) -> Iterator[Diagnosis]:
    """Yields a diagnosis of each kernel that was compared with its numba body, and of the process if it failed."""
    for name, different in outcome.told.items():
        if different:
            text = "; ".join(f"{part} differs by {gap:.2g}" for part, gap in different.items())
            yield GPU.fail(f"{name} kernels", text, _SEND)
        else:
            yield GPU.ok(f"{name} kernels", "as on a CPU")
    if outcome.failure:
        to_do = (
            "Install the Triton that this torch asks for, and gcc: kernels of ours are compiled when they first run."
        )
        yield GPU.fail("kernels", outcome.failure, to_do, outcome.log)
    yield GPU.ok("speed, memory, waits", "`make test-gpu` in a checkout measures them, in eleven minutes")


def _compare_kernels(order: Any, tell: Tell) -> None:
    """Tells of each comparison what differs, by how much."""
    import torch

    from lab.gpu.kernel_check import quick_comparisons

    for name, compared in quick_comparisons(torch.device("cuda")):
        tell(name, compared.different)


if __name__ == "__main__":
    answer(_compare_kernels)
