# SPDX-License-Identifier: Apache-2.0
"""Section "versions": what is installed, and whether it is supported."""

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
from nemo_specrollout.doctor.diagnosis import Diagnosis, State

SECTION = "versions"
OURS, PYTHON, VLLM, NEMO_RL = "nemo_specrollout", "python", "vllm", "nemo-rl"
OLDEST_PYTHON = (3, 11)
_ENGINE = "an engine"
_ENGINE_WORKER = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"


@dataclass(frozen=True)
class Needed:
    """A package, the module by which it is found without its metadata, and what needs it."""

    package: str
    module: str
    by: str


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
    """Versions of all that is installed, from metadata: nothing heavy is imported."""
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
    """One diagnosis for each package. `found`: its version by name, as `found_versions` returns them.

    `is_release`: whether the NeMo-RL is v0.7.0 or older; None: looked up.
    """
    yield Diagnosis(SECTION, OURS, State.OK, found[OURS])
    yield _python(found[PYTHON])
    yield _vllm(found)
    yield _nemo_rl(found, nemo_rl_is_a_release() if is_release is None else is_release)
    for needed in NEEDED:
        yield _needed(needed, found)


def _python(version: str) -> Diagnosis:
    is_new = tuple(int(n) for n in version.split(".")[:2]) >= OLDEST_PYTHON
    to_do = "" if is_new else "Use Python 3.11 or later."
    return Diagnosis(SECTION, PYTHON, State.OK if is_new else State.FAIL, version, to_do)


def _vllm(found: Mapping[str, str]) -> Diagnosis:
    version = found.get(VLLM)
    low, high = (".".join(map(str, bound)) for bound in VLLM_RANGE)
    if version is None and NEMO_RL in found:
        to_do = f"Run doctor in the engines' environment too: {engine_python()} -m nemo_specrollout.cli.main doctor."
        text = "not installed in this environment; NeMo-RL's driver does without"
        return Diagnosis(SECTION, VLLM, State.WARN, text, to_do)
    if version is None:
        return Diagnosis(SECTION, VLLM, State.FAIL, "not installed", f"Install vLLM {low} or later, before {high}.")
    message = unsupported_version(version)
    to_do = f"Install vLLM {low} or later, before {high}." if message else ""
    return Diagnosis(SECTION, VLLM, State.FAIL if message else State.OK, message or version, to_do)


def engine_python() -> str:
    """The Python in which NeMo-RL starts vLLM, if it has an environment of its own."""
    folder = os.environ.get("NEMO_RL_VENV_DIR", "$NEMO_RL_VENV_DIR")
    return f"{folder}/{_ENGINE_WORKER}/bin/python"


def _nemo_rl(found: Mapping[str, str], is_release: bool) -> Diagnosis:
    version = found.get(NEMO_RL)
    if version is None:
        return Diagnosis(SECTION, NEMO_RL, State.OK, "not installed; only runs in NeMo-RL need it")
    if is_release:
        to_do = "Use main of August 2026 (docs/reference/versions.md); releases up to v0.7.0 lack what we rely on."
        return Diagnosis(SECTION, NEMO_RL, State.FAIL, f"{version}, a release", to_do)
    return Diagnosis(SECTION, NEMO_RL, State.OK, f"calls itself {version}, is newer than v0.7.0")


def _needed(needed: Needed, found: Mapping[str, str]) -> Diagnosis:
    version = found.get(needed.package)
    if version is not None:
        return Diagnosis(SECTION, needed.package, State.OK, version)
    if needed.by is _ENGINE and VLLM in found:
        to_do = f"Install {needed.package}: an engine needs it."
        return Diagnosis(SECTION, needed.package, State.FAIL, "not installed", to_do)
    return Diagnosis(SECTION, needed.package, State.OK, f"not installed; only {needed.by} needs it")
