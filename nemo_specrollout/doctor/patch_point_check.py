# SPDX-License-Identifier: Apache-2.0
"""Section "patch points": what of NeMo-RL and vLLM this package relies on, and whether it is there as it was."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from nemo_specrollout.config.versions import nemo_rl_version, vllm_version
from nemo_specrollout.doctor.child import Outcome, run_child
from nemo_specrollout.doctor.diagnosis import Diagnosis, State
from nemo_specrollout.generation.vllm_names import vllm_names
from nemo_specrollout.generation.vllm_source import VllmSource, installed_source
from nemo_specrollout.nemo_rl.patch_points import ALL_PATCH_POINTS, EXTENSION_PATCH_POINTS, PatchPoint

SECTION = "patch points"
TIMEOUT_S = 300.0
_OTHER_NEMO_RL = (
    "Use main of August 2026 (docs/reference/versions.md), or set policy.generation.specrollout.enabled: false."
)
_BROKEN_IMPORT = "Mend this import: NeMo-RL itself cannot run in this environment without it."
_OTHER_VLLM = "Install a vLLM that is supported, unchanged, and send us the vLLM version if it is supported."


def diagnose_nemo_rl() -> Iterator[Diagnosis]:
    """Diagnoses of all holds on NeMo-RL. Takes a minute: NeMo-RL is loaded in a process of its own."""
    if nemo_rl_version() is None:
        yield Diagnosis(SECTION, "NeMo-RL", State.OK, "not installed, nothing to look at")
        return
    yield from patch_points_of_nemo_rl(ALL_PATCH_POINTS)
    if vllm_version() is None:  # the engine's process has an environment of its own
        text = "not looked at: vLLM is not in this environment"
        yield Diagnosis(SECTION, "holds in NeMo-RL's engine", State.OK, text)
        return
    yield from patch_points_of_nemo_rl(EXTENSION_PATCH_POINTS)


def patch_points_of_nemo_rl(holds: Sequence[PatchPoint], timeout_s: float = TIMEOUT_S) -> Iterator[Diagnosis]:
    """A diagnosis of each hold. One for all if the process that loads them fails."""
    outcome = run_child("nemo_specrollout.doctor.patch_point_child", [asdict(hold) for hold in holds], timeout_s)
    for i, hold in enumerate(holds):
        if str(i) in outcome.told:
            yield _of_patch_point(hold, outcome.told[str(i)])
    if outcome.failure:
        yield _unfinished(holds[len(outcome.told)], outcome)


def _of_patch_point(hold: PatchPoint, change: str) -> Diagnosis:
    name = name_of(hold)
    if not change:
        return Diagnosis(SECTION, name, State.OK, "present")
    to_do = _BROKEN_IMPORT if _is_import(change) else _OTHER_NEMO_RL
    return Diagnosis(SECTION, name, State.FAIL, change, to_do)


def name_of(hold: PatchPoint) -> str:
    """A hold's name with the file that it is in, as docs/reference/nemo-rl-patch-points.md has it."""
    return f"{hold.module.rpartition('.')[2]}.{hold.name}"


def _is_import(change: str) -> bool:
    """Whether an import fails, but for one of a module of NeMo-RL's own."""
    return change.startswith(("absent: its import", "absent: no module")) and "no module nemo_rl" not in change


def _unfinished(hold: PatchPoint, outcome: Outcome) -> Diagnosis:
    name = f"{name_of(hold)}, and those after it"
    return Diagnosis(SECTION, name, State.FAIL, f"their import was {outcome.failure}", _BROKEN_IMPORT, outcome.log)


def diagnose_vllm(folder: Path | None = None) -> Iterator[Diagnosis]:
    """Diagnoses of the names of vLLM: a count for each use, and each name that is gone. `folder` holds another vLLM."""
    folder = folder or installed_source()
    if folder is None:
        yield Diagnosis(SECTION, "vLLM", State.OK, "not installed, nothing to look at")
        return
    names = vllm_names(VllmSource(folder))
    present, all_ = Counter(n.use for n in names if not n.change), Counter(n.use for n in names)
    for use, count in all_.items():
        if present[use]:
            yield Diagnosis(SECTION, f"names of vLLM, {use}", State.OK, f"{present[use]} of {count} present")
    for name in names:
        if name.change:
            yield Diagnosis(SECTION, name.name, State.FAIL, name.change, _OTHER_VLLM)
