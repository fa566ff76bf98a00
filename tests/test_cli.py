# SPDX-License-Identifier: Apache-2.0
"""Behaviour that both programs share: usage, exit codes, one sentence for a mistake, signals."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_nemo_rl_config import CLEAN

from nemo_specrollout.cli.main import main
from nemo_specrollout.cli.terminal import Interrupts, Terminated
from nemo_specrollout.config.strict import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "--help"]])
def test_help_prints_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "usage: nemo-specrollout" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["train", "x.yaml"], ["run"], ["check", "--fast", "x.yaml"]])
def test_unknown_commands_and_flags_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: nemo-specrollout" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_swallowed_interrupt_is_raised_again(number: signal.Signals, kind: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):  # as in a finalizer
            signal.raise_signal(number)
        with pytest.raises(kind):
            interrupts.check()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(), 143, "terminated by SIGTERM"),
        (SystemExit(15), 143, "terminated by SIGTERM"),  # Ray's own handler raises this
        (
            OSError(28, "No space left on device", "/a/file"),
            1,
            "/a/file: No space left on device; what was finished is kept",
        ),
        (
            PermissionError(13, "Permission denied", "/a/file"),
            2,
            "/a/file: Permission denied; mend that, or name another",
        ),
        (ConfigError("a.b: c\n\x1b[31m; fix"), 2, "a.b: c \\x1b[31m; fix"),
    ],
)
def test_every_error_has_its_exit_code_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    def ends(_: object) -> int:
        raise error

    monkeypatch.setattr("nemo_specrollout.cli.check.check", ends)
    assert main(["check", "x.yaml"]) == code
    said = capsys.readouterr().err
    assert said.startswith(f"nemo-specrollout: {words}") and said.count("\n") == 1


@pytest.mark.parametrize("reads", [True, False])
def test_a_command_without_a_reader_ends_silently(reads: bool, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CLEAN)
    read, write = os.pipe()
    if not reads:
        os.close(read)
    command = [sys.executable, "-m", "nemo_specrollout.cli.main", "check", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == ((0, "") if reads else (141, ""))
    if reads:
        os.close(read)
