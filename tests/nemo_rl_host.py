# SPDX-License-Identifier: Apache-2.0
"""The real NeMo-RL on this machine's CPU: where it is, and the runs that the tests look at (CONTRIBUTING.md)."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from nemo_rl_scenarios import (
    CONTROLLER_SCENARIOS,
    DATA_PLANE_SCENARIOS,
    DISTILLATION_SCENARIOS,
    GYM_CONTROLLER_SCENARIOS,
    GYM_SCENARIOS,
    LEARNED_SCENARIOS,
    PAIR,
    PIN_SCENARIOS,
    PPO_SCENARIOS,
    SCENARIOS,
)

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "nemo_rl"
# Of float32 weights: a run whose weights moved by less has learned nothing.
ROUNDING = 1e-6
# Work trees and the Python of an environment that has their dependencies.
VARIABLES = ("NEMO_RL_SRC", "MEGATRON_BRIDGE_SRC", "MEGATRON_LM_SRC", "NEMO_RL_PYTHON")
PIN = "NEMO_RL_VLLM"
"""Variable with the version of vLLM in the environment, where NeMo-RL's loops are to run on a version that NeMo-RL pins."""
# For the tests with NeMo-Gym: its work tree, and the Python of an environment for its servers.
GYM_VARIABLES = ("NEMO_GYM_SRC", "NEMO_GYM_PYTHON")
_QUIET = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HF_HUB_OFFLINE": "1",
    "NEMO_RL_CPU_LOGICAL_GPUS": "3",
    "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
    "NRL_DISABLE_NUMA_BINDING": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray's workers are as polite as the test is, and none is killed because others have filled the machine's memory.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCH_CUDA_ARCH_LIST": "9.0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "WANDB_MODE": "disabled",
}


@dataclass(frozen=True)
class Host:
    """NeMo-RL's environment, and a tiny policy for it."""

    environment: Mapping[str, str]
    tiny: Path

    def run(
        self,
        *arguments: str | Path,
        timeout_s: int = 3000,
        may_fail: bool = False,
        more: Mapping[str, str] | None = None,
    ) -> str:
        """Runs NeMo-RL's interpreter and returns its output. `more` is added to its environment.

        Fails the test with the last lines if the interpreter fails, unless `may_fail`.
        """
        done = self._run(arguments, env={**self.environment, **(more or {})}, capture_output=True, timeout=timeout_s)
        output: str = done.stdout + done.stderr
        assert may_fail or done.returncode == 0, output[-6000:]
        return output

    def run_logged(self, log: Path, *arguments: str | Path, timeout_s: int) -> None:
        """Like `run`, but appends the output to `log` as it comes."""
        with log.open("a") as lines:
            how = {"env": self.environment, "stdout": lines, "stderr": subprocess.STDOUT, "timeout": timeout_s}
            done = self._run(arguments, **how)
        assert done.returncode == 0, log.read_text()[-6000:]

    def _run(self, arguments: Sequence[str | Path], **how: Any) -> subprocess.CompletedProcess[str]:
        command = [self.environment["NEMO_RL_PYTHON"], *map(str, arguments)]
        return subprocess.run(command, text=True, check=False, cwd=HERE, **how)


def answer_in(output: str, word: str) -> Any:
    """The JSON of the only line of `output` that begins with `word`."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"{word} ")]
    return json.loads(line.removeprefix(f"{word} "))


def make_host(tiny: Path) -> Host:
    """NeMo-RL's environment from the variables of this process, with a tiny policy in the folder `tiny`."""
    given = {name: os.environ[name] for name in VARIABLES}
    paths = [
        HERE / "cpu_host",
        ROOT,
        given["NEMO_RL_SRC"],
        f"{given['MEGATRON_BRIDGE_SRC']}/src",
        given["MEGATRON_LM_SRC"],
    ]
    own = {
        "PYTHONPATH": ":".join(map(str, paths)),
        "TINY": str(tiny),
        "NRL_MEGATRON_CHECKPOINT_DIR": str(tiny / "megatron"),
    }
    # Bytecode of everything, kept between runs: without it each of some thirty processes compiles for a minute.
    own["PYTHONPYCACHEPREFIX"] = str(ROOT / ".pytest_cache" / "bytecode")
    if PIN in os.environ:  # this vLLM takes no other bodies for its kernels
        own["TRITON_INTERPRET"] = "1"
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    ready = Host({**kept, **given, **_QUIET, **own}, tiny)
    ready.run(HERE / "tiny_policy.py", tiny)
    return ready


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Skips where there is no NeMo-RL."""
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        pytest.skip(f"set {', '.join(missing)} to test against NeMo-RL (CONTRIBUTING.md)")
    return make_host(tmp_path_factory.mktemp("tiny"))


# Of NeMo-Gym's work tree, the folders of the servers that tests/nemo_rl/gym.yaml starts.
_GYM_SERVERS = (
    "responses_api_models/vllm_model",
    "responses_api_agents/gymnasium_agent",
    "resources_servers/example_multi_turn_gymnasium",
)


@pytest.fixture(scope="session")
def gym_host(host: Host) -> Host:
    """NeMo-RL with NeMo-Gym beside it. Skips where there is no NeMo-Gym."""
    missing = [name for name in GYM_VARIABLES if not os.environ.get(name)]
    if missing:
        pytest.skip(f"set {', '.join(missing)} to test against NeMo-Gym (CONTRIBUTING.md)")
    for server in _GYM_SERVERS:  # where NeMo-Gym looks for its environment
        folder = host.tiny / "servers" / server
        folder.mkdir(parents=True)
        (folder / ".venv").symlink_to(Path(os.environ["NEMO_GYM_PYTHON"]).parents[1])
    path = f"{host.environment['PYTHONPATH']}:{os.environ['NEMO_GYM_SRC']}"
    return replace(host, environment={**host.environment, "PYTHONPATH": path})


@dataclass(frozen=True)
class Run:
    """A run of a scenario, over or not yet."""

    folder: Path

    @property
    def is_over(self) -> bool:
        """True if the run has ended, well or badly."""
        return (self.folder / "result.json").is_file()

    def remove(self) -> None:
        """Removes what a run that was cut off has left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.record_file.unlink(missing_ok=True)

    @property
    def record_file(self) -> Path:
        """The file in which `cpu_host` writes rollouts that NeMo-RL keeps no rows of."""
        return self.folder.parent / f"{self.folder.name}.jsonl"

    @property
    def log(self) -> str:
        """Its output. Where a run began again, the output of the last time."""
        whole = (self.folder.parent / "log.txt").read_text()
        return whole.rpartition(f"=== scenario {self.folder.name}\n")[2].partition(f"=== {self.folder.name}:")[0]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Ours, step by step."""
        return self.lines("metrics.jsonl")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A file of JSON lines."""
        return [json.loads(line) for line in self.find(name).read_text().splitlines()]

    def samples(self, step: int) -> list[tuple[list[list[int]], list[list[int]]]]:
        """Tokens of each row of a step's training batch, and its loss mask, as NeMo-RL logs them: one list in a list."""
        return [(row["token_ids"], row["token_loss_mask"]) for row in self.lines(f"train_data_step{step}.jsonl")]

    @property
    def record(self) -> list[Any]:
        """Rollouts of a loop that NeMo-RL keeps no rows of, as `cpu_host` writes them down."""
        return [json.loads(line) for line in self.record_file.read_text().splitlines()]

    @property
    def movement(self) -> list[float]:
        """The policy's distance from its first weights after each weight update, relative to their norm.

        It is the largest of all engines. `cpu_host` measures it.
        """
        changes: dict[str, list[float]] = {}
        for update in self.lines("weights.jsonl"):
            changes.setdefault(update["engine"], []).append(update["since_first"])
        return [max(of_engines) for of_engines in zip_longest(*changes.values(), fillvalue=0.0)]

    @property
    def weights_moved_by(self) -> float:
        """The same, after the last update."""
        return self.movement[-1]

    def find(self, name: str) -> Path:
        """The only file of that name."""
        (path,) = self.folder.rglob(name)
        return path


def num_drafts(step: Mapping[str, Any], drafter: str, kind: str = "proposed") -> int:
    """Draft tokens of a drafter that were proposed, or `accepted`, in a step."""
    return sum(step.get("acceptance", {}).get(drafter, {}).get(kind, []))


def count_equal(left: Run, right: Run, step: int) -> tuple[int, int]:
    """Returns the rows of a step's training batch with the same tokens and mask in two runs, and the rows in all."""
    a, b = (sorted(run.samples(step)) for run in (left, right))
    return sum(x == y for x, y in zip(a, b, strict=True)), max(len(a), len(b))


def run_all(host: Host, name: str, base: str, scenarios: Mapping[str, Any], scratch: Path) -> dict[str, Run]:
    """Runs `scenarios` on the config `base`, one after another in one process; their folders, by name.

    NEMO_RL_RUNS names a folder in which to keep them. A run that ended there is used; one that was cut off begins again.
    """
    kept = os.environ.get("NEMO_RL_RUNS")
    out = Path(kept, name) if kept else scratch
    runs = {scenario: Run(out / scenario) for scenario in scenarios}
    if missing := {scenario: scenarios[scenario] for scenario, run in runs.items() if not run.is_over}:
        out.mkdir(parents=True, exist_ok=True)
        for scenario in missing:
            runs[scenario].remove()
        listed = out / "scenarios.json"
        listed.write_text(json.dumps(missing).replace("$OUT", str(out)))
        host.run_logged(
            out / "log.txt", HERE / "run_scenarios.py", HERE / base, listed, out, timeout_s=600 * len(missing)
        )
    return runs


@pytest.fixture(scope="session")
def controller_runs(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of the SingleController: some 40 minutes."""
    scratch = tmp_path_factory.mktemp("controller")
    return run_all(host, "controller", "single_controller.yaml", CONTROLLER_SCENARIOS, scratch)


@pytest.fixture(scope="session")
def turn_runs(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of three turns."""
    return run_all(host, "turns", "multi_turn.yaml", PAIR, tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="session")
def distillation_runs(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of on-policy distillation."""
    return run_all(
        host, "distillation", "distillation.yaml", DISTILLATION_SCENARIOS, tmp_path_factory.mktemp("distillation")
    )


@pytest.fixture(scope="session")
def ppo_runs(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of PPO."""
    return run_all(host, "ppo", "ppo.yaml", PPO_SCENARIOS, tmp_path_factory.mktemp("ppo"))


@pytest.fixture(scope="session")
def gym_runs(gym_host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of three turns with NeMo-Gym."""
    return run_all(gym_host, "gym", "gym.yaml", GYM_SCENARIOS, tmp_path_factory.mktemp("gym"))


@pytest.fixture(scope="session")
def gym_controller_runs(gym_host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of three turns with NeMo-Gym, under the SingleController."""
    scratch = tmp_path_factory.mktemp("gym_controller")
    return run_all(gym_host, "gym_controller", "gym_controller.yaml", GYM_CONTROLLER_SCENARIOS, scratch)


@pytest.fixture(scope="session")
def data_plane_runs(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of the TransferQueue trainer, each in a process of its own: its client outlives a Ray cluster."""
    scratch = tmp_path_factory.mktemp("data_plane")
    found: dict[str, Run] = {}
    for name, facts in DATA_PLANE_SCENARIOS.items():
        found |= run_all(host, f"data_plane_{name}", "base.yaml", {name: facts}, scratch / name)
    return found


@pytest.fixture(scope="session")
def runs(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """GRPO's scenarios, an hour on two cores."""
    return run_all(host, "grpo", "base.yaml", SCENARIOS, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def learned_runs(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """GRPO with prompts that recur, in two engines and after another start: half an hour on two cores."""
    return run_all(host, "learned", "base.yaml", LEARNED_SCENARIOS, tmp_path_factory.mktemp("learned"))


@pytest.fixture(scope="session")
def pin_runs(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """GRPO's scenarios on the vLLM that NEMO_RL_VLLM names."""
    scratch = tmp_path_factory.mktemp("pin")
    return run_all(host, f"pin-{os.environ[PIN]}", "base.yaml", PIN_SCENARIOS, scratch)
