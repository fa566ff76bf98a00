# SPDX-License-Identifier: Apache-2.0
"""An engine of two ranks, two processes on this CPU, makes the same tokens as one rank, with drafts and without."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for a function that all ranks call
}
RANDOM = {"policy": "random"}


PLAIN = '{"drafters": []}'


@functools.cache
def engine(model: Path, ranks: int, block: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "parallel_engine.py"), str(model), str(ranks), block, *options]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"tokens"')))


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose attention heads can be split between two ranks."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("two_heads")
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[:4] *= 5  # it mostly writes these, so that some drafts are right
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head(two_heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained EAGLE-3 head with the policy's LM head, so that some of its drafts are right."""
    from nemo_specrollout.heads.training.head import create_head, save_head

    folder = tmp_path_factory.mktemp("heads") / "untrained"
    save_head(create_head(two_heads), folder)
    return folder


def same_tokens(model: Path, block: dict[str, Any], count: str = "accepted") -> list[int]:
    """Asserts that two ranks under `block` sample the tokens of plain decoding. Returns the `count` of drafts by drafter."""
    one, two = engine(model, 1, PLAIN), engine(model, 2, json.dumps(block))
    assert two["tokens"] == one["tokens"]
    assert two["ranks"] == 2 and len(two["totals"]) == 1  # the rank whose drafts count
    return [sum(row) for _, row in two["totals"][0][count]]


@pytest.mark.parametrize("drafts", ["plain", "drafts"])
def test_two_tensor_parallel_ranks_sample_the_tokens_of_one(two_heads: Path, drafts: str) -> None:
    block = {"budget": RANDOM} if drafts == "drafts" else {"drafters": []}
    assert (sum(same_tokens(two_heads, block)) > 0) == (drafts == "drafts")


@pytest.mark.parametrize("policy", ["random", "auto"])
def test_two_tensor_parallel_ranks_hold_a_part_of_the_head_each(two_heads: Path, head: Path, policy: str) -> None:
    """Only the first rank plans which drafter drafts and how deep; the other rank follows."""
    drafters = [{"type": "eagle3", "model": str(head)}, {"type": "ngram"}]
    block = {"drafters": drafters, "budget": RANDOM if policy == "random" else {"policy": policy}}
    count = "accepted" if policy == "random" else "proposed"  # by measured times few drafts may pay
    assert same_tokens(two_heads, block, count)[0] > 0, "the head had no part in it, so that nothing was shown"


@pytest.mark.parametrize(("policy", "rates"), [("random", "host"), ("auto", "host"), ("random", "late")])
def test_two_ranks_whose_hosts_choose_keep_the_same_drafts(
    two_heads: Path, head: Path, policy: str, rates: str
) -> None:
    """Each rank has its own clock, but they only tell each other the costs from time to time, and no step's decision.

    In each step the first rank tells one tensor: the drafts, their rates, and how sure they are.
    """
    drafters = [{"type": "eagle3", "model": str(head)}, {"type": "ngram"}]
    block = {"drafters": drafters, "budget": RANDOM if policy == "random" else {"policy": policy}}
    two = engine(two_heads, 2, json.dumps(block), rates)
    assert two["tokens"] == engine(two_heads, 1, PLAIN)["tokens"]
    (first, num_told, num_tensors, num_steps), (second, *_) = two["kept_drafts"]
    assert first and first == second
    assert 0 < num_tensors <= num_steps
    if policy == "random":  # the other policy drafts in as many steps as pay on this machine
        assert num_told < len(first) / 2
    assert any(asked != kept for asked, kept in first), "nothing was left out, so nothing was shown"


def test_all_ranks_begin_with_what_the_first_one_has_read(two_heads: Path, head: Path, tmp_path: Path) -> None:
    """Only the first rank writes. The times of the ranks differ, but what they begin with does not."""
    drafters = [{"type": "eagle3", "model": str(head)}, {"type": "ngram"}]
    block = json.dumps({"drafters": drafters, "learned": {"folder": str(tmp_path)}})
    cold, warm = (engine.__wrapped__(two_heads, 2, block) for _ in range(2))
    assert len(list(tmp_path.glob("engine-*.json"))) == 1
    assert [sentence for sentence, *_ in cold["began"]] == [None, None]
    first, second = warm["began"]
    assert first == second
    assert "rates and step times of" in first[0] and first[1:] != cold["began"][0][1:]
    assert cold["tokens"] == warm["tokens"] == engine(two_heads, 1, PLAIN)["tokens"]
