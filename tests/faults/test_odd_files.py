# SPDX-License-Identifier: Apache-2.0
"""Every file that a user hands to a command, in every state that files are found in: it is read, or refused in a sentence.

The sentence names the file. Nothing ends with a traceback, and nothing waits for a pipe that nobody writes to.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER
from fuzzing import files_below, odd_contents, outcome
from run_files import metrics, trace, write_run
from test_fuzz import HEAD, linked
from test_nemo_rl_config import CLEAN

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROLLOUT = {"prompt_token_ids": [1, 5, 7], "response_token_ids": [8, 9, 2]}
LOGGED = {"token_ids": [[1, 2, 3, 4]], "token_loss_mask": [[0, 0, 1, 1]], "input_lengths": [4]}
LADDER = {"device": "H200", "model": "a/name", "prefill_s_per_token": 1e-4, "rungs": []}
CLUSTER = "account: a\npartition: p\ntime: 1:00:00\ncontainer: x\nnemo_rl: /tmp\n"


@dataclass(frozen=True)
class Place:
    """A file that a command reads, with content that it takes."""

    file: Path
    good: bytes
    command: list[str]


def refresh(folder: Path, rollouts: Path, *more: str, policy: Path = STEP_ADDER) -> list[str]:
    # Too few prompts end the command when all has been read.
    return ["refresh-draft", "--policy", str(policy), "--out", f"{folder}/head", "--rollouts", str(rollouts), *more]


def rollouts(record: object) -> Callable[[Path], Place]:
    """Returns the place of a file of rollouts with one line."""

    def place(folder: Path) -> Place:
        file = folder / "rollouts.jsonl"
        return Place(file, f"{json.dumps(record)}\n".encode(), refresh(folder, file))

    return place


def of_model(name: str, source: Path, command: Callable[[Path, Path], list[str]]) -> Callable[[Path], Place]:
    """Returns the place of a file in the folder of a model or of a head."""

    def place(folder: Path) -> Place:
        file = linked(folder / "model", source) / name
        good = file.read_bytes()
        file.unlink()
        return Place(file, good, command(folder, file.parent))

    return place


def refresh_of_policy(folder: Path, policy: Path) -> list[str]:
    (folder / "text.jsonl").write_text('{"prompt": "1 + 2", "response": "3"}\n')
    return refresh(folder, folder / "text.jsonl", policy=policy)


def refresh_of_head(folder: Path, head: Path) -> list[str]:
    (folder / "ids.jsonl").write_text(json.dumps(ROLLOUT) + "\n")
    return refresh(folder, folder / "ids.jsonl", "--draft", str(head))


def of_run(name: str) -> Callable[[Path], Place]:
    """Returns the place of a file in the records of a run."""

    def place(folder: Path) -> Place:
        steps, traces = ([record(i, random.Random(i)) for i in range(2)] for record in (metrics, trace))
        file = write_run(folder / "run", steps, traces, completed=True) / name
        return Place(file, file.read_bytes(), ["report", str(file.parent)])

    return place


def named(name: str, good: str, command: Callable[[Path], list[str]]) -> Callable[[Path], Place]:
    """Returns the place of a file of its own, beside a config."""

    def place(folder: Path) -> Place:
        (folder / "config.yaml").write_text(CLEAN)
        return Place(folder / name, good.encode(), command(folder))

    return place


def launch(folder: Path) -> list[str]:
    files = [str(folder / name) for name in ("config.yaml", "launched", "cluster.yaml")]
    return ["launch", files[0], "--nodes", "1", "--dry-run", "--run-dir", files[1], "--cluster", files[2]]


def check_ladder(folder: Path) -> list[str]:
    ladder = f"policy.generation.specrollout.fastest_of_n.ladder={folder}/ladder.json"
    return ["check", str(folder / "config.yaml"), ladder]


def prompts(folder: Path) -> list[str]:
    lines = f"{folder}/prompts.jsonl"
    return ["rollouts", str(QUICKSTART), "--prompts", lines, "--out", f"{folder}/nowhere/out.jsonl"]


PLACES: dict[str, Callable[[Path], Place]] = {
    "rollouts as token ids": rollouts(ROLLOUT),
    "rollouts as text": rollouts({"prompt": "1 + 2", "response": "3"}),
    "rollouts as NeMo-RL logs them": rollouts(LOGGED),
    **{
        f"{name} of a policy": of_model(name, STEP_ADDER, refresh_of_policy)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    },
    **{f"{name} of a head": of_model(name, HEAD, refresh_of_head) for name in ("config.json", "model.safetensors")},
    "config": named("other.yaml", CLEAN, lambda folder: ["check", f"{folder}/other.yaml"]),
    "cluster file": named("cluster.yaml", CLUSTER, launch),
    "ladder": named("ladder.json", json.dumps(LADDER), check_ladder),
    "trace": named(
        "trace.jsonl",
        '{"prompt": 0, "sample": 0, "tokens": 5}\n',
        lambda folder: ["simulate", "nvidia-8b-zero", "--trace", f"{folder}/trace.jsonl"],
    ),
    "prompts": named("prompts.jsonl", 'hi\n{"prompt_token_ids": [1]}\n', prompts),
}
RECORDS = {
    f"{name} of a run": of_run(name)
    for name in ("metrics.jsonl", "run.json", "summary.json", "config.yaml", "trace.jsonl")
}
"""Files of which a report is drawn again and again, which takes minutes."""
ALL = [*PLACES, *(pytest.param(name, marks=pytest.mark.slow) for name in RECORDS)]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", ALL)
def test_a_file_in_any_state_is_read_or_refused(name: str, tmp_path: Path) -> None:
    place = {**PLACES, **RECORDS}[name](tmp_path)
    for state in states(place):
        before = files_below(tmp_path)
        code, said = outcome(f"odd files: {name}", *place.command)
        assert code in (0, 2), (state, code, said)
        assert "Traceback" not in said, (state, said)
        if code == 2:
            sentence = said.strip().splitlines()[-1]
            assert len(sentence) < 1500, (state, sentence)
            assert files_below(tmp_path) == before, state


def states(place: Place) -> Iterator[str]:
    """Puts the file into one state after another, and yields what each is."""
    for what, content in odd_contents(place.good).items():
        place.file.write_bytes(content)
        yield what
    place.file.unlink()
    yield "missing"
    place.file.mkdir()
    yield "a folder"
    place.file.rmdir()
    os.mkfifo(place.file)
    yield "a pipe without a writer"
    for target in (place.file.name, "nowhere", "/dev/null"):
        place.file.unlink()
        place.file.symlink_to(target)
        yield f"a link to {target}"
