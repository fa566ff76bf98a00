# SPDX-License-Identifier: Apache-2.0
"""Values and names of NeMo-RL configs that NeMo-RL or vLLM would refuse only when it starts."""

from pathlib import Path

import pytest
from test_nemo_rl_config import APART, ASYNC, CLEAN, CONTROLLER, NATIVE, found, tree

from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.cli.main import main
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl
from nemo_specrollout.config.nemo_rl_tree import GENERATION, SPECULATIVE_CONFIG, VLLM_CFG
from nemo_specrollout.config.nemo_rl_values import unknown_overrides

pytestmark = pytest.mark.unit

RESOURCES = f"{GENERATION}.colocated.resources"


@pytest.mark.parametrize(
    "override",
    [
        "policy.model_name=null", "policy.model_name=''", "policy.model_name=3",
        "policy.max_total_sequence_length=abc", "policy.train_global_batch_size=0", "policy.train_micro_batch_size=1.5",
        "policy.logprob_batch_size=-1", "grpo.max_num_steps=-1", "grpo.num_prompts_per_step=0",
        "grpo.num_generations_per_prompt=many", f"{GENERATION}.top_p=3", f"{GENERATION}.top_p=0", f"{GENERATION}.top_p=true",
        f"{GENERATION}.top_k=0", f"{GENERATION}.top_k=-2", f"{GENERATION}.top_k=1.5", f"{GENERATION}.max_new_tokens=-4",
        f"{VLLM_CFG}.max_model_len=0", f"{VLLM_CFG}.gpu_memory_utilization=9", f"{VLLM_CFG}.gpu_memory_utilization=0",
        f"{VLLM_CFG}.precision=fp9", f"{VLLM_CFG}=null", f"{VLLM_CFG}.tensor_parallel_size=3",
        f"{VLLM_CFG}.tensor_parallel_size=16",
    ],
)  # fmt: skip
def test_a_value_that_cannot_run_is_the_one_error(override: str) -> None:
    (error,) = found(override)["error"]
    assert error.startswith(f"{override.partition('=')[0]}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ("top_p=1", "top_k=null", "max_new_tokens=null", "vllm_cfg.gpu_memory_utilization=1"),
        ("top_p=0.01", "top_k=-1", "max_new_tokens=1", "vllm_cfg.gpu_memory_utilization=0.6"),
        ("top_p=null", "top_k=1", "vllm_cfg.max_model_len=-1", "vllm_cfg.gpu_memory_utilization=null"),
        ("vllm_cfg.precision=fp8",),
        ("vllm_cfg.tensor_parallel_size=8",),
    ],
)
def test_values_at_the_bounds_have_no_error(overrides: tuple[str, ...]) -> None:
    assert found(*(f"{GENERATION}.{override}" for override in overrides))["error"] == []


@pytest.mark.parametrize("steps", ["0", "1e6", "null"])
def test_numbers_of_steps_that_nemo_rl_takes_have_no_error(steps: str) -> None:
    assert found(f"grpo.max_num_steps={steps}")["error"] == []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((*APART, f"{RESOURCES}.gpus_per_node=99"), f"{RESOURCES}.gpus_per_node: 99; generation and training share 8 GPUs"),
        ((*APART, f"{RESOURCES}.gpus_per_node=8"), f"{RESOURCES}.gpus_per_node: 8; generation"),
        ((*APART, f"{RESOURCES}.gpus_per_node=null"), f"{RESOURCES}.gpus_per_node: null; generation"),
        ((*APART, f"{RESOURCES}.num_nodes=2"), f"{RESOURCES}.num_nodes: 2; there is one node: set it to null"),
        ((*APART, f"{VLLM_CFG}.tensor_parallel_size=8"), f"{VLLM_CFG}.tensor_parallel_size: 8; 4 GPUs generate, which"),
        ((*APART, "cluster.num_nodes=4", f"{RESOURCES}.gpus_per_node=8"), f"{RESOURCES}.num_nodes: null; the rest of the 4"),
        ((*APART, "cluster.num_nodes=4", f"{RESOURCES}.gpus_per_node=8", f"{RESOURCES}.num_nodes=4"),
         f"{RESOURCES}.num_nodes: 4; the rest of the 4 nodes trains: set it to at least 1 and below 4"),
        ((*APART, "cluster.num_nodes=4", f"{RESOURCES}.num_nodes=1"), f"{RESOURCES}.gpus_per_node: 4; whole nodes generate"),
        ((*ASYNC, f"{VLLM_CFG}.expert_parallel_size=2"), f"{VLLM_CFG}.expert_parallel_size: 2 with tensor_parallel_size 1; "),
    ],
)  # fmt: skip
def test_gpus_that_cannot_be_dealt_out_are_an_error(overrides: tuple[str, ...], sentence: str) -> None:
    (error,) = found(*overrides)["error"]
    assert error.startswith(sentence)


def test_gpus_that_nemo_rl_deals_out_have_no_error() -> None:
    nodes = ("cluster.num_nodes=4", f"{RESOURCES}.num_nodes=1")
    assert found(*APART, f"{VLLM_CFG}.tensor_parallel_size=4")["error"] == []
    assert found(*APART, *nodes, f"{RESOURCES}.gpus_per_node=8")["error"] == []
    assert found(*CONTROLLER, *nodes)["error"] == []  # it may use a part of a node
    others = ("data.train=[{env_name: reward_model}]", "on_policy_distillation.enabled=true")
    for other in others:  # a reward model or teachers take some GPUs
        assert found(f"{VLLM_CFG}.tensor_parallel_size=3", other)["error"] == []


def test_the_description_has_no_negative_number_of_gpus() -> None:
    lines = dict(describe_nemo_rl(tree(*APART, f"{RESOURCES}.gpus_per_node=99")))
    assert "99 GPUs generate, 0 train" in lines["placement"]


def test_values_for_vllm_are_not_checked_for_another_engine() -> None:
    (error,) = found(f"{GENERATION}.backend=sglang", f"{GENERATION}.top_p=3", f"{VLLM_CFG}.tensor_parallel_size=3")[
        "error"
    ]
    assert error.startswith(f"{GENERATION}.backend: ")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("sft", "a run of this kind makes no rollouts"),
        ("dpo", "a run of this kind makes no rollouts"),
        ("rm", "a run of this kind makes no rollouts"),
        ("eval", "an evaluation trains nothing"),
    ],
)
def test_a_config_without_rollouts_says_so_alone(block: str, words: str) -> None:
    (finding,) = check_nemo_rl(
        {block: {"seed": 1}, "policy": {"model_name": "a/name"}, "cluster": {"gpus_per_node": 8}}
    )
    assert finding.kind == "error" and str(finding).startswith(f"{block}: {words}")


def test_a_head_whose_folder_is_not_here_has_a_note(tmp_path: Path) -> None:
    def notes(name: str) -> list[str]:
        drafters = f"{BLOCK_PATH}.drafters=[{{type: eagle3, model: {name}}}]"
        return [note for note in found(drafters)["note"] if "folder here" in note]

    for name in ("/nope", "./nope", "../nope"):
        assert notes(name) == [
            f"{BLOCK_PATH}.drafters: {name} is not a folder here; each engine looks for it on its own machine"
        ]
    assert notes(str(tmp_path)) == notes("a/head") == []
    native = found(NATIVE.format("method: eagle3, model: /nope"))["note"]
    assert any(note.startswith(f"{SPECULATIVE_CONFIG}.model: /nope is not a folder here") for note in native)


# Overrides.


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CLEAN)
    return path


@pytest.mark.parametrize(
    ("override", "likely"),
    [
        ("grpo.num_prompt_per_step=3", "num_prompts_per_step"),
        (f"{VLLM_CFG}.tensor_paralel_size=3", "tensor_parallel_size"),
        ("polcy.model_name=a/b", "policy"),
    ],
)
def test_a_misspelled_override_is_warned_of(config: Path, override: str, likely: str) -> None:
    (finding,) = unknown_overrides(config, [override])
    assert finding.kind == "warning" and finding.subject == override.partition("=")[0]
    assert finding.text.endswith(f"; did you mean {likely!r}?")


def test_an_override_that_resembles_nothing_has_a_note(config: Path) -> None:
    (finding,) = unknown_overrides(config, ["foo=1"])
    assert (finding.kind, finding.text.endswith("; then write +key=value")) == ("note", True)


@pytest.mark.parametrize(
    "override",
    [
        "grpo.num_prompts_per_step=3", "+grpo.num_prompt_per_step=3", "++foo=1", "runtime=nemo_rl", "env.math.workers=2",
        f"{BLOCK_PATH}.budgt=1", f"{GENERATION}.vllm_kwargs.async_scheduling=true", f"{VLLM_CFG}.env_vars.SOME=1",
        "policy.draft.model_name.deeper=1",
    ],
)  # fmt: skip
def test_known_new_and_free_keys_have_no_finding(config: Path, override: str) -> None:
    assert list(unknown_overrides(config, [override])) == []


def test_a_key_of_an_earlier_override_is_known(config: Path) -> None:
    assert list(unknown_overrides(config, ["+more={a: 1}", "more.a=2"])) == []
    assert [finding.subject for finding in unknown_overrides(config, ["foo=1", "foo=2"])] == ["foo"]


def test_check_prints_the_key_that_was_meant(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(config), "grpo.num_prompt_per_step=3"]) == 0
    printed = capsys.readouterr()
    (line,) = (line for line in printed.out.splitlines() if line.startswith("warning"))
    assert "grpo.num_prompt_per_step: not a key" in line and "did you mean 'num_prompts_per_step'?" in line
    assert printed.err == ""
