# SPDX-License-Identifier: Apache-2.0
"""Section "machine": limits of the operating system that break engines, Ray or downloads."""

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_specrollout.doctor.diagnosis import Diagnosis, Section

MACHINE = Section("machine")
GIB = 1 << 30
SMALLEST_SHM = GIB
"""Bytes of shared memory. Docker gives a container 64 MiB, with which NCCL and vLLM's queues between processes fail."""
FEWEST_FILES = 1024
"""Files that a process must be able to open."""
LITTLE_DISK = GIB
"""Free bytes of the temporary folder below which a warning is due."""
TOO_LITTLE_DISK = GIB >> 4
"""Free bytes of the temporary folder below which runs fail."""
_RAY_TIMEOUT_S = 3.0


def diagnose_machine(environment: Mapping[str, str] = os.environ) -> Iterator[Diagnosis]:
    """Yields one diagnosis for each limit."""
    yield shared_memory(Path("/dev/shm"))
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield temporary_folder()
    if (address := environment.get("RAY_ADDRESS", "")) not in ("", "auto", "local"):
        yield ray_address(address)
    yield model_cache(environment)


def shared_memory(folder: Path) -> Diagnosis:
    """Checks that shared memory is large enough for several processes of an engine."""
    to_do = "Start the container with --shm-size=16g, or --ipc=host: engines of several GPUs and Ray need it."
    try:
        size = shutil.disk_usage(folder).total
    except OSError as error:
        return MACHINE.fail(str(folder), f"{error.strerror}", to_do)
    if size < SMALLEST_SHM:
        return MACHINE.warn(str(folder), f"{size / GIB:.2f} GiB", to_do)
    return MACHINE.ok(str(folder), f"{size / GIB:.1f} GiB")


def open_files(limit: int) -> Diagnosis:
    """Checks that a process may open enough files and sockets."""
    if limit != resource.RLIM_INFINITY and limit < FEWEST_FILES:
        to_do = "Raise it with `ulimit -n 65536`: Ray and an engine open hundreds of sockets."
        return MACHINE.warn("ulimit -n", str(limit), to_do)
    return MACHINE.ok("ulimit -n", "unlimited" if limit == resource.RLIM_INFINITY else str(limit))


def temporary_folder() -> Diagnosis:
    """Checks that the temporary folder is writable and has room."""
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


def ray_address(address: str) -> Diagnosis:
    """Checks that something listens at RAY_ADDRESS."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _RAY_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        to_do = "Unset RAY_ADDRESS, or start Ray there: a run would wait for it."
        return MACHINE.fail("RAY_ADDRESS", f"{address}: {reason}", to_do)
    return MACHINE.ok("RAY_ADDRESS", f"{address}: something listens there")


def model_cache(environment: Mapping[str, str]) -> Diagnosis:
    """Checks that models can be downloaded to the cache of Hugging Face, unless downloads are off."""
    name = "Hugging Face cache"
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(environment.get("HF_HUB_CACHE") or home / "hub").absolute()
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return MACHINE.ok(name, f"{folder}; HF_HUB_OFFLINE is set, nothing is downloaded")
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        return MACHINE.ok(name, f"{folder}, writable")
    to_do = "Set HF_HOME to a writable folder, or name models by local folders."
    return MACHINE.warn(name, f"{folder}: {existing} is not writable", to_do)
