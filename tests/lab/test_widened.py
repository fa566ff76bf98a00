# SPDX-License-Identifier: Apache-2.0
"""A policy and its head that are widened to a larger model's cost: the same logits, tokens and acceptance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from lab.gpu.drained import acceptance, drain
from lab.gpu.gpu_stage import GIB, HEAD, POLICY, STOCK, block, start_engine, task_requests
from lab.gpu.one_update import _moved
from lab.gpu.real_8b import load
from lab.gpu.widened_loader import LOAD_FORMAT, register, widened_folder
from lab.policies.widened import Shape, Widening, read_policy, widened, write_head, write_policy
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.arguments import set_process_environment
from nemo_specrollout.heads.features.features import hf_features, load_policy
from nemo_specrollout.heads.training.acceptance import measure_acceptance
from nemo_specrollout.heads.training.head import load_eagle3_head

SMOLLM2, SMOLLM2_HEAD = ROOT / "models" / "smollm2_start", ROOT / "examples" / "models" / "smollm2_eagle3"
WIDE = Shape(384, 1024, 6, 12, 4)
"""The shipped policy has 256, 704, 4 layers, 4 heads and 2 of keys and values."""
WIDE_SMOLLM2 = Shape(1152, 3072, 33, 16, 4)
MAX_GAP = 1e-4
unit = pytest.mark.unit


def logits_of(folder: Path, ids_BT: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(ids_BT, use_cache=False).logits


def written(policy: Path, head: Path, target: Shape, folder: Path) -> tuple[Path, Path]:
    """Writes the pair, widened, the policy in float32: in bfloat16 scaled norms would be rounded. Returns both folders."""
    from safetensors.torch import save_file

    write_policy(policy, target, folder / "policy")
    config, tensors = read_policy(policy)
    wide = widened(config, {name: tensor.float() for name, tensor in tensors.items()}, target)
    save_file({name: t.contiguous() for name, t in wide}, folder / "policy" / "model.safetensors", {"format": "pt"})
    write_head(head, target, folder / "head")
    return folder / "policy", folder / "head"


def assert_same(policy: Path, head: Path, wide: tuple[Path, Path], texts: Sequence[tuple[list[int], int]]) -> None:
    """Compares logits, likeliest tokens, and the head's acceptance on texts, given as tokens and length of the prompt."""
    ids_BT = torch.tensor([ids[:40] for ids, _ in texts])
    narrow_logits, wide_logits = (logits_of(folder, ids_BT) for folder in (policy, wide[0]))
    assert (narrow_logits - wide_logits).abs().max() < MAX_GAP
    assert torch.equal(narrow_logits.argmax(-1), wide_logits.argmax(-1))
    lengths = []
    for of_policy, of_head in ((policy, head), wide):
        loaded = load_eagle3_head(of_head, of_policy)
        features = hf_features(load_policy(of_policy), texts, loaded.layer_ids)
        lengths.append(measure_acceptance(loaded, features, 3, 1.0).expected_length)
    assert lengths[0] == pytest.approx(lengths[1], abs=2e-3)
    assert lengths[0] > 1.2, "the head hardly drafts a right token here, so the test shows little"


@unit
def test_a_widened_policy_and_its_head_compute_the_same(tmp_path: Path) -> None:
    texts = [([*r.prompt_token_ids, *r.prompt_token_ids] * 4, 20) for r in task_requests(4, 1)]
    wide = written(POLICY, HEAD, WIDE, tmp_path)
    assert_same(POLICY, HEAD, wide, [(ids[:64], start) for ids, start in texts])
    tensors = load_file(wide[0] / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (384, 1024)
    assert sum(t.count_nonzero() for t in tensors.values()) > 0.6 * sum(t.numel() for t in tensors.values())


@unit
def test_a_widening_that_cannot_be_is_refused() -> None:
    config, tensors = read_policy(POLICY)
    for target, words in ((Shape(255, 704, 4, 4, 2), "hidden_size"), (Shape(256, 704, 4, 4, 4), "heads in a group")):
        with pytest.raises(ValueError, match=words):
            Widening(config, target)
    with pytest.raises(ValueError, match="nothing is known"):
        Widening(config, WIDE).tensor("model.layers.0.mlp.experts.weight", tensors["model.norm.weight"])


@unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_moves_rounded_weights_by_its_size_on_average(dtype: torch.dtype) -> None:
    weight = torch.empty(400_000).normal_(std=0.1, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:100] = 0
    moved = _moved(weight, torch.full((len(weight),), 5e-6), torch.Generator().manual_seed(1))
    assert moved.dtype == dtype and not moved[:100].any()
    change = (moved.double() - weight.double())[100:]
    error = float(change.std()) / len(change) ** 0.5
    assert abs(float(change.mean()) - 5e-6) < 4 * error + 1e-8
    if dtype == torch.bfloat16:
        assert np.mean((change != 0).numpy()) < 0.2, "rounding leaves most weights where they were"


def run_pair(options: Mapping[str, Any], folder: Path, head: Path, way: SpecrolloutConfig) -> tuple[Any, ...]:
    """Returns tokens and records of a batch at temperatures 0 and 1."""
    engine = start_engine(folder, way, eager=True, max_num_seqs=8, kv_cache_memory_bytes=GIB // 4, **options)
    found = [drain(engine, [r for r in task_requests(4, 2)], 48)]
    tokens = [rollout.token_ids for rollout in found[0].rollouts]
    greedy = [rollout.token_ids for rollout in engine.generate(task_requests(4, 1), temperature=0.0, max_tokens=48)]
    return engine, found[0], tokens, greedy


@pytest.mark.slow
@pytest.mark.integration
def test_vllm_makes_the_same_tokens_of_a_widened_pair(tmp_path: Path) -> None:
    """The weights are made while the engine loads, as on a GPU. Older weights and a change back are loaded in place."""
    set_process_environment()
    register()
    config, tensors = read_policy(POLICY)
    source = tmp_path / "source"  # in float32, because scaled norms are not rounded then
    write_policy(POLICY, Shape.of(config), source)
    from safetensors.torch import save_file

    save_file({n: t.float().contiguous() for n, t in tensors.items()}, source / "model.safetensors", {"format": "pt"})
    wide = widened_folder(source, WIDE, tmp_path / "wide")
    write_head(HEAD, WIDE, tmp_path / "head")
    assert not (wide / "model.safetensors").exists()
    found = []
    for folder, head, options in ((POLICY, HEAD, {}), (wide, tmp_path / "head", {"load_format": LOAD_FORMAT})):
        way = block("eagle3", budget=BudgetConfig("fixed", k=3), head=head)
        engine, drained, tokens, greedy = run_pair(options, folder, head, way)
        assert engine.counters().num_accepted > 0
        found.append((tokens, greedy, drained.num_with.tolist()))
        if options:
            load(engine, config, {n: t.float() * 1.05 for n, t in tensors.items()}, WIDE)
            assert drain(engine, task_requests(4, 2), 48).num_tokens and engine.counters().num_accepted > 0
            load(engine, config, {n: t.float() for n, t in tensors.items()}, WIDE)
            again = drain(engine, task_requests(4, 2), 48)
            assert [rollout.token_ids for rollout in again.rollouts] == tokens
        engine.close()
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.integration
def test_a_drained_batch_is_recorded_alike_for_vllms_own_eagle3(tmp_path: Path) -> None:
    speculative = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 3}
    engine = start_engine(POLICY, STOCK, eager=True, max_num_seqs=8, speculative_config=speculative)
    drained = drain(engine, task_requests(4, 2), 48)
    engine.close()
    assert drained.num_tokens == sum(len(rollout.token_ids) for rollout in drained.rollouts)
    assert sum(tokens for _, tokens in drained.bands().values()) == drained.num_tokens
    assert sum(seconds for seconds, _ in drained.bands().values()) == pytest.approx(drained.seconds)
    shares = acceptance([drained])
    assert shares[0] > 0.3 and shares == sorted(shares, reverse=True) and shares[3] == 0.0
    assert drained.running_S[0] == 8 and (np.diff(drained.running_S) <= 0).all()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="`make smollm2` makes the model")
def test_a_widened_smollm2_and_its_head_compute_the_same(tmp_path: Path) -> None:
    from lab.gpu.real_prompts import RealPrompts

    requests = RealPrompts(SMOLLM2).requests(0, 4, 1)
    texts = [([*r.prompt_token_ids][:100], 60) for r in requests]
    assert_same(SMOLLM2, SMOLLM2_HEAD, written(SMOLLM2, SMOLLM2_HEAD, WIDE_SMOLLM2, tmp_path), texts)
