# SPDX-License-Identifier: Apache-2.0
"""Keeps acceptance rates, times of engine steps, and responses of an engine for later starts and for other engines."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.drafting.history_drafter import HistoryDrafter
from nemo_specrollout.generation.warm_start import Learning, WarmStart


class Kept:
    """Keeps what an engine has learned (`warm_start`) and its responses (`history`), or only one of them, or nothing."""

    def __init__(self, warm_start: WarmStart | None = None, history: HistoryDrafter | None = None) -> None:
        self.warm_start = warm_start
        """Keeps acceptance rates and times of engine steps. None if the engine has no drafters."""
        self.history = history
        """Keeps responses. None if the block keeps no history, and on ranks other than the output rank."""
        self._was_told = False

    @classmethod
    def begun(cls, config: SpecrolloutConfig, runner: Any, learning: Learning) -> "Kept":
        """Lets a warmed-up engine begin with what was kept before. Returns the `Kept` that keeps what this engine learns."""
        warm_start = WarmStart(config, runner, learning)
        warm_start.begin()
        return cls(warm_start, learning.router.history)

    def began(self) -> list[str]:
        """Returns what the engine began with, for the user, in phrases such as "found 12 earlier responses (3 KiB)"."""
        found = [] if self.warm_start is None else [self.warm_start.sentence]
        if self.history is not None:
            facts = self.history.facts()
            if facts.num_read:
                found.append(f"found {facts.num_read:,} earlier responses ({max(facts.bytes_read >> 10, 1):,} KiB)")
        return [sentence for sentence in found if sentence is not None]

    def take_began(self) -> list[str]:
        """Returns the same as `began` at the first call, and an empty list at later calls, so that the user is told once."""
        was_told = self._was_told
        self._was_told = True
        return [] if was_told else self.began()

    def keep(self) -> None:
        """Starts to write what the engine has learned since the last call. Call it while the engine is idle."""
        if self.warm_start is not None:
            self.warm_start.keep()
        if self.history is not None:
            self.history.end_rollout()

    def loaded_head(self, folder: Path) -> None:
        """Notes that the draft head now has the weights in `folder`."""
        if self.warm_start is not None:
            self.warm_start.loaded_head(folder)

    def facts(self) -> dict[str, Any] | None:
        """Returns `HistoryFacts` as a dict, or None without a history."""
        return None if self.history is None else asdict(self.history.facts())

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the problems with files since the last call, each as a dict whose `sentence` is for the user."""
        alarms = [] if self.warm_start is None else self.warm_start.take_alarms()
        if self.history is not None:
            alarms += [{"sentence": sentence} for sentence in self.history.service.take_problems()]
        return alarms

    def close(self) -> None:
        """Ends the history after all of its responses are written."""
        if self.history is not None:
            self.history.service.close()
