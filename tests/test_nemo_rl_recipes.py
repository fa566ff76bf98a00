# SPDX-License-Identifier: Apache-2.0
"""Files of NeMo-RL configs: how they are read, their scripts, and the shipped recipes.

Comparisons with NeMo-RL itself need NEMO_RL_SRC, a checkout, and NEMO_RL_PYTHON, an interpreter that can import it.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from test_nemo_rl_config import tree

from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, effective_config, script_of
from nemo_specrollout.config.nemo_rl_tree import runtime_of
from nemo_specrollout.config.strict import ConfigError

pytestmark = pytest.mark.unit

RECIPES = sorted((ROOT / "examples" / "configs").glob("*-specrollout.yaml"))


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


# Runtimes and scripts.


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
    monkeypatch.setenv("WANDB_MODE", "offline")  # the recipes log to Weights & Biases, as NeMo-RL's do
    trees = {str(path): load_config(path) for path in RECIPES}
    for path, recipe in trees.items():
        assert runtime_of(recipe) == "nemo_rl" and effective_config(recipe) is not None
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
