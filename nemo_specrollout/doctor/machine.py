# SPDX-License-Identifier: Apache-2.0
"""Section "machine": what of the operating system's limits has broken engines, Ray or downloads."""

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_specrollout.doctor.diagnosis import Diagnosis, State

SECTION = "machine"
GIB = 1 << 30
# Docker gives a container 64 MiB, on which NCCL and vLLM's queues between processes fail.
SMALLEST_SHM = GIB
FEWEST_FILES = 1024
LITTLE_DISK, TOO_LITTLE_DISK = GIB, GIB >> 4
_RAY_TIMEOUT_S = 3.0


def diagnose_machine(environment: Mapping[str, str] = os.environ) -> Iterator[Diagnosis]:
    """One diagnosis for each limit. `environment`: the variables of this process, or others."""
    yield shared_memory(Path("/dev/shm"))
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield temporary_folder()
    if (address := environment.get("RAY_ADDRESS", "")) not in ("", "auto", "local"):
        yield ray_address(address)
    yield model_cache(environment)


def shared_memory(folder: Path) -> Diagnosis:
    """Whether shared memory is there, and large enough for several processes of an engine."""
    to_do = "Start the container with --shm-size=16g, or --ipc=host: engines of several GPUs and Ray need it."
    try:
        size = shutil.disk_usage(folder).total
    except OSError as error:
        return Diagnosis(SECTION, str(folder), State.FAIL, f"{error.strerror}", to_do)
    if size < SMALLEST_SHM:
        return Diagnosis(SECTION, str(folder), State.WARN, f"{size / GIB:.2f} GiB", to_do)
    return Diagnosis(SECTION, str(folder), State.OK, f"{size / GIB:.1f} GiB")


def open_files(limit: int) -> Diagnosis:
    """Whether a process may open enough files and sockets."""
    if limit != resource.RLIM_INFINITY and limit < FEWEST_FILES:
        to_do = "Raise it with `ulimit -n 65536`: Ray and an engine open hundreds of sockets."
        return Diagnosis(SECTION, "ulimit -n", State.WARN, str(limit), to_do)
    return Diagnosis(SECTION, "ulimit -n", State.OK, "unlimited" if limit == resource.RLIM_INFINITY else str(limit))


def temporary_folder() -> Diagnosis:
    """Whether a file can be written there, and room."""
    name = "temporary folder"
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        to_do = "Set TMPDIR to a folder that can be written to."
        return Diagnosis(SECTION, name, State.FAIL, f"{error.strerror}", to_do)
    state = State.FAIL if free < TOO_LITTLE_DISK else State.WARN if free < LITTLE_DISK else State.OK
    to_do = "Free some disk there, or set TMPDIR to another folder: Ray and compilers need 1 GiB."
    text = f"{folder}, {free / GIB:.1f} GiB free"
    return Diagnosis(SECTION, name, state, text, "" if state is State.OK else to_do)


def ray_address(address: str) -> Diagnosis:
    """Whether something listens at RAY_ADDRESS."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _RAY_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        to_do = "Unset RAY_ADDRESS, or start Ray there: a run would wait for it."
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Diagnosis(SECTION, "RAY_ADDRESS", State.FAIL, f"{address}: {reason}", to_do)
    return Diagnosis(SECTION, "RAY_ADDRESS", State.OK, f"{address}: something listens there")


def model_cache(environment: Mapping[str, str]) -> Diagnosis:
    """Whether models can be downloaded to the cache of Hugging Face, if they may be at all."""
    name = "Hugging Face cache"
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(environment.get("HF_HUB_CACHE") or home / "hub").absolute()
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Diagnosis(SECTION, name, State.OK, f"{folder}; HF_HUB_OFFLINE is set, nothing is downloaded")
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        return Diagnosis(SECTION, name, State.OK, f"{folder}, can be written to")
    to_do = "Set HF_HOME to a folder that can be written to, or name models by local folders."
    return Diagnosis(SECTION, name, State.WARN, f"{folder}: {existing} cannot be written to", to_do)
