# SPDX-License-Identifier: Apache-2.0
"""Section "versions": the installed packages, and whether this package supports them."""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from nemo_specrollout.config.versions import (
    VLLM_RANGE,
    checkout_commit,
    nemo_rl_is_a_release,
    nemo_rl_version,
    unsupported_version,
    vllm_version,
)
from nemo_specrollout.doctor.diagnosis import Diagnosis, Section

VERSIONS = Section("versions")
OURS = "nemo_specrollout"
PYTHON = "python"
VLLM = "vllm"
NEMO_RL = "nemo-rl"
OLDEST_PYTHON = (3, 11)
"""Oldest supported version of Python."""
_ENGINE = "an engine"
_ENGINE_WORKER = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
"""NeMo-RL's class whose name is also the name of its environment."""


@dataclass(frozen=True)
class Needed:
    """A package that some part of this package needs."""

    package: str
    module: str
    """Module by which the package is found without its metadata."""
    by: str
    """The part that needs it."""


NEEDED = (
    Needed("torch", "torch", _ENGINE),
    Needed("triton", "triton", _ENGINE),
    Needed("transformers", "transformers", _ENGINE),
    Needed("numba", "numba", _ENGINE),
    Needed("ray", "ray", "NeMo-RL, and a local run with several rollout workers"),
    Needed("megatron-core", "megatron", "a trainer"),
    Needed("speculators", "speculators", "refresh-draft and draft_refresh"),
)


def found_versions() -> dict[str, str]:
    """Returns the versions of all installed packages of this section, without importing them."""
    found = {PYTHON: platform.python_version(), OURS: _own_version()}
    found |= {n.package: version for n in NEEDED if (version := _version(n))}
    return found | {name: v for name, v in ((VLLM, vllm_version()), (NEMO_RL, nemo_rl_version())) if v}


def _own_version() -> str:
    commit = checkout_commit()
    try:
        version = metadata.version("nemo-specrollout")
    except metadata.PackageNotFoundError:
        version = "not installed, on the path"
    return version + (f", commit {commit}" if commit else "") + f", in {Path(__file__).parents[1]}"


def _version(needed: Needed) -> str | None:
    try:
        return metadata.version(needed.package)
    except metadata.PackageNotFoundError:
        return "of unknown version" if util.find_spec(needed.module) else None


def diagnose_versions(found: Mapping[str, str], *, is_release: bool | None = None) -> Iterator[Diagnosis]:
    """Yields one diagnosis for each package. `found`: the versions by name, as `found_versions` returns them.

    `is_release`: whether the NeMo-RL is v0.7.0 or older; None: as installed here.
    """
    yield VERSIONS.ok(OURS, found[OURS])
    yield _python(found[PYTHON])
    yield _vllm(found)
    yield _nemo_rl(found, nemo_rl_is_a_release() if is_release is None else is_release)
    for needed in NEEDED:
        yield _needed(needed, found)


def _python(version: str) -> Diagnosis:
    if tuple(int(n) for n in version.split(".")[:2]) >= OLDEST_PYTHON:
        return VERSIONS.ok(PYTHON, version)
    return VERSIONS.fail(PYTHON, version, "Use Python 3.11 or later.")


def _vllm(found: Mapping[str, str]) -> Diagnosis:
    version = found.get(VLLM)
    if version is None and NEMO_RL in found:
        to_do = f"Run doctor in the engines' environment too: {engine_python()} -m nemo_specrollout.cli.main doctor."
        return VERSIONS.warn(VLLM, "not installed in this environment; NeMo-RL's driver does not need it", to_do)
    low, high = (".".join(map(str, bound)) for bound in VLLM_RANGE)
    problem = "not installed" if version is None else unsupported_version(version)
    if problem is not None:
        return VERSIONS.fail(VLLM, problem, f"Install vLLM {low} or later, before {high}.")
    return VERSIONS.ok(VLLM, str(version))


def engine_python() -> str:
    """Returns the path of the Python in which NeMo-RL starts vLLM, if vLLM has an environment of its own."""
    folder = os.environ.get("NEMO_RL_VENV_DIR", "$NEMO_RL_VENV_DIR")
    return f"{folder}/{_ENGINE_WORKER}/bin/python"


def _nemo_rl(found: Mapping[str, str], is_release: bool) -> Diagnosis:
    version = found.get(NEMO_RL)
    if version is None:
        return VERSIONS.ok(NEMO_RL, "not installed; only runs in NeMo-RL need it")
    if is_release:
        to_do = (
            "Use main of August 2026 (docs/reference/versions.md); releases up to v0.7.0 lack what this package uses."
        )
        return VERSIONS.fail(NEMO_RL, f"{version}, a release", to_do)
    return VERSIONS.ok(NEMO_RL, f"calls itself {version}, is newer than v0.7.0")


def _needed(needed: Needed, found: Mapping[str, str]) -> Diagnosis:
    version = found.get(needed.package)
    if version is not None:
        return VERSIONS.ok(needed.package, version)
    if needed.by is _ENGINE and VLLM in found:
        return VERSIONS.fail(needed.package, "not installed", f"Install {needed.package}: an engine needs it.")
    return VERSIONS.ok(needed.package, f"not installed; only {needed.by} needs it")
