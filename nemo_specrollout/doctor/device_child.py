# SPDX-License-Identifier: Apache-2.0
"""A child of `doctor`: what torch says of this machine's devices."""

from typing import Any

from nemo_specrollout.doctor.child import Tell, answer


def look(order: Any, tell: Tell) -> None:
    """Tells torch's CUDA version and the GPUs that torch can use: name, memory in bytes, compute capability."""
    import torch

    tell("cuda", torch.version.cuda)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    tell("gpus", [[p.name, p.total_memory, f"{p.major}.{p.minor}"] for p in found])
    if found:
        torch.ones(8, device="cuda").sum().item()  # fails with a driver that is too old, or a broken GPU


if __name__ == "__main__":
    answer(look)
