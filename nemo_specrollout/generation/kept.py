# SPDX-License-Identifier: Apache-2.0
"""What an engine keeps for later starts and for other engines, namely rates, step times and responses."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.drafting.history_drafter import HistoryDrafter
from nemo_specrollout.generation.warm_start import Learning, WarmStart


class Kept:
    """The things that an engine keeps, which are its warm start, its history, both or neither."""

    def __init__(self, warm_start: WarmStart | None = None, history: HistoryDrafter | None = None) -> None:
        self.warm_start = warm_start
        """None without drafters."""
        self.history = history
        """None without a history, and on a rank whose drafts are not used."""
        self._was_told = False

    @classmethod
    def begun(cls, config: SpecrolloutConfig, runner: Any, learning: Learning) -> "Kept":
        """Lets the drafters of a warmed-up engine begin with what is kept. Returns the object that keeps what they learn."""
        warm_start = WarmStart(config, runner, learning)
        warm_start.begin()
        return cls(warm_start, learning.router.history)

    def began(self) -> list[str]:
        """Returns what the engine began with, in phrases that end a sentence about it."""
        found = [] if self.warm_start is None else [self.warm_start.sentence]
        if self.history is not None:
            facts = self.history.facts()
            if facts.num_read:
                found.append(f"found {facts.num_read:,} earlier responses ({max(facts.bytes_read >> 10, 1):,} KiB)")
        return [sentence for sentence in found if sentence is not None]

    def take_began(self) -> list[str]:
        """Returns `began` at the first call, and nothing at later calls."""
        was_told = self._was_told
        self._was_told = True
        return [] if was_told else self.began()

    def keep(self) -> None:
        """Keeps what was learned since the last call. The engine should be idle."""
        if self.warm_start is not None:
            self.warm_start.keep()
        if self.history is not None:
            self.history.end_rollout()

    def loaded_head(self, folder: Path) -> None:
        """Notes that the drafter has the weights of `folder`."""
        if self.warm_start is not None:
            self.warm_start.loaded_head(folder)

    def facts(self) -> dict[str, Any] | None:
        """Returns `HistoryFacts` as a dict, or None without a history."""
        return None if self.history is None else asdict(self.history.facts())

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns what went wrong since the last call, as plain values."""
        alarms = [] if self.warm_start is None else self.warm_start.take_alarms()
        if self.history is not None:
            alarms += [{"sentence": sentence} for sentence in self.history.service.take_problems()]
        return alarms

    def close(self) -> None:
        """Writes what has not been written yet."""
        if self.history is not None:
            self.history.service.close()
