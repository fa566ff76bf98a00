# SPDX-License-Identifier: Apache-2.0
"""The block `run_ahead`: where it works, and what is said where it does not."""

from dataclasses import replace
from typing import Any

import pytest
from conftest import QUICKSTART
from test_nemo_rl_config import APART, CONTROLLER, found, tree

from lab.local.run_config import RunConfig
from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.config.block import BLOCK_PATH, BudgetConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    AheadDrafterConfig,
    DflashDrafterConfig,
    Eagle3DrafterConfig,
    RemoteDrafterConfig,
)
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.generation.engine.arguments import DRAFT_ROWS, VllmAbilities, added_graphs, with_specrollout
from nemo_specrollout.generation.engine.cuda_graphs import graph_bytes, vllms_graphs

pytestmark = pytest.mark.unit

COLOCATED = "policy.generation.colocated.enabled"
AHEAD = f"{BLOCK_PATH}.run_ahead={{enabled: true}}"
IN_FLIGHT = "in_flight_weight_updates: true, recompute_kv_cache_after_weight_updates"


def test_loops_whose_next_prompts_are_known_have_no_findings() -> None:
    """Engines apart or on the trainer's GPUs, one or several, synchronous or not, with the data plane, PPO, distillation,
    and first turns of NeMo-Gym."""
    one_gpu = "cluster={gpus_per_node: 1, num_nodes: 1}"
    for overrides in (
        APART,
        (*APART, f"grpo.async_grpo={{enabled: true, {IN_FLIGHT}: true}}"),
        (one_gpu,),
        (one_gpu, "policy.generation.vllm_cfg.async_engine=true"),
        (one_gpu, "data_plane={enabled: true}"),
        (one_gpu, "grpo=null", "ppo={seed: 1}"),
        (one_gpu, "grpo=null", "distillation={seed: 1}"),
        CONTROLLER,
        (one_gpu, "env.should_use_nemo_gym=true"),
        (*APART, "env.should_use_nemo_gym=true"),
        (*CONTROLLER, "env.should_use_nemo_gym=true"),
    ):
        assert not [s for s in found(AHEAD, *overrides)["error"] if "run_ahead" in s]
    described = dict(describe_nemo_rl(tree(*APART, AHEAD)))["run_ahead"]
    assert described.startswith("engines decode requests of the next steps, as many as pay, in free slots")
    assert (
        "of the next 2 steps in" in dict(describe_nemo_rl(tree(AHEAD, f"{BLOCK_PATH}.run_ahead.steps=2")))["run_ahead"]
    )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((*APART, f"grpo.async_grpo={{enabled: true, {IN_FLIGHT}: false}}"),
         "grpo.async_grpo.recompute_kv_cache_after_weight_updates: false with run_ahead"),
        ((*APART, "grpo=null", f"ppo={{async_ppo: {{enabled: true, {IN_FLIGHT}: false}}}}"),
         "ppo.async_ppo.recompute_kv_cache_after_weight_updates: false with run_ahead"),
        ((*APART, f"grpo.async_grpo={{enabled: true, {IN_FLIGHT}: true}}", f"{BLOCK_PATH}.fastest_of_n={{}}"),
         f"{BLOCK_PATH}.fastest_of_n: with run_ahead and grpo.async_grpo; requests that begin again do not move"),
        ((*APART, "env.should_use_nemo_gym=true", f"grpo.async_grpo={{enabled: true, {IN_FLIGHT}: true}}"),
         "env.should_use_nemo_gym: true with run_ahead and grpo.async_grpo; requests of NeMo-Gym's agents do not begin again"),
        ((*APART, "data.use_multiple_dataloader=true"), "data.use_multiple_dataloader: true with run_ahead; a function of"),
        (("grpo.use_dynamic_sampling=true",), "grpo.use_dynamic_sampling: true with run_ahead; rewards decide"),
        ((*APART, "grpo.use_dynamic_sampling=true", f"{BLOCK_PATH}.run_ahead.steps=2"),
         f"{BLOCK_PATH}.run_ahead.steps: 2 with grpo.use_dynamic_sampling; rewards decide which step the prompts after"),
    ],
    ids=["stale", "stale ppo", "racing", "gym", "loaders", "filter", "filtered steps"],
)  # fmt: skip
def test_where_it_cannot_work_is_a_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    assert any(s.startswith(sentence) for s in found(AHEAD, *overrides)["error"])
    off = found(AHEAD.replace("true", "false"), *overrides)["error"]
    assert not any("run_ahead" in s for s in off)


def test_dynamic_sampling_of_engines_apart_is_one_step_ahead() -> None:
    for steps in ("auto", "1"):
        said = found(AHEAD, *APART, "grpo.use_dynamic_sampling=true", f"{BLOCK_PATH}.run_ahead.steps={steps}")
        assert not any("run_ahead" in s for s in said["error"])


def test_numbers_that_cannot_take_effect_are_a_warning() -> None:
    """The run has three steps of eight responses."""
    (steps,) = found(AHEAD, f"{BLOCK_PATH}.run_ahead.steps=3")["warning"]
    assert steps.startswith(
        f"{BLOCK_PATH}.run_ahead.steps: 3, but the run has 3 steps (grpo.max_num_steps), so no text"
    )
    (memory,) = found(AHEAD, f"{BLOCK_PATH}.run_ahead.text_mib=1", "policy.generation.max_new_tokens=30000")["warning"]
    assert memory.startswith(f"{BLOCK_PATH}.run_ahead.text_mib: 1; 8 responses of 30000 tokens take up to 3 MiB")
    assert not found(AHEAD, f"{BLOCK_PATH}.run_ahead.steps=2")["warning"]


def test_steps_have_no_effect_on_asynchronous_requests() -> None:
    asynchronous = (*APART, f"grpo.async_grpo={{enabled: true, {IN_FLIGHT}: true}}", AHEAD)
    (said,) = found(*asynchronous, f"{BLOCK_PATH}.run_ahead={{steps: 3, text_mib: 1}}")["warning"]
    assert said.startswith(f"{BLOCK_PATH}.run_ahead.steps: 3 with grpo.async_grpo, whose engines are never idle")
    assert not found(*asynchronous)["warning"]
    described = dict(describe_nemo_rl(tree(*asynchronous)))["run_ahead"]
    assert (
        described
        == "requests that are under way begin again when weights change; their texts are drafts, up to 256 per request "
        "and engine step, with up to 3 branches"
    )


def test_greedy_sampling_is_told_what_it_means() -> None:
    (said,) = [s for s in found(AHEAD, "policy.generation.temperature=0")["note"] if "run_ahead" in s]
    assert "greedy sampling has no noise" in said and "branches help all the same" in said


@pytest.mark.parametrize("steps", [0, 5, "all", 1.5, True, None])
def test_steps_are_auto_or_a_number(steps: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"run_ahead\.steps: .* is not available; write auto, or a number from 1 to 4"
    ):
        build(RunAheadConfig, {"steps": steps}, f"{BLOCK_PATH}.run_ahead")
    assert build(RunAheadConfig, {"steps": 4}, "").steps == 4 and RunAheadConfig().steps == "auto"


def test_many_drafts_share_the_rows_of_a_step() -> None:
    """Four requests may have as many drafts together as 32."""
    block = SpecrolloutConfig(run_ahead=RunAheadConfig())
    assert block.most_drafts == 256
    rows = {slots: block.most_draft_rows(slots) for slots in (2, 4, 32, 128)}
    assert rows == {2: 512, 4: 1024, 32: 1024, 128: 4096}
    assert replace(block, run_ahead=RunAheadConfig(most_drafts=64)).most_draft_rows(128) == 128 * 64
    for drafter in (Eagle3DrafterConfig(model="m"), RemoteDrafterConfig(model="m", workers=1)):
        assert replace(block, drafters=(drafter,)).most_drafts == 32
    made = with_specrollout({"max_num_seqs": 128}, block, "cpu")
    assert made["additional_config"][DRAFT_ROWS] == 4096
    assert made["max_num_batched_tokens"] == VllmAbilities().default_tokens + 4096
    made = with_specrollout({"max_num_seqs": 128, "max_num_batched_tokens": 2048}, block, "cpu")
    assert made["additional_config"][DRAFT_ROWS] == 2048 - 128, "the user's own limit holds"
    with pytest.raises(ValueError, match="128 requests with 8 drafts each need 1152: raise it"):
        with_specrollout({"max_num_seqs": 128, "max_num_batched_tokens": 1100}, block, "cpu")


@pytest.mark.parametrize("name", ["use_fp64_gumbel", "return_sampling_mask", "enable_batch_sharded_sampling"])
def test_branches_need_near_ties(name: str) -> None:
    with pytest.raises(ValueError, match=rf"vllm_kwargs\.{name}: True with run_ahead\.branches: 3; .* to 0"):
        with_specrollout({name: True}, SpecrolloutConfig(run_ahead=RunAheadConfig()), "cpu")
    without = SpecrolloutConfig(run_ahead=RunAheadConfig(branches=0))
    assert with_specrollout({name: True}, without, "cpu")[name]


def test_the_block_gets_its_drafter_and_room_for_its_drafts() -> None:
    block = SpecrolloutConfig(run_ahead=RunAheadConfig(most_drafts=40))
    arguments = with_specrollout({"max_num_seqs": 256}, block, "cuda")
    assert arguments["additional_config"]["specrollout"]["drafters"][-1] == {"type": "ahead"}
    assert arguments["speculative_config"]["num_speculative_tokens"] == 40
    assert arguments["max_num_batched_tokens"] >= 256 * 41
    named = replace(block, drafters=(AheadDrafterConfig(),))
    assert named.with_own_drafters == named
    off = replace(block, run_ahead=RunAheadConfig(enabled=False))
    assert off.with_own_drafters == off and off.most_drafts == 8
    assert replace(block, budget=BudgetConfig("fixed", k=3)).most_drafts == 3
    assert replace(block, drafters=(DflashDrafterConfig(model="m"),)).most_drafts == 8, (
        "its network has eight positions"
    )


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ({"max_num_seqs": 32}, [640, 768, 896, 1024, 1056]),
        ({"max_num_seqs": 15}, []),
        ({"max_num_seqs": 37}, [640, 768, 896, 1024, 1216]),
        ({"max_num_seqs": 256}, [640, 768, 896, 1024, 1280, 1536, 1760]),
        ({"max_num_seqs": 32, "compilation_config": {"mode": 0}}, [640, 768, 896, 1024, 1056]),
        ({"max_num_seqs": 32, "compilation_config": {"cudagraph_capture_sizes": [8]}}, None),
        ({"max_num_seqs": 32, "compilation_config": {"max_cudagraph_capture_size": 64}}, None),
        ({"max_num_seqs": 32, "max_cudagraph_capture_size": 64}, None),
        ({"max_num_seqs": 32, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}, None),
        ({"max_num_seqs": 32, "enforce_eager": True}, None),
        ({"max_num_seqs": 32, "attention_backend": "FLASHINFER"}, None),
        ({"max_num_seqs": 32, "performance_mode": "interactivity"}, None),
    ],
)
def test_graphs_hold_the_texts_made_ahead(arguments: dict[str, Any], added: list[int] | None) -> None:
    """A user's own sizes stay. Rows of a vocabulary of 151,936 tokens are sampled at once up to 1,766."""
    block = SpecrolloutConfig(run_ahead=RunAheadConfig(most_drafts=32))
    abilities = VllmAbilities(policy={"vocab_size": 151_936})
    made = with_specrollout(arguments, block, "cuda", abilities)
    assert added_graphs(arguments, block, abilities) == (added or [])
    if not added:
        assert made.get("compilation_config") == arguments.get("compilation_config")
        return
    sizes = made["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == [*vllms_graphs(512), *added]
    assert made["compilation_config"] == {**arguments.get("compilation_config", {}), "cudagraph_capture_sizes": sizes}
    assert "compilation_config" not in with_specrollout({"max_num_seqs": 32}, block, "cpu")


def test_blackwell_keeps_its_larger_graphs() -> None:
    block = SpecrolloutConfig(run_ahead=RunAheadConfig(most_drafts=32))
    assert added_graphs({"max_num_seqs": 32}, block, VllmAbilities(largest_graph=1024)) == [1056]
    assert added_graphs({"max_num_seqs": 32}, block, VllmAbilities(chooses_on_device=False)) == []


def test_the_memory_of_graphs_is_known_by_the_models_sizes() -> None:
    """Qwen3-8B's graphs of up to 1,056 rows take 334 MiB more than vLLM's, most of it for the splits of attention."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8}
    needed = [graph_bytes(sizes, rows) or 0 for rows in (512, 1056)]
    assert needed[0] == 512 * (8 * 4096 + 2 * (6144 + 36_864) + 4 * 32 * 4096)
    assert (needed[1] - needed[0]) / 2**20 == pytest.approx(334, abs=5)
    assert graph_bytes({"text_config": sizes}, 512) == needed[0] > 1.8 * (graph_bytes(sizes, 512, 2) or 0)
    assert graph_bytes({}, 512) is None


def test_check_says_which_graphs_are_added() -> None:
    said = dict(describe_nemo_rl(tree(*APART, AHEAD, "policy.generation.vllm_kwargs.max_num_seqs=32")))["graphs"]
    assert said.startswith("of 640, 768, 896, 1024, 1056 rows beside vLLM's own up to 512")
    users = "policy.generation.vllm_kwargs.compilation_config={max_cudagraph_capture_size: 256}"
    assert "graphs" not in dict(describe_nemo_rl(tree(*APART, AHEAD, users)))
    assert "graphs" not in dict(describe_nemo_rl(tree(*APART, AHEAD, "policy.generation.vllm_cfg.enforce_eager=true")))


def test_local_asynchronous_runs_must_recompute() -> None:
    def run(*overrides: str) -> RunConfig:
        return build(RunConfig, load_config(QUICKSTART, [AHEAD, *overrides]), "")

    assert run().policy.generation.specrollout.runs_ahead
    with pytest.raises(ConfigError, match=r"run_ahead: with grpo\.async_grpo\.enabled; it then verifies"):
        run("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
    corrected = ("loss_fn.use_importance_sampling_correction=true", f"{BLOCK_PATH}.verify.requests_per_step=0")
    assert run(*corrected, f"grpo.async_grpo={{enabled: true, {IN_FLIGHT}: true}}").grpo.async_grpo.enabled


def test_a_task_that_the_run_lacks_is_refused() -> None:
    def run(task: str) -> RunConfig:
        return build(RunConfig, load_config(QUICKSTART, [f"{BLOCK_PATH}.tasks_without_drafts=[{task}]"]), "")

    with pytest.raises(ConfigError, match=r"tasks_without_drafts: the run has no task 'squad'; known: step_addition"):
        run("squad")
    run("step_addition")
