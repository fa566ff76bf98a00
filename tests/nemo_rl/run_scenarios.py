# SPDX-License-Identifier: Apache-2.0
"""Runs NeMo-RL's own GRPO several times in one process, so that its imports are paid once.

run_scenarios.py BASE.yaml SCENARIOS.json OUT_DIR; a scenario is a name and its overrides. OUT_DIR/<name>/result.json tells
how it ended; the logs are NeMo-RL's own. `"kill_after": N` among a scenario's facts kills an engine's actor after N steps,
or the one whose class has the name `"kill"` in its own.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors  # the public list needs Ray's dashboard

from nemo_specrollout.cli.main import main


def run_all(base: Path, scenarios: dict[str, Any], out: Path) -> None:
    for name, facts in scenarios.items():
        folder = out / name
        folder.mkdir(parents=True)
        print(f"=== scenario {name}", flush=True)
        killing = (facts["kill_after"], facts.get("kill", "Vllm")) if "kill_after" in facts else None
        result = _run(base, [*facts["overrides"], f"logger.log_dir={folder}"], folder, killing)
        (folder / "result.json").write_text(json.dumps(result))
        print(f"=== {name}: {result}", flush=True)
        gc.collect()
        ray.shutdown()


def _run(base: Path, overrides: list[str], folder: Path, killing: tuple[int, str] | None) -> dict[str, Any]:
    started = time.perf_counter()
    if killing is not None:
        threading.Thread(target=_kill, args=(folder, *killing), daemon=True).start()
    error: str | None = None
    try:
        code = main(["run", str(base), *overrides])  # the user's command
        error = None if code == 0 else f"exit code {code}"
    except BaseException as caught:
        error = type(caught).__name__
        print(f"{error}: {caught}", flush=True)
    seconds = time.perf_counter() - started
    return {"error": error, "seconds": seconds, "actors": _actors_left() if ray.is_initialized() else []}


def _actors_left() -> list[str]:
    """Names of the engines' actors, and of ours, that are alive when a run is over."""
    time.sleep(2)  # Ray's own book-keeping of deaths
    return [actor["Name"] or actor["ActorClassName"] for name in ("Vllm", "HeadTrainer") for actor in _alive(name)]


def _alive(name: str) -> list[dict[str, Any]]:
    return [a for a in actors().values() if a["State"] == "ALIVE" and name in a["ActorClassName"]]


def _kill(folder: Path, after: int, name: str) -> None:
    """SIGKILL to the first such actor once `after` steps are logged."""
    while not list(folder.rglob(f"train_data_step{after}.jsonl")):
        time.sleep(0.2)
    pid = _alive(name)[0]["Pid"]
    print(f"=== kills the actor {name} {pid}", flush=True)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
