# SPDX-License-Identifier: Apache-2.0
"""Where a head's features and its policy come from: Megatron's forwards against transformers, checkpoints read back."""

import argparse
import itertools
import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import STEP_ADDER
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load_file
from test_megatron import write_model as write_random_model
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from nemo_specrollout.config.run_config import OptimizerConfig
from nemo_specrollout.local import megatron_host, megatron_model
from nemo_specrollout.local.megatron_model import TokenBatch, token_logprobs
from nemo_specrollout.local.policy import MegatronPolicy
from nemo_specrollout.training.checkpoints.policy_shape import PolicyShape
from nemo_specrollout.training.checkpoints.policy_source import find_policy, policy_folder
from nemo_specrollout.training.checkpoints.weight_map import FusedQkv, weights_of_shape
from nemo_specrollout.training.features.features import SequenceFeatures
from nemo_specrollout.training.features.megatron_features import (
    KeptRow,
    MegatronFeatureCapture,
    packed_rows,
    padded_rows,
)

pytestmark = pytest.mark.integration

LAYER_IDS = (3, 0, 2)
KEPT = (4, 0, 3)
ATOL = 1e-4  # the residual stream reaches some tens


def load_policy(folder: Path, size: int = 1) -> MegatronPolicy:
    return MegatronPolicy.from_pretrained(folder, optimizer=OptimizerConfig(lr=1e-3), tensor_model_parallel_size=size)


def make_batch() -> TokenBatch:
    """Rows of 2 to 40 tokens: 40 and 39 at most, so that they can be cut over two ranks."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(0, 96, (n,), generator=generator).tolist()  # noqa: E731
    sizes = [(3, 9), (1, 40), (1, 1), (2, 17), (7, 0)]
    return TokenBatch.from_sequences([draw(p) for p, _ in sizes], [draw(r) for _, r in sizes], pad_id=0)


def rows_of(batch: TokenBatch, rows: Sequence[int]) -> tuple[KeptRow, ...]:
    return padded_rows(batch.tokens_BT, batch.lengths_B, batch.prompt_lengths_B, rows)


@torch.no_grad()
def hugging_face_features(tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """aux [T, A * H] and final [T, H] of the shipped policy, in float32."""
    model = Qwen3ForCausalLM.from_pretrained(STEP_ADDER, dtype=torch.float32)
    states = model(tokens_T[None], output_hidden_states=True).hidden_states
    return torch.cat([states[i][0] for i in LAYER_IDS], 1), states[-1][0]


def assert_features(features: Sequence[SequenceFeatures], rows: Sequence[Tensor], what: str) -> None:
    """Equal to transformers' up to rounding, which is printed (run with -s)."""
    assert len(features) == len(rows)
    worst_aux = worst_final = 0.0
    for ours, tokens_T in zip(features, rows, strict=True):
        assert ours.token_ids_T.tolist() == tokens_T[: ours.num_tokens].tolist()
        assert ours.num_tokens >= len(tokens_T) - 1
        aux_TF, final_TH = hugging_face_features(tokens_T)
        worst_aux = max(worst_aux, float((ours.aux_TF - aux_TF[: ours.num_tokens]).abs().max()))
        worst_final = max(worst_final, float((ours.final_TH - final_TH[: ours.num_tokens]).abs().max()))
    print(f"{what}: max abs difference {worst_aux:.2e} auxiliary, {worst_final:.2e} final")
    assert max(worst_aux, worst_final) < ATOL


# ---- one rank ----


@pytest.fixture(scope="module")
def policy() -> MegatronPolicy:
    return load_policy(STEP_ADDER)


def test_features_of_a_logprob_pass_equal_transformers(policy: MegatronPolicy) -> None:
    """In micro batches, some rows only, one forward with none of them."""
    batch, budget = make_batch(), 30
    forwards, order = [], []
    for rows_b, longest in batch.micro_batches(budget):
        part = batch.select(rows_b)
        kept = [i for i, row in enumerate(rows_b.tolist()) if row in KEPT]
        forwards.append(rows_of(replace(part, tokens_BT=part.tokens_BT[:, :longest]), kept))
        order += [int(rows_b[i]) for i in kept]
    with MegatronFeatureCapture(policy.model, LAYER_IDS, forwards, policy_version=7) as capture:
        policy.logprobs(batch, micro_batch_tokens=budget)
    features = capture.collect()
    assert_features(features, [batch.tokens_BT[i, : int(batch.lengths_B[i])] for i in order], "TP=1")
    assert [f.prompt_length for f in features] == batch.prompt_lengths_B[order].tolist()
    assert all(f.policy_version == 7 and f.aux_TF.shape[1] == 3 * 256 for f in features)
    assert () in forwards


def test_a_packed_forward_gives_its_spans(policy: MegatronPolicy) -> None:
    """The CPU's attention does not cut at sequences, so one sequence is packed as three pieces."""
    tokens_S = make_batch().tokens_BT[1]
    cu_seqlens, lengths = torch.tensor([0, 12, 20, 41]), torch.tensor([10, 8, 21])
    rows = packed_rows(tokens_S, cu_seqlens, lengths, torch.tensor([1, 2, 3]), [2, 0])
    with MegatronFeatureCapture(policy.model, LAYER_IDS, [rows], 0) as capture, torch.no_grad():
        megatron_model.next_token_logits(policy.model, tokens_S[None])
    aux_TF, final_TH = hugging_face_features(tokens_S)
    for features, span, prompt_length in zip(capture.collect(), [slice(20, 41), slice(0, 10)], [3, 1], strict=True):
        assert features.token_ids_T.tolist() == tokens_S[span].tolist()
        assert features.prompt_length == prompt_length
        torch.testing.assert_close(features.aux_TF, aux_TF[span], rtol=0, atol=ATOL)
        torch.testing.assert_close(features.final_TH, final_TH[span], rtol=0, atol=ATOL)


class Wrapped(nn.Module):
    """As DDP and Float16Module wrap: the model is `.module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_logprobs_and_gradients_are_bitwise_what_they_are_without(policy: MegatronPolicy) -> None:
    batch, model = make_batch(), policy.model

    def run(capture: Any) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        with capture:
            logprobs_BT = token_logprobs(Wrapped(Wrapped(model)), batch.tokens_BT)
            logprobs_BT.sum().backward()
        return logprobs_BT.detach().clone(), [p.grad.clone() for p in model.parameters()]

    capture = MegatronFeatureCapture([Wrapped(Wrapped(model))], LAYER_IDS, [rows_of(batch, KEPT)], 0)
    (plain, plain_grads), (caught, grads) = run(nullcontext()), run(capture)
    model.zero_grad()
    assert torch.equal(plain, caught)
    assert all(torch.equal(a, b) for a, b in zip(plain_grads, grads, strict=True))
    assert not any(f.aux_TF.requires_grad or f.final_TH.requires_grad for f in capture.collect())
    assert not model.decoder._forward_hooks and not model.decoder.layers[3]._forward_pre_hooks


def test_a_layer_that_a_backward_pass_runs_again_is_not_a_forward(policy: MegatronPolicy) -> None:
    batch, model = make_batch(), policy.model
    with MegatronFeatureCapture(model, (0,), [rows_of(batch, KEPT)], 0) as capture, torch.no_grad():
        token_logprobs(model, batch.tokens_BT)
        model.decoder.layers[0](hidden_states=torch.zeros(41, 5, 256), attention_mask=None, rotary_pos_emb=None)
    assert all(f.aux_TF.abs().sum() > 0 for f in capture.collect())


@pytest.mark.parametrize(
    ("forwards", "width", "what"),
    [
        ([], 41, "1 forwards ran, but 0"),
        ([[], rows_of(make_batch(), [0])], 41, "1 forwards ran, but 2"),
        ([rows_of(make_batch(), [4])[:1]], 41, "row 4 is kept, but it has 3 rows"),
        ([rows_of(make_batch(), [0])], 7, "7 positions, but a row of 12"),
        ([[replace(rows_of(make_batch(), [0])[0], row=2)]], 41, "row 2 from position 0 has other tokens"),
    ],
)
def test_a_pass_that_was_not_announced_ends_well_and_collect_tells(
    policy: MegatronPolicy, forwards: list[Any], width: int, what: str
) -> None:
    with MegatronFeatureCapture(policy.model, LAYER_IDS, forwards, 0) as capture, torch.no_grad():
        megatron_model.next_token_logits(policy.model, make_batch().tokens_BT[:3, :width])
    if not forwards:
        assert capture.collect() == []
        return
    with pytest.raises(ValueError, match=what):
        capture.collect()


def test_what_cannot_be_captured_is_refused_at_once(policy: MegatronPolicy) -> None:
    model = policy.model
    for layer_ids in ((), (0, 0), (4,), (-1,)):
        with pytest.raises(ValueError, match="0 to 3"):
            MegatronFeatureCapture(model, layer_ids, [], 0)
    with pytest.raises(ValueError, match="2 model chunks on a rank: virtual pipeline"):
        MegatronFeatureCapture([model, model], LAYER_IDS, [], 0)
    with pytest.raises(ValueError, match="Linear is not a Megatron-Core GPTModel"):
        MegatronFeatureCapture(nn.Linear(1, 1), LAYER_IDS, [], 0)
    for field, what in (("virtual_pipeline_model_parallel_size", "virtual"), ("context_parallel_size", "context")):
        before = getattr(model.config, field)
        setattr(model.config, field, 2)
        try:
            with pytest.raises(ValueError, match=what):
                MegatronFeatureCapture(model, LAYER_IDS, [], 0)
        finally:
            setattr(model.config, field, before)


# ---- layouts ----


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4).map(lambda n: 2 * n), st.integers(1, 3), st.integers(1, 4),
    st.booleans(),
)  # fmt: skip
def test_grouped_query_layout(
    per_rank: int, heads_per_group: int, head_dim: int, hidden: int, size: int, is_head: bool
) -> None:
    """Any heads, of a policy or of an EAGLE-3 head (which reads 2H): bit-exact there and back, over any ranks, and each
    row where Megatron's attention, which views [groups, q heads + k + v, head_dim], looks for it."""
    groups, width = per_rank * size, hidden * (2 if is_head else 1)
    layout = FusedQkv(groups, heads_per_group, head_dim)
    rows = [groups * heads_per_group * head_dim, groups * head_dim, groups * head_dim]
    q, k, v = torch.randn(sum(rows), width).to(torch.bfloat16).split(rows)
    shards = [layout.shard([q, k, v], rank, size) for rank in range(size)]
    assert all(torch.equal(a, b) for a, b in zip(layout.unshard(shards), (q, k, v), strict=True))
    for rank, shard in enumerate(shards):
        viewed = shard.view(per_rank, heads_per_group + 2, head_dim, width)
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        assert torch.equal(viewed[:, :-2], q.view(groups, heads_per_group, head_dim, width)[mine])
        assert torch.equal(viewed[:, -2], k.view(groups, head_dim, width)[mine])
        assert torch.equal(viewed[:, -1], v.view(groups, head_dim, width)[mine])


# ---- checkpoints ----


def write_model(folder: Path, tied: bool = False) -> Path:
    """A random Qwen3 of three layers, with a tokenizer."""
    write_random_model(folder, tied, num_layers=3)
    shutil.copy(STEP_ADDER / "tokenizer.json", folder)
    return folder


@contextmanager
def a_cpu_for_megatron() -> Iterator[None]:
    """Its pipeline schedule makes a counter on "cuda", that and its saving wait for the device, tied stages go to it."""
    zeros, synchronize, cuda = torch.zeros, torch.cuda.synchronize, Tensor.cuda
    torch.zeros = lambda *a, device=None, **k: zeros(*a, device="cpu" if device == "cuda" else device, **k)
    torch.cuda.synchronize, Tensor.cuda = lambda *_: None, lambda tensor: tensor
    try:
        yield
    finally:
        torch.zeros, torch.cuda.synchronize, Tensor.cuda = zeros, synchronize, cuda


def save_torch_dist(model: GPTModel, root: Path, **metadata: Any) -> None:
    """As Megatron-LM and NeMo-RL do: an iteration folder and its tracker, beside them what is not the policy's."""
    folder = root / "iter_0000000"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    state = model.sharded_state_dict(metadata=metadata or None)
    with a_cpu_for_megatron():
        dist_checkpointing.save({"model": state, "iteration": 0, "args": argparse.Namespace(lr=1.0)}, str(folder))
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("0")
    dist.barrier()


def save_torch(model: GPTModel, root: Path, rank_name: str) -> None:
    """As Megatron-LM's `--ckpt-format torch`: arguments and random states too."""
    folder = root / "iter_0000005" / rank_name
    folder.mkdir(parents=True)
    arguments = argparse.Namespace(params_dtype=torch.float32, model_type=ModelType.encoder_or_decoder)
    state = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 5,
        "model": model.state_dict_for_save_checkpoint(),
        "rng_state": [{"np_rng_state": np.random.default_rng(0).bit_generator.state, "np": np.arange(3, dtype="u4")}],
    }
    torch.save(state, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("5")


def assert_exported(checkpoint: Path, model: Path, out: Path, hf_config: str | None = None) -> None:
    folder = policy_folder(checkpoint, out, hf_config)
    exported, expected = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    assert json.loads((folder / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    assert (folder / "tokenizer.json").is_file()
    assert [p.name for p in out.parent.glob(".*")] == []


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model` and what one rank saves of it: `torch_dist`, `by_layer`, `torch`, `local`."""
    folder = tmp_path_factory.mktemp("saved")
    policy = load_policy(write_model(folder / "model", request.param))
    save_torch_dist(policy.model, folder / "torch_dist")
    save_torch_dist(policy.model, folder / "by_layer", non_homogeneous_layers=True)
    save_torch(policy.model, folder / "torch", "mp_rank_00")
    policy.save(folder / "local" / "checkpoints" / "step_3")
    (folder / "local" / "config.yaml").write_text(f"policy:\n  model_name: {folder / 'model'}\n")
    return folder


@pytest.mark.parametrize("name", ["torch_dist", "by_layer", "torch"])
def test_one_rank_checkpoints_are_read_bit_exactly(saved: Path, name: str, tmp_path: Path) -> None:
    assert find_policy(saved / name).kind == ("torch" if name == "torch" else "torch_dist")
    assert_exported(saved / name, saved / "model", tmp_path / "out", str(saved / "model"))


def test_a_local_checkpoint_names_its_model(saved: Path, tmp_path: Path) -> None:
    assert_exported(saved / "local" / "checkpoints" / "step_3", saved / "model", tmp_path / "out")
    with pytest.raises(ValueError, match=r"name one of them, such as .*step_3"):
        find_policy(saved / "local")


def test_a_hugging_face_folder_is_its_own(saved: Path, tmp_path: Path) -> None:
    assert policy_folder(saved / "model", tmp_path / "out") == saved / "model"
    with pytest.raises(ValueError, match="leave out --hf-config x"):
        policy_folder(saved / "model", tmp_path / "out", "x")


def test_a_nemo_rl_step_folder(saved: Path, tmp_path: Path) -> None:
    """Its config.yaml names the model; its own tokenizer files win."""
    step = tmp_path / "step_4"
    shutil.copytree(saved / "torch_dist", step / "policy" / "weights")
    (step / "policy" / "tokenizer").mkdir()
    (step / "policy" / "tokenizer" / "chat_template.jinja").write_text("ours")
    (step / "config.yaml").write_text(f"policy:\n  model_name: {saved / 'model'}\ngrpo: {{}}\n")
    for number, folder in enumerate((step, step / "policy" / "weights", step / "policy" / "weights" / "iter_0000000")):
        assert_exported(folder, saved / "model", tmp_path / f"out{number}")
        assert (tmp_path / f"out{number}" / "chat_template.jinja").read_text() == "ours"
    with pytest.raises(ValueError, match="out0 exists"):
        policy_folder(step, tmp_path / "out0")
    with pytest.raises(ValueError, match="never finished"):
        find_policy(step.rename(tmp_path / "tmp_step_4"))


def test_vocabulary_padding_is_cut(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    tensors = load_file(model / "model.safetensors")
    padded = load_policy_of(tensors, PolicyShape.from_hf(config | {"vocab_size": 128}))
    save_torch(padded, tmp_path / "torch", "mp_rank_00")
    (model / "config.json").write_text(json.dumps(config))
    assert_exported(tmp_path / "torch", model, tmp_path / "out", str(model))


def load_policy_of(tensors: dict[str, Tensor], shape: PolicyShape) -> GPTModel:
    """A model with the tensors in its first rows."""
    megatron_host.install()
    config = megatron_model._transformer_config(shape, 1)
    spec = megatron_model._layer_spec()
    model = GPTModel(config, spec, shape.vocab_size, 128, position_embedding_type="rope")
    fill(model, tensors, shape, range(shape.num_layers))
    return model


@torch.no_grad()
def fill(model: GPTModel, tensors: dict[str, Tensor], shape: PolicyShape, layers: range) -> None:
    """The part of the tensors that is in this pipeline stage, whose layers are `layers`."""
    parameters = dict(model.named_parameters())
    for weight in weights_of_shape(shape):
        name = weight.megatron
        if name.startswith("decoder.layers."):
            layer = int(name.split(".")[2])
            name = name.replace(f".{layer}.", f".{layer - layers.start}.", 1) if layer in layers else ""
        if name in parameters:
            whole = weight.layout.shard([tensors[hf] for hf in weight.hf], 0, 1)
            parameters[name].zero_()[: len(whole)].copy_(whole)


class Bomb:
    """What a hostile pickle does when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_a_chunk(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    del metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks[1]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def bomb(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb()))


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("torch_dist", lambda root: truncate(next(root.glob("*/__0_0.distcp"))), "is damaged or incomplete"),
    ("torch_dist", lambda root: next(root.glob("*/__0_0.distcp")).unlink(), "is damaged or incomplete"),
    ("torch_dist", lambda root: next(root.glob("*/.metadata")).unlink(), r"\.metadata cannot be read"),
    ("torch_dist", lambda root: truncate(next(root.glob("*/.metadata"))), r"\.metadata cannot be read"),
    ("torch_dist", lambda root: bomb(next(root.glob("*/.metadata"))), r"refers to posix\.mkdir"),
    ("torch_dist", lambda root: drop_a_chunk(root / "iter_0000000"), "parts of decoder.*linear_fc2.* are missing"),
    ("torch_dist", lambda root: (root / "iter_0000000/metadata.json").write_text('{"sharded_backend": "zarr"}'), "zarr"),
    ("torch_dist", lambda root: shutil.rmtree(root / "iter_0000000"), "there is no iter_0000000"),
    ("torch_dist", lambda root: (root / "latest_checkpointed_iteration.txt").write_text("x"), "says 'x'"),
    ("torch_dist", lambda root: (root / "latest_checkpointed_iteration.txt").unlink(), "name one of them"),
    ("torch", lambda root: truncate(next(root.glob("*/*/*.pt"))), "is damaged"),
    ("torch", lambda root: next(root.glob("*/*/*.pt")).unlink(), "is missing"),
    ("torch", lambda root: torch.save({"model": Bomb()}, next(root.glob("*/*/*.pt"))), "could run code"),
    ("torch", lambda root: torch.save({"model0": {}}, next(root.glob("*/*/*.pt"))), "virtual pipeline"),
    ("torch", lambda root: torch.save({"weights": {}}, next(root.glob("*/*/*.pt"))), "no weights"),
    ("torch", lambda root: (root / "iter_0000005/mp_rank_00").rename(root / "iter_0000005/mp_rank_01"), "incomplete"),
    ("torch", lambda root: (root / "iter_0000005/mp_rank_00_000_000").mkdir(), "expert"),
    ("local", lambda root: next(root.glob("*/*/*.pt")).rename(root / "checkpoints/step_3/rank_1_of_2.pt"), "incomplete"),
]  # fmt: skip


@pytest.mark.parametrize("saved", [False], indirect=True, ids=["untied"])
@pytest.mark.parametrize(("name", "damage", "what"), DAMAGE)
def test_damage_is_told_in_a_sentence(
    saved: Path, name: str, damage: Callable[[Path], Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    shutil.copytree(saved / name, tmp_path / "run")
    damage(tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_3" if name == "local" else tmp_path / "run"
    with pytest.raises(ValueError, match=what):
        policy_folder(folder, tmp_path / "out", str(saved / "model"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("saved", [False], indirect=True, ids=["untied"])
@pytest.mark.parametrize("name", ["torch_dist", "torch"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_hidden_layers": 4}, "lacks decoder.layers.3"),
        ({"num_hidden_layers": 2}, "has decoder.layers.2"),
        ({"vocab_size": 97}, r"embed_tokens.*\(96, 48\).*\(97, 48\)"),
        ({"intermediate_size": 40}, r"gate_proj.*\(80, 48\).*\(40, 48\)"),
        ({"num_key_value_heads": 1}, "does not fit|the config says"),
        ({"tie_word_embeddings": True}, "has output_layer"),
        ({"model_type": "gemma3"}, "model_type"),
    ],
)
def test_another_models_config_is_refused(
    saved: Path, name: str, change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    config = json.loads((saved / "model" / "config.json").read_text()) | change
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=what):
        policy_folder(saved / name, tmp_path / "out", str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_policy(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is not a folder: give a Hugging Face folder"):
        find_policy(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is empty: give"):
        find_policy(tmp_path)
    shutil.copy(saved / "model" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"config.json but no \*.safetensors"):
        find_policy(tmp_path)
    (tmp_path / "step_1" / "policy" / "weights" / "model").mkdir(parents=True)
    with pytest.raises(ValueError, match="DTensor policy"):
        find_policy(tmp_path / "step_1")
    for name in (None, "no/such-model", str(tmp_path / "step_1")):
        with pytest.raises(ValueError, match="give --hf-config FOLDER"):
            policy_folder(saved / "torch_dist", tmp_path / "out", name)


# ---- two ranks: one start, for its seconds ----


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two processes computed and saved: over tensor-parallel ranks, then over pipeline stages."""
    folder = tmp_path_factory.mktemp("two_ranks")
    write_model(folder / "model")
    write_model(folder / "tied_model", tied=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    mp.spawn(rank_main, (port, folder), nprocs=2)
    return folder


def rank_main(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    _tensor_parallel(folder)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2)
    with a_cpu_for_megatron():
        _pipeline_parallel(folder)
    dist.destroy_process_group()


def _tensor_parallel(folder: Path) -> None:
    for name in ("model", "tied_model"):
        policy = load_policy(folder / name, 2)
        save_torch_dist(policy.model, folder / f"{name}_torch_dist_tp2")
        if name == "model":
            save_torch_dist(policy.model, folder / f"{name}_halved_tp2", singleton_local_shards=True)
        save_torch(policy.model, folder / f"{name}_torch_tp2", f"mp_rank_0{dist.get_rank()}")
        policy.save(folder / f"{name}_local_tp2" / "step_1")
    policy = load_policy(STEP_ADDER, 2)
    _capture(policy.model, folder / "features_tp2", lambda batch: token_logprobs(policy.model, batch.tokens_BT))
    model = _step_adder(tensor_model_parallel_size=2, sequence_parallel=True)
    for name, parameter in policy.model.named_parameters():
        dict(model.named_parameters())[name].data.copy_(parameter)
    _capture(model, folder / "features_sp2", lambda batch: token_logprobs(model, batch.tokens_BT))


def _pipeline_parallel(folder: Path) -> None:
    stage = dist.get_rank()
    model = _step_adder(pipeline_model_parallel_size=2)
    fill(model, _float32(STEP_ADDER), _shape(STEP_ADDER), range(2 * stage, 2 * stage + 2))
    _capture(model, folder / "features_pp2", lambda batch: _run_schedule(model, [batch.tokens_BT]))
    _fail_together(model, folder)
    for name in ("model", "tied_model"):
        shape, tied = _shape(folder / name), name == "tied_model"
        model = _stage_model(shape, uneven=True, pipeline_model_parallel_size=2)
        fill(model, _float32(folder / name), shape, range(1) if stage == 0 else range(1, 3))
        if tied and stage == 1:
            model.output_layer.weight.data.copy_(_float32(folder / name)["model.embed_tokens.weight"])
        save_torch_dist(model, folder / f"{name}_torch_dist_pp2")
        save_torch(model, folder / f"{name}_torch_pp2", f"mp_rank_00_00{stage}")


def _capture(model: GPTModel, out: Path, run: Callable[[TokenBatch], Any]) -> None:
    batch = make_batch()
    with MegatronFeatureCapture(model, LAYER_IDS, [rows_of(batch, KEPT)], 3) as capture, torch.no_grad():
        run(batch)
    features = [(f.token_ids_T, f.aux_TF, f.final_TH) for f in capture.collect()]
    torch.save(features, f"{out}_{dist.get_rank()}.pt")


def _fail_together(model: GPTModel, folder: Path) -> None:
    """A first stage whose hook is bypassed fails on both stages, and neither waits for the other."""
    batch = make_batch()
    with MegatronFeatureCapture(model, LAYER_IDS, [rows_of(batch, KEPT)], 3) as capture, torch.no_grad():
        if dist.get_rank() == 0:
            model.decoder.layers[0]._forward_pre_hooks.clear()
            model.decoder.layers[0]._forward_pre_hooks_with_kwargs.clear()
        _run_schedule(model, [batch.tokens_BT])
    try:
        capture.collect()
    except ValueError as error:
        (folder / f"failure_{dist.get_rank()}.txt").write_text(str(error))


def _run_schedule(model: GPTModel, micro_batches: list[Tensor]) -> None:
    """Megatron's own pipeline schedule, as NeMo-RL's log-prob pass runs it."""

    def forward_step(batches: Iterator[Tensor], model: GPTModel) -> tuple[Tensor, Any]:
        return megatron_model.next_token_logits(model, next(batches)), lambda output, **_: output.sum()

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(micro_batches), model=model,
        num_microbatches=len(micro_batches), seq_length=micro_batches[0].shape[1], micro_batch_size=5,
        forward_only=True, collect_non_loss_data=True,
    )  # fmt: skip


def _shape(folder: Path) -> PolicyShape:
    return PolicyShape.from_hf(json.loads((folder / "config.json").read_text()))


def _float32(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def _step_adder(**parallel: Any) -> GPTModel:
    return _stage_model(_shape(STEP_ADDER), **parallel)


def _stage_model(shape: PolicyShape, uneven: bool = False, **parallel: Any) -> GPTModel:
    """This rank's part; sequence parallel needs a norm that Megatron-Core has on GPUs only, and torch's does the same."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import torch_norm

    class NoRandomStates:
        def fork(self, *_: Any) -> Any:
            return nullcontext()

    megatron_random._CUDA_RNG_STATE_TRACKER = NoRandomStates()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    torch_norm.WrappedTorchNorm.__new__ = lambda _cls, config, hidden_size, eps=1e-5, **_: nn.RMSNorm(hidden_size, eps)
    config = replace(
        megatron_model._transformer_config(shape, parallel.get("tensor_model_parallel_size", 1)),
        pipeline_dtype=torch.float32, batch_p2p_comm=False, **parallel,
        **({"num_layers_in_first_pipeline_stage": 1} if uneven else {}),
    )  # fmt: skip
    return GPTModel(
        config, megatron_model._layer_spec(), shape.vocab_size, shape.max_positions, position_embedding_type="rope",
        rotary_base=shape.rotary_base, share_embeddings_and_output_weights=shape.tied,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "rank"), [("tp2", 0), ("sp2", 0), ("pp2", 1)], ids=["tensor", "sequence", "pipeline"])
def test_features_over_two_ranks_equal_transformers(two_ranks: Path, name: str, rank: int) -> None:
    """They come out on one rank only."""
    features = [
        SequenceFeatures(*tensors, prompt_length=1, policy_version=3)
        for tensors in torch.load(two_ranks / f"features_{name}_{rank}.pt", weights_only=True)
    ]
    batch = make_batch()
    assert_features(features, [batch.tokens_BT[i, : int(batch.lengths_B[i])] for i in KEPT], name)
    assert torch.load(two_ranks / f"features_{name}_{1 - rank}.pt", weights_only=True) == []


def test_a_stage_that_catches_nothing_fails_both(two_ranks: Path) -> None:
    assert "a hook was never called" in (two_ranks / "failure_0.txt").read_text()
    assert "pipeline stage 0 failed" in (two_ranks / "failure_1.txt").read_text()


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("halved_tp2", "model"),
        *itertools.product(
            ("torch_dist_tp2", "torch_tp2", "local_tp2/step_1", "torch_dist_pp2", "torch_pp2"), ("model", "tied_model")
        ),
    ],
)
def test_checkpoints_of_two_ranks_are_read_bit_exactly(two_ranks: Path, name: str, model: str, tmp_path: Path) -> None:
    assert_exported(two_ranks / f"{model}_{name}", two_ranks / model, tmp_path / "out", str(two_ranks / model))


def test_a_rank_that_is_missing_is_told(two_ranks: Path, tmp_path: Path) -> None:
    for name, gone, what in (
        ("torch_tp2", "iter_0000005/mp_rank_01", "the config says"),
        ("torch_pp2", "iter_0000005/mp_rank_00_001", "lacks decoder"),
        ("torch_pp2", "iter_0000005/mp_rank_00_000", "is incomplete"),
        ("local_tp2", "step_1/rank_1_of_2.pt", "is incomplete"),
        ("torch_dist_tp2", "iter_0000000/__1_0.distcp", "is damaged or incomplete"),
    ):
        shutil.copytree(two_ranks / f"model_{name}", tmp_path / "run")
        path = tmp_path / "run" / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(ValueError, match=what):
            folder = path.parent if name == "local_tp2" else tmp_path / "run"
            policy_folder(folder, tmp_path / "out", str(two_ranks / "model"))
        shutil.rmtree(tmp_path / "run")
