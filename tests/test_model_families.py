# SPDX-License-Identifier: Apache-2.0
"""The tables of model families and options: their page, and what `check` says of NeMo-RL's own recipes."""

from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, ROOT
from omegaconf import OmegaConf
from test_nemo_rl_config import CLEAN

from lab.cli.main import main as lab_main
from nemo_specrollout.cli.main import main
from nemo_specrollout.config.model_families import (
    NOT_TRIED,
    all_families,
    all_options,
    families_of,
    recurrent_layers,
    row_in_words,
)
from nemo_specrollout.generation.engine.arguments import VllmAbilities, host_choice

pytestmark = pytest.mark.unit

PAGE = ROOT / "docs" / "reference" / "model-families.md"
NAMES = {
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": ["hybrid, Mamba", "mixture of experts"],
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": ["hybrid, Mamba"],
    "nvidia/Llama-3.1-Nemotron-Nano-8B-v1": ["dense"],
    "Qwen/Qwen3.5-35B-A3B-Base": ["hybrid, gated delta rule", "mixture of experts"],
    "Qwen/Qwen3-30B-A3B": ["mixture of experts"],
    "moonshotai/Moonlight-16B-A3B-Instruct": ["MLA", "mixture of experts"],
    "openai/gpt-oss-20b": ["mixture of experts", "sliding window"],
    "Qwen/Qwen2.5-VL-3B-Instruct": ["several modalities"],
    "google/gemma-3-1b-it": ["sliding window"],
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ["dense"],
    "meta-llama/Llama-3.1-8B": ["dense"],
    "/path/to/model": [],
}


@pytest.mark.parametrize("name", NAMES)
def test_families_by_the_name_of_a_model(name: str) -> None:
    assert [row["name"] for row in families_of(name, {})] == NAMES[name]


def test_families_by_a_config() -> None:
    qwen = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_moe_text"}}
    assert [row["name"] for row in families_of("a folder", qwen)] == ["hybrid, gated delta rule", "mixture of experts"]
    assert families_of("meta-llama/x", {"model_type": "new"}) == [], "a config counts, not the folder's name"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"text_config": {"layers_block_type": ["attention", "mamba", "moe"]}}, "layers_block_type: mamba"),
        ({"hybrid_override_pattern": "M-M*-"}, "hybrid_override_pattern: mamba"),
        ({"ssm_state_size": 128}, "ssm_state_size: 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"hybrid_override_pattern": "**--"}, None),
        ({"num_hidden_layers": 2}, None),
    ],
)
def test_recurrent_layers_are_read_from_a_config(config: dict[str, Any], found: str | None) -> None:
    assert recurrent_layers(config) == found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"return_sampling_mask": True}, "vllm_kwargs.return_sampling_mask: vLLM finds the sampling masks"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts"),
        ({"attention_backend": "FLASHINFER"}, "the attention backend FLASHINFER plans"),
        ({"attention_config": {"backend": "FLEX_ATTENTION"}}, "FLEX_ATTENTION"),
        ({"attention_backend": "FLASH_ATTN", "return_sampling_mask": False}, None),
    ],
)
def test_arguments_decide_who_chooses_the_drafts(arguments: dict[str, Any], words: str | None) -> None:
    reason = host_choice(arguments, VllmAbilities())
    assert reason is None if words is None else words in str(reason)


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    for row in all_families():
        shown = (
            f"| {row['name']} | {row['models']} | {row['drafts']} | {row['tested']} | {row.get('older', NOT_TRIED)} |"
        )
        assert shown in page
    for row in all_options():
        assert f"| {row['name']} | {row['drafts']} | {row['tested']} | {row.get('older', NOT_TRIED)} |" in page


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.32.0", "(tested: random Qwen3-MoE, Mixtral, GPT-OSS"),
        (None, "(tested: random Qwen3-MoE, Mixtral, GPT-OSS"),
        ("0.25.1", "(tested with vLLM before 0.32: 0.25.1, random Qwen3-MoE, Mixtral and GLM 4 MoE"),
    ],
)
def test_a_row_is_about_the_vllm_of_the_engines(version: str | None, words: str) -> None:
    (row,) = families_of("Qwen/Qwen3-30B-A3B", {})
    assert words in row_in_words(row, version)
    (untried,) = families_of("", {"model_type": "deepseek_v3_mla_moonlight"})[:1]
    assert "not tried" in row_in_words(untried, "0.25.1")


def checked(capsys: pytest.CaptureFixture[str], folder: Path, override: str) -> tuple[int, str]:
    """Returns exit code and output of `check`."""
    config = folder / "run.yaml"
    config.write_text(OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(CLEAN), OmegaConf.from_dotlist([override]))))
    code = main(["check", str(config)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_check_tells_the_family_and_who_chooses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text = checked(capsys, tmp_path, "policy.model_name=nvidia/NVIDIA-Nemotron-Nano-12B-v2")
    assert code == 0 and "hybrid, Mamba: works; the host chooses the drafts of each step" in text
    (tmp_path / "config.json").write_text(
        '{"model_type": "new", "layer_types": ["linear_attention"], "vocab_size": 96}'
    )
    _, text = checked(capsys, tmp_path, f"policy.model_name={tmp_path}")
    assert "unknown: not tested" in text and "recurrent layers (layer_types: linear_attention)" in text


@pytest.mark.parametrize("name", ["enable_lora=true", "watermark_config={key: 1}"])
def test_check_refuses_what_drafts_would_break(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    code, text = checked(capsys, tmp_path, f"policy.generation.vllm_kwargs.{name}")
    field = name.partition("=")[0]
    assert code == 2 and f"policy.generation.vllm_kwargs.{field}: " in text and "or draft nothing" in text


def test_check_names_options_that_are_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    masks = "policy.generation={top_k: 5, vllm_kwargs: {return_sampling_mask: true}}"
    _, text = checked(capsys, tmp_path, masks)
    assert "sampling masks: works" in text and "the host chooses the drafts of each step: vllm_kwargs.return" in text


def test_sampling_masks_need_a_top_k(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text = checked(capsys, tmp_path, "policy.generation.vllm_kwargs.return_sampling_mask=true")
    assert code == 2 and "policy.generation.top_k: None" in text and "remove vllm_kwargs.return_sampling_mask" in text
    lab = ["explain", str(QUICKSTART), "+policy.generation.vllm_kwargs.return_sampling_mask=true"]
    assert lab_main(lab) == 2 and "policy.generation.top_k" in capsys.readouterr().err
