# SPDX-License-Identifier: Apache-2.0
"""Configs that once passed `explain` and failed later: `explain` and `run` refuse them before an engine starts."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER
from safetensors.torch import load_file, save_file

from lab.cli.main import main
from lab.cli.prepare import prepare, prepare_run
from lab.local.engine import RolloutEngine
from lab.local.policy import MegatronPolicy
from lab.local.run_sections import OptimizerConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError

pytestmark = pytest.mark.unit

HEAD = ROOT / "examples" / "models" / "step_adder_eagle3"
BLOCK = "policy.generation.specrollout"
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Asserts that `explain` and `run` refuse overrides with the same message, and returns the message."""
    monkeypatch.chdir(ROOT)

    def refused(*overrides: str) -> str:
        said = set()
        for command in ("explain", "run"):
            assert main([command, str(QUICKSTART), f"logger.log_dir={tmp_path / 'run'}", *overrides]) == 2
            said.add(capsys.readouterr().err)
            assert not (tmp_path / "run").exists()
        (sentence,) = said
        assert sentence.startswith("specrollout-lab: ") and sentence.count("\n") == 1
        return sentence

    return refused


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def rewritten(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be a whole number, at least 1"),
        ({"num_hidden_layers": 5}, "there is no tensor model.layers."),
        ({"num_hidden_layers": 10**9}, "config.json has 1000000000 layers, but there are 47 tensors in all"),
        ({"num_hidden_layers": 3}, "there is a tensor too many, model.layers.3."),
        ({"vocab_size": 4096}, "model.embed_tokens.weight is [96, 256], but config.json makes it [4096, 256]"),
        ({"head_dim": 0}, "head_dim is 0; it must be"),
        ({"head_dim": 32}, "is [256, 256], but config.json makes it [128, 256]"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]; it must be a block of keys"),
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported: use one of qwen3, llama"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is not supported"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    refused: Refused, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    model = copied(STEP_ADDER, tmp_path / "model")
    rewritten(model / "config.json", **values)
    said = refused(f"policy.model_name={model}")
    assert words in said and str(model) in said


def test_truncated_or_missing_weights_are_refused(refused: Refused, tmp_path: Path) -> None:
    model = copied(STEP_ADDER, tmp_path / "model")
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert "not a whole safetensors file" in refused(f"policy.model_name={model}")
    weights.write_bytes(b"garbage" * 100)
    assert "not a whole safetensors file" in refused(f"policy.model_name={model}")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("generation_config.json", '{"eos_token_id": "two"}', "eos_token_id is 'two'; it must be a token id"),
        ("generation_config.json", '{"eos_token_id": [2, 9999]}', "eos_token_id 9999 is beyond the vocabulary of 96"),
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        ("generation_config.json", "[]", "generation_config.json: not a JSON object"),
        ("config.json", "[" * 5000, "config.json: not JSON"),
        ("tokenizer.json", "{}", "tokenizer.json: no tokenizer"),
        ("tokenizer_config.json", '{"pad_token": "<nope>"}', "pad_token is '<nope>', which is no token"),
        ("tokenizer_config.json", "\0", "tokenizer_config.json: not JSON"),
    ],
)
def test_damaged_json_files_of_a_model_are_refused(
    refused: Refused, tmp_path: Path, file: str, content: str, words: str
) -> None:
    model = copied(STEP_ADDER, tmp_path / "model")
    (model / file).write_text(content)
    assert words in refused(f"policy.model_name={model}")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"eos_token_id": "two"}, "config.json: eos_token_id is 'two'; it must be a token id"),
        ({"eos_token_id": [2, True]}, "config.json: eos_token_id is [2, True]; it must be a token id"),
        ({"text_config": {"eos_token_id": "x"}}, "config.json: eos_token_id is 'x'; it must be a token id"),
        ({"text_config": "x"}, "config.json: text_config is 'x'; it must be a block of keys"),
        (
            {"bos_token_id": "one"},
            "config.json: bos_token_id is 'one', which transformers refuses; it must be of type int",
        ),
        ({"use_cache": 3}, "use_cache is 3, which transformers refuses; it must be of type bool"),
        ({"attention_dropout": "x"}, "attention_dropout is 'x', which transformers refuses"),
    ],
)
def test_values_that_transformers_refuses_are_refused(
    refused: Refused, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    model = copied(STEP_ADDER, tmp_path / "model")
    rewritten(model / "config.json", **values)
    assert words in refused(f"policy.model_name={model}")


def test_what_vllm_would_say_in_a_traceback_is_a_sentence(tmp_path: Path) -> None:
    rewritten(copied(STEP_ADDER, tmp_path / "model") / "config.json", layer_types=["x"] * 4)
    config = prepare(
        QUICKSTART, [f"policy.model_name={tmp_path / 'model'}", f"logger.log_dir={tmp_path / 'run'}"]
    ).config
    with pytest.raises(ConfigError, match=r"transformers refuses .*layer_types"):
        RolloutEngine(tmp_path / "model", config.policy.generation, 1)


def test_a_model_without_an_end_of_texts_is_refused(refused: Refused, tmp_path: Path) -> None:
    model = copied(STEP_ADDER, tmp_path / "model")
    rewritten(model / "config.json", eos_token_id=None)
    (model / "generation_config.json").unlink()
    assert main(["explain", str(QUICKSTART), f"policy.model_name={model}", f"logger.log_dir={tmp_path / 'run'}"]) == 0
    rewritten(model / "tokenizer_config.json", eos_token=None)
    said = refused(f"policy.model_name={model}")
    assert f"{model} names no token that ends a text" in said and "eos_token_id into generation_config.json" in said


def test_a_model_without_a_pad_token_can_run(tmp_path: Path) -> None:
    model = copied(STEP_ADDER, tmp_path / "model")
    for pad in ({"pad_token": None}, {"pad_token": {"content": "<unk>"}}):
        rewritten(model / "tokenizer_config.json", **pad)
        prepare_run(load_config(QUICKSTART, [f"policy.model_name={model}", f"logger.log_dir={tmp_path / 'run'}"]))


def test_a_model_in_shards_can_run(refused: Refused, tmp_path: Path) -> None:
    model = copied(STEP_ADDER, tmp_path / "model")
    tensors, names = load_file(model / "model.safetensors"), dict[str, str]()
    for i, part in enumerate((sorted(tensors)[:20], sorted(tensors)[20:])):
        names |= dict.fromkeys(part, f"model-{i}.safetensors")
        save_file({name: tensors[name] for name in part}, model / f"model-{i}.safetensors")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    overrides = [f"policy.model_name={model}", f"logger.log_dir={tmp_path / 'run'}"]
    prepared = prepare_run(load_config(QUICKSTART, overrides))
    policies = [MegatronPolicy.from_pretrained(f, optimizer=OptimizerConfig(lr=1e-4)) for f in (STEP_ADDER, model)]
    whole, parts = (dict(policy.hf_tensors()) for policy in policies)
    assert prepared.model_config["vocab_size"] == 96 and all(whole[name].equal(parts[name]) for name in whole)
    (model / "model-1.safetensors").unlink()
    assert "index.json: model-1.safetensors is missing; copy" in refused(f"policy.model_name={model}")
    (model / "model.safetensors.index.json").unlink()
    assert "there is no tensor model.layers." in refused(f"policy.model_name={model}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "has no model.safetensors; copy it too, or save the model again as safetensors"),
        ("tokenizer.json", "has no tokenizer.json; copy it too, or let transformers save the tokenizer again"),
        ("config.json", "has no config.json; copy the whole folder"),
    ],
)
def test_a_missing_file_of_a_model_is_named(refused: Refused, tmp_path: Path, name: str, words: str) -> None:
    model = copied(STEP_ADDER, tmp_path / "model")
    (model / name).unlink()
    assert words in refused(f"policy.model_name={model}")


CHAT = {"data.dataset_name": "reasoning_gym", "data.tasks": "[{name: chain_sum}]", "data.system_prompt": "null"}
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN


@pytest.mark.parametrize(
    ("template", "system", "words"),
    [
        (None, "null", "data.dataset_name: reasoning_gym has prompts for a chat, and the tokenizer of"),
        (NO_SYSTEM, "Think.", "data.system_prompt: 'Think.'; the chat template of"),
        (NO_SYSTEM, "simple", "refuses a system prompt (no system role): set it to null"),
        (NO_SYSTEM, "null", None),
        (PLAIN, "simple", None),
        ([{"name": "default", "template": NO_SYSTEM}, {"name": "rag", "template": "x"}], "simple", "(no system role)"),
        ([{"name": "rag", "template": "x"}], "null", "has no chat template"),
        (5, "null", "chat_template is '5'; it must be a text"),
        ("{{ raise_exception('never') }}", "null", "refuses a user's message (never)"),
        ("{% if %}", "null", "refuses a user's message ("),
        ("{{ bos_token + undefined_name }}", "null", "refuses a user's message ("),
        ("", "null", "refuses a user's message (it makes no text of it)"),
    ],
)
def test_a_chat_template_is_tried_before_an_engine_starts(
    refused: Refused, tmp_path: Path, template: Any, system: str, words: str | None
) -> None:
    pytest.importorskip("reasoning_gym")
    model = copied(STEP_ADDER, tmp_path / "model")
    if template is not None:
        rewritten(model / "tokenizer_config.json", chat_template=template)
    overrides = [f"{key}={value}" for key, value in {**CHAT, "data.system_prompt": system}.items()]
    overrides.append(f"policy.model_name={model}")
    if words is None:
        prepare_run(load_config(QUICKSTART, [*overrides, f"logger.log_dir={tmp_path / 'run'}"]))
    else:
        assert words in refused(*overrides)


def test_bench_and_rollouts_refuse_a_missing_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workloads = "bench.workloads=[{name: text, data: {dataset_name: free_text}}]"
    for command, more in (("bench", ()), ("rollouts", ("--out", str(tmp_path / "rollouts.jsonl")))):
        where = (f"policy.model_name={STEP_ADDER}", f"logger.log_dir={tmp_path / 'run'}")
        assert main([command, str(QUICKSTART), workloads, *where, *more]) == 2
        assert "free_text has prompts for a chat, and the tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "config.json: not a JSON object"),
        ({"eagle_aux_hidden_state_layer_ids": "x"}, "eagle_aux_hidden_state_layer_ids is 'x'; it must be a list"),
        ({"eagle_aux_hidden_state_layer_ids": [0, "1"]}, "it must be a list of layer numbers"),
        ({"head_dim": 0}, "head_dim is 0; it must be a whole number, at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"transformer_layer_config": "x"}, "transformer_layer_config is 'x'; it must be a block of keys"),
        ({"draft_vocab_size": "x"}, "draft_vocab_size is 'x'"),
    ],
)
def test_a_wrong_config_of_a_head_is_refused(refused: Refused, tmp_path: Path, values: Any, words: str) -> None:
    head = copied(HEAD, tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    if isinstance(values, dict):
        for name, value in values.items():  # where the head has it
            inner = config.get("transformer_layer_config", {})
            (inner if name in inner else config)[name] = value
        values = config
    (head / "config.json").write_text(json.dumps(values))
    assert words in refused(f"{BLOCK}.drafters=[{{type: eagle3, model: '{head}'}}]")


def test_missing_or_unfit_drafters_are_refused(refused: Refused, tmp_path: Path) -> None:
    assert "type mtp, but examples/models/step_adder/config.json has no num_nextn_predict_layers" in refused(
        f"{BLOCK}.drafters=[{{type: mtp}}]"
    )
    for kind, more in (("draft_model", ""), ("remote", ", workers: 1")):
        said = refused(f"{BLOCK}.drafters=[{{type: {kind}, model: nowhere/at/all{more}}}]")
        assert "folder nowhere/at/all of the draft model does not exist; name a Hugging Face folder" in said
    model = copied(STEP_ADDER, tmp_path / "model")
    rewritten(model / "config.json", vocab_size=97)
    assert "knows 97 tokens, the policy 96" in refused(f"{BLOCK}.drafters=[{{type: draft_model, model: '{model}'}}]")
    padded = f"{BLOCK}.drafters=[{{type: remote, workers: 1, model: '{model}'}}]"
    prepare(QUICKSTART, [padded, f"logger.log_dir={tmp_path / 'run'}"])
    rewritten(model / "config.json", eos_token_id="two")
    assert "eos_token_id is 'two'" in refused(padded)
    (model / "tokenizer.json").unlink()
    rewritten(model / "config.json", eos_token_id=2)
    assert "knows 97 tokens, the policy 96" in refused(padded)


@pytest.mark.parametrize(
    "log_dir", ["/proc/nope", "/dev/null/x", "x" * 300, "a/" + "y" * 300, "/".join(["z" * 200] * 25)]
)
def test_a_log_dir_that_cannot_be_made_is_refused(refused: Refused, log_dir: str) -> None:
    assert "logger.log_dir: " in refused(f"logger.log_dir={log_dir}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.generation.vllm_kwargs.max_num_seqs=[1]", "max_num_seqs: [1]; it must be a whole number"),
        (f"{BLOCK}.enabled=false cluster.rollout_workers=2", "need it true: set drafters: [] for no speculation"),
        (
            "policy.max_total_sequence_length=10 policy.generation.max_new_tokens=2",
            "10; a prompt has 41 tokens, and none is",
        ),
        ("policy.megatron_cfg.optimizer.lr=1e30", "lr: 1e+30 is out of range"),
        ("policy.megatron_cfg.optimizer.adam_eps=0", "adam_eps: 0.0 is out of range; it must be above 0.0"),
        ("loss_fn.ratio_clip_max=1e308", "ratio_clip_max: 1e+308 is out of range"),
        (
            f"{BLOCK}.fastest_of_n.ladder=/nope.json cluster.rollout_workers=2",
            "fastest_of_n.ladder: /nope.json is not a ladder",
        ),
    ],
)
def test_other_wrong_values_are_refused(refused: Refused, override: str, words: str) -> None:
    assert words in refused(*override.split())


@pytest.mark.parametrize("field", [f"{BLOCK}.fastest_of_n.ladder", f"{BLOCK}.drafters"])
def test_a_pipe_instead_of_a_file_is_refused(refused: Refused, tmp_path: Path, field: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    placed = f"placement: auto, acceptance: 0.7, profile: {tmp_path / 'pipe'}"
    drafter = f"[{{type: remote, workers: 1, model: {STEP_ADDER}, {placed}}}]"
    value = drafter if field.endswith("drafters") else tmp_path / "pipe"
    assert str(tmp_path / "pipe") in refused(f"{field}={value}", "cluster.rollout_workers=2")


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "dflash", "remote"])
def test_a_drafters_name_that_is_too_long_is_refused(refused: Refused, kind: str) -> None:
    name, more = "m" * 300, ", workers: 1" if kind == "remote" else ""
    assert "File name too long" in refused(f"{BLOCK}.drafters=[{{type: {kind}, model: {name}{more}}}]")


def test_check_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["explain", str(QUICKSTART), f"logger.log_dir={tmp_path / 'deep' / 'run'}"]) == 0
    assert list(tmp_path.iterdir()) == []
