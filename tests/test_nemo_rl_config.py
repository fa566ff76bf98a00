# SPDX-License-Identifier: Apache-2.0
"""Configs of NeMo-RL: reading, findings, scripts, and the shipped recipes.

Comparisons with NeMo-RL itself need NEMO_RL_SRC, a checkout, and NEMO_RL_PYTHON, an interpreter that can import it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER
from omegaconf import OmegaConf

from nemo_specrollout.cli.check import explain_nemo_rl
from nemo_specrollout.cli.main import main
from nemo_specrollout.config import nemo_rl_config, versions
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, effective_block, prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_scripts import script_of
from nemo_specrollout.config.nemo_rl_tree import SPECULATIVE_CONFIG as SPECULATIVE
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG
from nemo_specrollout.config.runtime import runtime_of
from nemo_specrollout.config.strict import ConfigError, build

pytestmark = pytest.mark.unit

RECIPES = sorted((ROOT / "examples" / "configs").glob("*-specrollout.yaml"))
EAGLE3 = "policy.generation.vllm_kwargs.speculative_config={method: eagle3, model: a/head, num_speculative_tokens: 3}"
NATIVE = "policy.generation.vllm_kwargs.speculative_config={{{}, num_speculative_tokens: 3}}"
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
    "loss_fn.use_importance_sampling_correction=true",
)
ASYNC_PPO = ("grpo=null", "ppo={seed: 42, async_ppo: {enabled: true, in_flight_weight_updates: true}}", *ASYNC[1:])
CONTROLLER = (
    "grpo.async_grpo=null",
    "async_rl.sampler.name=in_order",
    "data_plane.enabled=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
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


# Files, read as NeMo-RL reads them.


def test_the_resolvers_of_nemo_rl_work(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("n: 6\na: ${add:${n}, 2}\nb: ${mul:${n}, 2}\nc: ${div:${n}, 4}\nd: ${max:${n}, 7}")
    assert load_config(file) == {"n": 6, "a": 8, "b": 12, "c": 1.5, "d": 7}


def test_a_block_marked_override_replaces_its_parents_block(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("data: {train: a, shuffle: true}\nother: {x: 1}")
    (tmp_path / "child.yaml").write_text("defaults: parent.yaml\ndata: {_override_: true, train: b}\nother: {y: 2}")
    assert load_config(tmp_path / "child.yaml") == {"data": {"train": "b"}, "other": {"x": 1, "y": 2}}


def test_a_child_may_set_mandatory_values(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("data: ???\nn: ${data.n}")
    (tmp_path / "child.yaml").write_text("defaults: parent.yaml\ndata: {n: 3}")
    assert load_config(tmp_path / "child.yaml") == {"data": {"n": 3}, "n": 3}


def test_parents_may_be_absolute_or_in_nemo_rl_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "base.yaml").write_text("a: 1")
    child = tmp_path / "child.yaml"
    child.write_text(f"defaults: {tmp_path}/examples/base.yaml")
    assert load_config(child) == {"a": 1}
    child.write_text("defaults: ${oc.env:NEMO_RL_DIR,/opt/nemo-rl}/examples/base.yaml")
    monkeypatch.setenv("NEMO_RL_DIR", str(tmp_path))
    assert load_config(child) == {"a": 1}
    monkeypatch.setenv("NEMO_RL_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"base\.yaml does not exist; set NEMO_RL_DIR to the folder"):
        load_config(child)


# The block for the vLLM workers.


def test_the_effective_block_is_complete_and_plain() -> None:
    block = effective_block(tree())
    assert block is not None and [d["type"] for d in block["drafters"]] == ["suffix", "ngram"]
    assert json.loads(json.dumps(block)) == block
    assert build(SpecrolloutConfig, block, BLOCK_PATH) == SpecrolloutConfig()


@pytest.mark.parametrize("override", [f"{BLOCK_PATH}.enabled=false", f"{BLOCK_PATH}=null", "policy.generation=null"])
def test_a_disabled_block_is_none(override: str) -> None:
    assert effective_block(tree(override)) is None


def test_a_disabled_block_has_no_findings() -> None:
    assert not any(found(f"{BLOCK_PATH}.enabled=false", "policy.generation.backend=sglang").values())


def test_a_speculative_config_replaces_our_drafters() -> None:
    config = tree(EAGLE3)
    block = effective_block(config)
    assert block is not None and block["drafters"] == []
    config["policy"]["generation"]["specrollout"] = block
    assert effective_block(config) == block


def test_a_disabled_speculative_config_leaves_our_drafters() -> None:
    block = effective_block(tree(EAGLE3.replace("tokens: 3", "tokens: 0")))
    assert block is not None and len(block["drafters"]) == 2


def test_drafters_beside_a_speculative_config_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"drafters: named beside policy\..*speculative_config; remove `drafters` to keep"
    ):
        effective_block(tree(EAGLE3, f"{BLOCK_PATH}.drafters=[{{type: ngram}}]"))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [("enable=true", "did you mean 'enabled'"), ("enabled='yes'", "expected bool"), ("budget.k=99", "out of range")],
)
def test_the_block_is_strict(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        effective_block(tree(f"{BLOCK_PATH}.{override}"))
    (error,) = found(f"{BLOCK_PATH}.{override}")["error"]
    assert error.startswith(f"{BLOCK_PATH}.") and sentence in error


# Moving and racing.


TAIL = f"{BLOCK_PATH}.fastest_of_n"
TWO_GPUS = "cluster={num_nodes: 1, gpus_per_node: 2}"


def test_fastest_of_n_with_two_engines_has_no_findings() -> None:
    assert not any(found(f"{TAIL}={{max_racers: 2}}", TWO_GPUS).values())
    recomputed = "in_flight_weight_updates: true, recompute_kv_cache_after_weight_updates: true"
    in_flight = f"grpo.async_grpo={{enabled: true, {recomputed}}}"
    resources = "policy.generation.colocated.resources.gpus_per_node=2"
    assert not found(*ASYNC, in_flight, f"{TAIL}={{}}", "cluster={num_nodes: 1, gpus_per_node: 4}", resources)["error"]


def test_check_explains_fastest_of_n() -> None:
    def said(*overrides: str) -> dict[str, str]:
        return dict(explain_nemo_rl(tree(TWO_GPUS, *overrides)))

    assert "fastest_of_n" not in said()
    assert "no engine races: all draft alike" in said(f"{TAIL}={{}}")["fastest_of_n"]
    assert "raced by up to 2 engines" in said(f"{TAIL}={{methods: [[suffix],[ngram]]}}")["fastest_of_n"]


@pytest.mark.parametrize(
    ("kind", "overrides", "sentence"),
    [
        ("warning", (TWO_GPUS.replace("2}", "1}"),), f"{TAIL}: without effect: by the sizes of the cluster there is one"),
        ("warning", (TWO_GPUS, "policy.generation.vllm_cfg.tensor_parallel_size=2"), f"{TAIL}: without effect"),
        ("error", (TWO_GPUS, f"{TAIL}.max_racers=3"), f"{TAIL}.max_racers: 3 racers for 2 engines"),
        ("error", (TWO_GPUS, f"{TAIL}.methods=[[suffix],[ngram],[]]"), f"{TAIL}.methods: 3 entries for 2 engines"),
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
    assert any(s.startswith(sentence) for s in found(f"{TAIL}={{}}", *overrides)[kind])
    off = found(f"{TAIL}={{}}", *overrides, f"{TAIL}.enabled=false")
    assert not any("fastest_of_n" in s for s in (*off["error"], *off["warning"]))


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
        ((*ASYNC_PPO, "ppo.use_dynamic_sampling=true"), "ppo.use_dynamic_sampling: true; NeMo-RL refuses it"),
        ((*CONTROLLER, "grpo.async_grpo.enabled=false"), "grpo.async_grpo: {"),
        ((*CONTROLLER, "data_plane.enabled=false"), "data_plane.enabled: false; "),
        ((*CONTROLLER, "policy.generation.vllm_cfg.async_engine=false"), "policy.generation.vllm_cfg.async_engine: false; "),
        ((*CONTROLLER, "policy.generation.colocated.enabled=true"), "policy.generation.colocated.enabled: true; "),
        ((*CONTROLLER, "grpo.val_period=5"), "grpo.val_period: 5; the SingleController has no validation"),
        ((*CONTROLLER, "policy.train_global_batch_size=4"), "policy.train_global_batch_size: 4; a step has 8 rows"),
        ((*CONTROLLER, "checkpointing={enabled: true, metric_name: 'val:accuracy'}"), 'checkpointing.metric_name: "val:acc'),
        (("data_plane.enabled=true", f"{BLOCK_PATH}.fastest_of_n={{}}"), f"{BLOCK_PATH}.fastest_of_n: with data_plane.enab"),
        (("policy.generation.quant_cfg=NVFP4",), 'policy.generation.quant_cfg: "NVFP4"; '),
        (("policy.generation.vllm_kwargs.worker_cls=a.B",), 'policy.generation.vllm_kwargs.worker_cls: "a.B"; '),
        (("policy.generation.worker_extension_cls_fqn=a.B",), 'policy.generation.worker_extension_cls_fqn: "a.B"; '),
        (("policy.generation.vllm_kwargs.speculative_config=eagle3",), "policy.generation.vllm_kwargs.speculative_config: "),
        (("policy.generation.vllm_kwargs.seed=1",), "policy.generation.vllm_kwargs.seed: NeMo-RL passes it itself"),
        (("policy.generation.vllm_cfg.env_vars.VLLM_USE_V2_MODEL_RUNNER=0",),
         "policy.generation.vllm_cfg.env_vars.VLLM_USE_V2_MODEL_RUNNER: 0; "),
        ((NATIVE.format("method: suffix"),), f'{SPECULATIVE}.method: "suffix"; vLLM\'s V2 model runner does not have it: re'),
        ((NATIVE.format("method: medusa, model: a/b"),), f'{SPECULATIVE}.method: "medusa"; vLLM\'s V2 model runner'),
        ((NATIVE.format("method: eagle3, parallel_drafting: true"),), f"{SPECULATIVE}.parallel_drafting: true; "),
        ((NATIVE.format("method: eagle3, disable_padded_drafter_batch: true"),),
         f"{SPECULATIVE}.disable_padded_drafter_batch: true; "),
        ((f"{VLLM_CFG}.pipeline_parallel_size=2",), f"{VLLM_CFG}.pipeline_parallel_size: 2 with drafters (suffix, ngram); "),
        ((f"{VLLM_CFG}.pipeline_parallel_size=2", EAGLE3), f"{VLLM_CFG}.pipeline_parallel_size: 2 with drafters (eagle3); "),
        ((f"{VLLM_CFG}.pipeline_parallel_size=2", f"{BLOCK_PATH}.drafters=[]"),
         f"{VLLM_CFG}.pipeline_parallel_size: 2; NeMo-RL needs async_engine: true"),
        ((f"{VLLM_CFG}.expert_parallel_size=2", f"{BLOCK_PATH}.drafters=[{{type: mtp}}]"),
         f"{VLLM_CFG}.expert_parallel_size: 2 with tensor_parallel_size 1 and a drafter with weights (mtp); "),
        (("policy.generation.vllm_cfg.expert_parallel_size=3", "policy.generation.vllm_cfg.tensor_parallel_size=2"),
         "policy.generation.vllm_cfg.expert_parallel_size: 3"),
        ((*ASYNC, "policy.generation.vllm_cfg.async_engine=false"), "policy.generation.vllm_cfg.async_engine: false"),
        ((*ASYNC, "policy.generation.colocated.enabled=true"), "policy.generation.colocated.enabled: true"),
        ((*ASYNC, "loss_fn.use_importance_sampling_correction=false"), "loss_fn.use_importance_sampling_correction: false"),
        ((*ASYNC, "grpo.use_dynamic_sampling=true"), "grpo.use_dynamic_sampling: true"),
        ((*DRAFT, "policy.megatron_cfg.enabled=false"), "policy.megatron_cfg.enabled: false"),
        ((*DRAFT, "policy.sequence_packing.enabled=true"), "policy.sequence_packing.enabled: true"),
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
        ("warning", ("policy.generation.vllm_cfg.max_model_len=32",), "differs from policy.max_total_sequence_length 64"),
        ("warning", (f"{BLOCK_PATH}.verify.requests_per_step=4",), "only the local runner decodes requests again"),
        ("warning", ("policy.draft.enabled=true", "policy.sequence_packing.enabled=false"), "no engine drafts with it"),
        ("warning", (*DRAFT, "policy.draft.aux_layer_indices=[1,2,3]"), "policy.draft.aux_layer_indices: [1, 2, 3]"),
        ("warning", ("policy.megatron_cfg.tensor_model_parallel_size=4",), "NRL_IGNORE_TP_ACCURACY_CHECK"),
        ("warning", ("policy.router_replay.enabled=true",), "not tested with drafts"),
        ("note", (REMOTE + "}]",), "only vLLM's CPU build can use"),
        ("note", (REMOTE + ", gpus: 0.5}]",), "Ray places the drafters on GPUs in addition to those of `cluster`"),
        ("note", (EAGLE3,), "4 tokens before max_model_len"),
        ("note", ("policy.generation.vllm_kwargs.async_scheduling=false",), "an estimated 3 to 5 ms at 256 requests"),
        ("note", (*ASYNC, "grpo.async_grpo.in_flight_weight_updates=true"), "KV of older weights"),
        ("note", ASYNC_PPO, "ppo.async_ppo.in_flight_weight_updates: true; running requests keep KV of older weights"),
        ("note", ("policy.generation.vllm_cfg.precision=bfloat16",), "VLLM_BATCH_INVARIANT"),
        ("note", ("policy.generation.vllm_cfg.tensor_parallel_size=2",), "several GPUs were tested only on a CPU"),
        ("note", ("policy.generation.vllm_cfg.expert_parallel_size=2",), "expert_parallel_size: engines of several GPUs"),
        ("note", ("policy.generation.vllm_cfg.expose_http_server=true",), "without a seed gets one from its prompt"),
        ("note", ("data.default.prompt_file=no/such.txt",), "no/such.txt does not exist here"),
    ],
)  # fmt: skip
def test_surprising_options_have_a_warning_or_note(kind: str, overrides: tuple[str, ...], words: str) -> None:
    findings = found(*overrides)
    assert findings["error"] == []
    assert sum(words in text for text in findings[kind]) == 1


def test_a_policy_too_shallow_for_eagle3_is_warned_of(tmp_path: Path) -> None:
    assert json.loads((STEP_ADDER / "config.json").read_text())["num_hidden_layers"] < 7
    assert any(
        "captures the states of layers" in t for t in found(*DRAFT, f"policy.model_name={STEP_ADDER}")["warning"]
    )
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 28}')
    assert found(*DRAFT, f"policy.model_name={tmp_path}")["warning"] == []


def test_errors_come_first_and_are_counted() -> None:
    config = tree(
        "policy.generation.backend=sglang",
        "policy.generation.quant_cfg=NVFP4",
        "policy.generation.vllm_cfg.max_model_len=32",
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
    assert error.subject == "nemo-rl" and "gradient clip" in error.text


@pytest.mark.parametrize(("nemo_rl", "kind"), [(None, "warning"), ("0.6.0", "error")])
def test_an_unsupported_vllm_is_an_error_beside_nemo_rl(
    monkeypatch: pytest.MonkeyPatch, nemo_rl: str | None, kind: str
) -> None:
    monkeypatch.setattr(nemo_rl_config, "nemo_rl_version", lambda: nemo_rl)
    monkeypatch.setattr(nemo_rl_config, "vllm_version", lambda: "0.20.0")
    assert [f.kind for f in check_nemo_rl(tree()) if f.subject == "vllm"] == [kind]


def test_missing_packages_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_rl_config, "nemo_rl_version", lambda: None)
    monkeypatch.setattr(nemo_rl_config, "vllm_version", lambda: None)
    assert next(str(f) for f in prepare_nemo_rl(tree())).startswith("nemo-rl: not installed here")


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


def test_the_key_runtime_names_the_runtime() -> None:
    assert [runtime_of({}), runtime_of({"runtime": "local"}), runtime_of(tree())] == ["local", "local", "nemo_rl"]
    with pytest.raises(ConfigError, match=r"^runtime: 'nemorl' is not available; did you mean 'nemo_rl'\?"):
        runtime_of({"runtime": "nemorl"})


def test_a_config_with_gpus_belongs_to_nemo_rl() -> None:
    stock = {name: value for name, value in tree().items() if name != "runtime"}
    assert runtime_of(stock) == "nemo_rl"
    assert runtime_of({"cluster": {"gpus_per_node": 0, "rollout_workers": 2}}) == "local"
    assert runtime_of(stock | {"runtime": "local"}) == "local"


@pytest.mark.parametrize(
    ("blocks", "script"),
    [
        ({"grpo": {"seed": 1}}, "examples/run_grpo.py"),
        (
            {"grpo": {"seed": 1}, "async_rl": {"sampler": {"name": "in_order"}}},
            "examples/run_grpo_single_controller.py",
        ),
        ({"grpo": {"seed": 1}, "env": {"should_use_nemo_gym": True}}, "examples/nemo_gym/run_grpo_nemo_gym.py"),
        ({"grpo": {"seed": 1}, "env": {"sliding_puzzle_game": {"cfg": {}}}}, "examples/run_grpo_sliding_puzzle.py"),
        (
            {"grpo": {"seed": 1}, "data": {"train": [{"processor": "vlm_hf_data_processor"}]}},
            "examples/run_vlm_grpo.py",
        ),
        ({"ppo": {"seed": 1}}, "examples/run_ppo.py"),
        ({"distillation": {"seed": 1}}, "examples/run_distillation.py"),
    ],
)
def test_script_of_finds_the_script_by_the_blocks(blocks: dict[str, Any], script: str) -> None:
    assert script_of(blocks) == script


def test_a_config_without_rollouts_has_no_script() -> None:
    with pytest.raises(ConfigError, match=r"^sft: a run of this kind makes no rollouts"):
        script_of({"sft": {"seed": 1}})
    with pytest.raises(ConfigError, match="name NeMo-RL's script with --script"):
        script_of({"policy": {}})


# NeMo-RL's test suites are shell scripts with the names of recipes, and start the script of the recipe.
_STARTED = re.compile(r"examples/[a-z_/]*run_[a-z_]*\.py")
_ROLLS_OUT = ("grpo", "ppo", "distillation")


def test_scripts_equal_those_of_nemo_rls_test_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Path(os.environ.get("NEMO_RL_SRC") or pytest.skip("needs NEMO_RL_SRC"))
    monkeypatch.setenv("HF_HOME", "/somewhere")  # in which some recipes have their data
    num_compared = 0
    for suite in sorted(checkout.glob("tests/test_suites/*/*.sh")):
        started, recipes = _STARTED.search(suite.read_text()), list(checkout.glob(f"examples/**/{suite.stem}.yaml"))
        if started is None or not recipes or "???" in _inherited(recipes[0]):  # a data set that the suite downloads
            continue
        recipe = load_config(recipes[0])
        if any(name in recipe for name in _ROLLS_OUT) and "teachers" not in recipe:
            assert script_of(recipe) == started[0], suite.name
            num_compared += 1
    assert num_compared > 100


def _inherited(recipe: Path) -> str:
    """Returns the text of a recipe and of all files that it inherits."""
    text = recipe.read_text()
    parent = re.search(r"^defaults: *(\S+)", text, re.MULTILINE)
    return text if parent is None else text + _inherited(recipe.parent / parent[1].strip("'\""))


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


def test_bench_refuses_a_config_of_nemo_rl(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(QUICKSTART), "runtime=nemo_rl"]) == 2
    assert "need a config with runtime: local" in capsys.readouterr().err


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


# Comparisons with NeMo-RL itself.

SOURCE, PYTHON = os.environ.get("NEMO_RL_SRC"), os.environ.get("NEMO_RL_PYTHON")
beside_nemo_rl = pytest.mark.skipif(
    SOURCE is None or PYTHON is None,
    reason="set NEMO_RL_SRC to a checkout of NeMo-RL and NEMO_RL_PYTHON to an interpreter that can import it",
)
LOADER = """
import json, sys
from omegaconf import OmegaConf
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
register_omegaconf_resolvers()
trees = {}
for path in json.load(sys.stdin):
    try:
        trees[path] = OmegaConf.to_container(load_config(path), resolve=True)
    except Exception:
        trees[path] = None
"""
MASTER_CONFIG = """
from nemo_rl.algorithms.grpo import MasterConfig
for tree in trees.values():
    config = MasterConfig(**tree)
    assert config.policy["generation"]["specrollout"] == tree["policy"]["generation"]["specrollout"]
"""
ANSWER = "print('ANSWER' + json.dumps(trees, sort_keys=True))"


def ask_nemo_rl(code: str, paths: list[Path]) -> "subprocess.Popen[str]":
    host = ROOT / "tests" / "nemo_rl" / "cpu_host"  # NeMo-RL is written for Python 3.13
    path = os.pathsep.join([str(host), str(SOURCE)])
    environment = {**os.environ, "PYTHONPATH": path, "NEMO_RL_DIR": str(SOURCE)}
    asked = subprocess.Popen(
        [str(PYTHON), "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert asked.stdin is not None
    asked.stdin.write(json.dumps([str(p) for p in paths]))
    asked.stdin.close()
    asked.stdin = None
    return asked


def answer(asked: "subprocess.Popen[str]") -> dict[str, Any]:
    out, _ = asked.communicate()
    assert asked.returncode == 0
    answered: dict[str, Any] = json.loads(out.rpartition("ANSWER")[2])
    return answered


def ours(path: Path) -> dict[str, Any] | None:
    try:
        return load_config(path)
    except ConfigError:
        return None


@pytest.mark.slow
@beside_nemo_rl
def test_configs_of_nemo_rl_are_read_as_nemo_rl_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "some/folder")  # a few configs demand it
    paths = sorted((Path(str(SOURCE)) / "examples" / "configs").rglob("*.yaml"))
    asked = ask_nemo_rl(LOADER + ANSWER, paths)
    trees = {str(path): ours(path) for path in paths}
    theirs = answer(asked)
    different = [p for p in trees if json.dumps(trees[p], sort_keys=True) != json.dumps(theirs[p], sort_keys=True)]
    assert different == []
    assert sum(tree is not None for tree in theirs.values()) > 200


@beside_nemo_rl
def test_recipes_are_valid_configs_of_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ask_nemo_rl(LOADER + MASTER_CONFIG + ANSWER, RECIPES)
    monkeypatch.setenv("NEMO_RL_DIR", str(SOURCE))
    trees = {str(path): load_config(path) for path in RECIPES}
    for path, recipe in trees.items():
        assert runtime_of(recipe) == "nemo_rl" and effective_block(recipe) is not None
        assert [f for f in check_nemo_rl(recipe) if f.kind != "note" and f.subject != "vllm"] == [], path
    assert answer(asked) == trees


def test_recipes_are_named_like_their_output() -> None:
    assert len(RECIPES) == 11
    for path in RECIPES:
        recipe = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(recipe, dict)
        assert recipe["defaults"].startswith("${oc.env:NEMO_RL_DIR,/opt/nemo-rl}/examples/")
        assert recipe["logger"]["log_dir"] == f"logs/{path.stem}"
        assert recipe["checkpointing"]["checkpoint_dir"] == f"results/{path.stem}"


@pytest.mark.parametrize("temperature", ["0", "2.5", "-1", "warm", "true"])
def test_a_temperature_unfit_for_training_is_refused(temperature: str) -> None:
    (error,) = found(f"policy.generation.temperature={temperature}")["error"]
    assert error.startswith("policy.generation.temperature: ") and "set 1.0" in error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("temperature=0.7",), "null with temperature 0.7; the engine's log-probs are not those of NeMo-RL's trainer"),
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
