# SPDX-License-Identifier: Apache-2.0
"""Findings about the block `fastest_of_n` of a NeMo-RL config."""

import pytest
from test_nemo_rl_config import ASYNC, CONTROLLER, found, tree

from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.config.block import BLOCK_PATH

pytestmark = pytest.mark.unit

FASTEST = f"{BLOCK_PATH}.fastest_of_n"
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
        ("error", (TWO_GPUS, *ASYNC, "grpo.async_grpo.in_flight_weight_updates=true"),
         "grpo.async_grpo.recompute_kv_cache_after_weight_updates: false with in-flight weight updates and fastest_of_n"),
        ("error", (TWO_GPUS, *CONTROLLER), "async_rl.recompute_kv_cache_after_weight_updates: false with in-flight"),
        ("warning", (TWO_GPUS, "env.sliding_puzzle_game.cfg={}"), "env.sliding_puzzle_game: its turns end at a string"),
    ],
    ids=["one engine", "one of two GPUs", "racers", "methods", "experts", "stop strings", "server", "in flight",
         "controller", "turns"],
)  # fmt: skip
def test_fastest_of_n_that_cannot_work_has_a_finding(kind: str, overrides: tuple[str, ...], sentence: str) -> None:
    assert any(s.startswith(sentence) for s in found(f"{FASTEST}={{}}", *overrides)[kind])
    off = found(f"{FASTEST}={{}}", *overrides, f"{FASTEST}.enabled=false")
    assert not any("fastest_of_n" in s for s in (*off["error"], *off["warning"]))
