# SPDX-License-Identifier: Apache-2.0
"""Findings about NeMo-RL configs with the block `specrollout`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, STEP_ADDER
from omegaconf import OmegaConf

from lab.cli.main import main as lab
from nemo_specrollout.cli.main import main
from nemo_specrollout.config import engine_vllm, nemo_rl_config
from nemo_specrollout.config.block import BLOCK_PATH, LearnedConfig, SpecrolloutConfig
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, effective_config, prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_tree import SPECULATIVE_CONFIG as SPECULATIVE
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.installed import versions
from nemo_specrollout.nemo_rl.installation import _check_block, with_absolute_paths
from nemo_specrollout.nemo_rl.run_facts import RunFacts, block_of, put_run
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.nemo_rl.supervisor import Supervisor
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedRow, SpeedTableFile

pytestmark = pytest.mark.unit

EAGLE3 = "policy.generation.vllm_kwargs.speculative_config={method: eagle3, model: a/head, num_speculative_tokens: 3}"
NATIVE = "policy.generation.vllm_kwargs.speculative_config={{{}, num_speculative_tokens: 3}}"
APART = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=4")
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "policy.generation.vllm_cfg.async_engine=true",
    *APART,
    "loss_fn.use_importance_sampling_correction=true",
)
ASYNC_PPO = ("grpo=null", "ppo={seed: 42, async_ppo: {enabled: true, in_flight_weight_updates: true}}", *ASYNC[1:])
CONTROLLER = (
    "grpo.async_grpo=null",
    "async_rl.sampler.name=in_order",
    "data_plane.enabled=true",
    "policy.generation.vllm_cfg.async_engine=true",
    *APART,
)
DRAFT = ("policy.draft.enabled=true", "policy.sequence_packing.enabled=false", EAGLE3)
# The relevant part of NeMo-RL's grpo_math_1B_megatron.yaml, in float32.
CLEAN = """
runtime: nemo_rl
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2, max_num_steps: 3, async_grpo: {enabled: false}}
loss_fn: {use_importance_sampling_correction: false}
policy:
  model_name: a/name
  precision: float32
  max_total_sequence_length: 64
  train_global_batch_size: 8
  train_micro_batch_size: 2
  logprob_batch_size: 4
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2}
  draft: {enabled: false, model_name: null, aux_layer_indices: null}
  sequence_packing: {enabled: true}
  generation:
    backend: vllm
    temperature: 1.0
    colocated: {enabled: true, resources: {num_nodes: null, gpus_per_node: null}}
    vllm_cfg: {precision: float32, max_model_len: 64, async_engine: false, tensor_parallel_size: 1,
               pipeline_parallel_size: 1, expert_parallel_size: 1}
    vllm_kwargs: {}
    specrollout: {enabled: true}
logger: {log_dir: logs}
cluster: {num_nodes: 1, gpus_per_node: 8}
"""


REMOTE = f"{BLOCK_PATH}.drafters=[{{type: remote, model: DRAFT, workers: 2"


def tree(*overrides: str) -> dict[str, Any]:
    merged = OmegaConf.merge(OmegaConf.create(CLEAN), OmegaConf.from_dotlist(list(overrides)))
    resolved = OmegaConf.to_container(merged)
    assert isinstance(resolved, dict)
    return resolved  # type: ignore[return-value]


def found(*overrides: str) -> dict[str, list[str]]:
    """Returns the findings about the clean config with `overrides`, by kind, without those about installed packages."""
    kinds: dict[str, list[str]] = {"error": [], "warning": [], "note": []}
    for finding in check_nemo_rl(tree(*overrides)):
        if finding.subject not in {"nemo-rl", "vllm"}:
            kinds[finding.kind].append(str(finding))
    return kinds


# The block for the vLLM workers.


def test_nemo_rl_carries_the_complete_block_as_plain_values() -> None:
    block, carried = effective_config(tree()), dict[str, Any]()
    assert block == SpecrolloutConfig() and [d.type for d in block.drafters] == ["suffix", "ngram"]
    put_run(carried, block, RunFacts(1, 2, 3, "heads"))
    assert json.loads(json.dumps(carried)) == carried and RunFacts.of(carried) == RunFacts(1, 2, 3, "heads")
    assert block_of(carried) == block


def test_actors_in_other_folders_find_the_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    drafters = "[{type: suffix}, {type: remote, model: draft, workers: 1}]"
    racing = f"{BLOCK_PATH}.fastest_of_n={{ladder: speeds.json}}"
    block = effective_config(tree(f"{BLOCK_PATH}.drafters={drafters}", racing))
    assert block is not None
    found = with_absolute_paths(block, tmp_path)
    assert found.fastest_of_n is not None and found.fastest_of_n.ladder == str(tmp_path / "speeds.json")
    assert found.remote is not None and found.remote.model == str(tmp_path / "draft")
    assert found.drafters[0] == block.drafters[0]
    assert found.learned.folder == str(tmp_path / "specrollout_learned")
    named = SpecrolloutConfig(learned=LearnedConfig(folder="mine"))
    assert with_absolute_paths(named, tmp_path).learned.folder == str(Path("mine").absolute())


@pytest.mark.parametrize("override", [f"{BLOCK_PATH}.enabled=false", f"{BLOCK_PATH}=null", "policy.generation=null"])
def test_a_disabled_block_is_none(override: str) -> None:
    assert effective_config(tree(override)) is None


LADDER = f"{BLOCK_PATH}.fastest_of_n.ladder"


def test_a_run_may_start_from_a_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(CLEAN)
    rung = SpeedRow(ANY_TASK, "suffix+ngram", (1, 4), (200.0, 90.0), (5.0, 5.0))
    ladder = tmp_path / "ladder.json"
    ladder.write_text(SpeedTableFile("H200", "a/name", 1e-4, (rung,)).to_json())
    assert main(["check", str(tmp_path / "config.yaml"), f"{LADDER}={ladder}"]) == 0
    assert f"decode speeds start from {ladder}" in capsys.readouterr().out
    ladder.write_text(ladder.read_text().replace("0.0001", "-1"))
    wrong = "is not a ladder (prefill_s_per_token: -1.0 is out of range; it must be above 0.0); create one with"
    assert main(["check", str(tmp_path / "config.yaml"), f"{LADDER}={ladder}"]) == 2
    assert f"nemo-specrollout: {LADDER}: {ladder} {wrong}" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "config.yaml"), f"{LADDER}={tmp_path / 'none.json'}"]) == 2
    assert f"{LADDER}: {tmp_path / 'none.json'} is not a ladder (No such file" in capsys.readouterr().err
    off = [f"{LADDER}={ladder}", f"{BLOCK_PATH}.fastest_of_n.enabled=false"]
    assert main(["check", str(tmp_path / "config.yaml"), *off]) == 0


def test_a_wrong_ladder_ends_a_run_before_its_engines_start(tmp_path: Path) -> None:
    block = effective_config(tree(f"{LADDER}={tmp_path / 'none.json'}"))
    assert block is not None
    with pytest.raises(ConfigError, match=r"fastest_of_n\.ladder: .*none\.json is not a ladder"):
        _check_block(block, {"model_name": "a/name", "generation": {"vllm_cfg": {}}})
    config = dict[str, Any]()
    put_run(config, block, RunFacts(1, 0, 3, "heads"))
    with pytest.raises(ConfigError, match=r"fastest_of_n\.ladder: .*none\.json is not a ladder"):
        Supervisor(block, config, StepLog())


def test_a_disabled_block_has_no_findings() -> None:
    assert not any(found(f"{BLOCK_PATH}.enabled=false", "policy.generation.backend=sglang").values())


def test_a_vllm_with_which_nemo_rl_alone_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 is installed; a file stands in for NeMo-RL's worker extension."""
    extension = tmp_path / "nemo_rl" / "models" / "generation" / "vllm" / "vllm_backend.py"
    extension.parent.mkdir(parents=True)
    (tmp_path / "nemo_rl" / "__init__.py").touch()
    (tmp_path / "nemo_rl" / "package_info.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    off = tree(f"{BLOCK_PATH}.enabled=false")
    for method, is_named in (("synchronize_device", True), ("synchronize_sparse_delta_refit", False)):
        extension.write_text(f"class VllmInternalWorkerExtension:\n    def {method}(self): ...\n")
        (found_,) = check_nemo_rl(off) or [None]
        assert (found_ is not None) is is_named
    assert not check_nemo_rl(tree(f"{BLOCK_PATH}.enabled=false", "policy.generation.backend=sglang"))


def test_a_speculative_config_replaces_our_drafters() -> None:
    config = tree(EAGLE3)
    block = effective_config(config)
    assert block is not None and block.drafters == ()
    put_run(config["policy"]["generation"], block, RunFacts(1, 2, 3, "heads"))
    assert effective_config(config) == block


def test_a_disabled_speculative_config_leaves_our_drafters() -> None:
    block = effective_config(tree(EAGLE3.replace("tokens: 3", "tokens: 0")))
    assert block is not None and len(block.drafters) == 2


def test_drafters_beside_a_speculative_config_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"drafters: named beside policy\..*speculative_config; remove `drafters` to keep"
    ):
        effective_config(tree(EAGLE3, f"{BLOCK_PATH}.drafters=[{{type: ngram}}]"))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [("enable=true", "did you mean 'enabled'"), ("enabled='yes'", "expected bool"), ("budget.k=99", "out of range")],
)
def test_the_block_is_strict(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        effective_config(tree(f"{BLOCK_PATH}.{override}"))
    (error,) = found(f"{BLOCK_PATH}.{override}")["error"]
    assert error.startswith(f"{BLOCK_PATH}.") and sentence in error


# Options that do not go together.


@pytest.mark.parametrize("more", ["env.should_use_nemo_gym=true", f"{BLOCK_PATH}.http_seeds=required"])
def test_a_server_with_seeded_requests_has_no_findings(more: str) -> None:
    assert not any(found(f"{VLLM_CFG}.expose_http_server=true", more).values())


def test_a_sound_config_has_no_findings() -> None:
    assert not any(found().values())
    assert not any(found(*ASYNC).values())
    assert not any(found(*CONTROLLER).values())
    assert not any(found("data_plane.enabled=true").values())
    assert found(*DRAFT)["error"] == found(*DRAFT)["warning"] == []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("grpo=null",), "grpo: missing"),
        (("policy.generation=null",), "policy.generation: missing"),
        (("policy.generation.backend=sglang",), 'policy.generation.backend: "sglang"; '),
        (("data_plane.enabled=true", f"{BLOCK_PATH}.fastest_of_n={{}}"), f"{BLOCK_PATH}.fastest_of_n: with data_plane.enab"),
        (("policy.generation.quant_cfg=NVFP4",), 'policy.generation.quant_cfg: "NVFP4"; '),
        (("policy.generation.vllm_kwargs.worker_cls=a.B",), 'policy.generation.vllm_kwargs.worker_cls: "a.B"; '),
        (("policy.generation.worker_extension_cls_fqn=a.B",), 'policy.generation.worker_extension_cls_fqn: "a.B"; '),
        (("policy.generation.vllm_kwargs.speculative_config=eagle3",), "policy.generation.vllm_kwargs.speculative_config: "),
        (("policy.generation.vllm_cfg.env_vars.VLLM_USE_V2_MODEL_RUNNER=0",),
         "policy.generation.vllm_cfg.env_vars.VLLM_USE_V2_MODEL_RUNNER: 0; "),
        ((NATIVE.format("method: suffix"),), f'{SPECULATIVE}.method: "suffix"; vLLM\'s V2 model runner does not have it: re'),
        ((NATIVE.format("method: medusa, model: a/b"),), f'{SPECULATIVE}.method: "medusa"; vLLM\'s V2 model runner'),
        ((NATIVE.format("method: eagle3, parallel_drafting: true"),), f"{SPECULATIVE}.parallel_drafting: true; "),
        ((NATIVE.format("method: eagle3, disable_padded_drafter_batch: true"),),
         f"{SPECULATIVE}.disable_padded_drafter_batch: true; "),
        ((f"{VLLM_CFG}.pipeline_parallel_size=2",), f"{VLLM_CFG}.pipeline_parallel_size: 2 with drafters (suffix, ngram); "),
        ((f"{VLLM_CFG}.pipeline_parallel_size=2", EAGLE3), f"{VLLM_CFG}.pipeline_parallel_size: 2 with drafters (eagle3); "),
        ((f"{VLLM_CFG}.expert_parallel_size=2", f"{BLOCK_PATH}.drafters=[{{type: mtp}}]"),
         f"{VLLM_CFG}.expert_parallel_size: 2 with tensor_parallel_size 1 and a drafter with weights (mtp); "),
    ],
)  # fmt: skip
def test_a_config_that_cannot_run_has_an_error(overrides: tuple[str, ...], sentence: str) -> None:
    errors = found(*overrides)["error"]
    assert len(errors) == 1 and errors[0].startswith(sentence)
    with pytest.raises(ConfigError, match=r"^\S+: .+"):
        prepare_nemo_rl(tree(*overrides))


def test_options_of_the_v2_model_runner_are_allowed() -> None:
    allowed = (
        ("policy.generation.vllm_kwargs.async_scheduling=true",),
        (f"{VLLM_CFG}.env_vars.VLLM_USE_V2_MODEL_RUNNER=1",),
        (NATIVE.format("method: dflash, model: a/b, parallel_drafting: true"),),
        (NATIVE.format("method: suffix").replace("tokens: 3", "tokens: 0"),),  # switched off
        (f"{VLLM_CFG}.expert_parallel_size=2",),
        (f"{VLLM_CFG}.pipeline_parallel_size=2", f"{VLLM_CFG}.async_engine=true", f"{BLOCK_PATH}.drafters=[]"),
    )
    for overrides in allowed:
        assert found(*overrides)["error"] == [], overrides


def test_an_environment_with_the_v1_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    (error,) = found()["error"]
    assert error.startswith('VLLM_USE_V2_MODEL_RUNNER: "0" in the environment; ') and error.endswith("remove it")
    assert found(f"{VLLM_CFG}.env_vars.VLLM_USE_V2_MODEL_RUNNER=1")["error"] == []


@pytest.mark.parametrize(
    ("kind", "overrides", "words"),
    [
        ("warning", (f"{BLOCK_PATH}.verify.requests_per_step=4",), "only the local runner decodes requests again"),
        ("warning", ("policy.draft.enabled=true", "policy.sequence_packing.enabled=false"), "no engine drafts with it"),
        ("warning", (*DRAFT, "policy.draft.aux_layer_indices=[1,2,3]"), "policy.draft.aux_layer_indices: [1, 2, 3]"),
        ("note", (REMOTE + "}]",), "only vLLM's CPU build can use"),
        ("note", (REMOTE + ", gpus: 0.5}]",), "Ray places the drafters on GPUs in addition to the GPUs of `cluster`"),
        ("note", (EAGLE3,), "4 tokens before max_model_len"),
        ("note", ("policy.generation.vllm_cfg.precision=bfloat16",), "VLLM_BATCH_INVARIANT"),
        ("note", ("policy.generation.vllm_cfg.tensor_parallel_size=2",), "several GPUs were tested only on a CPU"),
        ("note", ("policy.generation.vllm_cfg.expert_parallel_size=2",), "expert_parallel_size: engines of several GPUs"),
        ("note", ("policy.generation.vllm_cfg.expose_http_server=true",), "without a seed gets one from its prompt"),
    ],
)  # fmt: skip
def test_surprising_options_have_a_warning_or_note(kind: str, overrides: tuple[str, ...], words: str) -> None:
    findings = found(*overrides)
    assert findings["error"] == []
    assert sum(words in text for text in findings[kind]) == 1


def test_errors_come_first_and_are_counted() -> None:
    config = tree(
        "policy.generation.worker_extension_cls_fqn=a.B",
        "policy.generation.quant_cfg=NVFP4",
        "policy.router_replay.enabled=true",
    )
    kinds = [finding.kind for finding in check_nemo_rl(config)]
    assert kinds == sorted(kinds, key=["error", "warning", "note"].index)
    with pytest.raises(ConfigError, match=r"\(1 more: `nemo-specrollout check` lists them\)$"):
        prepare_nemo_rl(config)


# Installed packages.


def test_a_release_of_nemo_rl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nemo_rl").mkdir()
    for name in ("__init__", "package_info"):
        (tmp_path / "nemo_rl" / f"{name}.py").write_text(
            "MAJOR = 0\nMINOR = 7\nPATCH = 0\nraise SystemExit('imported')"
        )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert (versions.nemo_rl_version(), versions.nemo_rl_is_a_release()) == ("0.7.0", True)
    (error,) = (f for f in check_nemo_rl(tree(*DRAFT)) if f.kind == "error")
    assert error.subject == "nemo-rl" and "pin a vLLM (0.20 or older)" in error.text


@pytest.mark.parametrize(("nemo_rl", "kind"), [(None, "warning"), ("0.6.0", "error")])
def test_an_unsupported_vllm_is_an_error_beside_nemo_rl(
    monkeypatch: pytest.MonkeyPatch, nemo_rl: str | None, kind: str
) -> None:
    monkeypatch.setattr(nemo_rl_config, "nemo_rl_version", lambda: nemo_rl)
    monkeypatch.setattr(engine_vllm, "vllm_version", lambda: "0.20.0")
    monkeypatch.setattr(engine_vllm, "nemo_rl_checkout", lambda: None)
    assert [f.kind for f in check_nemo_rl(tree()) if f.subject == "vllm"] == [kind]


def test_missing_packages_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_rl_config, "nemo_rl_version", lambda: None)
    monkeypatch.setattr(engine_vllm, "vllm_version", lambda: None)
    assert next(str(f) for f in prepare_nemo_rl(tree())[1]).startswith("nemo-rl: not installed here")


HEAD = f"{BLOCK_PATH}.drafters=[{{type: eagle3, model: a/head}}, {{type: suffix}}]"
REFRESH = (HEAD, f"{BLOCK_PATH}.draft_refresh={{trigger: auto}}")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((*REFRESH, "policy.draft.enabled=true", "policy.sequence_packing.enabled=false"), "a draft head of its own"),
        ((REFRESH[1],), "there is no head to refresh; name a drafter of type eagle3"),
        ((REFRESH[1], EAGLE3), "there is no head to refresh"),
        ((*REFRESH, "policy.generation.vllm_cfg.pipeline_parallel_size=2", "policy.generation.vllm_cfg.async_engine=true"),
         "engines of one pipeline stage: set it to 1"),
        ((HEAD, f"{BLOCK_PATH}.draft_refresh={{trainer_gpus: 2}}"), "trainer_gpus: 2 is out of range"),
    ],
)  # fmt: skip
def test_options_that_contradict_draft_refresh_are_errors(overrides: tuple[str, ...], sentence: str) -> None:
    errors = found(*overrides)["error"]
    assert len(errors) == 1 and sentence in errors[0], errors


def test_a_gpu_for_draft_refresh_has_a_note() -> None:
    assert found(*REFRESH)["error"] == found(*REFRESH)["warning"] == []
    assert found(f"{BLOCK_PATH}.draft_refresh.trainer_gpus=1", *REFRESH)["error"] == []
    notes = found(*REFRESH, f"{BLOCK_PATH}.draft_refresh.trainer_gpus=1")["note"]
    assert any("until Ray has one free" in note for note in notes)


def test_check_refuses_a_head_that_does_not_fit_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(CLEAN)
    (tmp_path / "head").mkdir()
    head = f"{BLOCK_PATH}.drafters=[{{type: eagle3, model: {tmp_path / 'head'}}}]"
    arguments = [str(tmp_path / "config.yaml"), head, REFRESH[1], f"policy.model_name={STEP_ADDER}"]
    assert main(["check", *arguments]) == 2
    assert f"{BLOCK_PATH}.drafters: " in capsys.readouterr().err


# Commands.


def test_check_explains_and_lists_all_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CLEAN)
    assert main(["check", str(config)]) == 0
    printed = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    assert lines["runtime"].startswith("nemo_rl: ") and "synchronous" in lines["runtime"]
    assert "pipeline parallel 2" in lines["policy"] and "suffix" in lines["drafters"]
    assert lines["placement"] == "generation and training share 1 x 8 GPUs; 8 engines of 1 GPU"
    assert printed.err == ""
    assert main(["check", str(config), "policy.generation.quant_cfg=NVFP4", f"{BLOCK_PATH}.drafter=1"]) == 2
    assert capsys.readouterr().err.count("nemo-specrollout: ") == 2


def test_the_laboratory_refuses_a_config_of_nemo_rl(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(["bench", str(QUICKSTART), "runtime=nemo_rl"]) == 2
    assert "runtime: 'nemo_rl'; this command works with configs for one machine" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_config_of_the_laboratory_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(QUICKSTART)]) == 2
    said = capsys.readouterr().err
    assert "use `specrollout-lab`, or set runtime=nemo_rl" in said and said.count("\n") == 1


def test_check_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CLEAN)
    code = (
        "import sys; from nemo_specrollout.cli.main import main\n"
        f"assert main(['check', {str(tmp_path / 'config.yaml')!r}]) == 0\n"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'ray', 'nemo_rl', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("temperature", ["0", "2.5", "-1", "warm", "true"])
def test_a_temperature_unfit_for_training_is_refused(temperature: str) -> None:
    (error,) = found(f"policy.generation.temperature={temperature}")["error"]
    assert error.startswith("policy.generation.temperature: ") and "set 1.0" in error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("temperature=0.7",),
            "null with temperature 0.7; the engine's log-probs differ from the trainer's",
        ),
        (
            ("temperature=0.7", "top_k=5", "vllm_cfg.logprobs_mode=raw_logprobs"),
            "raw_logprobs with temperature 0.7 and top_k 5",
        ),
        (("top_p=0.9",), "null with top_p 0.9"),
        (("temperature=0.7", "vllm_cfg.logprobs_mode=processed_logprobs"), ""),
        (("top_k=-1", "top_p=1.0"), ""),
    ],
)
def test_raw_logprobs_unlike_the_trainers_are_warned_of(overrides: tuple[str, ...], words: str) -> None:
    warnings = found(*(f"policy.generation.{o}" for o in overrides)).get("warning", [])
    about = [w for w in warnings if w.startswith(f"{VLLM_CFG}.logprobs_mode: ")]
    assert len(about) == bool(words) and all(words in w and "set it to processed_logprobs" in w for w in about)
