# SPDX-License-Identifier: Apache-2.0
"""Drafter processes of a run: starts and watches them. A rollout waits for them only at its start."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig
from nemo_specrollout.config.run_sections import VllmConfig
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.remote.verifier.drafter_process import ANY_PORT, START_S, DrafterProcess, DrafterSpec

_WATCH_PERIOD_S = 0.5
CPU_KV_BYTES = 256 << 20
"""KV cache of a drafter on a CPU."""
GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a drafter with the whole GPU takes."""


class DrafterPool:
    """Owns the drafter processes of a run, and the thread that watches them.

    Example: `pool = DrafterPool(specs)`, an engine for `pool.addresses()`, `pool.wait_until_up()`, at the end `pool.stop()`.
    """

    def __init__(self, specs: Sequence[DrafterSpec]) -> None:
        """Starts all processes."""
        self.processes = [DrafterProcess(spec) for spec in specs]
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def addresses(self) -> list[str]:
        """Waits until all drafters have bound their addresses, and returns these. Raises ConfigError if one cannot start."""
        self._wait(lambda process: process.status is not None)
        return [p.spec.address for p in self.processes]

    def wait_until_up(self) -> None:
        """Waits until all drafters are up, then restarts each that fails. Raises ConfigError if one cannot start."""
        self._wait(lambda process: process.is_up)
        self.start_watching()

    def start_watching(self) -> None:
        """Restarts each drafter that fails from now on, even before it was up. Returns at once."""
        self._watcher.start()

    def _wait(self, is_there: Callable[[DrafterProcess], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not all(map(is_there, self.processes)):
            reasons = [r for r in (p.failure() for p in self.processes) if r is not None]
            if not reasons and time.monotonic() > deadline:
                reasons = [f"not up after {START_S:.0f} s"]
            if reasons:
                self.stop()
                raise ConfigError(f"a drafter process cannot start: {reasons[0]}")
            time.sleep(0.05)

    def take_deaths(self) -> list[str]:
        """Returns a sentence for each process that has ended since the last call."""
        found: list[str] = []
        for number, process in enumerate(self.processes):
            while process.deaths:
                words = process.deaths.pop(0)
                found.append(f"drafter process {number} died ({words}); it is restarted, and no token depends on it")
        return found

    def stop(self) -> None:
        """Ends all processes."""
        self._stopped.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for process in self.processes:
            process.stop()

    def _watch(self) -> None:
        while not self._stopped.wait(_WATCH_PERIOD_S):
            for process in self.processes:
                process.watch()


def drafter_spec(
    drafter: RemoteDrafterConfig, engine: VllmConfig, address: str = ANY_PORT, *, on_cpu: bool = True
) -> DrafterSpec:
    """Returns the settings of a drafter process for a policy's engine. Raises ConfigError if the model's folder is missing."""
    if drafter.model.startswith(("/", ".")) and not Path(drafter.model).is_dir():
        raise ConfigError(f"drafters.model: {drafter.model} does not exist; name the folder of the draft model")
    return DrafterSpec(
        address=address,
        model=drafter.model,
        precision=engine.precision,
        max_model_len=engine.max_model_len,
        max_requests=drafter.max_requests,
        most_ahead=drafter.most_ahead,
        allowed_hosts=drafter.allowed_hosts,
        vllm_kwargs={"enforce_eager": engine.enforce_eager, **_memory(drafter, on_cpu), **drafter.vllm_kwargs},
    )


def _memory(drafter: RemoteDrafterConfig, on_cpu: bool) -> dict[str, Any]:
    """Returns vLLM arguments for the memory of a drafter, which takes its share of a GPU that it shares."""
    if on_cpu:
        return {"kv_cache_memory_bytes": CPU_KV_BYTES}
    return {"gpu_memory_utilization": GPU_MEMORY_SHARE * drafter.gpus} if drafter.gpus else {}


def shared_vllm_config(vllm_cfg: Mapping[str, Any]) -> VllmConfig:
    """Returns the settings that a drafter shares with the policy's engine, from the local runner's or NeMo-RL's `vllm_cfg`."""
    known = {name: vllm_cfg[name] for name in ("max_model_len", "precision", "enforce_eager") if name in vllm_cfg}
    return build(VllmConfig, known, "policy.generation.vllm_cfg")


def with_addresses(block: SpecrolloutConfig, addresses: Sequence[str]) -> SpecrolloutConfig:
    """Returns `block` with `addresses` as the addresses of its remote drafter."""
    assert block.remote is not None
    remote = replace(block.remote, workers=0, addresses=tuple(addresses))
    return replace(block, drafters=tuple(remote if d is block.remote else d for d in block.drafters))
