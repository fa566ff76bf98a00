# SPDX-License-Identifier: Apache-2.0
"""The arguments and worker classes of an engine under NeMo-RL; tests/nemo_rl has the engine itself."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from nemo_rl_standin import make_nemo_rl
from vllm import SamplingParams

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.nemo_rl.engine_inputs import MTP_FROM_FOLDER, RequestSeeds, engine_arguments
from nemo_specrollout.nemo_rl.run_facts import block_of

pytestmark = pytest.mark.integration

# The part of NeMo-RL's worker extension that ours overrides.


def arguments(drafters: list[dict[str, Any]], **known: Any) -> dict[str, Any]:
    native = {"worker_extension_cls": "a.VllmInternalWorkerExtension", "load_format": "dummy"}
    config = {"specrollout": {"drafters": drafters}, "vllm_cfg": {}, **known}
    return engine_arguments(native, config, block_of(config))


def test_with_text_drafters_the_first_refit_brings_all_weights() -> None:
    made = arguments([{"type": "ngram"}])
    assert made["load_format"] == "dummy" and MTP_FROM_FOLDER not in made["additional_config"]
    assert made["worker_cls"] == "nemo_specrollout.nemo_rl.vllm_workers.NemoRlWorker"


@pytest.mark.parametrize("is_trained", [False, True])
def test_native_heads_come_by_refit_only_if_they_are_trained(is_trained: bool) -> None:
    made = arguments([{"type": "mtp"}], _mtp_weights_from_refit=is_trained)
    assert made["load_format"] == "auto" and made["additional_config"][MTP_FROM_FOLDER] is not is_trained


def test_samples_of_one_request_differ_and_min_p_is_taken(
    tiny_model: Path, start_engine: Callable[..., RolloutEngine]
) -> None:
    """Sends requests as over HTTP: without rows, and with options that vLLM refuses beside drafts."""
    engine, seeds = start_engine(tiny_model, SpecrolloutConfig()), RequestSeeds()
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 5, 6, 7, 8]}]

    def samples(seed: int | None) -> list[tuple[int, ...]]:
        params = SamplingParams(n=4, max_tokens=12, min_p=0.01, logit_bias={9: -3.0}, detokenize=False, seed=seed)
        (made,) = engine._llm.generate(prompts, seeds.of_requests(params, prompts), use_tqdm=False)
        return [tuple(sample.token_ids) for sample in made.outputs]

    assert len(set(samples(None))) == 4 and seeds.num_derived == 1
    assert samples(77) == samples(77) and len(set(samples(77))) == 4


# vLLM's registration of kernels for a CPU inspects all loaded modules, and fails on llvmlite's.
NO_NUMBA = """
import sys
import nemo_specrollout.nemo_rl.engine_inputs
assert 'llvmlite' not in sys.modules
"""
# vLLM's CPU worker replaces streams and events of torch.cuda in its process.
NOTHING_OF_A_CPU = """
import pkgutil
import torch
parts = {name: getattr(torch.cuda, name) for name in ("Event", "Stream", "current_stream", "synchronize")}
pin_memory = torch.Tensor.pin_memory
from nemo_specrollout.generation.engine import compat
compat.device_type = lambda: 'cuda'
import nemo_specrollout.drafters, nemo_specrollout.generation, nemo_specrollout.sampling
for package in (nemo_specrollout.drafters, nemo_specrollout.generation, nemo_specrollout.sampling):
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.endswith('_triton'):
            __import__(f'{package.__name__}.{module.name}')
from nemo_specrollout.nemo_rl import vllm_workers as gpu
assert 'nemo_specrollout.generation.vllm_worker' in sys.modules
assert all(getattr(torch.cuda, name) is part for name, part in parts.items())
assert torch.Tensor.pin_memory is pin_memory
for worker in (gpu.NemoRlWorker, gpu.NemoRlCheckpointEngineWorker):
    assert worker._get_drafter_model is gpu.ExtensionOverrides._get_drafter_model
assert not [name for name in sys.modules if name.startswith('vllm.v1.worker.cpu')]
"""
HEADS_OF_THE_FOLDER = """
from types import SimpleNamespace
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from nemo_specrollout.nemo_rl.vllm_workers import MTP_FROM_FOLDER, ExtensionOverrides

class Base:
    def load_model(self): ...

class Worker(ExtensionOverrides, VllmInternalWorkerExtension, Base):
    def __init__(self, **additional):
        load_config = SimpleNamespace(load_format='auto')
        self.vllm_config = SimpleNamespace(
            additional_config=additional, load_config=load_config, speculative_config=None
        )
        self.load_model()

assert Worker(**{MTP_FROM_FOLDER: True})._mtp_drafter_from_disk
assert not Worker(**{MTP_FROM_FOLDER: False})._mtp_drafter_from_disk and not Worker()._mtp_drafter_from_disk
"""


def test_what_the_workers_of_a_gpu_import_and_override(tmp_path: Path) -> None:
    """In a process of its own, with a stand-in for NeMo-RL. It imports engine arguments, then workers, then the stand-in."""
    make_nemo_rl(tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    environment.pop("NEMO_SPECROLLOUT_V2_ON_CPU", None)
    run = subprocess.run(
        [sys.executable, "-c", NO_NUMBA + NOTHING_OF_A_CPU + HEADS_OF_THE_FOLDER],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout + run.stderr
