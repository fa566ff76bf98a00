# SPDX-License-Identifier: Apache-2.0
"""Overrides of the command line mean what they mean to NeMo-RL, which reads them by Hydra's grammar.

The expected values are NeMo-RL's own. With NEMO_RL_SRC and NEMO_RL_PYTHON, its function is asked again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from test_nemo_rl_recipes import PYTHON, SOURCE, beside_nemo_rl

from nemo_specrollout.config.overrides import parse_override
from nemo_specrollout.config.strict import ConfigError

pytestmark = pytest.mark.unit

BASE: dict[str, Any] = {"n": None, "d": {"x": 1, "y": [1, 2]}, "l": [1, {"k": 2}], "t": "text", "grpo": {"seed": 1}}
GONE = "(gone)"
REFUSED = "(refused)"
VALUES = {
    "t=on": "on", "t=yes": "yes", "t=TRUE": True, "t=Null": None, "t='null'": "null", "t=": "", "t=-": "-",
    "t=10:00:00:00": "10:00:00:00", "t=1:30": "1:30", "t=2024-01-01": "2024-01-01", "t=1.2.3": "1.2.3",
    "t=010": "010", "t=0x10": "0x10", "t=1_000": 1000, "t=+3": 3, "t=1e-6": 1e-6, "t=1.": 1.0, "t=.5": 0.5,
    't="1"': "1", "t=int(3.7)": 3, "t=inf": float("inf"), "t=12345678901234567890123": 12345678901234567890123,
    r"t=x\=y": "x=y", "t='x=y'": "x=y", r"t=a\ b": "a b", r"t=a\,b": "a,b", r"t=a\b": r"a\b", r"t='it\'s'": "it's",
    "t=two words": "two words", "t= spaced ": "spaced", "t='größe'": "größe", "t=http://x:80/y": "http://x:80/y",
    "t=/a/b-c.d@e%f*g?h|i$j+k": "/a/b-c.d@e%f*g?h|i$j+k", "t=${grpo.seed}": "${grpo.seed}", r"t=\${x}": r"\${x}",
    "t=[a,b, c]": ["a", "b", "c"], "t=[]": [], "t={}": {}, "t=[1,[2,{x: y}]]": [1, [2, {"x": "y"}]],
    "t={a: 1, b: [c]}": {"a": 1, "b": ["c"]}, "t=[null,'null',\"1\",1]": [None, "null", "1", 1],
}  # fmt: skip
"""Overrides of the key `t`, and its value afterwards."""
CHANGES: dict[str, dict[str, Any]] = {
    "++d={num_nextn_predict_layers:0}": {"d": {"x": 1, "y": [1, 2], "num_nextn_predict_layers": 0}},
    "++new.deep={method:mtp,num_speculative_tokens:3}": {
        "new": {"deep": {"method": "mtp", "num_speculative_tokens": 3}}
    },
    "+new=1": {"new": 1},
    "+n=1": {"n": 1},
    "++d.z=3": {"d": {"x": 1, "y": [1, 2], "z": 3}},
    "++d.x.y=3": {"d": {"x": {"y": 3}, "y": [1, 2]}},
    "++n.b=c": {"n": {"b": "c"}},
    "d={x:3}": {"d": {"x": 3, "y": [1, 2]}},
    "d=5": {"d": 5},
    "l.0=5": {"l": [5, {"k": 2}]},
    "l.1.k=7": {"l": [1, {"k": 7}]},
    "~d": {"d": GONE},
    "~d.x": {"d": {"y": [1, 2]}},
    "~d.x=1": {"d": {"y": [1, 2]}},
    "~grpo.seed": {"grpo": {}},
}
"""Overrides, and what differs afterwards."""
MISTAKES = {
    "+t=1": "the config has t already; write t=1 without the +",
    "~d.x=2": "d.x is 1, not 2; write ~d.x",
    "~n": "n is absent or null",
    "~grpo.sed": "grpo.sed is absent or null; did you mean 'seed'?",
    "~l.0": "l is no block of keys",
    "l.5=1": "list index out of range",
    "d=[1]": "d is a list here, but a block below it; write a block",
    "t=a,b": "it gives several values; write a list as [1, 2]",
    "t=choice(a,b)": "it gives several values",
    "t=a=b=c": "mismatched input '='",
    "t=größe": "token recognition error at: 'ö'; write a list as [1, 2]",
    't={"a": 1}': "no viable alternative",
    "t={a}": "a block as {a: 1}",
    "t='open": "in quotes of its own",
    "t=f(x)": "Unknown function 'f'",
    "t=a#b": "token recognition error at: '#'",
    "a@b=1": "'a@b' is not a key",
    "++ü=1": "'ü' is not a key",
    "++d..x=1": "'d..x' is not a key",
}
"""Overrides that NeMo-RL refuses, and words of our sentence."""


def changed(override: str) -> dict[str, Any]:
    """Returns the keys of BASE that differ after `override`, with their values."""
    tree = OmegaConf.create(BASE)
    parse_override(override).apply(tree)
    return difference(OmegaConf.to_container(tree, resolve=False))


def difference(now: Any) -> dict[str, Any]:
    found = {key: now.get(key, GONE) for key in [*BASE, *now]}
    return {key: value for key, value in found.items() if key not in BASE or value != BASE[key]}


@pytest.mark.parametrize(("override", "value"), VALUES.items())
def test_a_value_is_nemo_rls(override: str, value: Any) -> None:
    found = changed(override)
    assert found == {"t": value} and type(found["t"]) is type(value)


@pytest.mark.parametrize(("override", "expected"), CHANGES.items())
def test_a_change_is_nemo_rls(override: str, expected: dict[str, Any]) -> None:
    assert changed(override) == expected


@pytest.mark.parametrize(("override", "words"), MISTAKES.items())
def test_what_nemo_rl_refuses_is_refused_in_a_sentence(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        changed(override)
    assert str(refusal.value).startswith(f"override {override!r}: ") and words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_new_key_needs_no_plus() -> None:
    """Only here NeMo-RL is stricter; `unknown_overrides` tells of such a key."""
    assert changed("d.new.deep=3") == {"d": {"x": 1, "y": [1, 2], "new": {"deep": 3}}}


def test_hydra_is_needed_for_overrides_only(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    config.write_text(STEPS)
    said = {}
    for overrides in ((), ("grpo.max_num_steps=7",)):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_HYDRA, "check", str(config), *overrides],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        said[overrides] = done.stderr
    assert "hydra" not in said[()]
    assert "needs the Python package hydra, which is not installed here" in said[("grpo.max_num_steps=7",)]


STEPS = "grpo: {max_num_steps: 3}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
WITHOUT_HYDRA = """
import sys
sys.modules["hydra"] = None
from nemo_specrollout.cli.main import main
sys.exit(main())
"""
ASK = """
import json, sys
from omegaconf import OmegaConf
from nemo_rl.utils.config import parse_hydra_overrides
base, overrides = json.load(sys.stdin)
trees = {}
for override in overrides:
    try:
        tree = parse_hydra_overrides(OmegaConf.create(base), [override])
        trees[override] = OmegaConf.to_container(tree, resolve=False)
    except Exception:
        trees[override] = "(refused)"
print("ANSWER" + json.dumps(trees))
"""


@pytest.mark.nemo_rl
@beside_nemo_rl
def test_nemo_rl_itself_gives_the_same() -> None:
    asked = json.dumps([BASE, [*VALUES, *CHANGES, *MISTAKES]])
    host = ROOT / "tests" / "nemo_rl" / "cpu_host"  # NeMo-RL is written for Python 3.13
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(host), str(SOURCE)])}
    done = subprocess.run(
        [str(PYTHON), "-c", ASK], input=asked, capture_output=True, text=True, env=environment, check=True
    )
    trees = json.loads(done.stdout.rpartition("ANSWER")[2])
    assert {override for override, tree in trees.items() if tree == REFUSED} == set(MISTAKES)
    expected = {**{override: {"t": value} for override, value in VALUES.items()}, **CHANGES}
    found = {override: difference(trees[override]) for override in expected}
    # In JSON every key is text.
    assert found == json.loads(json.dumps(expected))
