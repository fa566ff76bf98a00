# SPDX-License-Identifier: Apache-2.0
"""Kills, stops and interrupts each process of a run in each phase: nothing is lost, nothing is left behind.

Slow: `make test-kill`, about an hour for all, three cases at once; `-k` picks, e.g. `-k "main and checkpoint"`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER, TINY_ROLLOUTS
from processes import lives

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

NUM_STEPS, STEP = 3, 1
PHASES = ("start", "rollout", "training", "refit", "checkpoint", "report")
STOPPED_S = 60.0
SETTINGS = {
    **TINY_ROLLOUTS,
    "policy.generation.max_new_tokens": 96,
    "grpo.max_num_steps": NUM_STEPS,
    "policy.megatron_cfg.optimizer.lr": 1e-3,
}
DRAFTERS = f"[{{type: suffix}}, {{type: remote, model: {STEP_ADDER}, workers: 1}}]"
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "two workers": ("quickstart_two_workers_cpu.yaml", {}),
    "asynchronous": ("quickstart_async_cpu.yaml", {}),
    "working ahead": (
        "quickstart_cpu.yaml",
        {"policy.generation.specrollout.run_ahead": "{steps: 2}", "policy.generation.colocated.enabled": "false"},
    ),
    "remote drafter": ("quickstart_cpu.yaml", {"policy.generation.specrollout.drafters": DRAFTERS}),
}
# Signals, and the exit code of a run whose own process gets them.
BLOWS: dict[str, tuple[tuple[signal.Signals, ...], int]] = {
    "SIGKILL": ((signal.SIGKILL,), -signal.SIGKILL),
    "SIGSTOP": ((signal.SIGSTOP,), 0),
    "SIGTERM": ((signal.SIGTERM,), 143),
    "SIGINT twice": ((signal.SIGINT, signal.SIGINT), 130),
}

# Ray's workers do not hear SIGINT, nor do children of a command in the background.
DEADLY = ("SIGKILL", "SIGTERM")


class Run:
    """One start of a run, in a session of its own. Owns the process."""

    def __init__(self, log_dir: Path, config: str, phase: str | None) -> None:
        name, more = CONFIGS[config]
        overrides = [f"{key}={value}" for key, value in {**SETTINGS, **more, "logger.log_dir": log_dir}.items()]
        arguments = ["run", str(QUICKSTART.with_name(name)), *overrides]
        self._marker = Path(tempfile.mkdtemp()) / "marker"
        script = [str(Path(__file__).with_name("phased_run.py")), phase or "", str(STEP), str(self._marker)]
        command = [*script, *arguments] if phase else ["-m", "lab.cli.main", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._family: dict[int, psutil.Process] = {}

    def reach(self) -> None:
        """Waits for the phase."""
        while not self._marker.exists():
            assert self.process.poll() is None, self.process.communicate()[0][-3000:]
            self._meet()
            time.sleep(0.02)
        self._meet()

    def go_on(self) -> None:
        """Lets it leave the phase."""
        self._marker.unlink()

    def victim(self, target: str) -> int:
        """The process that is meant."""
        if target == "main":
            return self.process.pid
        sign = {"worker": "RolloutActor", "drafter": "lab.local.drafter_process"}[target]
        return next(p.pid for p in self._family.values() if p.is_running() and sign in " ".join(p.cmdline()))

    def end(self) -> tuple[int, str]:
        """Exit code and output, when it has ended."""
        output, _ = self.process.communicate(timeout=400)
        return self.process.returncode, output

    def left_behind(self) -> list[str]:
        """Processes of it that are there two minutes after its end: two agents of Ray take one to see that Ray is dead."""
        until = time.monotonic() + 120
        while (alive := [p for p in self._family.values() if lives(p)]) and time.monotonic() < until:
            time.sleep(0.2)
        return [" ".join(p.cmdline())[:120] for p in alive]

    def _meet(self) -> None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self._family.setdefault(process.pid, process)


def strike(run: Run, target: str, blow: str) -> None:
    victim = run.victim(target)
    for number in BLOWS[blow][0]:
        os.kill(victim, number)
        time.sleep(0.2)
    if target != "main" and blow in DEADLY:
        # Until its parent has collected it: it is a zombie before its last threads have ended.
        with suppress(psutil.NoSuchProcess):
            psutil.Process(victim).wait()
    run.go_on()
    if blow == "SIGSTOP":
        time.sleep(STOPPED_S)
        with suppress(ProcessLookupError):  # a drafter that says nothing for half a minute has been killed by then
            os.kill(victim, signal.SIGCONT)


def lines(log_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def left_in_memory(before: set[str]) -> set[str]:
    """Returns new names that are still there after five minutes. Files of another run vanish when it ends."""
    new, until = shared_memory() - before, time.monotonic() + 300
    while new & shared_memory() and time.monotonic() < until:
        time.sleep(0.5)
    return new & shared_memory()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The metrics of an uninterrupted run of each config, made when first asked for."""

    class Made(dict[str, list[dict[str, Any]]]):
        def __missing__(self, config: str) -> list[dict[str, Any]]:
            log_dir = tmp_path_factory.mktemp("whole") / "run"
            code, output = Run(log_dir, config, None).end()
            assert code == 0, output[-3000:]
            self[config] = lines(log_dir)
            return self[config]

    yield Made()


def assert_same_steps(config: str, made: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """In an asynchronous run it depends on the clock which policy made a token, so its steps are only sound."""
    assert [m["step"] for m in made] == list(range(NUM_STEPS))
    if config == "asynchronous":
        gaps = [m["logprob_gap_on_policy"] for m in made if m["logprob_gap_on_policy"] is not None]
        assert gaps and max(gaps) < 1e-3
        return
    for ours, theirs in zip(made, whole, strict=True):
        for key in ("reward", "num_tokens", "mean_gen_tokens_per_sample"):
            assert ours[key] == theirs[key], (ours["step"], key)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["tokens_equal"] == ours["tokens_checked"]


TARGETS = [
    *((config, target) for config in ("two workers", "asynchronous", "working ahead") for target in ("main", "worker")),
    ("remote drafter", "drafter"),
]
CASES = [
    (config, target, blow, phase)
    for config, target in TARGETS
    for blow in BLOWS
    for phase in PHASES
    if target == "main" or phase not in ("start", "report")  # nothing is asked of others then
]


@pytest.mark.parametrize(("config", "target", "blow", "phase"), CASES, ids=["-".join(case) for case in CASES])
def test_nothing_is_lost(
    references: dict[str, list[dict[str, Any]]], tmp_path: Path, config: str, target: str, blow: str, phase: str
) -> None:
    whole = [] if config == "asynchronous" else references[config]
    log_dir, before = tmp_path / "run", shared_memory()
    run = Run(log_dir, config, phase)
    run.reach()
    strike(run, target, blow)
    code, output = run.end()
    expected = BLOWS[blow][1] if target == "main" else 0
    if target == "main" and phase == "report" and blow != "SIGKILL":
        expected = 0  # all steps are done, and what is written then is not interrupted
    assert code == expected, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    assert run.left_behind() == [] and left_in_memory(before) == set()
    if target != "main" and blow in DEADLY:
        assert sum(m["deaths"] for m in lines(log_dir)) >= 1 and "died" in output
    code, output = Run(log_dir, config, None).end()
    assert "Traceback" not in output and code in (0, 2), output[-3000:]
    assert code == 0 or "complete" in output
    assert_same_steps(config, lines(log_dir), whole)
    assert (log_dir / "report.html").is_file() and json.loads((log_dir / "summary.json").read_text())["completed"]
