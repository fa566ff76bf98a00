# SPDX-License-Identifier: Apache-2.0
"""Leftovers of a command after its end, and access to it while it runs."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER, TINY_ROLLOUTS
from processes import lives

from nemo_specrollout.cli.terminal import LEFT_BEHIND_S, LOCK, PREFIX, scratch_folder
from nemo_specrollout.doctor.diagnosis import PARENT

pytestmark = pytest.mark.integration


def test_temporary_files_are_in_one_folder_that_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with scratch_folder():
        made = Path(tempfile.mkdtemp())
        child = subprocess.run(
            [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert made.parent == Path(child.stdout.strip()).parent and made.parent.parent == tmp_path
    assert list(tmp_path.iterdir()) == [] and os.environ["TMPDIR"] == str(tmp_path)
    assert tempfile.gettempdir() == str(tmp_path)


def test_what_a_killed_command_left_is_removed_by_a_later_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed, recent, strange = (tmp_path / f"{PREFIX}{name}" for name in ("killed", "recent", "strange"))
    for folder in (killed, recent, strange):
        folder.mkdir()
        (folder / "file").touch()
    for folder in (killed, recent):
        (folder / LOCK).touch()
    long_ago = time.time() - 2 * LEFT_BEHIND_S
    with scratch_folder():
        (held,) = set(tmp_path.iterdir()) - {killed, recent, strange}
        for folder in (killed, strange, held):
            os.utime(folder, (long_ago, long_ago))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with scratch_folder():
            assert set(tmp_path.iterdir()) >= {held, recent, strange} and not killed.exists()


def test_a_child_ends_with_its_parent_even_while_it_loads() -> None:
    """The child is busy in Python and never comes back to its loop, as one that loads a model."""
    child = "from nemo_specrollout.doctor.diagnosis import end_with_parent; end_with_parent()\\nwhile True: pass"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "{child}"], env={{**os.environ, "{PARENT}": str(os.getpid())}})
print(child.pid, flush=True)
time.sleep(600)
"""],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1.5)
    assert orphan.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    orphan.wait()


def name_of(command: list[str]) -> str:
    """Returns the kind of a process by its command line: a script, a module of ours, a Ray actor."""
    known = [Path(part).name for part in command if part.endswith(".py") or part.startswith("nemo_specrollout.")]
    return known[0] if known else Path(command[0].strip()).name.partition(".")[0] if command else "?"


@pytest.mark.slow
def test_a_run_of_two_workers_ignores_strangers_and_cleans_up(tmp_path: Path) -> None:
    """Every listening socket of its processes is on the loopback; temporary files and shared memory go with it."""
    scratch = tmp_path / "t"
    scratch.mkdir()
    shared = set(os.listdir("/dev/shm"))
    settings = {
        **TINY_ROLLOUTS,
        "grpo.max_num_steps": 6,
        "logger.log_dir": tmp_path / "run",
        "policy.generation.specrollout.drafters": f"[{{type: suffix}}, {{type: remote, model: {STEP_ADDER}, workers: 1}}]",
    }
    config = str(QUICKSTART.with_name("quickstart_two_workers_cpu.yaml"))
    run = subprocess.Popen(
        [sys.executable, "-m", "lab.cli.main", "run", config, *(f"{k}={v}" for k, v in settings.items())],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    listening: dict[str, dict[str, set[int]]] = {}
    family: dict[int, psutil.Process] = {}
    while run.poll() is None:
        for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
            try:
                family.setdefault(process.pid, process)
                for connection in process.net_connections(kind="inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        who = "the run" if process.pid == run.pid else name_of(process.cmdline())
                        listening.setdefault(who, {}).setdefault(connection.laddr.ip, set()).add(connection.laddr.port)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.5)
    output = run.communicate()[0]
    assert run.returncode == 0, output[-3000:]
    for who, addresses in sorted(listening.items()):
        print(who, {ip: len(ports) for ip, ports in addresses.items()})
    assert {"gcs_server", "raylet"} <= set(listening)  # and monitor.py, unless another Ray of this machine has its port
    everywhere = {who: ips for who, ips in listening.items() if set(ips) - {"127.0.0.1", "::1", "::ffff:127.0.0.1"}}
    assert everywhere == {}
    while any(map(lives, family.values())):
        time.sleep(0.1)
    kept = [p.name for p in scratch.iterdir() if not p.name.startswith("torchinductor_")]  # what is compiled stays
    assert kept == [] and set(os.listdir("/dev/shm")) <= shared
