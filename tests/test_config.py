# SPDX-License-Identifier: Apache-2.0
"""Configs: inheritance, overrides, the strict block, the sections of NeMo-RL, the shipped configs."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from plugin_package import install_plugin

from lab.cli.prepare import prepare
from lab.local.run_config import BenchConfig, RunConfig, read_run_config
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.interpolation import escaped, resolved
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.installed.versions import unsupported_version

pytestmark = pytest.mark.unit

FASTEST = f"{BLOCK_PATH}.fastest_of_n"


def write(folder: Path, **files: str) -> Path:
    """Writes `<name>.yaml` for every keyword; returns the path of the first."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def quickstart(*overrides: str) -> RunConfig:
    return read_run_config(load_config(QUICKSTART, list(overrides)))[0]


def assert_refused(sentence: str, *overrides: str) -> None:
    """Asserts that the quickstart with `overrides` is refused with a message that begins with `sentence`."""
    with pytest.raises(ConfigError, match=rf"^{re.escape(sentence)}"):
        quickstart(*overrides)


# Files: inheritance, interpolation, overrides.


def test_a_file_overrides_its_defaults(tmp_path: Path) -> None:
    child = write(tmp_path, child="defaults: parent.yaml\na: {x: 1}", parent="a: {x: 0, y: 2}\nb: 3")
    assert load_config(child) == {"a": {"x": 1, "y": 2}, "b": 3}


def test_later_defaults_override_earlier_ones(tmp_path: Path) -> None:
    child = write(tmp_path, child="defaults: [one.yaml, two.yaml]\nc: 3", one="a: 1\nb: 1", two="b: 2\nc: 2")
    assert load_config(child) == {"a": 1, "b": 2, "c": 3}


def test_defaults_are_relative_to_their_own_file(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", parent="defaults: grandparent.yaml\nb: 2", grandparent="a: 1\nb: 1")
    assert load_config(write(tmp_path, child="defaults: base/parent.yaml")) == {"a": 1, "b": 2}


def test_defaults_may_share_a_parent_but_not_form_a_cycle(tmp_path: Path) -> None:
    shared = write(
        tmp_path, top="defaults: [left.yaml, right.yaml]", left="defaults: base.yaml", right="b: 1", base="a: 1"
    )
    assert load_config(shared) == {"a": 1, "b": 1}
    with pytest.raises(ConfigError, match="leads back"):
        load_config(write(tmp_path, one="defaults: two.yaml", two="defaults: one.yaml"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("defaults: nowhere.yaml", r"nowhere\.yaml does not exist"),
        ("defaults: 3", "defaults"),
        ("defaults: ['${oc.env:NOWHERE_SET}/x.yaml']", "defaults: .*'NOWHERE_SET' not found"),
        ("defaults: ['???']", "defaults: Missing value"),
        ("a: {_override_: '${nope}'}", r"a\._override_: '\$\{nope\}'; it must be true or false"),
        ("a: {_override_: '???'}", r"a\._override_: '\?\?\?'; it must be true or false"),
        ("- a\n- b", "expected a mapping"),
        ("a: [1,", r"line \d, column \d: .*; close what was opened"),
        ("a: ${b}", "'b' not found"),
    ],
)
def test_an_error_in_a_file_names_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        load_config(write(tmp_path, broken=text))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_about_a_binary_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match=r"weights\.bin"):
        load_config(tmp_path / "weights.bin")


def test_interpolation_sees_overrides() -> None:
    config = quickstart("policy.max_total_sequence_length=800")
    assert config.policy.generation.vllm_cfg.max_model_len == 800


@pytest.mark.parametrize("plus", ["", "++"])
def test_an_override_may_begin_with_plus(plus: str) -> None:
    tree = load_config(QUICKSTART, [f"{plus}grpo.max_num_steps=3", f"{plus}grpo.made_up.deep=[1,two]"])
    assert (tree["grpo"]["max_num_steps"], tree["grpo"]["made_up"]) == (3, {"deep": [1, "two"]})
    assert tree["grpo"]["num_prompts_per_step"] == 8


@pytest.mark.parametrize("override", ["grpo.max_num_steps", "", "=3", "grpo.seed=[1,"])
def test_an_override_must_be_key_and_value(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config(QUICKSTART, [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.generation.specrollout.drafters[0].type=ngram", "an entry of a list is written with a dot"),
        ("policy=[1]", r"override 'policy=\[1\]': policy is a list here, but a block below it; write a block"),
    ],
)
def test_an_override_that_cannot_be_merged_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(QUICKSTART, [override])


@given(st.text(alphabet="\\${}x:'\" \n.", max_size=14))
def test_a_computed_text_is_written_so_that_it_is_read_again(text: str) -> None:
    tree = OmegaConf.create({"a": [escaped(text)]})
    assert resolved(OmegaConf.create(OmegaConf.to_yaml(tree))) == {"a": [text]}


# The block: strict.


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("enable", "true", ".enable: unknown key; did you mean 'enabled'?"),
        ("budget.polcy", "auto", ".budget.polcy: unknown key; did you mean 'policy'?"),
        ("verify.zzz", "1", ".verify.zzz: unknown key; known: requests_per_step"),
        ("enabled", "yes please", ".enabled: expected bool, got 'yes please'"),
        ("enabled", "1", ".enabled: expected bool, got 1"),
        ("num_speculative_tokens", "true", ".num_speculative_tokens: expected int, got True"),
        ("num_speculative_tokens", "2.5", ".num_speculative_tokens: expected int, got 2.5"),
        ("num_speculative_tokens", "0", ".num_speculative_tokens: 0 is out of range"),
        ("verify.requests_per_step", "-1", ".verify.requests_per_step: -1 is out of range"),
        ("budget.margin", "1.5", ".budget.margin: 1.5 is out of range"),
        ("budget.margin", "nan", ".budget.margin: nan"),
        ("budget.policy", "atuo", ".budget.policy: 'atuo' is not available; did you mean 'auto'?"),
        ("drafters", "suffix", ".drafters: expected a list, got 'suffix'"),
        ("drafters", "[suffix]", ".drafters[0]: expected a block of keys, got 'suffix'"),
        ("drafters", "[{max_order: 3}]", ".drafters[0].type: missing"),
        ("drafters", "[{type: sufix}]", ".drafters[0].type: 'sufix' is not available; did you mean 'suffix'?"),
        ("drafters", "[{type: eagle}]", ".drafters[0].type: 'eagle' is not available; did you mean 'eagle3'?"),
        ("drafters", "[{type: ngram}, {type: ngram}]", ".drafters: 'ngram' is named 2 times"),
        ("drafters", "[{type: ngram, num_slots: 5000}]", ".drafters[0].num_slots: 5000"),
        ("drafters", "[{type: ngram, max_order: 99}]", ".drafters[0].max_order: 99 is out of range"),
        ("budget", "{policy: fixed, k: 9}", ".budget.k: 9 is above num_speculative_tokens 8"),
        ("budget", "null", ".budget: expected a block of keys, got None"),
    ],
)
def test_the_block_refuses_wrong_keys_and_values(key: str, value: str, sentence: str) -> None:
    assert_refused(BLOCK_PATH + sentence, f"{BLOCK_PATH}.{key}={value}")


def test_drafters_keep_their_order() -> None:
    types = ["random", "ngram", "suffix"]
    block = build(SpecrolloutConfig, {"drafters": [{"type": t} for t in types]}, BLOCK_PATH)
    assert [d.type for d in block.drafters] == types


def test_an_absent_block_is_off(tmp_path: Path) -> None:
    tree = load_config(QUICKSTART)
    del tree["policy"]["generation"]["specrollout"]
    assert not read_run_config(tree)[0].policy.generation.specrollout.enabled


# Sections of NeMo-RL: lenient about keys that the local runner ignores, strict about keys that it reads.


def test_ignored_keys_are_listed() -> None:
    overrides = ["grpo.val_period=10", "env.math.num_workers=8", "policy.dtensor_cfg.enabled=false"]
    config, ignored = read_run_config(load_config(QUICKSTART, overrides))
    assert set(ignored) == {"grpo.val_period", "env", "policy.dtensor_cfg"}
    assert config == quickstart()


def test_warm_up_is_read_from_the_block_scheduler() -> None:
    optimizer = quickstart("policy.megatron_cfg.scheduler.lr_warmup_iters=5").policy.megatron_cfg.optimizer
    assert optimizer.lr_warmup_iters == 5


def test_floats_may_be_written_as_integers_or_with_exponent() -> None:
    assert quickstart("policy.megatron_cfg.optimizer.lr=1e-4").policy.megatron_cfg.optimizer.lr == 1e-4
    assert quickstart("policy.generation.temperature=1").policy.generation.temperature == 1.0


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("policy.train_micro_batch_size=x", "policy.train_micro_batch_size: expected int, got 'x'"),
        ("policy.generation.vllm_cfg.max_model_len=256", "policy.generation.vllm_cfg.max_model_len: 256 differs from"),
        ("policy.train_global_batch_size=48", "policy.train_global_batch_size: 48 does not divide the 64 samples"),
        ("policy.generation.max_new_tokens=896", "policy.generation.max_new_tokens: 896 leaves no room"),
        ("policy.generation.temperature=-1", "policy.generation.temperature: -1.0 is out of range"),
        ("policy.generation.temperature=inf", "policy.generation.temperature: inf"),
        ("policy.generation.top_p=0", "policy.generation.top_p: 0"),
        ("policy.generation.top_k=0", "policy.generation.top_k: 0 is out of range"),
        ("policy.generation.backend=sglang", "policy.generation.backend: 'sglang' is not available"),
        ("policy.megatron_cfg.enabled=false", "policy.megatron_cfg.enabled: false"),
        ("policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.tensor_model_parallel_size: 2"),
        (
            "policy.megatron_cfg.optimizer.lr_warmup_init=1",
            "policy.megatron_cfg.optimizer.lr_warmup_init: 1.0 exceeds lr",
        ),
        ("policy.megatron_cfg.optimizer.adam_beta2=1", "policy.megatron_cfg.optimizer.adam_beta2: 1.0"),
        ("policy.megatron_cfg.scheduler=3", "policy.megatron_cfg.scheduler: expected a block of keys, got 3"),
        ("policy.megatron_cfg=null", "policy.megatron_cfg: expected a block of keys, got None"),
        ("policy=3", "policy: expected a block of keys, got 3"),
        ("loss_fn.ratio_clip_c=1", "loss_fn.ratio_clip_c: 1"),
        ("grpo.num_generations_per_prompt=1", "grpo.num_generations_per_prompt: 1 is out of range"),
        ("grpo.seed=18446744073709551616", "grpo.seed: 18446744073709551616 is out of range"),
        ("cluster.gpus_per_node=8", "cluster.gpus_per_node: 8 is out of range"),
        ("runtime=ray", "runtime: 'ray' is not available"),
    ],
)
def test_the_sections_refuse_wrong_values(override: str, sentence: str) -> None:
    assert_refused(sentence, override)


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ("{max_racers: 3}", ".max_racers: 3 racers for 2 rollout workers; lower it"),
        ("{max_racers: 9}", ".max_racers: 9 is out of range"),
        ("{max_racers: 1, moving: false}", ": moving false and max_racers 1 leave nothing to do"),
        (
            "{moving: false}",
            ".moving: false, and all engines have the same drafters, so no request would be raced; set it to true",
        ),
        ("{min_gain: -0.1}", ".min_gain: -0.1 is out of range"),
        ("{methods: [[suffix], [ngarm]]}", ".methods: 'ngarm' is not among the drafters; did you mean 'ngram'?"),
        ("{methods: [[suffix], [random]]}", ".methods: 'random' is not among the drafters"),
        ("{methods: [[suffix], []]}", ".methods: no engine drafts by ngram; give it to one"),
        ("{methods: [[suffix], [ngram], []]}", ".methods: 3 entries for 2 rollout workers; the last would never draft"),
        ("{methods: [suffix, ngram]}", ".methods[0]: expected a list, got 'suffix'"),
        ("{racers: 2}", ".racers: unknown key"),
    ],
)
def test_fastest_of_n_refuses_wrong_values(block: str, sentence: str) -> None:
    assert_refused(f"{FASTEST}{sentence}", f"{FASTEST}={block}", "cluster.rollout_workers=2")


def test_racing_needs_engines_and_engines_need_requests() -> None:
    assert_refused(f"{FASTEST}: there is only one rollout worker, so requests cannot move", f"{FASTEST}={{}}")
    few = ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=4")
    assert_refused(
        "cluster.rollout_workers: 5 workers for 4 requests of a step; lower it", *few, "cluster.rollout_workers=5"
    )
    assert_refused("cluster.rollout_workers: 0 is out of range", "cluster.rollout_workers=0")
    assert quickstart(f"{FASTEST}={{enabled: false}}").cluster.rollout_workers == 1, (
        "a disabled block needs no second engine"
    )


def test_no_run_continues_requests_whose_tokens_depend_on_the_end_of_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests continue from the text so far where they move, where an engine dies, and after an update in flight."""
    kwargs = "policy.generation.vllm_kwargs"
    processors = f"{kwargs}.logits_processors=['a.b:C']"
    assert quickstart(processors).policy.generation.vllm_kwargs["logits_processors"] == ["a.b:C"]
    sentence = (
        f"{kwargs}.logits_processors: with several rollout workers, requests continue from the text so far, but a log"
    )
    assert_refused(sentence, processors, "cluster.rollout_workers=2")
    in_flight = "in_flight_weight_updates: true, recompute_kv_cache_after_weight_updates: true"
    asynchronous = f"grpo.async_grpo={{enabled: true, {in_flight}}}"
    corrected = "loss_fn.use_importance_sampling_correction=true"
    assert_refused(f"{kwargs}.logits_processors: with recompute_kv_cache_after", processors, asynchronous, corrected)
    watermark = (f"{kwargs}.watermark_config={{key: 1}}", f"{BLOCK_PATH}.drafters=[]")
    assert_refused(f"{kwargs}.watermark_config: with several rollout workers", *watermark, "cluster.rollout_workers=2")
    install_plugin(tmp_path, monkeypatch)
    assert_refused("vllm.logits_processors: ['budget'] are installed here; with several", "cluster.rollout_workers=2")
    assert quickstart().cluster.rollout_workers == 1


def test_each_engine_has_at_most_one_drafter_with_weights() -> None:
    heads = "drafters=[{type: eagle3, model: a}, {type: draft_model, model: b}]"
    together = ["cluster.rollout_workers=2", f"{BLOCK_PATH}.{heads}"]
    apart = f"{FASTEST}={{methods: [[eagle3], [draft_model]]}}"
    assert_refused(f"{BLOCK_PATH}.drafters: eagle3 and draft_model; an engine of vLLM holds one", *together)
    one_has_both = f"{FASTEST}={{methods: [[eagle3, draft_model], []]}}"
    assert_refused(f"{BLOCK_PATH}.drafters: eagle3 and draft_model; an engine", *together, one_has_both)
    block = quickstart(*together, apart).policy.generation.specrollout
    assert [[d.type for d in kind] for kind in block.drafters_of_engines] == [["eagle3"], ["draft_model"]]


def test_a_forced_on_policy_ratio_needs_one_optimizer_step() -> None:
    forced = "loss_fn.force_on_policy_ratio=true"
    assert quickstart(forced, "policy.train_global_batch_size=64").loss_fn.force_on_policy_ratio
    assert_refused(
        "loss_fn.force_on_policy_ratio: true, but a step has 64 samples", forced, "policy.train_global_batch_size=32"
    )


def test_drafts_must_fit_the_context() -> None:
    small = ["policy.max_total_sequence_length=32", "policy.generation.max_new_tokens=16"]
    assert_refused(
        f"{BLOCK_PATH}.num_speculative_tokens: 32 drafts do not fit a context of 32",
        *small, f"{BLOCK_PATH}.num_speculative_tokens=32",
    )  # fmt: skip


def test_an_error_names_the_missing_key() -> None:
    tree: dict[str, Any] = load_config(QUICKSTART)
    del tree["policy"]["generation"]["max_new_tokens"]
    with pytest.raises(ConfigError, match=r"^policy\.generation\.max_new_tokens: missing"):
        read_run_config(tree)
    with pytest.raises(ConfigError, match=r"^grpo: missing"):
        read_run_config({})


# Shipped configs, and supported versions.


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "configs").glob("*_cpu.yaml")), ids=lambda p: p.name)
def test_shipped_configs_can_run_and_have_no_ignored_keys(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    overrides = []
    if path.name == "smollm2_cpu.yaml":  # `make smollm2` makes its model and installs its tasks
        pytest.importorskip("reasoning_gym")
        block, model = "policy.generation.specrollout", shutil.copytree(STEP_ADDER, tmp_path / "model")
        (model / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
        overrides = [
            f"policy.model_name={model}", f"{block}.drafters=[{{type: suffix}}]", f"{block}.draft_refresh=null"
        ]  # fmt: skip
    prepared = prepare(path, overrides)
    assert prepared.ignored == []
    assert read_run_config(prepared.tree)[0] == prepared.config


def test_a_missing_smollm2_names_the_command_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=r"elsewhere/smollm2 does not exist; run `make smollm2`"):
        prepare(ROOT / "examples/configs/smollm2_cpu.yaml", ["policy.model_name=elsewhere/smollm2"])


def test_bench_refuses_equal_names_and_groups_of_one_row() -> None:
    with pytest.raises(ConfigError, match="give each a name of its own"):
        build(BenchConfig, {"workloads": [{"name": "a", "data": {}}, {"name": "a", "data": {}}]}, "bench")
    with pytest.raises(ConfigError, match="no room beside plain"):
        build(BenchConfig, {"rows_at_a_time": 1}, "bench")


@pytest.mark.parametrize("version", ["0.25.1", "0.28.0", "0.32.0", "0.32", "0.33.0", "0.32.0+cpu", "0.32.3.post1"])
def test_supported_versions_of_vllm_are_accepted(version: str) -> None:
    assert unsupported_version(version) is None


@pytest.mark.parametrize(
    "version", ["0.25.0", "0.24.9", "0.34.0", "0.34.0rc1", "0.34.0.dev5+g12ab", "1.0.0", "0.9.1", "dev"]
)
def test_unsupported_versions_of_vllm_are_refused(version: str) -> None:
    sentence = unsupported_version(version)
    assert sentence is not None and version in sentence and "0.25.1 or later, before 0.34.0" in sentence
