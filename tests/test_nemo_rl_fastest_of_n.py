# SPDX-License-Identifier: Apache-2.0
"""Findings about the block `fastest_of_n` of a NeMo-RL config."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import STEP_ADDER
from plugin_package import install_plugin
from test_nemo_rl_config import ASYNC, CONTROLLER, found, tree

from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.config.block import BLOCK_PATH

pytestmark = pytest.mark.unit

FASTEST = f"{BLOCK_PATH}.fastest_of_n"
KWARGS = "policy.generation.vllm_kwargs"
TWO_GPUS = "cluster={num_nodes: 1, gpus_per_node: 2}"


def test_fastest_of_n_with_two_engines_has_no_findings() -> None:
    assert not any(found(f"{FASTEST}={{max_racers: 2}}", TWO_GPUS).values())
    recomputed = "in_flight_weight_updates: true, recompute_kv_cache_after_weight_updates: true"
    in_flight = f"grpo.async_grpo={{enabled: true, {recomputed}}}"
    resources = "policy.generation.colocated.resources.gpus_per_node=2"
    assert not found(*ASYNC, in_flight, f"{FASTEST}={{}}", "cluster={num_nodes: 1, gpus_per_node: 4}", resources)[
        "error"
    ]


def test_check_explains_fastest_of_n() -> None:
    def said(*overrides: str) -> dict[str, str]:
        return dict(describe_nemo_rl(tree(TWO_GPUS, *overrides)))

    assert "fastest_of_n" not in said()
    assert "no engine races: all draft alike" in said(f"{FASTEST}={{}}")["fastest_of_n"]
    assert "raced by up to 2 engines" in said(f"{FASTEST}={{methods: [[suffix],[ngram]]}}")["fastest_of_n"]


def test_check_says_that_decode_speeds_are_kept() -> None:
    said = dict(describe_nemo_rl(tree(TWO_GPUS, f"{FASTEST}={{}}")))
    assert said["fastest_of_n"].endswith(
        "learned while running, and begin as an earlier start like this one has kept them; no engine races: all draft alike"
    )
    assert (
        "step times, and the decode speeds of engines that share requests, with which the next start" in said["learned"]
    )
    off = dict(describe_nemo_rl(tree(TWO_GPUS, f"{FASTEST}={{}}", f"{BLOCK_PATH}.learned.warm_start=false")))
    assert off["fastest_of_n"].endswith("decode speeds are learned while running; no engine races: all draft alike")
    assert "decode speeds" not in off["learned"]
    assert "decode speeds" not in dict(describe_nemo_rl(tree(TWO_GPUS)))["learned"]


@pytest.mark.parametrize(
    ("kind", "overrides", "sentence"),
    [
        ("warning", (TWO_GPUS.replace("2}", "1}"),), f"{FASTEST}: without effect: by the sizes of the cluster there is one"),
        ("warning", (TWO_GPUS, "policy.generation.vllm_cfg.tensor_parallel_size=2"), f"{FASTEST}: without effect"),
        ("error", (TWO_GPUS, f"{FASTEST}.max_racers=3"), f"{FASTEST}.max_racers: 3 racers for 2 engines"),
        ("error", (TWO_GPUS, f"{FASTEST}.methods=[[suffix],[ngram],[]]"), f"{FASTEST}.methods: 3 entries for 2 engines"),
        ("error", (TWO_GPUS, "policy.generation.vllm_cfg.expert_parallel_size=2"),
         "policy.generation.vllm_cfg.expert_parallel_size: 2 with tensor_parallel_size 1 and fastest_of_n"),
        ("warning", (TWO_GPUS, "policy.generation.stop_strings=[x]"), 'policy.generation.stop_strings: ["x"] with'),
        ("warning", (TWO_GPUS, "policy.generation.vllm_cfg.expose_http_server=true"),
         "policy.generation.vllm_cfg.expose_http_server: true with fastest_of_n"),
        ("warning", (TWO_GPUS, "policy.generation.bad_words=[x]"), 'policy.generation.bad_words: ["x"] with fastest_of_n; '),
        ("warning", (TWO_GPUS, f"{KWARGS}.logits_processors=['a.b:C']"),
         f'{KWARGS}.logits_processors: ["a.b:C"] with fastest_of_n; a logits processor may count from the end of the prompt, '
         "as budgets do, so every request stays in its engine and none moves"),
        ("warning", (TWO_GPUS, f"{KWARGS}.watermark_config={{key: 1}}", f"{BLOCK_PATH}.drafters=[]"),
         f'{KWARGS}.watermark_config: {{"key": 1}} with fastest_of_n; a watermark depends on'),
        ("warning", (TWO_GPUS, f"{KWARGS}.enable_return_routed_experts=true"),
         f"{KWARGS}.enable_return_routed_experts: true with fastest_of_n; an engine that continues a request returns the exp"),
        ("warning", (TWO_GPUS, f"{KWARGS}.return_sampling_mask=true", "policy.generation.top_k=5"),
         f"{KWARGS}.return_sampling_mask: true with fastest_of_n; an engine that continues a request returns the sampling"),
        ("warning", (TWO_GPUS, "data.train=[{processor: vlm_hf_data_processor}]"),
         "data.train[0].processor: vlm_hf_data_processor with fastest_of_n; prompts with images, video or audio stay in"),
        ("error", (TWO_GPUS, *ASYNC, "grpo.async_grpo.in_flight_weight_updates=true"),
         "grpo.async_grpo.recompute_kv_cache_after_weight_updates: false with in-flight weight updates and fastest_of_n"),
        ("error", (TWO_GPUS, *CONTROLLER), "async_rl.recompute_kv_cache_after_weight_updates: false with in-flight"),
        ("warning", (TWO_GPUS, "env.sliding_puzzle_game.cfg={}"), "env.sliding_puzzle_game: its turns end at a string"),
    ],
    ids=["one engine", "one of two GPUs", "racers", "methods", "experts", "stop strings", "server", "bad words",
         "processors", "watermark", "routed experts", "masks", "images", "in flight", "controller", "turns"],
)  # fmt: skip
def test_fastest_of_n_that_cannot_work_has_a_finding(kind: str, overrides: tuple[str, ...], sentence: str) -> None:
    assert any(s.startswith(sentence) for s in found(f"{FASTEST}={{}}", *overrides)[kind])
    off = found(f"{FASTEST}={{}}", *overrides, f"{FASTEST}.enabled=false")
    assert not any("fastest_of_n" in s for s in (*off["error"], *off["warning"]))


def test_installed_logits_processors_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch)
    (sentence,) = found(f"{FASTEST}={{}}", TWO_GPUS)["warning"]
    assert sentence == (
        'vllm.logits_processors: ["budget"] with fastest_of_n; these plugins are installed here, and a logits processor may '
        "count from the end of the prompt, as budgets do, so every request stays in its engine and none moves"
    )


@pytest.mark.parametrize(
    ("key", "why"), [("rswa_window", "sees all of the prompt"), ("canvas_length", "is a diffusion model")]
)
def test_a_policy_whose_tokens_depend_on_the_end_of_the_prompt_is_named(tmp_path: Path, key: str, why: str) -> None:
    copy = shutil.copytree(STEP_ADDER, tmp_path / "policy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, key: 64}))
    warnings = found(f"{FASTEST}={{}}", TWO_GPUS, f"policy.model_name={copy}")["warning"]
    assert any(
        s.startswith(f'policy.model_name: "{copy}" with fastest_of_n; the policy') and why in s for s in warnings
    )
