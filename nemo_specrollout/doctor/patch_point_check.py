# SPDX-License-Identifier: Apache-2.0
"""Section "patch points" of `doctor`, which checks that NeMo-RL and vLLM have the names that this package uses.

A patch point is a name of NeMo-RL or vLLM that this package replaces, overrides or calls. This module is also the script of a
child process, which imports NeMo-RL's modules.
"""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_specrollout.config.nemo_rl_tree import nemo_rl_checkout
from nemo_specrollout.doctor.diagnosis import Diagnosis, Section, Tell, answer, in_one_line, run_child
from nemo_specrollout.doctor.vllm_imports import VllmSource, imports_of
from nemo_specrollout.installed.python_source import PythonSource, installed_source
from nemo_specrollout.installed.versions import NEMO_RL_NEEDED, can_run_nemo_rl, vllm_version
from nemo_specrollout.nemo_rl.patch_point_table import DRIVER_POINTS, WORKER_POINTS
from nemo_specrollout.nemo_rl.patch_points import NEMO_RL, PatchPoint, changes_of, unknown_shared_names

PATCH_POINTS = Section("patch points")
TIMEOUT_S = 300.0
_OTHER_NEMO_RL = (
    f"Use {NEMO_RL_NEEDED} (docs/reference/versions.md), or set policy.generation.specrollout.enabled: false."
)
_BROKEN_IMPORT = "Repair this import: NeMo-RL itself cannot run in this environment without it."
_OTHER_VLLM = "Install an unmodified vLLM of a supported version; if it is one, send us its version."


def diagnose_patch_points() -> Iterator[Diagnosis]:
    """Yields diagnoses of NeMo-RL's patch points, of imports of NeMo-RL's modules, and of vLLM's names.

    The imports take about a minute.
    """
    folder = nemo_rl_checkout()
    if folder is None or not (folder / NEMO_RL).is_dir():
        yield PATCH_POINTS.ok("NeMo-RL", "not installed, nothing to check")
    else:
        yield PATCH_POINTS.ok("NeMo-RL", f"read from its source in {folder}")
        yield from patch_points_of_nemo_rl((*DRIVER_POINTS, *WORKER_POINTS), folder)
        yield from _shared_names(folder)
    if can_run_nemo_rl():
        # A vLLM worker has an environment of its own, so vLLM may be missing here.
        here = DRIVER_POINTS if vllm_version() is None else (*DRIVER_POINTS, *WORKER_POINTS)
        yield from imports_of_nemo_rl(list(dict.fromkeys(point.module for point in here)))
    yield from diagnose_vllm()


def patch_points_of_nemo_rl(points: Sequence[PatchPoint], folder: Path) -> Iterator[Diagnosis]:
    """Yields a diagnosis of each of `points`, which are names of NeMo-RL that this package uses.

    `folder` is the folder that has NeMo-RL's package `nemo_rl`. The package is read, but not imported.
    """
    source = PythonSource(folder, NEMO_RL)
    for point in points:
        changes = changes_of(point, source)
        found = "; ".join(change.text for change in changes)
        if all(change.is_harmless for change in changes):
            yield PATCH_POINTS.ok(name_of(point), f"present; {found}" if found else "present")
        else:
            yield PATCH_POINTS.fail(name_of(point), found, _OTHER_NEMO_RL)


def _shared_names(folder: Path) -> Iterator[Diagnosis]:
    """Yields a failed diagnosis if NeMo-RL's worker extension has a method that vLLM's worker has too.

    An engine cannot start then. Names for which this package has a remedy are left out.
    """
    vllm = installed_source("vllm")
    names = [] if vllm is None else unknown_shared_names(PythonSource(folder, NEMO_RL), VllmSource(vllm))
    if names:
        text = f"{', '.join(names)}: also a name of vLLM's worker"
        yield PATCH_POINTS.fail("worker extension", text, "Install the vLLM that NeMo-RL pins.")


def imports_of_nemo_rl(modules: Sequence[str]) -> Iterator[Diagnosis]:
    """Imports modules in a child process, and yields a failed diagnosis for each import that fails.

    If all imports succeed, it yields one diagnosis that says so. If an import ends the process, the modules after it are not
    tried.
    """
    outcome = run_child(__name__, list(modules), TIMEOUT_S)
    failed = {module: reason for module, reason in outcome.told.items() if reason}
    for module, reason in failed.items():
        yield PATCH_POINTS.fail(f"import {module}", reason, _BROKEN_IMPORT)
    if outcome.failure:
        name = f"import {modules[len(outcome.told)]}, and those after it"
        yield PATCH_POINTS.fail(name, outcome.failure, _BROKEN_IMPORT, outcome.log)
    elif not failed:
        yield PATCH_POINTS.ok("imports of NeMo-RL", f"all {len(modules)} succeed")


def name_of(point: PatchPoint) -> str:
    """Returns a patch point's name as in docs/reference/nemo-rl-patch-points.md, which is MODULE.NAME.

    MODULE is only the last part of the module's dotted name.
    """
    return f"{point.module.rpartition('.')[2]}.{point.name}"


def diagnose_vllm(folder: Path | None = None) -> Iterator[Diagnosis]:
    """Yields a diagnosis with the number of vLLM's names that this package imports, and a failed one for each missing name.

    `folder` is the folder that has the package `vllm`, by default that of the installed vLLM.
    """
    folder = folder or installed_source("vllm")
    if folder is None:
        yield PATCH_POINTS.ok("vLLM", "not installed, nothing to check")
        return
    found = imports_of(VllmSource(folder))
    yield PATCH_POINTS.ok("names of vLLM", f"{sum(found.values())} of {len(found)} present")
    yield from (PATCH_POINTS.fail(name, "absent", _OTHER_VLLM) for name, is_there in found.items() if not is_there)


def _import_all(modules: Any, tell: Tell) -> None:
    """Runs in the child process, and reports for each module why its import fails, or an empty string if it succeeds."""
    for module in modules:
        try:
            importlib.import_module(module)
            tell(module, "")
        except Exception as error:  # an import may raise anything
            tell(module, in_one_line(error))


if __name__ == "__main__":
    answer(_import_all)
