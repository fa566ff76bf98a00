# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind ends with exit code 2 and a sentence, never with a traceback, and changes nothing.

150 cases here, thousands with `-m slow`.
"""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import QUICKSTART, ROOT, STEP_ADDER
from fuzzing import SCALARS, VALUES, assert_refused_or_fine, files_below, flipped, mutated, paths_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_files import metrics, trace, write_run
from test_nemo_rl_config import CLEAN

from lab.local.sealed_folder import seal_folder
from lab.simulation.workload import read_trace
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.heads.features.rollout_files import read_rollouts

HEAD = ROOT / "examples" / "models" / "step_adder_eagle3"
QUICKSTART_TREE = load_config(QUICKSTART)
HEAD_TREE = load_config(QUICKSTART.with_name("quickstart_head_cpu.yaml"))
TWO_WORKERS_TREE = load_config(QUICKSTART.with_name("quickstart_two_workers_cpu.yaml"))
ASYNC_TREE = load_config(QUICKSTART.with_name("quickstart_async_cpu.yaml"))
NEMO_RL_TREE = yaml.safe_load(CLEAN)
KEYS = [
    ".".join(map(str, path))
    for tree in (QUICKSTART_TREE, HEAD_TREE, ASYNC_TREE)
    for path in paths_of(tree)
    if all(isinstance(key, str) for key in path)
]
"""Keys of the shipped configs, which overrides set to values of every kind."""


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs tests in the repository root, because shipped configs name their models relative to it."""
    monkeypatch.chdir(ROOT)


def fuzz(number: int) -> Callable[[Any], Any]:
    """Makes two tests of one body: `number` cases by default, and a hundred times that number, marked slow."""

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    slow = (pytest.mark.slow, pytest.mark.timeout(3600))
    cases = [pytest.param(number, id="few"), pytest.param(100 * number, id="many", marks=slow)]

    def decorate(body: Any) -> Any:
        @pytest.mark.parametrize("num_cases", cases)
        def test(num_cases: int) -> None:
            limited = settings(max_examples=num_cases, deadline=None, suppress_health_check=checks)
            limited(given(st.data())(body))()

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def checked(kind: str, tree: Any, *overrides: str) -> bool:
    """Runs `explain` on a config file with the content `tree`; returns whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_bytes(tree if isinstance(tree, bytes) else yaml.safe_dump(tree, allow_unicode=True).encode())
        before = files_below(Path(folder))
        try:
            return assert_refused_or_fine(kind, "explain", str(file), f"logger.log_dir={folder}/run", *overrides)
        finally:
            assert files_below(Path(folder)) == before


@fuzz(13)
def test_mutated_configs_run_or_are_refused(data: st.DataObject) -> None:
    tree = data.draw(st.sampled_from([QUICKSTART_TREE, HEAD_TREE, TWO_WORKERS_TREE, ASYNC_TREE]))
    checked("configs: values and keys", data.draw(mutated(tree)))


@fuzz(11)
def test_mutated_nemo_rl_configs_run_or_are_refused(data: st.DataObject) -> None:
    """NeMo-RL itself need not be installed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text(yaml.safe_dump(data.draw(mutated(NEMO_RL_TREE)), allow_unicode=True))
        command = data.draw(st.sampled_from([("check",), ("explain",), ("explain", "--device", "H100")]))
        assert_refused_or_fine("NeMo-RL configs", command[0], str(file), *command[1:])


SCENARIO_KEYS = [
    "num_prompts",
    "batch",
    "lengths.median",
    "lengths.longest",
    "drafting.k",
    "device",
    "workers",
    "x",
    "policy",
]


@fuzz(11)
def test_random_scenarios_run_or_are_refused(data: st.DataObject) -> None:
    """Overrides of a missing scenario, of a file that is not a scenario, and of a command."""
    value = data.draw(SCALARS.map(lambda v: v if isinstance(v, str) else json.dumps(v)))
    override = f"{data.draw(st.sampled_from(SCENARIO_KEYS))}={value}".replace("\0", "")
    assert_refused_or_fine("scenarios", "simulate", data.draw(st.sampled_from(["nope", "/dev/null", "list"])), override)


@fuzz(11)
def test_configs_with_random_bytes_run_or_are_refused(data: st.DataObject) -> None:
    checked("configs: bytes of the file", flipped(QUICKSTART.read_bytes(), data))


@fuzz(26)
def test_overrides_with_random_values_run_or_are_refused(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(KEYS))
    value = data.draw(VALUES)
    text = value if isinstance(value, str) else json.dumps(value)
    assert_refused_or_fine("overrides: values", "explain", str(QUICKSTART), f"{key}={text}".replace("\0", ""))


@fuzz(11)
def test_overrides_with_random_keys_run_or_are_refused(data: st.DataObject) -> None:
    override = data.draw(st.text(max_size=20) | st.from_regex(r"\+{0,3}[a-z.\[\] =]{0,20}=?.{0,6}", fullmatch=True))
    if not override.startswith("-"):
        assert_refused_or_fine("overrides: keys", "explain", str(QUICKSTART), override)


def linked(folder: Path, source: Path) -> Path:
    """Makes a folder of links to the files of another folder, so that a test may replace some."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def changed_file(folder: Path, data: st.DataObject, names: list[str]) -> None:
    """Damages one of the files: its values if it is JSON, its bytes, or its existence."""
    file = folder / data.draw(st.sampled_from(names))
    content = file.read_bytes()
    file.unlink()
    kind = data.draw(st.sampled_from(["values", "values", "bytes", "missing", "a folder"]))
    if kind == "a folder":
        file.mkdir()
    elif kind == "bytes" or (kind == "values" and file.suffix != ".json"):
        file.write_bytes(flipped(content, data))
    elif kind == "values":
        file.write_text(json.dumps(data.draw(mutated(json.loads(content)))))


@fuzz(21)
def test_mutated_model_folders_run_or_are_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = linked(Path(folder, "model"), STEP_ADDER)
        names = ["config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
        changed_file(model, data, [*names, "model.safetensors"])
        assert_refused_or_fine("model folders", "explain", str(QUICKSTART), f"policy.model_name={model}")


@fuzz(21)
def test_mutated_heads_run_or_are_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        head = linked(Path(folder, "head"), HEAD)
        changed_file(head, data, ["config.json", "config.json", "config.json", "head_card.json", "model.safetensors"])
        drafters = f"policy.generation.specrollout.drafters=[{{type: eagle3, model: '{head}'}}]"
        assert_refused_or_fine("heads", "explain", str(QUICKSTART), drafters)


@fuzz(11)
def test_mutated_draft_models_run_or_are_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = linked(Path(folder, "model"), STEP_ADDER)
        changed_file(model, data, ["config.json", "model.safetensors"])
        kind = data.draw(st.sampled_from(["draft_model", "remote", "dflash", "dspark", "mtp"]))
        more = {"remote": ", workers: 1", "mtp": ""}.get(kind, "")
        named = "" if kind == "mtp" else f", model: '{model}'"
        drafters = f"policy.generation.specrollout.drafters=[{{type: {kind}{named}{more}}}]"
        assert_refused_or_fine("draft models", "explain", str(QUICKSTART), drafters)


def write_complete_run(folder: Path, tree: dict[str, Any]) -> None:
    """Writes a run directory with two finished steps."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "run.json").write_text('{"records": 1, "command": "x", "versions": {}, "commit": null, "started": "now"}')
    for name, record in (("metrics", metrics), ("samples", lambda step, rng: {"step": step}), ("trace", trace)):
        lines = (json.dumps(record(step, random.Random(step))) for step in (0, 1))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for step in (0, 1):
        checkpoint = folder / "checkpoints" / f"step_{step}"
        checkpoint.mkdir()
        (checkpoint / "rank_0_of_1.pt").write_bytes(b"weights" * 9)
        seal_folder(checkpoint)


@fuzz(3)
def test_mutated_run_directories_lose_nothing(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        overrides = [f"logger.log_dir={run}", "grpo.max_num_steps=1"]  # fewer than are done, so that no engine starts
        write_complete_run(run, load_config(QUICKSTART, overrides))
        names = ["config.yaml", "metrics.jsonl", "trace.jsonl", "run.json", "checkpoints/step_1/checksums.json",
                 "checkpoints/step_1/rank_0_of_1.pt", "checkpoints/step_0/checksums.json"]  # fmt: skip
        for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
            content = (run / name).read_bytes()
            (run / name).unlink()
            if data.draw(st.booleans()):
                (run / name).write_bytes(flipped(content, data))
        if not (run / "config.yaml").is_file() and not (run / "metrics.jsonl").is_file():
            return  # nothing of a run is left
        kept = {name: size for name, size in files_below(run).items() if name.endswith((".pt", ".jsonl"))}
        for command in (["report", str(run)], ["run", str(QUICKSTART), *overrides]):
            assert_refused_or_fine("run directories", *command)
        assert {name: size for name, size in files_below(run).items() if name in kept} == kept, "something was lost"


ROLLOUTS = [
    {"prompt_token_ids": [1, 5, 7], "response_token_ids": [8, 9, 2], "reward": 0.5},
    {"prompt": "1 + 2", "response": "3"},
    {
        "token_ids": [[1, 5, 8, 9, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0]],
        "input_lengths": [4],
        "content": [["1 +", "3"]],
        "idx": 0,
    },
]
ODD_VALUES = VALUES | st.sampled_from(
    [
        4.0,
        1e308,
        10**400,
        2**63,
        float("nan"),
        "\ud800",
        "4",
        [4.0],
        [True],
        [None],
        [[]],
        [{"type": "text", "text": "2"}],
    ]
)


def assert_sentence(error: ValueError, file: Path) -> None:
    """Asserts that a reader refused a file in one sentence about it. UnicodeError and others would be of no use."""
    said = str(error)
    assert type(error) in (ValueError, ConfigError), repr(error)
    assert str(file) in said and ": " in said and "\n" not in said and len(said) < 1500, said


@fuzz(60)
def test_mutated_rollouts_are_read_or_refused(data: st.DataObject) -> None:
    rows = st.sampled_from(ROLLOUTS).flatmap(lambda row: st.just(row) | mutated(row, ODD_VALUES))
    content = "\n".join(map(json.dumps, data.draw(st.lists(rows, min_size=1, max_size=3)))).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rollouts.jsonl")
        file.write_bytes(flipped(content, data) if data.draw(st.integers(0, 3)) == 0 else content)
        try:
            texts, _ = read_rollouts([file], STEP_ADDER, 96, 64)
        except ValueError as error:
            assert_sentence(error, file)
            return
        for text in texts:
            assert 0 < text.first_prompt_length <= text.prompt_length < len(text.token_ids) <= 64
            assert all(type(i) is int and 0 <= i < 96 for i in text.token_ids)


@fuzz(4)
def test_mutated_records_are_shown_or_refused(data: st.DataObject) -> None:
    full = metrics(1, random.Random(1)) | {
        "tail": {"moves": 1, "races": 1, "won_by_racer": 0, "idle_share": 0.1, "saved_s": 1.0},
        "draft_refresh": {"refresh_s": 1.0, "published": True, "decision": "x", "gate": "y"},
        "draft_supply": {"num_drafters": 2, "num_ready": 1, "bottleneck": "x"},
        "alarms": ["a"],
    }
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder, "run"), [metrics(0, random.Random(0)), data.draw(mutated(full, ODD_VALUES))], [])
        assert_refused_or_fine("records of a run", "report", str(run))


@fuzz(30)
def test_mutated_traces_are_read_or_refused(data: st.DataObject) -> None:
    rows = mutated({"prompt": 0, "sample": 0, "tokens": 5}, ODD_VALUES)
    samples = mutated({"step": 0, "samples": [{"prompt": 0, "sample": 0, "tokens": 5}]}, ODD_VALUES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.jsonl")
        file.write_text("\n".join(map(json.dumps, data.draw(st.lists(rows | samples, min_size=1, max_size=3)))))
        try:
            assert all(lengths.ndim == 2 and lengths.min() >= 1 for lengths in read_trace(file, "--trace"))
        except ValueError as error:
            assert_sentence(error, file)


ARGUMENTS = st.sampled_from([
    "run", "check", "bench", "explain", "launch", "profile", "ladder", "simulate", "report", "refresh-draft", "rollouts",
    "serve-drafter", "publish-draft", "list", "papers", str(QUICKSTART), "nowhere.yaml", "/", "", "grpo.seed=x", "=",
    "--out", "--device", "H100", "--nodes", "-1", "--dry-run", "--profile", "--ladder", "--trace", "--policy", "--rollouts",
    "--address", "tcp://x", "--batch", "nan", "--help-me", "-h=1", "--",
])  # fmt: skip


@fuzz(13)
def test_random_arguments_run_or_are_refused(data: st.DataObject) -> None:
    """Commands that start engines are left out, because valid arguments would start them."""
    command = data.draw(st.sampled_from(["check", "explain", "simulate", "report", "refresh-draft", "publish-draft"]))
    arguments = data.draw(st.lists(ARGUMENTS, max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        shutil.copytree(ROOT / "examples" / "configs", Path(folder, "configs"))
        os.chdir(folder)
        try:
            assert_refused_or_fine("arguments", command, *arguments)
        finally:
            os.chdir(before)
