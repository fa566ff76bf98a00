# SPDX-License-Identifier: Apache-2.0
"""Calls of the vLLM worker for the online refresh in NeMo-RL: feature stores, teachers and sample stats."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import STEP_ADDER
from safetensors.torch import load_file
from test_parallel import ENVIRONMENT

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.heads.features.feature_store import FeatureReader, newest_sequences

pytestmark = pytest.mark.integration

REQUESTS = [RolloutRequest([5 + i % 4, 6, 7], i % 4, i // 4, exact_length=24) for i in range(8)]
GATHER = """
import sys
from vllm import LLM
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.arguments import with_specrollout
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls

if __name__ == "__main__":
    arguments = with_specrollout({}, SpecrolloutConfig(), "cpu")
    llm = LLM(model=sys.argv[1], distributed_executor_backend="mp", enforce_eager=True, max_model_len=96, dtype="float32",
              skip_tokenizer_init=True, tensor_parallel_size=2, **arguments)
    assert llm.collective_rpc(WorkerCalls.specrollout_save_teacher.__name__, args=(sys.argv[2],)) == [None, None]
"""


class Asked:
    """Engine of the shipped policy with an untrained head, which captures all requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def __call__(self, method: Callable[..., object], *arguments: Any) -> Any:
        return self.engine._llm.collective_rpc(method.__name__, args=arguments)[0]


@pytest.fixture(scope="module")
def asked(start_engine: Callable[..., RolloutEngine], tmp_path_factory: pytest.TempPathFactory) -> Asked:
    from nemo_specrollout.heads.training.head import create_head, save_head

    folder = tmp_path_factory.mktemp("heads") / "untrained"
    save_head(create_head(STEP_ADDER), folder)
    refresh = {"rollout_capture_share": 1.0, "held_out_share": 0.5}
    drafters = [{"type": "eagle3", "model": str(folder)}]
    block = build(SpecrolloutConfig, {"drafters": drafters, "draft_refresh": refresh}, BLOCK_PATH)
    return Asked(start_engine(STEP_ADDER, replace(block, budget=RANDOM), max_new_tokens=24))


def place(folder: Path, asked: Asked) -> dict[str, Any]:
    model = asked.engine._llm.model_config
    source = {
        "policy_name": "policy", "tokenizer_hash": "x", "vocab_size": model.get_vocab_size(),
        "hidden_size": model.get_hidden_size(), "layer_ids": [1, model.hf_config.num_hidden_layers // 2,
                                                              model.hf_config.num_hidden_layers - 1],
    }  # fmt: skip
    return {"folder": str(folder), "max_bytes": 64 << 20, "held_out_share": 0.5, "source": source}


def test_stats_and_features_have_the_version_of_their_policy(asked: Asked, tmp_path: Path) -> None:
    weights = list(load_file(STEP_ADDER / "model.safetensors").items())
    asked.engine.load_weights(weights)
    asked(WorkerCalls.specrollout_policy_is, 7)  # the first refit of a resumed run
    asked.engine.generate(REQUESTS)
    asked.engine.load_weights(weights)  # raises the version by one
    end = asked(WorkerCalls.specrollout_end_step, None)
    assert (end["policy_version"], end["alarms"]) == (8, [])
    sample_stats = [sample for _, sample in end["sample_stats"]]
    assert sample_stats and all(sample["policy_spans"] == ((7, 3),) for sample in sample_stats)
    assert len({seed for seed, _ in end["sample_stats"]}) == len(sample_stats)
    where = place(tmp_path / "features", asked)
    assert asked(WorkerCalls.specrollout_store_features, where) is None
    reader = FeatureReader(tmp_path / "features")
    assert json.loads((reader.folder / "index.json").read_text())["source"] == where["source"]
    found = [*newest_sequences([reader], True, 10**6), *newest_sequences([reader], False, 10**6)]
    assert {f.policy_version for f in found} == {7}
    assert sum(f.num_tokens > f.prompt_length == 3 for f in found) == len(REQUESTS)


def test_the_teacher_is_the_lm_head_and_embedding_of_the_policy(asked: Asked, tmp_path: Path) -> None:
    assert asked(WorkerCalls.specrollout_save_teacher, str(tmp_path / "policy_7.safetensors")) is None
    saved, policy = load_file(tmp_path / "policy_7.safetensors"), load_file(STEP_ADDER / "model.safetensors")
    assert set(saved) == {"model.embed_tokens.weight", "lm_head.weight"} & set(policy)
    assert all(torch.equal(tensor, policy[name].to(tensor.dtype)) for name, tensor in saved.items())


def test_a_failed_write_is_reported_and_stops_nothing(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in asked(WorkerCalls.specrollout_save_teacher, str(tmp_path / "file" / "policy.safetensors"))
    assert len(asked.engine.generate(REQUESTS)) == len(REQUESTS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_write_the_whole_teacher(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "policy")
    (tmp_path / "gather.py").write_text(GATHER)
    command = [sys.executable, tmp_path / "gather.py", tmp_path / "policy", tmp_path / "teacher.safetensors"]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    saved, policy = load_file(tmp_path / "teacher.safetensors"), load_file(tmp_path / "policy" / "model.safetensors")
    assert len(saved) == 2
    assert all(torch.equal(tensor, policy[name]) for name, tensor in saved.items())
