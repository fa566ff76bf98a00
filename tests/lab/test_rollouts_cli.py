# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab rollouts`: prompts of tasks and of files, and a command that goes on where it was killed."""

import json
from pathlib import Path

import pytest
from conftest import QUICKSTART, ROOT

from lab.cli.main import main
from lab.cli.rollouts import task_prompts
from lab.local.run_config import read_run_config
from nemo_specrollout.config.load import load_config

TWO_TASKS = "bench.workloads=[{name: sums, data: {dataset_name: step_addition}}, {name: short, data: {max_terms: 3}}]"
SHORT = ("policy.generation.max_new_tokens=8", "policy.generation.vllm_kwargs.kv_cache_memory_bytes=67108864")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.unit
def test_the_tasks_of_a_config_make_prompts() -> None:
    (alone, _), (two, _) = (read_run_config(load_config(QUICKSTART, more)) for more in ([], [TWO_TASKS]))
    one, both = task_prompts(alone, 20, 0), task_prompts(two, 21, 0)
    assert len(one) == 20 and len(both) == 21 and all(both)
    assert both[::2] == task_prompts(alone, 11, 0), "every second prompt is of the first workload"
    assert max(map(len, both[1::2])) < max(map(len, both[::2]))
    assert one != task_prompts(alone, 20, 1)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num", "0"], "--num: 0; make at least one"),
        (["--samples", "0"], "--samples: 0; make at least one"),
        (["--prompts", "no/such.txt"], "--prompts: no/such.txt cannot be read"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["rollouts", str(QUICKSTART), "--out", str(tmp_path / "made.jsonl"), *arguments]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.integration
def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("please add 1 + 2\n\nplease add 1 + 2\nplease add 3 + 4\n")
    whole, file = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--samples", "2", *SHORT]
    assert main(["rollouts", str(QUICKSTART), "--out", str(whole), *flags]) == 0
    lines = whole.read_text().splitlines()
    read = [json.loads(line) for line in lines]
    assert len(read) == 4 and read[0]["prompt_token_ids"] == read[1]["prompt_token_ids"] != read[2]["prompt_token_ids"]
    assert all(1 <= len(r["response_token_ids"]) <= 8 for r in read)
    file.write_text("\n".join([*lines[:3], lines[3][:20]]))
    assert main(["rollouts", str(QUICKSTART), "--out", str(file), *flags]) == 0
    assert file.read_text() == whole.read_text()
    ids = [{"prompt_token_ids": r["prompt_token_ids"]} for r in read]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, ids)))
    again = ["--out", str(tmp_path / "again.jsonl"), *flags[2:], "--prompts", str(tmp_path / "ids.jsonl")]
    assert main(["rollouts", str(QUICKSTART), *again]) == 0
    assert (tmp_path / "again.jsonl").read_text() == whole.read_text()
