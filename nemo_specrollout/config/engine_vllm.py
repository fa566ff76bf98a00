# SPDX-License-Identifier: Apache-2.0
"""Which vLLM the engines of a run will have. It need not be the one of the Python at hand, or there may be none here.

NeMo-RL starts engines in environments of their own. A login node without vLLM therefore gives the answer of the job, and so
does the environment of NeMo-RL's driver.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, Finding, Tree, at, nemo_rl_checkout, runtime_of
from nemo_specrollout.installed.pinned_vllm import SYSTEM_PYTHON, Pin, built_vllm, read_pin
from nemo_specrollout.installed.versions import vllm_version

HERE = "here"
PINNED = "pinned by NeMo-RL's checkout"


@dataclass(frozen=True)
class EngineVllm:
    """The vLLM of a run's engines, as far as it is known before they start."""

    version: str | None
    """None if nothing here tells."""
    place: str
    """Where the version is from: `HERE`, `PINNED`, or words that name the engines' environment."""
    here: str | None
    """The version in the Python at hand; None if there is none."""
    pin: Pin | None
    """What NeMo-RL's checkout says; None without a checkout."""


def vllm_here() -> EngineVllm:
    """Returns the vLLM of the Python at hand, for engines that this Python starts itself."""
    here = vllm_version()
    return EngineVllm(here, HERE, here, None)


def engine_vllm(tree: Tree, variables: Mapping[str, str] = os.environ) -> EngineVllm:
    """Returns the vLLM that the engines of a config will have.

    With `NEMO_RL_PY_EXECUTABLES_SYSTEM=1` it is the one here. Else it is what the engines' environment of NeMo-RL's checkout
    has, or would get from `uv.lock` when it is made. Without a checkout, and for a local run, it is the one here.
    """
    here = vllm_version()
    checkout = nemo_rl_checkout() if runtime_of(tree) == "nemo_rl" else None
    pin = None if checkout is None else read_pin(checkout)
    is_shared = variables.get(SYSTEM_PYTHON) == "1" and here is not None
    if checkout is None or is_shared:
        return EngineVllm(here, HERE, here, pin)
    is_async = bool(at(tree, f"{VLLM_CFG}.async_engine"))
    if (built := built_vllm(checkout, is_async=is_async, variables=variables)) is not None:
        version, environment = built
        return EngineVllm(version, f"in the engines' environment {environment}", here, pin)
    if pin is None or pin.version is None:
        return EngineVllm(here, HERE, here, pin)
    return EngineVllm(pin.version, PINNED, here, pin)


def vllm_differences(vllm: EngineVllm) -> Iterator[Finding]:
    """Yields a finding for each thing about the engines' vLLM that a user may not expect: another one here, a doubtful pin."""
    if vllm.pin is not None and (problem := vllm.pin.problem) is not None:
        yield Finding("vllm", problem, "warning")
    if vllm.place != HERE and vllm.here is not None and vllm.here != vllm.version:
        text = (
            f"{vllm.here} is in this Python, but the engines get {vllm.version}, {vllm.place}, so that one counts here. With "
            f"{SYSTEM_PYTHON}=1 they get the one in this Python"
        )
        yield Finding("vllm", text, "note")
    if vllm.pin is None or vllm.pin.version in (None, vllm.version):
        return
    if vllm.place != PINNED:
        text = (
            f"{vllm.version} ({vllm.place}) is not what NeMo-RL pins, {vllm.pin.version}; its authors test it with its pin "
            "only (docs/reference/nemo-rl-vllm.md)"
        )
        yield Finding("vllm", text, "note")
