# SPDX-License-Identifier: Apache-2.0
"""Compares rankings of draft methods by acceptance rate, by decode speed measured before a run, and by speed in the run.

SpecActor's draft ladder ranks methods by acceptance rate. The true ranking for stragglers is by the decode speeds that the run
has measured at one request. The regret of a ranking is how much longer a straggler takes with the ranking's first method than
with the fastest one, as a share of the time.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, PLAIN
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile, started_table


def rankings(ladder: SpeedTableFile | None, running: SpeedTableFile | None) -> dict[str, Any]:
    """Returns for each ranking its methods in order, the figures by which it ranks them, and its regret.

    `ladder` has the speeds measured before the run, and `running` those of the run. Without `running` the result is empty.
    """
    if running is None:
        return {}
    names = list(dict.fromkeys(rung.method for rung in running.rungs))
    table = started_table(names, running)
    in_tail = {name: table.tokens_per_s(i, 1) for i, name in enumerate(names)}
    found = {"running": in_tail}
    if ladder is not None:
        rungs = {rung.method: rung for rung in ladder.rungs if rung.task == ANY_TASK and rung.method in names}
        speeds = started_table(list(rungs), ladder)
        found["ladder, by speed"] = {name: speeds.tokens_per_s(i, 1) for i, name in enumerate(rungs)}
        found["ladder, by acceptance"] = {name: rung.acceptance for name, rung in rungs.items() if name != PLAIN}
    return {
        name: {"order": _ranked(by), "by": by, "regret": max(in_tail.values()) / in_tail[_ranked(by)[0]] - 1.0}
        for name, by in found.items()
        if by
    }


def _ranked(by: Mapping[str, float]) -> list[str]:
    return sorted(by, key=lambda name: -by[name])


def ladder_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each ranking in the result of `rankings`."""
    for name, ranking in found.items():
        order = ", ".join(f"{method} {ranking['by'][method]:.3g}" for method in ranking["order"])
        yield f"ranking {name}: {order}; its first method makes a straggler {ranking['regret']:.0%} slower than the best"
