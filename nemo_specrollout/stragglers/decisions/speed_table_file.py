# SPDX-License-Identifier: Apache-2.0
"""The decode-speed table as a file, which the block calls `ladder`. A run can start from such a file, and writes one."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.measured_file import MeasuredFile, check_columns
from nemo_specrollout.config.strict import bounded
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, MEMORY_S, DecodeSpeedTable

FORMAT = 1
FIELD = f"{BLOCK_PATH}.fastest_of_n.ladder"
"""Field of a config that names a decode-speed file."""
LADDER = "ladder.json"
"""Name of the decode-speed file that a run writes."""
FADED_S = MEMORY_S / 8.0
"""Weight of speeds that an earlier start has measured. They count at most like a measurement over this number of seconds of
decoding."""


@dataclass(frozen=True)
class SpeedRow:
    """Measured decode speeds of one draft method on one task, as lists over batch sizes."""

    task: str
    """Name of the task, or `any` for all tasks together."""
    method: str
    """Types of the drafters, joined by +, or `plain` without drafters."""
    batches: tuple[int, ...] = bounded(low=1)
    """Batch sizes, which are numbers of requests in the engine, ascending."""
    tokens_per_s: tuple[float, ...] = bounded(above=0.0)
    weights_s: tuple[float, ...] = bounded(above=0.0)
    """Weight of each speed, which is the measured time in seconds multiplied by the batch size."""
    acceptance: float = bounded(0.0, low=0.0, high=1.0)
    """Acceptance rate of the method's draft tokens, or 0 if it was not measured. It is for information only."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the lists differ in length, are empty or not ascending."""
        check_columns(path, batches=self.batches, tokens_per_s=self.tokens_per_s, weights_s=self.weights_s)


@dataclass(frozen=True)
class SpeedTableFile(MeasuredFile):
    """A decode-speed table in a file. `specrollout-lab ladder` writes one, and so does each run with several engines."""

    KIND: ClassVar = "ladder"
    device: str
    policy: str
    prefill_s_per_token: float = bounded(above=0.0)
    rungs: tuple[SpeedRow, ...] = ()
    """Measured decode speeds by task and method. Within a task, the fastest method for a single request comes first."""
    prefill_weight_s: float = bounded(MEMORY_S, above=0.0)
    """Seconds of prefill over which `prefill_s_per_token` was measured."""
    format: int = bounded(FORMAT, low=FORMAT, high=FORMAT)


def ladder_of(block: SpecrolloutConfig) -> SpeedTableFile | None:
    """Reads the file with the decode speeds from which a run starts.

    Returns None if the block names no file, or if speeds are not needed because requests neither move nor race.

    Raises ConfigError with the field, the file and the fix if the file cannot be read or is not valid.
    """
    racing = block.fastest_of_n
    if not block.enabled or racing is None or not racing.enabled or racing.ladder is None:
        return None
    return SpeedTableFile.read(Path(racing.ladder), FIELD)


def started_table(methods: Sequence[str], file: SpeedTableFile | None) -> DecodeSpeedTable:
    """Returns a decode-speed table of these methods, which starts from the measurements in `file` if there are any."""
    table = DecodeSpeedTable(methods)
    if file is None:
        return table
    table.prefill.add(file.prefill_weight_s / file.prefill_s_per_token, file.prefill_weight_s)
    for rung in file.rungs:
        if rung.method in table.methods:
            means = table.rates[rung.task, table.methods.index(rung.method)]
            for batch, rate, weight_s in zip(rung.batches, rung.tokens_per_s, rung.weights_s, strict=True):
                means[batch].add(rate * weight_s, weight_s)
    return table


def faded(file: SpeedTableFile) -> SpeedTableFile:
    """Returns the speeds of an earlier start with the weight of a few seconds of measurement.

    They must not count for more, because the policy and the machine may have changed since.
    """
    return replace(file, rungs=tuple(map(_faded, file.rungs)), prefill_weight_s=FADED_S)


def _faded(rung: SpeedRow) -> SpeedRow:
    pairs = zip(rung.batches, rung.weights_s, strict=True)
    return replace(rung, weights_s=tuple(min(weight_s, FADED_S * batch) for batch, weight_s in pairs))


def table_file(table: DecodeSpeedTable, device: str, policy: str, acceptance: Sequence[float]) -> SpeedTableFile | None:
    """Returns all measurements and the acceptance rate of each method as the content of a file, or None if there are none.

    `device` and `policy` describe the device and the policy with which the speeds were measured.
    """
    if not table.prefill.seconds or not table.rates:
        return None
    tasks = sorted(
        {task for (task, _), means in table.rates.items() if means}, key=lambda task: (task == ANY_TASK, task)
    )
    fastest = sorted(range(len(table.methods)), key=lambda m: -table.tokens_per_s(m, 1))
    rows = []
    for task, method in itertools.product(tasks, fastest):
        if means := sorted(table.rates.get((task, method), {}).items()):
            batches, ratios, seconds = zip(*((b, m.ratio, m.seconds) for b, m in means), strict=True)
            rows.append(SpeedRow(task, table.methods[method], batches, ratios, seconds, acceptance[method]))
    return SpeedTableFile(device, policy, 1.0 / table.prefill.ratio, tuple(rows))
