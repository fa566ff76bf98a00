# SPDX-License-Identifier: Apache-2.0
"""Model folders as they come from the Hub: ends of texts, index and shards, tied embeddings, padding, templates, BOS."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import STEP_ADDER
from safetensors.numpy import save_file
from test_nemo_rl_config import tree

from lab.local.step_rollout import load_tokenizer
from nemo_specrollout.cli.check import describe_config
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.drafter_configs import DflashDrafterConfig
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG
from nemo_specrollout.heads.features.rollout_files import _encoder, token_ids_of
from nemo_specrollout.heads.files.block_heads import misfit_of_block_drafter
from nemo_specrollout.heads.files.head_facts import misfit
from nemo_specrollout.remote.protocol.draft_buffers import COUNT, STALE, TOKENS, DraftBuffers
from nemo_specrollout.remote.protocol.drafter_side import DrafterSide, DraftModel
from nemo_specrollout.remote.protocol.messages import DRAFT_ROW, PROTOCOL, Hello, Refuse, Welcome
from nemo_specrollout.remote.protocol.shadow_sequences import text_hash
from nemo_specrollout.storage.model_folder import (
    EMBEDDING,
    LM_HEAD,
    check_model,
    longest_text,
    stop_token_ids,
    tensor_files,
    tensor_shapes,
    with_tied_lm_head,
)

pytestmark = pytest.mark.unit

INDEX = "model.safetensors.index.json"
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
SPECULATIVE = "policy.generation.vllm_kwargs.speculative_config"


def policy(folder: Path, **changes: dict[str, Any] | None) -> Path:
    """Makes a folder with the step adder's files. A keyword is a JSON file without its ending: its content, or None."""
    folder.mkdir()
    for file in STEP_ADDER.iterdir():
        if changes.get(file.stem, {}) is not None and file.stem not in changes:
            (folder / file.name).symlink_to(file)
    for name, content in changes.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def settings(name: str, **values: Any) -> dict[str, Any]:
    """Returns the content of a JSON file of the step adder, with these values; one of ... takes the key away."""
    changed = {**json.loads((STEP_ADDER / f"{name}.json").read_text()), **values}
    return {key: value for key, value in changed.items() if value is not ...}


def resized(folder: Path, rows: int, **changes: dict[str, Any] | None) -> Path:
    """Makes the step adder with another number of rows for tokens, and without its values."""
    policy(folder, model=None, config=settings("config", vocab_size=rows), **changes)
    shapes = tensor_shapes(tensor_files(STEP_ADDER))
    tensors = {
        name: np.zeros((rows if size[0] == 96 else size[0], *size[1:]), np.float16) for name, size in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def sharded(folder: Path) -> Path:
    """Makes the step adder in two files, with their index and without its values."""
    policy(folder, model=None)
    tensors = {n: np.zeros(shape, np.float16) for n, shape in tensor_shapes(tensor_files(STEP_ADDER)).items()}
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({n: tensors[n] for n in names if names[n] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


# Ends of texts


NO_EOS = {"generation_config": {}, "config": settings("config", eos_token_id=...)}


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"generation_config": {"eos_token_id": [5, 2]}}, [5, 2]),
        ({"generation_config": {"_from_model_config": True}}, [2]),
        ({"generation_config": {"eos_token_id": None}, "config": settings("config", eos_token_id=7)}, [7]),
        ({"generation_config": {"eos_token_id": []}}, [2]),
        ({"generation_config": None}, [2]),
        ({"generation_config": {}, "config": {"text_config": {"eos_token_id": 9}}}, [9]),
        (NO_EOS, [2]),
        ({**NO_EOS, "tokenizer_config": {"eos_token": {"content": "<unk>"}}}, [3]),
        ({**NO_EOS, "tokenizer_config": {}, "special_tokens_map": {"eos_token": "<eos>"}}, [2]),
        ({**NO_EOS, "tokenizer_config": {"eos_token": "<nope>"}}, []),
        ({**NO_EOS, "tokenizer_config": None}, []),
    ],
)
def test_the_first_file_with_an_eos_ends_texts(tmp_path: Path, changes: dict[str, Any], ids: list[int]) -> None:
    assert stop_token_ids(policy(tmp_path / "model", **changes)) == ids


@pytest.mark.parametrize("value", ["two", True, 2.0, -1, [2, "x"], [[2]], {"id": 2}])
@pytest.mark.parametrize("name", ["generation_config", "config", "nested"])
def test_an_eos_that_is_no_id_is_refused_anywhere(tmp_path: Path, name: str, value: Any) -> None:
    if name == "nested":
        changes = {"config": settings("config", eos_token_id=2, text_config={"eos_token_id": value})}
    else:
        changes = {name: settings(name, eos_token_id=value)}
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id is .*; it must be a token id, or a list"):
        stop_token_ids(policy(tmp_path / "model", **changes))


def test_lengths_are_read_from_a_nested_config(tmp_path: Path) -> None:
    assert longest_text(policy(tmp_path / "model", config={"text_config": {"max_position_embeddings": 77}})) == 77


# Tensors


def test_an_index_names_the_files(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    (folder / "consolidated.safetensors").write_bytes(b"of another layout")
    assert [f.name for f in tensor_files(folder)] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    check_model(folder, folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing; copy"):
        tensor_files(folder)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 5}}']
)
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    folder = sharded(tmp_path / "model")
    (folder / INDEX).write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: .*copy"):
        tensor_files(folder)


@pytest.mark.parametrize(
    ("config", "is_tied"),
    [
        ({}, True),  # some models are tied by default
        ({"tie_word_embeddings": False}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"text_config": {"tie_word_embeddings": False}}, False),
        ({"tie_word_embeddings": True, "text_config": {}}, True),
    ],
)
def test_a_tied_head_gets_the_embedding(tmp_path: Path, config: dict[str, Any], is_tied: bool) -> None:
    folder = policy(tmp_path / "model", config=config)
    assert (LM_HEAD in dict(with_tied_lm_head(folder, [(EMBEDDING, 1)]))) == is_tied
    assert dict(with_tied_lm_head(folder, [(EMBEDDING, 1), (LM_HEAD, 2)]))[LM_HEAD] == 2


# Vocabularies of draft models


def other_tokenizer() -> dict[str, Any]:
    changed = settings("tokenizer")
    changed["added_tokens"][3]["content"] = "<other>"
    return changed


@pytest.mark.parametrize("kind", ["remote", "draft_model"])
def test_equal_tokenizers_allow_padding_where_vllm_does(tmp_path: Path, kind: str) -> None:
    padded = resized(tmp_path / "padded", 128)
    unknown = resized(tmp_path / "unknown", 128, tokenizer=None)
    other = policy(tmp_path / "other", tokenizer=other_tokenizer())
    check_model(policy(tmp_path / "same"), STEP_ADDER, kind)
    with pytest.raises(
        ValueError, match="unknown knows 128 tokens, the policy 96; name a model of the policy's family"
    ):
        check_model(unknown, STEP_ADDER, kind)
    if kind == "remote":
        check_model(padded, STEP_ADDER, kind)
        with pytest.raises(ValueError, match="other has another tokenizer"):
            check_model(other, STEP_ADDER, kind)
    else:
        with pytest.raises(ValueError, match=r"padded knows 128 tokens, the policy 96; .*or remote if padding differs"):
            check_model(padded, STEP_ADDER, kind)


@pytest.mark.parametrize("rows", [90, 96, 128])
@pytest.mark.parametrize("tokenizer", ["t", "", "other"])
def test_a_drafter_welcomes_equal_tokenizers(rows: int, tokenizer: str) -> None:
    side: Any = DrafterSide(SimpleNamespace(model=DraftModel(96, "t", 64)), 1, 4, 8)  # type: ignore[arg-type]
    side.receive("peer", Hello(PROTOCOL, 5, rows, tokenizer, []), 0.0)
    ((_, answer),) = side.outgoing()
    is_welcome = tokenizer == "t" or (not tokenizer and rows == 96)
    assert isinstance(answer, Welcome if is_welcome else Refuse)


def test_no_draft_beyond_the_policy_s_vocabulary_is_kept() -> None:
    buffers = DraftBuffers(1, 8, vocab_size=96)
    buffers.open(0, 0, 7, np.zeros(1, np.int32))
    table_SX = np.zeros((1, 20), np.int32)
    prefix = text_hash(7, np.zeros(1, np.int32))
    for token in (96, 127, 2**31 - 1, 95):
        buffers.add(np.array([(0, 1, prefix, token, 0)], DRAFT_ROW))
    buffers.write(table_SX)
    assert buffers.counts[STALE] == 3 and table_SX[0, COUNT] == 1 and table_SX[0, TOKENS] == 95


# What `check` says of folders that an engine could not use


HEAD = STEP_ADDER.parent / "step_adder_eagle3"
DRAFTERS = f"{BLOCK_PATH}.drafters"


def refusals(folder: Path, *overrides: str) -> list[str]:
    """Returns what `check` says against a run with the policy in `folder`, which has no chat template."""
    found = describe_config(tree(f"policy.model_name={folder}", *overrides)).errors
    return [text for text in found if not text.startswith("policy.tokenizer")]


def drafting(kind: str, model: Path | None = None) -> str:
    return f"{DRAFTERS}=[{{type: {kind}{'' if model is None else f', model: {model}'}}}]"


def head(folder: Path, index: dict[str, str] | None = None) -> Path:
    """Copies the step adder's head, with this index of its tensors."""
    shutil.copytree(HEAD, folder)
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def test_a_head_with_a_stale_index_is_refused_everywhere(tmp_path: Path) -> None:
    """Of the index, a file is absent, or a tensor. `check` says it, and so does what a run asks before its engines start."""
    absent = head(tmp_path / "absent", {"fc.weight": "model-00001-of-00002.safetensors"})
    (error,) = refusals(STEP_ADDER, drafting("eagle3", absent))
    assert f"{absent / INDEX}: model-00001-of-00002.safetensors is missing; copy" in error
    assert "model-00001-of-00002.safetensors is missing" in str(misfit(str(absent), str(STEP_ADDER)))
    lost = head(tmp_path / "lost", {"fc.weight": "model.safetensors", "gone.weight": "model.safetensors"})
    (error,) = refusals(STEP_ADDER, drafting("eagle3", lost))
    assert "no file has the tensor gone.weight; copy the folder again" in error
    assert refusals(STEP_ADDER, drafting("eagle3", head(tmp_path / "whole"))) == []


def test_a_block_drafter_with_a_stale_index_is_refused(tmp_path: Path) -> None:
    folder = policy(tmp_path / "dflash", config=settings("config", architectures=["DFlashDraftModel"]))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": "other.safetensors"}}))
    reason = misfit_of_block_drafter(DflashDrafterConfig(model=str(folder)), STEP_ADDER)
    assert reason is not None and "other.safetensors is missing" in reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, "no *.safetensors file; copy the weights to the folder"),
        ({"config": settings("config", num_hidden_layers=6)}, "there are 4 layers of the 6 in config.json"),
        (
            {"config": settings("config", vocab_size=100)},
            "model.embed_tokens.weight is [96, 256], config.json makes it [100",
        ),
        ({"config": settings("config", hidden_size="256")}, "hidden_size is '256'; it must be a whole number"),
        ({"config": settings("config", max_position_embeddings=0)}, "max_position_embeddings is 0; it must be a whole"),
        ({"config": settings("config", rope_parameters=[1])}, "rope_parameters is [1]; it must be a block of keys"),
    ],
)
def test_a_policy_that_vllm_cannot_load_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    found = refusals(policy(tmp_path / "policy", **changes))
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize("kind", ["draft_model", "dflash", "dspark"])
def test_a_drafter_with_fewer_positions_than_the_texts_is_refused(tmp_path: Path, kind: str) -> None:
    folder = policy(tmp_path / "short", config=settings("config", max_position_embeddings=128))
    longer = f"{VLLM_CFG}.max_model_len=256"
    words = f"{folder}/config.json: max_position_embeddings 128 is less than max_model_len 256; raise it, or lower"
    assert any(words in error for error in refusals(STEP_ADDER, drafting(kind, folder), longer))
    assert not any("max_position" in error for error in refusals(STEP_ADDER, drafting(kind, folder)))
    stretched = settings("config", max_position_embeddings=128, rope_parameters={
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0})  # fmt: skip
    yarn = policy(tmp_path / "yarn", config=stretched)
    assert not any("max_position" in error for error in refusals(STEP_ADDER, drafting(kind, yarn), longer))


def test_a_native_head_with_fewer_positions_and_a_short_remote_drafter_are_named(tmp_path: Path) -> None:
    folder = policy(tmp_path / "short", config=settings("config", max_position_embeddings=128))
    longer = f"{VLLM_CFG}.max_model_len=256"
    native = f"{SPECULATIVE}={{method: draft_model, model: {folder}, num_speculative_tokens: 3}}"
    assert any(error.startswith(f"{SPECULATIVE}.model: ") for error in refusals(STEP_ADDER, native, longer))
    remote = f"{DRAFTERS}=[{{type: remote, model: {folder}, workers: 1}}]"
    subject = describe_config(tree(f"policy.model_name={STEP_ADDER}", remote, longer))
    assert any("is made for 128 tokens, and max_model_len is 256" in text for _, text in subject.notes)


def test_texts_longer_than_the_policy_s_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = f"{VLLM_CFG}.max_model_len=2048"
    (error,) = refusals(STEP_ADDER, longer)
    assert "2048; the policy's max_position_embeddings are 1024, so vLLM refuses it" in error
    assert refusals(STEP_ADDER, longer, "policy.hf_config_overrides={max_position_embeddings: 4096}") == []
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert refusals(STEP_ADDER, longer) == []


def test_attention_heads_that_gpus_cannot_share_are_an_error() -> None:
    three = (f"{VLLM_CFG}.tensor_parallel_size=3", "cluster.gpus_per_node=6")
    (error,) = refusals(STEP_ADDER, *three)
    assert f"3; the 4 attention heads of {STEP_ADDER} cannot be divided by it" in error


def test_mtp_needs_layers_and_tensors_in_the_policy(tmp_path: Path) -> None:
    words = (
        "mtp, but {}/config.json has no num_nextn_predict_layers, and nothing else could draft: name another drafter"
    )
    (error,) = refusals(STEP_ADDER, drafting("mtp"))
    assert error == f"{DRAFTERS}: {words.format(STEP_ADDER)}"
    (error,) = refusals(STEP_ADDER, f"{SPECULATIVE}={{method: mtp, num_speculative_tokens: 1}}")
    assert error == f"{SPECULATIVE}.method: {words.format(STEP_ADDER)}"
    promised = policy(tmp_path / "promised", config=settings("config", num_nextn_predict_layers=1))
    (error,) = refusals(promised, drafting("mtp"))
    assert "has no tensor of the layers for multi-token prediction that its config.json names" in error
    assert refusals(promised, drafting("mtp"), "policy.megatron_cfg.mtp_num_layers=1") == []
    fewer = policy(tmp_path / "fewer", config=settings("config", num_nextn_predict_layers=1, num_hidden_layers=3))
    assert refusals(fewer, drafting("mtp")) == [], "the fourth layer is the head, as in DeepSeek-V3"


@pytest.mark.parametrize(
    ("name", "num_warnings"), [("Qwen/Qwen3-8B", 1), ("deepseek-ai/DeepSeek-V3", 0), ("a/name", 0)]
)
def test_mtp_with_a_dense_model_of_the_hub_is_warned_of(name: str, num_warnings: int) -> None:
    subject = describe_config(tree(f"policy.model_name={name}", drafting("mtp")))
    warned = [
        text for kind, text in subject.notes if kind == "warning" and "no layers for multi-token prediction" in text
    ]
    assert len(warned) == num_warnings


# BOS in the texts of rollouts


@pytest.mark.parametrize("text", ["<bos>1 + 2", "1 + 2", "<bos>", "", "<bos> 1 + 2"])
def test_a_text_that_begins_with_bos_gets_one(text: str) -> None:
    encode, rest = _encoder(STEP_ADDER), text.removeprefix("<bos>")
    assert encode(text, True) == [1, *encode(rest, False)] and 1 not in encode(rest, False)


class TwoTokens:
    """A tokenizer whose texts begin with two special tokens, of which none is a BOS, and end with one."""

    bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(letter) for letter in text]
        return {"input_ids": [71, 83, *ids, 69] if add_special_tokens else ids}


@pytest.mark.parametrize(("text", "ids"), [("GSab", "GSabE"), ("ab", "GSabE"), ("Gab", "GSGabE"), ("", "GSE")])
def test_other_beginnings_are_not_doubled_either(text: str, ids: str) -> None:
    assert "".join(map(chr, token_ids_of(TwoTokens(), text))) == ids
    assert token_ids_of(TwoTokens(), text, False) == [ord(letter) for letter in text]


def test_a_tokenizer_without_pad_token_pads_with_its_eos(tmp_path: Path) -> None:
    folder = policy(tmp_path / "model", tokenizer_config=settings("tokenizer_config", pad_token=..., eos_token=...))
    assert load_tokenizer(folder).pad_token_id == 2 and load_tokenizer(STEP_ADDER).pad_token_id == 0


# `nemo-specrollout check`


def errors(folder: Path, *overrides: str) -> list[str]:
    return describe_config(tree(f"policy.model_name={folder}", *overrides)).errors


def test_check_reads_a_policy_in_a_folder(tmp_path: Path) -> None:
    wrong = {"generation_config": {"eos_token_id": 2}, "config": settings("config", eos_token_id="two")}
    (error,) = errors(policy(tmp_path / "eos", **wrong))
    assert error.startswith("policy.model_name: ") and "eos_token_id is 'two'" in error
    shards = sharded(tmp_path / "shards")
    assert errors(shards) == []
    (shards / "model-00001-of-00002.safetensors").unlink()
    (error,) = errors(shards)
    assert "model-00001-of-00002.safetensors is missing" in error
    (error,) = errors(policy(tmp_path / "bare", config=None))
    assert "config.json" in error


def test_check_refuses_padding_only_of_a_draft_model(tmp_path: Path) -> None:
    padded = resized(tmp_path / "padded", 128)
    remote = f"{BLOCK_PATH}.drafters=[{{type: remote, workers: 1, model: {padded}}}]"
    assert errors(STEP_ADDER, remote) == []
    for override in (
        f"{BLOCK_PATH}.drafters=[{{type: draft_model, model: {padded}}}]",
        f"{SPECULATIVE}={{method: draft_model, model: {padded}, num_speculative_tokens: 3}}",
    ):
        (error,) = errors(STEP_ADDER, override)
        assert "knows 128 tokens, the policy 96" in error


def template(folder: Path, text: str | None) -> Path:
    policy(folder)
    if text is not None:
        (folder / "chat_template.jinja").write_text(text)
    return folder


def test_check_wants_a_chat_template_where_data_need_one(tmp_path: Path) -> None:
    bare, data = template(tmp_path / "bare", None), "data={train: {dataset_name: OpenMathInstruct-2}}"
    assert errors(bare) == []
    (error,) = errors(bare, data)
    assert error.startswith(f"policy.tokenizer: {bare} does not suit prompts of user (") and "chat_template" in error
    assert errors(bare, data, "policy.tokenizer={chat_template: null}") == []
    assert errors(bare, data, f"policy.tokenizer={{chat_template: '{PLAIN[:8]}'}}") == []
    whole = template(tmp_path / "whole", PLAIN)
    assert errors(whole, data) == errors(bare, data, f"policy.tokenizer.name={whole}") == []


@pytest.mark.parametrize("block", ["default: {%s}", "train: {%s}", "train: [{dataset_name: a}, {%s}]"])
def test_check_finds_a_template_without_system_role(tmp_path: Path, block: str) -> None:
    folder = template(tmp_path / "model", NO_SYSTEM)
    assert errors(folder, f"data={{{block % 'system_prompt_file: null'}}}") == []
    (error,) = errors(folder, f"data={{{block % 'system_prompt_file: a.txt'}}}")
    assert "does not suit prompts of system and user (no system role)" in error


def test_check_wants_an_eos_of_the_tokenizer(tmp_path: Path) -> None:
    pads = settings("tokenizer_config", eos_token=...)
    folder = policy(tmp_path / "model", **NO_EOS, tokenizer_config=pads)
    (error,) = errors(folder)
    assert "no eos_token ends a response, and policy.generation.stop_token_ids is null" in error
    assert errors(folder, "policy.generation.stop_token_ids=[2]") == []
