# SPDX-License-Identifier: Apache-2.0
"""Runs NeMo-RL's own GRPO several times in one process, so that its imports are paid once.

run_scenarios.py BASE.yaml SCENARIOS.json OUT_DIR; a scenario is a name and its overrides. OUT_DIR/<name>/result.json tells
how it ended; the logs are NeMo-RL's own. `"kill_after": N` among a scenario's facts kills an engine actor after N steps,
or after N recorded prompt groups where the scenario records them. `"kill"` names another actor by a part of its class name.
`"environment"` is set while it runs. `"earlier": NAME` lets it begin with the checkpoints of that scenario and with what its
engines had learned, and `"damage"` says what had become of the latter (`earlier_start.py`).
How far the weights move is in OUT_DIR/<name>/weights.jsonl, written by `cpu_host`.
NEMO_RL_CPU_PROFILE=1 writes OUT_DIR/<name>/profile.pstats, of the driver.
"""

import cProfile
import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from earlier_start import put_earlier_start
from ray._private.state import actors  # the public list needs Ray's dashboard

from nemo_specrollout.cli.main import main


@dataclass(frozen=True)
class Killing:
    """A process to kill after a number of steps, or of prompt groups if the scenario records them."""

    after: int
    actor: str

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Killing | None":
        after = facts.get("kill_after")
        return None if after is None else cls(after, facts.get("kill", "EngineActor"))


def run_all(base: Path, scenarios: dict[str, Any], out: Path) -> None:
    for name, facts in scenarios.items():
        folder = out / name
        folder.mkdir(parents=True)
        print(f"=== scenario {name}", flush=True)
        if (earlier := facts.get("earlier")) is not None:
            put_earlier_start(out / earlier / "checkpoints", folder / "checkpoints", facts.get("damage"))
        killing = Killing.of(facts)
        environment = {"NEMO_RL_CPU_WEIGHTS": str(folder / "weights.jsonl"), **facts.get("environment", {})}
        os.environ.update(environment)
        result = _run(base, [*facts["overrides"], f"logger.log_dir={folder}"], folder, killing)
        (folder / "result.json").write_text(json.dumps(result))
        print(f"=== {name}: {result}", flush=True)
        gc.collect()
        ray.shutdown()
        for variable in environment:
            del os.environ[variable]


def _run(base: Path, overrides: list[str], folder: Path, killing: Killing | None) -> dict[str, Any]:
    started = time.perf_counter()
    if killing is not None:
        threading.Thread(target=_kill, args=(folder, killing), daemon=True).start()
    error: str | None = None
    try:
        with _profiled(folder / "profile.pstats"):
            code = main(["run", str(base), *overrides])  # the user's command
        error = None if code == 0 else f"exit code {code}"
    except BaseException as caught:
        error = type(caught).__name__
        print(f"{error}: {caught}", flush=True)
    seconds = time.perf_counter() - started
    return {"error": error, "seconds": seconds, "actors": _actors_left() if ray.is_initialized() else []}


def _profiled(file: Path) -> AbstractContextManager[object]:
    return _Profile(file) if os.environ.get("NEMO_RL_CPU_PROFILE") else nullcontext()


class _Profile(cProfile.Profile):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        self.dump_stats(self._file)


def _actors_left() -> list[str]:
    """Names of the engine actors, and of our other actors, that are alive when a run is over."""
    time.sleep(2)  # Ray's own book-keeping of deaths
    kinds = ("EngineActor", "Vllm", "HeadTrainer", "SpecrolloutDrafter", "SpecrolloutExchange")
    return [actor["Name"] or actor["ActorClassName"] for name in kinds for actor in _alive(name)]


def _alive(name: str) -> list[dict[str, Any]]:
    return [a for a in actors().values() if a["State"] == "ALIVE" and name in a["ActorClassName"]]


def _kill(folder: Path, killing: Killing) -> None:
    """SIGKILL to the first such actor, once it is time."""
    while not _is_time(folder, killing.after):
        time.sleep(0.2)
    pid = _alive(killing.actor)[0]["Pid"]
    print(f"=== kills {killing.actor} {pid}", flush=True)
    os.kill(pid, signal.SIGKILL)


def _is_time(folder: Path, after: int) -> bool:
    if recorded := os.environ.get("NEMO_RL_CPU_RECORD"):
        return Path(recorded).is_file() and len(Path(recorded).read_text().splitlines()) >= after
    return bool(list(folder.rglob(f"train_data_step{after}.jsonl")))


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
