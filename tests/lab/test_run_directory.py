# SPDX-License-Identifier: Apache-2.0
"""A run directory under faults: damaged and foreign checkpoints, two runs at once, a full disk, torn lines."""

import errno
import json
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.local.run_directory import LEARNED, LOCK, CompleteRun, DirectoryLock, RunDirectory
from lab.local.sealed_folder import CHECKSUMS, DamagedFolder, check_seal, seal_folder
from nemo_specrollout.config.block import LearnedConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports.records import read_lines
from nemo_specrollout.storage.files import write_atomically

pytestmark = pytest.mark.unit

CONFIG = {"grpo": {"max_num_steps": 9, "seed": 1}}
WEIGHTS = "rank_0_of_1.pt"


def save(folder: Path) -> None:
    """Writes a folder like `MegatronPolicy.save`, with other content."""
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(os.urandom(300_000))
    seal_folder(folder)


def make_steps(path: Path, config: dict[str, Any], num_steps: int) -> None:
    """Makes a run directory with that many steps."""
    directory = RunDirectory(path, config, 9)
    directory.begin()
    for step in range(num_steps):
        directory.append("metrics.jsonl", {"step": step})
        directory.keep_checkpoint(step, save)
    directory.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run of five steps."""
    make_steps(tmp_path / "run", CONFIG, 5)
    return tmp_path / "run"


def opened(path: Path, max_num_steps: int = 9) -> RunDirectory:
    return RunDirectory(path, CONFIG, max_num_steps)


def test_engines_learn_into_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails after its engines have learned something can be repeated in the same folder."""
    monkeypatch.chdir(tmp_path)
    directory = opened(Path("run"))
    folder = directory.with_learned(LearnedConfig()).folder
    assert folder == str(tmp_path / "run" / LEARNED)
    assert directory.with_learned(LearnedConfig(folder="/elsewhere")).folder == "/elsewhere"
    Path(folder).mkdir()
    (Path(folder) / "file").write_text("")
    directory.close()
    assert opened(Path("run")).next_step == 0


# Checkpoints.


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "truncated": lambda folder: truncate(folder / WEIGHTS),
    "one bit": lambda folder: flip(folder / WEIGHTS),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "a folder for weights": lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()),
    "empty": lambda folder: [file.unlink() for file in folder.iterdir()],
    "no checksums": lambda folder: (folder / CHECKSUMS).unlink(),
    "torn checksums": lambda folder: truncate(folder / CHECKSUMS),
    "other checksums": lambda folder: (folder / CHECKSUMS).write_text("[1, 2]"),
    "checksums of nothing": lambda folder: (folder / CHECKSUMS).write_text("{}"),
    "checksums without end": lambda folder: (folder / CHECKSUMS).write_text("[" * 100_000),
    "infinite checksums": lambda folder: (folder / CHECKSUMS).write_text('{"a": {"bytes": 1e999, "sha256": ""}}'),
    "checksums of NUL": lambda folder: (folder / CHECKSUMS).write_text('{"\\u0000": {"bytes": 1, "sha256": ""}}'),
    "checksums of half a letter": lambda folder: (folder / CHECKSUMS).write_text(
        '{"\\ud800": {"bytes": 1, "sha256": ""}}'
    ),
    "checksums of others": lambda folder: (folder / CHECKSUMS).write_text('{"../x": {"bytes": 1, "sha256": ""}}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(run: Path, damage: str) -> None:
    DAMAGES[damage](run / "checkpoints" / "step_4")
    directory = opened(run)
    assert directory.next_step == 4 and directory.checkpoint == run / "checkpoints" / "step_3"
    (sentence,) = directory.begin()
    assert "step_4 is damaged" in sentence and "kept as step_4.damaged" in sentence
    assert [record["step"] for record in read_lines(directory.path / "metrics.jsonl")] == [0, 1, 2, 3]
    directory.keep_checkpoint(4, save)
    directory.close()
    assert opened(run).next_step == 5, "the step is made again, beside what was set aside"
    assert (run / "checkpoints" / "step_4.damaged").is_dir()


def test_damaged_checkpoints_of_a_step_do_not_replace_each_other(run: Path) -> None:
    for number in range(3):
        directory = opened(run)
        directory.begin()
        if number:
            directory.keep_checkpoint(4, save)
        directory.close()
        flip(run / "checkpoints" / "step_4" / WEIGHTS)
    opened(run).begin()
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step_3", "step_4.damaged", "step_4.damaged.1", "step_4.damaged.2"}


def test_a_run_with_only_damaged_checkpoints_is_not_restarted(run: Path) -> None:
    for step in (3, 4):
        truncate(run / "checkpoints" / f"step_{step}" / WEIGHTS)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole .*has 150000 bytes of 300000.*; restore one"):
        opened(run)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    "name", ["step_5_backup", "step_x", "step_", "step_-1", "step_05", "step_1e3", "step_٣", "STEP_7"]
)
def test_names_that_are_no_step_are_ignored(run: Path, name: str) -> None:
    (run / "checkpoints" / name).mkdir()
    directory = opened(run)
    assert directory.next_step == 5
    assert directory.begin() == []
    directory.keep_checkpoint(5, save)
    assert (run / "checkpoints" / name).is_dir()


def test_a_file_with_the_name_of_a_step_is_ignored(run: Path) -> None:
    (run / "checkpoints" / "step_9").write_text("notes")
    assert opened(run).next_step == 5


def test_what_a_killed_process_was_writing_is_removed(run: Path) -> None:
    (run / "checkpoints" / ".step_5.tmp").mkdir()
    (run / "checkpoints" / ".step_5.tmp" / WEIGHTS).write_bytes(b"half")
    (run / ".metrics.jsonl.12345").write_text("half")
    opened(run).begin()
    assert not [path for path in run.rglob(".*")]


def test_a_sealed_folder_is_whole_until_something_changes(tmp_path: Path) -> None:
    save(tmp_path / "sealed")
    check_seal(tmp_path / "sealed")
    flip(tmp_path / "sealed" / WEIGHTS)
    with pytest.raises(DamagedFolder, match="checksum differs"):
        check_seal(tmp_path / "sealed")


# Lines.


def test_torn_and_foreign_lines_are_dropped_when_a_run_goes_on(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5}\n[1, 2]\n\xff\xfe\n{"step": "six"}\n{"step": 7, "rew')
    directory = opened(run)
    directory.begin()
    assert (run / "metrics.jsonl").read_text().splitlines() == [json.dumps({"step": step}) for step in range(5)]


@pytest.mark.parametrize("content", ["{", "- a list", "\x00", "a: [b", "!!python/object:os.system {}"])
def test_a_run_whose_config_is_damaged_is_refused(run: Path, content: str) -> None:
    (run / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.yaml is missing or damaged; restore it"):
        opened(run)


@pytest.mark.parametrize("run_json", [None, "{}", "[1]", "{", '{"command": "make"}'])
def test_a_folder_of_the_user_s_own_is_no_run_directory(tmp_path: Path, run_json: str | None) -> None:
    """The folder of the config file itself, say, with files of the names that a run writes."""
    files = {"config.yaml": "# mine\ngrpo: {}\n", "samples.jsonl": "{}\n", ".notes.2024": "notes"}
    for name, content in (files | ({} if run_json is None else {"run.json": run_json})).items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match="exists and is not a run directory"):
        opened(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_hidden_files_of_the_user_s_own_stay(run: Path) -> None:
    (run / ".notes.2024").write_text("notes")
    (run / ".config.yaml.1").mkdir()
    opened(run).begin()
    assert (run / ".notes.2024").read_text() == "notes" and (run / ".config.yaml.1").is_dir()


def test_a_run_that_was_killed_before_its_first_file_begins(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / ".run.json.77").write_text("half")
    directory = opened(tmp_path)
    directory.begin()
    directory.close()
    (tmp_path / "config.yaml").unlink()  # it is written second
    assert opened(tmp_path).next_step == 0


@pytest.mark.parametrize("how", ["gone", "a link to nowhere"])
def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(run: Path, how: str) -> None:
    (run / "checkpoints").rename(run.with_name("elsewhere"))
    if how == "a link to nowhere":
        (run / "checkpoints").symlink_to("unmounted")
    with pytest.raises(ConfigError, match=r"holds 5 steps, but .*checkpoints holds no checkpoint of them; restore one"):
        opened(run)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_step_without_its_first_checkpoint_is_made_again(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    directory.begin()
    directory.append("metrics.jsonl", {"step": 0})
    directory.close()
    directory = opened(tmp_path)
    directory.begin()
    assert directory.next_step == 0 and read_lines(directory.path / "metrics.jsonl") == []


def test_checkpoints_that_cannot_be_read_are_an_error(run: Path) -> None:
    (run / "checkpoints").rename(run.with_name("elsewhere"))
    (run / "checkpoints").write_text("a file")
    with pytest.raises(NotADirectoryError):
        opened(run)
    opened(run.with_name("another")).close()


def test_a_checkpoint_that_the_user_moved_and_linked_is_let_go(run: Path) -> None:
    moved = (run / "checkpoints" / "step_3").rename(run.with_name("elsewhere"))
    (run / "checkpoints" / "step_3").symlink_to(moved)
    directory = opened(run)
    directory.begin()
    directory.keep_checkpoint(5, save)
    assert not (run / "checkpoints" / "step_3").exists() and (moved / WEIGHTS).is_file()


def test_a_value_that_is_no_number_is_the_same_config_each_time(tmp_path: Path) -> None:
    config = CONFIG | {"note": float("nan")}
    make_steps(tmp_path, config, 2)
    assert RunDirectory(tmp_path, config, 9).next_step == 2


def test_another_config_is_named_even_if_it_has_no_sections(run: Path) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"grpo": None, "policy": []}))
    with pytest.raises(ConfigError, match="another config"):
        opened(run)


def test_a_complete_run_is_told_apart(run: Path) -> None:
    with pytest.raises(CompleteRun):
        opened(run, 5)


# Two runs.


def test_a_second_run_is_refused_with_the_holder_s_pid_and_start(run: Path) -> None:
    first = opened(run)
    with pytest.raises(
        ConfigError, match=rf"in use by process {os.getpid()} on .*, which has run since 20\d\d-.*; wait for"
    ):
        opened(run)
    first.close()
    opened(run).close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import subprocess, sys, time
            from pathlib import Path
            from lab.local.run_directory import DirectoryLock
            lock = DirectoryLock(Path({str(tmp_path)!r}))
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            print(child.pid, flush=True)
            time.sleep(60)
        """)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
        DirectoryLock(tmp_path)
    holder.kill()
    holder.wait()
    DirectoryLock(tmp_path).release()  # though its child lives
    os.kill(child, 9)


def test_the_folder_of_a_run_that_did_not_start_is_removed(tmp_path: Path) -> None:
    DirectoryLock(tmp_path / "new").release()
    assert not (tmp_path / "new").exists()
    tmp_path.joinpath("old").mkdir()
    DirectoryLock(tmp_path / "old").release()
    assert list((tmp_path / "old").iterdir()) == []


def test_a_lock_file_without_a_holder_says_so(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    (tmp_path / LOCK).write_text("{")
    with pytest.raises(ConfigError, match="in use by another process"):
        DirectoryLock(tmp_path)
    lock.release()


def test_a_file_system_without_locks_is_told_of(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    (sentence,) = opened(run).begin()
    assert "has no locks" in sentence


# A full disk.


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files cannot grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_does_not_fit_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_atomically(file, "before")
    with full_disk(1000), pytest.raises(OSError) as error:
        write_atomically(file, "x" * 5000)
    assert error.value.errno == errno.EFBIG
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_line_that_did_not_fit_is_dropped_when_there_is_room(run: Path) -> None:
    directory = opened(run)
    directory.begin()
    with full_disk((run / "metrics.jsonl").stat().st_size + 4), pytest.raises(OSError):
        directory.append("metrics.jsonl", {"step": 5, "text": "x" * 9000})
    directory.close()
    directory = opened(run)
    directory.begin()
    directory.append("metrics.jsonl", {"step": 5})
    assert [record["step"] for record in read_lines(directory.path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    from lab.local.policy import MegatronPolicy
    from lab.local.run_sections import OptimizerConfig

    policy = MegatronPolicy.from_pretrained(tiny_model, optimizer=OptimizerConfig(lr=1e-3))
    with full_disk(100_000), pytest.raises(OSError) as error:
        policy.save(tmp_path / "step_0")
    assert error.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []
    policy.save(tmp_path / "step_0")
    policy.load(tmp_path / "step_0")
    truncate(tmp_path / "step_0" / WEIGHTS)
    with pytest.raises(DamagedFolder, match="bytes of"):
        policy.load(tmp_path / "step_0")
