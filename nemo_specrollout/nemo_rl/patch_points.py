# SPDX-License-Identifier: Apache-2.0
"""Defines patch points of NeMo-RL, and compares an installed NeMo-RL with them.

A patch point is a name of NeMo-RL that this package replaces, overrides, calls or assigns. `patch_point_table.py` lists all of
them. `install` checks that they exist before anything starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.installed.python_source import PythonSource, Signature, installed_source
from nemo_specrollout.installed.versions import NEMO_RL_NEEDED

NEMO_RL = "nemo_rl"
EXTENSIONS = tuple(
    f"{NEMO_RL}.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension{suffix}"
    for suffix in ("", "WithCheckpointEngine")
)
SHARED_NAMES = ("synchronize_device",)
"""Names that NeMo-RL's worker extension and vLLM's worker may share. Both methods do the same, and vLLM keeps its own."""

Result = Literal["nothing", "value", "stream", "async nothing", "async value", "async stream"]
"""Kind of a function's result, as in `Signature.result`."""


class Use(StrEnum):
    PASSED_ON = "passed on"
    """Replaced or overridden by code of this package, which passes on all arguments and the result."""
    CALLED = "called"
    STORED = "stored"
    """Assigned by this package, so that NeMo-RL reads the assigned value."""


@dataclass(frozen=True)
class PatchPoint:
    """A name of NeMo-RL that this package uses, and what must be true of it."""

    module: str
    """Full name of the NeMo-RL module in which `name` is defined."""
    name: str
    """Name in the module. A method has its class before a dot."""
    use: Use = Use.PASSED_ON
    needed: tuple[str, ...] = ()
    """Parameters that the function must take."""
    known: tuple[str, ...] = ()
    """Other parameters that the function takes in the NeMo-RL for which this package was written."""
    result: Result = "nothing"
    """Kind of the function's result in the NeMo-RL for which this package was written."""


@dataclass(frozen=True)
class Change:
    """A way in which an installed NeMo-RL differs from what a patch point expects."""

    text: str
    is_harmless: bool = False
    """Whether this package works in spite of the change, because it passes on all arguments and the result as they are."""


def changes_of(point: PatchPoint, source: PythonSource) -> list[Change]:
    """Returns how the NeMo-RL of `source` differs from what a patch point expects."""
    name = f"{point.module}.{point.name}"
    exists, _ = source.definition(name)
    if not exists:
        return [Change("absent")]
    found = source.signature(name)
    if found is None or point.use is Use.STORED:
        return [Change("changed: it is not a function any more")] if point.needed else []
    return [*_parameter_changes(point, found), *_result_changes(point, found)]


def _parameter_changes(point: PatchPoint, found: Signature) -> list[Change]:
    missing = [p for p in point.needed if p not in found.parameters]
    added = [p for p in found.parameters if p not in point.needed + point.known]
    changes = [Change(f"changed: it no longer takes {', '.join(missing)}")] if missing else []
    if point.use is Use.CALLED:
        new = [p for p in added if p in found.required]
        changes += [Change(f"changed: it needs {', '.join(new)} now")] if new else []
    elif added:
        changes.append(Change(f"it also takes {', '.join(added)}: passed on", is_harmless=True))
    return changes


def _result_changes(point: PatchPoint, found: Signature) -> list[Change]:
    was = point.result
    now = found.result
    if was == now:
        return []
    kinds = {was, now}
    if kinds in ({"nothing", "value"}, {"async nothing", "async value"}) and point.use is Use.PASSED_ON:
        what = now.rpartition(" ")[2].replace("value", "a value")
        return [Change(f"its result is {what} now: passed on", is_harmless=True)]
    is_unused = point.use is Use.CALLED and was == "nothing" and now == "value"
    return [] if is_unused else [Change(f"changed: its result is {now}, not {was}")]


def check_patch_points(points: Sequence[PatchPoint], source: PythonSource | None = None) -> None:
    """Raises ConfigError if a NeMo-RL lacks one of `points`, or has it in a form that this package cannot use.

    `source` is the source of that NeMo-RL, or None for the installed one.
    """
    if source is None:
        folder = installed_source(NEMO_RL)
        if folder is None:
            raise ConfigError("NeMo-RL is not in this Python environment")
        source = PythonSource(folder, NEMO_RL)
    changes = [
        f"{p.module}.{p.name} is {change.text}"
        for p in points
        for change in changes_of(p, source)
        if not change.is_harmless
    ]
    if changes:
        raise ConfigError(
            f"this NeMo-RL is not one that specrollout knows: {'; '.join(changes)}. Use "
            f"{NEMO_RL_NEEDED} (docs/reference/nemo-rl-patch-points.md), or set policy.generation.specrollout.enabled: false"
        )


def unknown_shared_names(nemo_rl: PythonSource, vllm: PythonSource) -> list[str]:
    """Returns the attribute names that NeMo-RL's worker extensions and vLLM's worker both have, except `SHARED_NAMES`."""
    extension = set().union(*(nemo_rl.members(name) for name in EXTENSIONS))
    shared = extension & set(vllm.members("vllm.v1.worker.gpu_worker.Worker"))
    return sorted(name for name in shared.difference(SHARED_NAMES) if not name.startswith("__"))
