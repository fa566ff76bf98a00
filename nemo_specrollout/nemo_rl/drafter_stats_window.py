# SPDX-License-Identifier: Apache-2.0
"""How well remote drafters kept up in a step of NeMo-RL, over all engines."""

from typing import Any

from nemo_specrollout.nemo_rl.remote_drafters import CallAll
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.reports.nemo_rl_run import PREFIX

# By the names of docs/reference/metrics.md, and of `DrafterStats.figures`.
_LOGGED = {
    "draft_occupancy": "occupancy",
    "draft_run_ahead": "run_ahead",
    "draft_waste": "waste",
    "draft_host_s": "host_s",
    "draft_token_s": "draft_token_s",
    "draft_answer_s": "answer_s",
    "drafters": "num_drafters",
    "drafters_ready": "num_ready",
    "drafter_failures": "num_failures",
}


class DrafterStatsWindow:
    """Owns what engines had counted when the step began. Used in turns: `begin`, `end`."""

    def __init__(self) -> None:
        self._before: list[DrafterStats] = []

    def begin(self, call_all: CallAll) -> None:
        """The step begins."""
        self._before = _read(call_all)

    def end(self, call_all: CallAll) -> dict[str, Any]:
        """What came since, over all engines, as `DrafterStats.figures`."""
        pairs = zip(self._before, _read(call_all), strict=True)
        return DrafterStats.together([after.since(before) for before, after in pairs]).figures()


def logged(figures: dict[str, Any]) -> dict[str, float]:
    """What of them NeMo-RL's logger gets; what there is none of is left out."""
    known = {name: figures[key] for name, key in _LOGGED.items() if figures[key] is not None}
    return {PREFIX + name: float(value) for name, value in known.items()}


def _read(call_all: CallAll) -> list[DrafterStats]:
    """Of engines for which remote drafters draft."""
    return [DrafterStats(**reply) for reply in call_all("specrollout_drafter_stats", []) if reply is not None]
