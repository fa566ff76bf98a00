# SPDX-License-Identifier: Apache-2.0
"""The tables of what is called by name: calls of vLLM workers and engine actors, and modules of kernels."""

import ast
import inspect
from importlib.util import find_spec

import pytest
from conftest import ROOT

from lab.vllm_on_cpu import own_kernels
from nemo_specrollout.generation.engine.remote_calls import EngineActorCalls, WorkerCalls
from nemo_specrollout.installed.python_source import PythonSource
from nemo_specrollout.sampling.platforms import KernelModule

pytestmark = pytest.mark.unit

PRODUCT = "nemo_specrollout"
PREFIX = "specrollout_"
TABLES = ROOT / PRODUCT / "generation" / "engine" / "remote_calls.py"
WORKER = f"{PRODUCT}.generation.vllm_worker.VllmWorkerMixin"
ENGINE_ACTORS = f"{PRODUCT}.nemo_rl.engine_actors"
SEEDED, SYNCHRONOUS, ASYNCHRONOUS = (
    f"{ENGINE_ACTORS}.{name}" for name in ("_SeededEngine", "EngineActor", "AsyncEngineActor")
)


def calls(table: type) -> set[str]:
    return {name for name in vars(table) if name.startswith(PREFIX)}


def answers(class_name: str) -> set[str]:
    """Returns the calls that the body of a class defines. Reads its source, because NeMo-RL may be absent."""
    _, found = PythonSource(ROOT, PRODUCT).definition(class_name)
    assert isinstance(found, ast.ClassDef)
    methods = [node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {name for name in methods if name.startswith(PREFIX)}


def test_the_vllm_worker_answers_every_call_and_no_other() -> None:
    assert answers(WORKER) == calls(WorkerCalls)


def test_the_engine_actors_answer_every_call_and_no_other() -> None:
    shared = answers(SEEDED)
    assert shared | answers(ASYNCHRONOUS) == calls(EngineActorCalls)
    only_asynchronous = {
        EngineActorCalls.specrollout_leave_exchange.__name__,
        EngineActorCalls.specrollout_chat_prompts.__name__,
    }
    assert shared | answers(SYNCHRONOUS) == calls(EngineActorCalls) - only_asynchronous


@pytest.mark.parametrize("name", sorted(calls(EngineActorCalls)))
def test_the_calls_of_engine_actors_are_such_as_nemo_rl_sends(name: str) -> None:
    """It sends arguments by their names only. An `async` method would put synchronous engines on an event loop."""
    method = getattr(EngineActorCalls, name)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    assert {parameter.kind for parameter in parameters} <= {inspect.Parameter.KEYWORD_ONLY}
    assert not inspect.iscoroutinefunction(method)


def test_no_caller_writes_the_name_of_a_call() -> None:
    names = calls(WorkerCalls) | calls(EngineActorCalls)
    files = [path for package in (PRODUCT, "lab") for path in (ROOT / package).rglob("*.py")]
    written = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in (*names, PREFIX) and path != TABLES
    ]
    # The alarm of a failed call leaves the prefix out.
    assert [line.partition(":")[0] for line in written] == [f"{PRODUCT}/nemo_rl/head_refresh.py"]


@pytest.mark.parametrize("module", KernelModule)
def test_each_module_of_kernels_exists_and_has_a_body_for_a_cpu(module: KernelModule) -> None:
    assert find_spec(module) is not None
    assert find_spec(own_kernels.PLATFORM.kernels[module]) is not None
