# SPDX-License-Identifier: Apache-2.0
"""Tells which version of vLLM the engines of a run will have.

NeMo-RL starts engines in a Python environment of their own. So their vLLM may differ from the one in this Python, which may
have none. This module reads their version from NeMo-RL's checkout. Therefore a login node gives the same answer as the job.
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
    """What is known about the vLLM of a run's engines before they start."""

    version: str | None
    """The version of the engines' vLLM, or None if nothing on this machine tells it."""
    place: str
    """Words for where `version` was found: `HERE`, `PINNED`, or a phrase that names the engines' environment."""
    here: str | None
    """The version of vLLM in this Python, or None if it has no vLLM."""
    pin: Pin | None
    """The vLLM that NeMo-RL's checkout pins, or None if there is no checkout."""


def vllm_here() -> EngineVllm:
    """Returns the vLLM of this Python. It is the right answer if this process starts engines itself."""
    here = vllm_version()
    return EngineVllm(here, HERE, here, None)


def engine_vllm(tree: Tree, variables: Mapping[str, str] = os.environ) -> EngineVllm:
    """Returns the vLLM that the engines of a config will have. `variables` are the environment variables of the run.

    In most runs, this is the vLLM in the Python environment that NeMo-RL has made for its engines. If NeMo-RL has not made the
    environment yet, this is the vLLM in NeMo-RL's `uv.lock`, because the environment will be made from that file. In a local
    run, or if there is no checkout of NeMo-RL, this is the vLLM of this Python. The same holds with
    `NEMO_RL_PY_EXECUTABLES_SYSTEM=1`, because NeMo-RL then uses one Python for all processes.
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
    """Yields findings if the vLLM of a run's engines is another one than the user may expect.

    That is so if the engines' version differs from the version in this Python, or from the version that NeMo-RL pins. A
    problem with NeMo-RL's pin is a finding too.
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
