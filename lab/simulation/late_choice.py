# SPDX-License-Identifier: Apache-2.0
"""Shows what it costs if the host chooses drafts by acceptance rates that are one engine step old.

    python -m lab.simulation.late_choice [RECORD] [--machine two_cores|deep|gpu] [--at-a-time N]

The proposals of real drafters are replayed (`lab.simulation.replay`). Each row of the table is a way to choose drafts, and its
figures are the tokens per second divided by those of a choice on the device. All rows have the same proposals, tokens, draft
board and speculation policy. Each figure is the median of `SEEDS` runs, which differ in the random noise on the seconds.
"""

from collections.abc import Sequence

import numpy as np

from lab.simulation.replay import MACHINES, Choice, Machine, Replay, options_of, ways_of
from lab.simulation.replay_record import Record

SEEDS = 5


def rates(
    record: Record, drafters: Sequence[int], machine: Machine, choice: Choice, at_a_time: int | None = None
) -> np.ndarray:
    """Replays all batches of the record, and returns the tokens per second of each, float64, as medians of `SEEDS` replays."""
    order = sorted(set(record.batch_R.tolist()))
    found = []
    for seed in range(SEEDS):
        replay = Replay(record, drafters, machine, seed=seed)
        replay.choice = choice
        found.append([replay.play(batch, at_a_time).rate for batch in order])
    return np.median(found, axis=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table for a record of proposals."""
    options = options_of(__doc__, arguments)
    record = Record.load(options.record)
    machine = MACHINES[options.machine]
    batches = sorted(set(record.batch_R.tolist()))
    print(f"{options.machine}: speed over the device's choice, by batch, and the mean")
    print(f"{'drafters':9}{'choice':24}" + "".join(f"{batch:>8}" for batch in [*batches, "mean"]))
    for way, drafters in ways_of(record).items():
        if not drafters:
            continue
        of_device = rates(record, drafters, machine, Choice.DEVICE, options.at_a_time)
        for choice in (Choice.NOW, Choice.HOST, Choice.UNFORESEEN):
            ratios = rates(record, drafters, machine, choice, options.at_a_time) / of_device
            cells = [*ratios, np.exp(np.log(ratios).mean())]
            print(f"{way:9}{choice.value:24}" + "".join(f"{cell:8.3f}" for cell in cells))


if __name__ == "__main__":
    main()
