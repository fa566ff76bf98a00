# SPDX-License-Identifier: Apache-2.0
"""Tells which vLLM the engines of a run will have. The Python that runs this module may have another one, or none.

NeMo-RL starts engines in environments of their own, and this module reads from NeMo-RL's checkout what is in them. So a login
node without vLLM gives the same answer as the job, and so does the environment of NeMo-RL's driver.
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
    """The version, or None if nothing on this machine tells it."""
    place: str
    """Where the version is from: `HERE`, `PINNED`, or words that name the engines' environment."""
    here: str | None
    """The version in this Python; None if it has no vLLM."""
    pin: Pin | None
    """The vLLM that NeMo-RL's checkout pins; None without a checkout."""


def vllm_here() -> EngineVllm:
    """Returns the vLLM of this Python, for engines that it starts itself."""
    here = vllm_version()
    return EngineVllm(here, HERE, here, None)


def engine_vllm(tree: Tree, variables: Mapping[str, str] = os.environ) -> EngineVllm:
    """Returns the vLLM that the engines of a config will have.

    In most runs it is the vLLM in the environment that NeMo-RL's checkout has made for its engines. If there is no such
    environment yet, it is the version in `uv.lock`, from which NeMo-RL would make one. For a local run, without a checkout, or
    with `NEMO_RL_PY_EXECUTABLES_SYSTEM=1`, by which NeMo-RL uses one Python for all, it is the vLLM of this Python.
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
    """Yields findings about what a user may not expect of the engines' vLLM.

    They tell if NeMo-RL's pin has a problem, if this Python has another version, or if the engines' version is not the pinned
    one.
    """
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
