# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-Core policies, converted into Hugging Face folders bit by bit."""

import argparse
import itertools
import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from test_megatron import write_model as write_random_model
from torch import Tensor

from lab.local import megatron_model
from lab.local.policy import MegatronPolicy
from lab.local.run_sections import OptimizerConfig
from nemo_specrollout.training.checkpoints.policy_shape import PolicyShape, Weight
from nemo_specrollout.training.checkpoints.policy_source import find_policy, policy_folder

pytestmark = pytest.mark.integration


def load_policy(folder: Path) -> MegatronPolicy:
    return MegatronPolicy.from_pretrained(folder, optimizer=OptimizerConfig(lr=1e-3))


# ---- layouts ----


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4).map(lambda n: 2 * n), st.integers(1, 3), st.integers(1, 4),
    st.booleans(),
)  # fmt: skip
def test_query_groups_lie_where_megatron_looks_for_them(
    per_rank: int, heads_per_group: int, head_dim: int, hidden: int, size: int, is_head: bool
) -> None:
    """The layout is bit-exact both ways for any number of ranks, for a policy and for an EAGLE-3 head, which reads 2H.

    Megatron's attention views a shard as [groups, q heads + k + v, head_dim] and finds each row there.
    """
    groups, width = per_rank * size, hidden * (2 if is_head else 1)
    rows = [groups * heads_per_group * head_dim, groups * head_dim, groups * head_dim]
    weight = Weight("qkv", {name: (n, width) for name, n in zip("qkv", rows, strict=True)}, num_groups=groups)
    q, k, v = torch.randn(sum(rows), width).to(torch.bfloat16).split(rows)
    shards = [weight.shard([q, k, v], rank, size) for rank in range(size)]
    assert all(torch.equal(a, b) for a, b in zip(weight.unshard(shards), (q, k, v), strict=True))
    for rank, shard in enumerate(shards):
        viewed = shard.view(per_rank, heads_per_group + 2, head_dim, width)
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        assert torch.equal(viewed[:, :-2], q.view(groups, heads_per_group, head_dim, width)[mine])
        assert torch.equal(viewed[:, -2], k.view(groups, head_dim, width)[mine])
        assert torch.equal(viewed[:, -1], v.view(groups, head_dim, width)[mine])


# ---- checkpoints ----


def write_model(folder: Path, tied: bool = False) -> Path:
    """Writes a random Qwen3 of three layers, with a tokenizer."""
    write_random_model(folder, tied, num_layers=3)
    shutil.copy(STEP_ADDER / "tokenizer.json", folder)
    return folder


@contextmanager
def megatron_on_a_cpu() -> Iterator[None]:
    """Makes the calls harmless by which saving waits for a GPU and tied pipeline stages move to it."""
    synchronize, cuda = torch.cuda.synchronize, Tensor.cuda
    torch.cuda.synchronize, Tensor.cuda = lambda *_: None, lambda tensor: tensor
    try:
        yield
    finally:
        torch.cuda.synchronize, Tensor.cuda = synchronize, cuda


def save_torch_dist(model: GPTModel, root: Path, **metadata: Any) -> None:
    """Saves an iteration folder and its tracker as Megatron-LM and NeMo-RL do, with values that are not weights."""
    folder = root / "iter_0000000"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    state = model.sharded_state_dict(metadata=metadata or None)
    with megatron_on_a_cpu():
        dist_checkpointing.save({"model": state, "iteration": 0, "args": argparse.Namespace(lr=1.0)}, str(folder))
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("0")
    dist.barrier()


def save_torch(model: GPTModel, root: Path, rank_name: str) -> None:
    """Saves as Megatron-LM's `--ckpt-format torch` does, with arguments and random states."""
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
    """Folder with `model` and its checkpoints by one rank: `torch_dist`, `by_layer`, `torch` and `local`."""
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


def test_a_hugging_face_folder_is_used_as_it_is(saved: Path, tmp_path: Path) -> None:
    assert policy_folder(saved / "model", tmp_path / "out") == saved / "model"
    with pytest.raises(ValueError, match="leave out --hf-config x"):
        policy_folder(saved / "model", tmp_path / "out", "x")


def test_a_nemo_rl_step_folder_is_exported_with_its_tokenizer(saved: Path, tmp_path: Path) -> None:
    """The folder's config.yaml names the model, and its own tokenizer files replace the model's."""
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
    """Returns a model whose first rows are the tensors."""
    megatron_model.install()
    model = megatron_model.build_model(shape)
    fill(model, tensors, shape, range(shape.num_layers))
    return model


@torch.no_grad()
def fill(model: GPTModel, tensors: dict[str, Tensor], shape: PolicyShape, layers: range) -> None:
    """Copies into a pipeline stage the tensors of its layers, which are `layers`."""
    parameters = dict(model.named_parameters())
    for weight in shape.weights():
        name = weight.megatron
        if name.startswith("decoder.layers."):
            layer = int(name.split(".")[2])
            name = name.replace(f".{layer}.", f".{layer - layers.start}.", 1) if layer in layers else ""
        if name in parameters:
            whole = weight.shard([tensors[hf] for hf in weight.hf], 0, 1)
            parameters[name].zero_()[: len(whole)].copy_(whole)


class Bomb:
    """Object whose unpickling creates a folder, as a hostile pickle would."""

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
def test_a_damaged_checkpoint_is_refused_in_one_sentence(
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
def test_the_config_of_another_model_is_refused(
    saved: Path, name: str, change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    config = json.loads((saved / "model" / "config.json").read_text()) | change
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=what):
        policy_folder(saved / name, tmp_path / "out", str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


def test_folders_without_a_policy_are_refused(saved: Path, tmp_path: Path) -> None:
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


# ---- two ranks, in one pair of processes for all tests ----


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with checkpoints of two processes: tensor-parallel ranks, then pipeline stages."""
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
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2)
    _tensor_parallel(folder)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2)
    with megatron_on_a_cpu():
        _pipeline_parallel(folder)
    dist.destroy_process_group()


def _tensor_parallel(folder: Path) -> None:
    for name in ("model", "tied_model"):
        model = _half(folder / name)
        save_torch_dist(model, folder / f"{name}_torch_dist_tp2")
        if name == "model":
            save_torch_dist(model, folder / f"{name}_halved_tp2", singleton_local_shards=True)
        save_torch(model, folder / f"{name}_torch_tp2", f"mp_rank_0{dist.get_rank()}")


@torch.no_grad()
def _half(folder: Path) -> GPTModel:
    """Returns the tensor-parallel shard of this rank."""
    shape, tensors = _shape(folder), _float32(folder)
    config = replace(megatron_model.transformer_config(shape), tensor_model_parallel_size=2)
    model = _gpt_model(config, shape)
    parameters = dict(model.named_parameters())
    for weight in shape.weights():
        shard = weight.shard([tensors[name] for name in weight.hf], dist.get_rank(), 2)
        parameters[weight.megatron].copy_(shard)
    return model


def _gpt_model(config: TransformerConfig, shape: PolicyShape, **stage: bool) -> GPTModel:
    return GPTModel(
        config, megatron_model.layer_spec(), shape.vocab_size, shape.max_positions, position_embedding_type="rope",
        rotary_base=shape.rotary_base, share_embeddings_and_output_weights=shape.is_tied, **stage,
    )  # fmt: skip


def _pipeline_parallel(folder: Path) -> None:
    stage = dist.get_rank()
    for name in ("model", "tied_model"):
        shape, tied = _shape(folder / name), name == "tied_model"
        model = _first_or_last_stage(shape)
        fill(model, _float32(folder / name), shape, range(1) if stage == 0 else range(1, 3))
        if tied and stage == 1:
            model.output_layer.weight.data.copy_(_float32(folder / name)["model.embed_tokens.weight"])
        save_torch_dist(model, folder / f"{name}_torch_dist_pp2")
        save_torch(model, folder / f"{name}_torch_pp2", f"mp_rank_00_00{stage}")


def _shape(folder: Path) -> PolicyShape:
    return PolicyShape.from_hf(json.loads((folder / "config.json").read_text()))


def _float32(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def _first_or_last_stage(shape: PolicyShape) -> GPTModel:
    """Returns the pipeline stage of this rank: one layer on the first, the rest on the second."""
    config = replace(
        megatron_model.transformer_config(shape),
        pipeline_dtype=torch.float32, batch_p2p_comm=False, pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=1,
    )  # fmt: skip
    return _gpt_model(
        config, shape, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("halved_tp2", "model"),
        *itertools.product(("torch_dist_tp2", "torch_tp2", "torch_dist_pp2", "torch_pp2"), ("model", "tied_model")),
    ],
)
def test_checkpoints_of_two_ranks_are_read_bit_exactly(two_ranks: Path, name: str, model: str, tmp_path: Path) -> None:
    assert_exported(two_ranks / f"{model}_{name}", two_ranks / model, tmp_path / "out", str(two_ranks / model))


def test_a_checkpoint_without_one_of_its_ranks_is_refused(two_ranks: Path, tmp_path: Path) -> None:
    for name, gone, what in (
        ("torch_tp2", "iter_0000005/mp_rank_01", "the config says"),
        ("torch_pp2", "iter_0000005/mp_rank_00_001", "lacks decoder"),
        ("torch_pp2", "iter_0000005/mp_rank_00_000", "is incomplete"),
        ("torch_dist_tp2", "iter_0000000/__1_0.distcp", "is damaged or incomplete"),
    ):
        shutil.copytree(two_ranks / f"model_{name}", tmp_path / "run")
        path = tmp_path / "run" / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(ValueError, match=what):
            policy_folder(tmp_path / "run", tmp_path / "out", str(two_ranks / "model"))
        shutil.rmtree(tmp_path / "run")
