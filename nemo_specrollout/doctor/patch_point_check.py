# SPDX-License-Identifier: Apache-2.0
"""Section "patch points": names of NeMo-RL and vLLM that this package uses. As a script, the process that loads NeMo-RL."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_specrollout.config.versions import NEMO_RL_NEEDED, nemo_rl_version, vllm_version
from nemo_specrollout.doctor.diagnosis import Diagnosis, Section, Tell, answer, run_child
from nemo_specrollout.generation.vllm_names import VllmSource, installed_source, vllm_names
from nemo_specrollout.nemo_rl.patch_points import ALL_PATCH_POINTS, EXTENSION_PATCH_POINTS, PatchPoint, change_of

PATCH_POINTS = Section("patch points")
TIMEOUT_S = 300.0
"""Seconds for loading NeMo-RL."""
_OTHER_NEMO_RL = (
    f"Use {NEMO_RL_NEEDED} (docs/reference/versions.md), or set policy.generation.specrollout.enabled: false."
)
_BROKEN_IMPORT = "Repair this import: NeMo-RL itself cannot run in this environment without it."
_OTHER_VLLM = "Install an unmodified vLLM of a supported version; if it is one, send us its version."


def diagnose_patch_points() -> Iterator[Diagnosis]:
    """Yields diagnoses of the patch points in NeMo-RL and of the names of vLLM.

    Takes a minute if NeMo-RL is installed, because a process loads it.
    """
    if nemo_rl_version() is None:
        yield PATCH_POINTS.ok("NeMo-RL", "not installed, nothing to check")
    else:
        yield from patch_points_of_nemo_rl(ALL_PATCH_POINTS)
        if vllm_version() is None:  # the engine's process has its own environment
            yield PATCH_POINTS.ok("patch points in NeMo-RL's engine", "not checked: vLLM is not in this environment")
        else:
            yield from patch_points_of_nemo_rl(EXTENSION_PATCH_POINTS)
    yield from diagnose_vllm()


def patch_points_of_nemo_rl(points: Sequence[PatchPoint]) -> Iterator[Diagnosis]:
    """Yields a diagnosis of each patch point, up to the one whose import makes the process fail."""
    outcome = run_child(__name__, [asdict(point) for point in points], TIMEOUT_S)
    for point, change in zip(points, outcome.told.values(), strict=False):
        # The import of another package failed, not of a module of NeMo-RL.
        is_import = change.startswith(("absent: its import", "absent: no module")) and "module nemo_rl" not in change
        if change:
            yield PATCH_POINTS.fail(name_of(point), change, _BROKEN_IMPORT if is_import else _OTHER_NEMO_RL)
        else:
            yield PATCH_POINTS.ok(name_of(point), "present")
    if outcome.failure:
        name = f"{name_of(points[len(outcome.told)])}, and those after it"
        yield PATCH_POINTS.fail(name, f"their import was {outcome.failure}", _BROKEN_IMPORT, outcome.log)


def name_of(point: PatchPoint) -> str:
    """Returns a patch point's name with its module, as in docs/reference/nemo-rl-patch-points.md."""
    return f"{point.module.rpartition('.')[2]}.{point.name}"


def diagnose_vllm(folder: Path | None = None) -> Iterator[Diagnosis]:
    """Yields the number of names of vLLM that are present, by use, and a diagnosis of each that is absent or changed.

    `folder` holds the source of another vLLM than the installed one.
    """
    folder = folder or installed_source()
    if folder is None:
        yield PATCH_POINTS.ok("vLLM", "not installed, nothing to check")
        return
    names = vllm_names(VllmSource(folder))
    present, all_ = Counter(n.use for n in names if not n.change), Counter(n.use for n in names)
    for use, count in all_.items():
        if present[use]:
            yield PATCH_POINTS.ok(f"names of vLLM, {use}", f"{present[use]} of {count} present")
    for name in names:
        if name.change:
            yield PATCH_POINTS.fail(name.name, name.change, _OTHER_VLLM)


def _ask_nemo_rl(order: Any, tell: Tell) -> None:
    """Tells, for each patch point of `order` under its number, what changed; an empty string if nothing did."""
    for i, fields in enumerate(order):
        tell(str(i), change_of(PatchPoint(**fields)))


if __name__ == "__main__":
    answer(_ask_nemo_rl)
