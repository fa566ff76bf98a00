# SPDX-License-Identifier: Apache-2.0
"""Writes a decode-speed table as the file from which another run starts, and names the methods that one can have."""

import itertools
from collections.abc import Sequence

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.scheduling.racing.speed_table import (
    ANY_TASK,
    DecodeSpeedTable,
    SpeedRow,
    SpeedTableFile,
    draft_method,
)


def table_file(table: DecodeSpeedTable, device: str, policy: str, acceptance: Sequence[float]) -> SpeedTableFile | None:
    """Returns all measurements as a file, with the acceptance of each method; None if there are none."""
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


def methods_of(block: SpecrolloutConfig) -> list[str]:
    """Returns the names of the draft methods of a block's engines, each once."""
    kinds = range(len(block.drafters_of_engines))
    return list(dict.fromkeys(draft_method(block.of_engine(kind)) for kind in kinds))
