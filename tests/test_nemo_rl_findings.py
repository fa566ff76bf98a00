# SPDX-License-Identifier: Apache-2.0
"""Findings about NeMo-RL configs that depend on the engine's kind, on files, or on the place of the block.

Also the place of a run's figures in the documents.
"""

import sys
from pathlib import Path

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from test_nemo_rl_config import APART, ASYNC, ASYNC_PPO, CONTROLLER, DRAFT, NATIVE, found, tree

from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.cli.doctor import diagnose_config
from nemo_specrollout.cli.main import main
from nemo_specrollout.config import engine_vllm, resource_rules
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
    monkeypatch.setattr(engine_vllm, "vllm_version", lambda: "0.20.0")
    monkeypatch.setattr(engine_vllm, "nemo_rl_checkout", lambda: None)
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


# GPUs, and keys of logging services

SIZES = {"tensor": f"{VLLM_CFG}.tensor_parallel_size", "pipeline": f"{VLLM_CFG}.pipeline_parallel_size"}
RESOURCES = "policy.generation.colocated.resources"
APART_ON_NODES = ("policy.generation.colocated.enabled=false", f"{RESOURCES}.gpus_per_node=8", "cluster.num_nodes=4")
PIPELINE = (f"{SIZES['pipeline']}=4", f"{VLLM_CFG}.async_engine=true", f"{BLOCK_PATH}.drafters=[]")
REWARD_MODEL = ("data.train.env_name=reward_model", "env.reward_model.resources={num_nodes: 1, gpus_per_node: 2}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            (f"{SIZES['tensor']}=4", *PIPELINE),
            "tensor_parallel_size 4 x pipeline_parallel_size 4 is 16 GPUs, which do not",
        ),
        ((f"{SIZES['tensor']}=3",), "is 3 GPUs, which do not divide the 8 that it has of cluster's 1 x 8"),
        ((*APART, f"{SIZES['tensor']}=8"), "is 8 GPUs, which do not divide the 4 that it has"),
        ((*APART_ON_NODES, f"{RESOURCES}.num_nodes=1", f"{SIZES['tensor']}=16"), "do not divide the 8 that it has"),
        ((*APART_ON_NODES, f"{RESOURCES}.num_nodes=4"), "policy.megatron_cfg.pipeline_model_parallel_size: "),
        ((*REWARD_MODEL, f"{SIZES['tensor']}=4"), "is 4 GPUs, which do not divide the 6 that it has"),
        (("policy.megatron_cfg.tensor_model_parallel_size=16",), "is 32 GPUs, which do not divide the 8"),
        (
            ("policy.megatron_cfg.enabled=false", "policy.dtensor_cfg={enabled: true, context_parallel_size: 16}"),
            "policy.dtensor_cfg.context_parallel_size: tensor_parallel_size 1 x context_parallel_size 16 is 16 GPUs",
        ),
        ((APART[0],), f"{RESOURCES}.gpus_per_node: null; generation apart from training needs a number of GPUs"),
        ((*APART, f"{RESOURCES}.num_nodes=2"), f"{RESOURCES}.num_nodes: 2, but one node is there"),
        ((*APART_ON_NODES, f"{RESOURCES}.num_nodes=2", APART[1]), "4; with several nodes, generation takes whole ones"),
        (APART_ON_NODES, f"{RESOURCES}.num_nodes: null; with several nodes, set the number"),
        ((f"{SIZES['pipeline']}=2", PIPELINE[2]), f"{VLLM_CFG}.async_engine: false with pipeline_parallel_size 2"),
        (
            (f"{SIZES['tensor']}=2", f"{VLLM_CFG}.expert_parallel_size=3"),
            "expert_parallel_size: 3; NeMo-RL needs a multiple of tensor_parallel_size 2",
        ),
        (
            (f"{VLLM_CFG}.expert_parallel_size=2", f"{VLLM_CFG}.async_engine=true"),
            "true with expert_parallel_size 2 above",
        ),
    ],
)
def test_sizes_that_nemo_rl_refuses_for_a_cluster_are_errors(overrides: tuple[str, ...], words: str) -> None:
    assert any(words in error for error in found(*overrides)["error"]), found(*overrides)["error"]


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{SIZES['tensor']}=4", *PIPELINE, "cluster.num_nodes=2"),
        (*APART, f"{SIZES['tensor']}=4"),
        (*APART_ON_NODES, f"{RESOURCES}.num_nodes=2", f"{SIZES['tensor']}=16"),
        (*REWARD_MODEL, f"{SIZES['tensor']}=2", "cluster.num_nodes=3"),
        (f"{SIZES['tensor']}=16", "cluster.gpus_per_node=null"),
        (f"{SIZES['tensor']}=16", "on_policy_distillation={enabled: true, non_colocated_teachers: {enabled: true}}"),
        (*CONTROLLER, "cluster.num_nodes=2"),
    ],
)
def test_sizes_that_fit_are_no_error(overrides: tuple[str, ...]) -> None:
    assert found(*overrides)["error"] == []


@pytest.mark.parametrize(
    ("service", "key", "mode", "login"),
    [
        ("wandb", "WANDB_API_KEY", "WANDB_MODE", ".netrc"),
        ("swanlab", "SWANLAB_API_KEY", "SWANLAB_MODE", ".swanlab/.netrc"),
    ],
)
def test_a_logging_service_without_a_key_is_warned_of(
    service: str, key: str, mode: str, login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (key, mode, "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    enabled = f"logger.{service}_enabled"
    (warning,) = found(f"{enabled}=true")["warning"]
    assert warning.startswith(f"{enabled}: true, but no key is known here: neither {key} nor a login in ~/{login}")
    assert found(f"{enabled}=true", f"logger.{service}.mode=offline")["warning"] == []
    for name, value in ((key, "abc"), (mode, "offline")):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            assert found(f"{enabled}=true")["warning"] == []
    (tmp_path / login).parent.mkdir(exist_ok=True)
    for host, num_warnings in (("github.com", 1), (f"api.{service}.io", 0)):
        (tmp_path / login).write_text(f"machine {host}\n  login user\n  password abc\n")
        assert len(found(f"{enabled}=true")["warning"]) == num_warnings
    assert found(f"{enabled}=true", NO_BLOCK)["warning"] == []


def test_kinds_of_gpus_that_megatron_needs_are_asked_for_in_nemo_rl_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert found()["warning"] == [], "a login node is not the place of the run"
    monkeypatch.setattr(resource_rules, "can_run_nemo_rl", lambda: True)
    (warning,) = found()["warning"]
    assert warning.startswith("TORCH_CUDA_ARCH_LIST: not set; NeMo-RL's container sets it")
    assert found("policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.enabled=true")["warning"] == []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert found()["warning"] == []
