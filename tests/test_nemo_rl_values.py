# SPDX-License-Identifier: Apache-2.0
"""Values of NeMo-RL configs that vLLM would refuse late, and names of keys."""

from pathlib import Path

import pytest
from test_nemo_rl_config import APART, CLEAN, NATIVE, found, tree

from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.cli.main import main
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl
from nemo_specrollout.config.nemo_rl_rules import unknown_overrides
from nemo_specrollout.config.nemo_rl_tree import GENERATION, SPECULATIVE_CONFIG, VLLM_CFG

pytestmark = pytest.mark.unit

RESOURCES = f"{GENERATION}.colocated.resources"


@pytest.mark.parametrize(
    "override",
    [
        "policy.model_name=null", "policy.model_name=''", "policy.model_name=3",
        f"{GENERATION}.top_p=3", f"{GENERATION}.top_p=0", f"{GENERATION}.top_p=true",
        f"{GENERATION}.top_k=0", f"{GENERATION}.top_k=-2", f"{GENERATION}.top_k=1.5", f"{GENERATION}.max_new_tokens=-4",
        f"{VLLM_CFG}=null",
    ],
)  # fmt: skip
def test_a_value_that_cannot_run_is_the_one_error(override: str) -> None:
    (error,) = found(override)["error"]
    assert error.startswith(f"{override.partition('=')[0]}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ("top_p=1", "top_k=null", "max_new_tokens=null"),
        ("top_p=0.01", "top_k=-1", "max_new_tokens=1"),
        ("top_p=null", "top_k=1"),
    ],
)
def test_values_at_the_bounds_have_no_error(overrides: tuple[str, ...]) -> None:
    assert found(*(f"{GENERATION}.{override}" for override in overrides))["error"] == []


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
