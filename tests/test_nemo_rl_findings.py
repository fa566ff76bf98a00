# SPDX-License-Identifier: Apache-2.0
"""Findings about NeMo-RL configs that depend on the engine's kind, on files, or on the place of the block.

Also the place of a run's figures in the documents.
"""

import sys
from pathlib import Path

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from test_nemo_rl_config import ASYNC, ASYNC_PPO, CONTROLLER, DRAFT, NATIVE, found, tree

from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.cli.doctor import diagnose_config
from nemo_specrollout.cli.main import main
from nemo_specrollout.config import nemo_rl_config
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG
from nemo_specrollout.doctor.diagnosis import State

pytestmark = pytest.mark.unit

PROMPTS = (
    "data.default.prompt_file=a/user.txt",
    "data.default.system_prompt_file=a/system.txt",
    "data.validation.deep.prompt_file=a/user.txt",
    "env.math.judge.system_prompt_file=a/system.txt",
)


@pytest.mark.parametrize("backend", ["megatron", "sglang", "trtllm"])
def test_another_engine_is_the_only_finding_about_engines(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer and the data are still checked."""
    monkeypatch.setattr(nemo_rl_config, "vllm_version", lambda: "0.20.0")
    faults_in_vllm = (
        f"{VLLM_CFG}={{async_engine: false, precision: bfloat16, max_model_len: 32, tensor_parallel_size: 2, "
        "expert_parallel_size: 3, expose_http_server: true, env_vars: {VLLM_USE_V2_MODEL_RUNNER: 0}}",
        NATIVE.format("method: suffix"),
        "policy.generation.top_p=3",
        "policy.router_replay.enabled=true",
        f"{BLOCK_PATH}.fastest_of_n={{max_racers: 9}}",
    )
    for loop in (ASYNC, ASYNC_PPO, CONTROLLER, DRAFT):
        with_faults = (*loop, "policy.generation.colocated.enabled=true", *faults_in_vllm)
        other = found(*with_faults, f"policy.generation.backend={backend}")
        sentence = f'policy.generation.backend: "{backend}"; specrollout works only in vLLM: set it to vllm'
        assert other == {"error": [sentence], "warning": [], "note": []}
        assert "vLLM" not in str(describe_nemo_rl(tree(f"policy.generation.backend={backend}"))[3:])
        assert all(f.subject != "vllm" for f in check_nemo_rl(tree(f"policy.generation.backend={backend}")))
        assert len(found(*with_faults)["error"]) > 2
    both = found(*DRAFT, f"policy.generation.backend={backend}", "policy.draft.aux_layer_indices=[1]")
    assert len(both["error"]) == 1 and both["warning"][0].startswith("policy.draft.aux_layer_indices")


@pytest.mark.parametrize("is_imported", [False, True])
def test_prompt_files_are_looked_for_as_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_imported: bool
) -> None:
    here, checkout = tmp_path / "here", tmp_path / "checkout"
    for folder in (here / "a", checkout / "a", checkout / "nemo_rl"):
        folder.mkdir(parents=True)
    (checkout / "nemo_rl" / "__init__.py").touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("NEMO_RL_DIR", str(here if is_imported else checkout))
    if is_imported:
        monkeypatch.setattr(sys, "path", [str(checkout), *sys.path])
    notes = [note for note in found(*PROMPTS)["note"] if "prompt_file" in note]
    assert [note.split(": ")[0] for note in notes] == [prompt.split("=")[0] for prompt in PROMPTS]
    assert all(f"is neither in this folder nor in NeMo-RL's checkout {checkout}; " in note for note in notes)
    (here / "a" / "user.txt").touch()
    assert len(found(*PROMPTS)["note"]) == 2
    (checkout / "a" / "system.txt").touch()
    assert found(*PROMPTS)["note"] == []
    absolute = f"data.default.prompt_file={checkout / 'a' / 'system.txt'}"
    assert found(absolute, "data.train=[{prompt_file: null}]")["note"] == []


def test_a_missing_prompt_file_without_a_checkout_has_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL_DIR", str(tmp_path / "nowhere"))
    (note,) = found("data.default.prompt_file=no/such.txt")["note"]
    assert "no/such.txt is not in this folder; a run looks next in NeMo-RL's checkout" in note
    assert note.endswith("set NEMO_RL_DIR")


MISPLACED = [
    ("specrollout.enabled=true", "specrollout"),
    ("policy.specrollout.enabled=true", "policy.specrollout"),
    (f"{VLLM_CFG}.specrollout.enabled=true", f"{VLLM_CFG}.specrollout"),
    ("policy.generation.vllm_kwargs.specrollout.enabled=true", "policy.generation.vllm_kwargs.specrollout"),
    ("policy.generation.spec_rollout.enabled=true", "policy.generation.spec_rollout"),
    ("policy.generation.specrolout.enabled=true", "policy.generation.specrolout"),
    ("policy.generation.specRollout.enabled=true", "policy.generation.specRollout"),
    ("policy.generation.nemo-specrollout.enabled=true", "policy.generation.nemo-specrollout"),
    ("policy.generation.speculative_rollout.enabled=true", "policy.generation.speculative_rollout"),
    ("polcy.generation.specrollout.enabled=true", "polcy.generation.specrollout"),
    ("env.servers=[{}, {specrollout: {enabled: true}}]", "env.servers[1].specrollout"),
    ("specrollout=true", "specrollout"),
]
NO_BLOCK = f"{BLOCK_PATH}.enabled=false"


@pytest.mark.parametrize(("override", "path"), MISPLACED)
def test_a_misplaced_or_misspelt_block_is_named_with_its_place(override: str, path: str) -> None:
    off = f"{path}: nothing reads it there, and specrollout is off; it belongs at {BLOCK_PATH}"
    assert found(NO_BLOCK, override)["warning"] == [off]
    (beside_a_block,) = found(override)["warning"]
    assert beside_a_block.startswith(f"{path}: nothing reads it there; the block in effect is {BLOCK_PATH}")


@pytest.mark.parametrize("part", ["run_ahead", "fastest_of_n", "draft_refresh", "drafters", "tasks_without_drafts"])
def test_a_part_of_the_block_beside_it_is_named_with_its_place(part: str) -> None:
    (warning,) = found(NO_BLOCK, f"policy.generation.{part}={{}}")["warning"]
    assert warning.startswith(f"policy.generation.{part}: ") and warning.endswith(f"it belongs at {BLOCK_PATH}.{part}")


def test_a_block_without_a_value_is_named() -> None:
    (warning,) = found(f"{BLOCK_PATH}=null")["warning"]
    assert warning.startswith(f"{BLOCK_PATH}: null; a block without a value is off: write `enabled: true`")
    (note,) = found(f"{BLOCK_PATH}.run_ahead=null", f"{BLOCK_PATH}.draft_refresh=null")["note"]
    assert note.startswith(f"{BLOCK_PATH}: run_ahead and draft_refresh without a value, which is off")


def test_keys_that_are_like_the_block_are_left_alone() -> None:
    likes = ("speculative_config", "sample_rollouts", "num_rollouts", "rollout", "spec", "budget", "verify")
    for name in likes:
        assert not any(found(NO_BLOCK, f"policy.generation.{name}={{enabled: true}}").values()), name


def test_every_command_tells_of_a_misplaced_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mistake is in the parent, as a key with dots. `run`, `launch` and `install` print what `prepare_nemo_rl` returns."""
    (tmp_path / "base.yaml").write_text(OmegaConf.to_yaml({**tree(), f"{BLOCK_PATH}.enabled": True}))
    config = tmp_path / "config.yaml"
    config.write_text("defaults: base.yaml\npolicy: {generation: {specrollout: {enabled: false}}}\n")
    sentence = (
        f"{BLOCK_PATH}.enabled: nothing reads it there, and specrollout is off; it belongs at {BLOCK_PATH}, each name"
    )
    assert main(["check", str(config)]) == 0
    assert sentence in capsys.readouterr().out
    assert any(str(finding).startswith(sentence) for finding in prepare_nemo_rl(load_config(config))[1])
    told = [d.state for d in diagnose_config(config, []) if d.found.startswith(sentence)]
    assert told == [State.WARN]


def test_documents_name_the_folder_of_figures() -> None:
    """NeMo-RL's scripts make a folder `exp_NNN` in `log_dir` for each start, and log there."""
    texts = (*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("nemo_specrollout/**/*.py"))
    assert [str(p.relative_to(ROOT)) for p in texts if "log_dir>/specrollout" in p.read_text(encoding="utf-8")] == []
