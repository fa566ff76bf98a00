# SPDX-License-Identifier: Apache-2.0
"""Keeps acceptance rates, times of engine steps and responses in files, for later starts of the run and for other engines."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.drafting.history_drafter import HistoryDrafter
from nemo_specrollout.generation.warm_start import Learning, WarmStart


class Kept:
    """Writes files that later starts and other engines read, and takes over what such files already contain.

    `warm_start` keeps acceptance rates and times of engine steps, and `history` keeps responses. An engine may have both of
    them, one or none.
    """

    def __init__(self, warm_start: WarmStart | None = None, history: HistoryDrafter | None = None) -> None:
        self.warm_start = warm_start
        """Keeps acceptance rates and times of engine steps. None if the engine has no drafters."""
        self.history = history
        """Keeps responses. None if the block asks for no history, and on ranks other than the output rank."""
        self._was_told = False

    @classmethod
    def begun(cls, config: SpecrolloutConfig, runner: Any, learning: Learning) -> "Kept":
        """Lets an engine take over what earlier engines have kept, and returns the object that keeps what this engine learns.

        `runner` is vLLM's model runner, which must be warmed up.
        """
        warm_start = WarmStart(config, runner, learning)
        warm_start.begin()
        return cls(warm_start, learning.router.history)

    def began(self) -> list[str]:
        """Returns phrases that tell the user what the engine took over, such as "found 12 earlier responses (3 KiB)"."""
        found = [] if self.warm_start is None else [self.warm_start.sentence]
        if self.history is not None:
            facts = self.history.facts()
            if facts.num_read:
                found.append(f"found {facts.num_read:,} earlier responses ({max(facts.bytes_read >> 10, 1):,} KiB)")
        return [sentence for sentence in found if sentence is not None]

    def take_began(self) -> list[str]:
        """Returns the phrases of `began` at the first call, and an empty list later, so that the user is told only once."""
        was_told = self._was_told
        self._was_told = True
        return [] if was_told else self.began()

    def keep(self) -> None:
        """Starts to write what the engine has learned since the last call. Call it while the engine decodes no request."""
        if self.warm_start is not None:
            self.warm_start.keep()
        if self.history is not None:
            self.history.end_rollout()

    def loaded_head(self, folder: Path) -> None:
        """Notes that the engine's draft head now has the weights in `folder`."""
        if self.warm_start is not None:
            self.warm_start.loaded_head(folder)

    def facts(self) -> dict[str, Any] | None:
        """Returns the `HistoryFacts` of the engine's history as a dict, or None without a history."""
        return None if self.history is None else asdict(self.history.facts())

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the problems with the files since the last call. Each is a dict whose `sentence` is shown to the user."""
        alarms = [] if self.warm_start is None else self.warm_start.take_alarms()
        if self.history is not None:
            alarms += [{"sentence": sentence} for sentence in self.history.service.take_problems()]
        return alarms

    def close(self) -> None:
        """Ends the thread of the history after it has written all responses."""
        if self.history is not None:
            self.history.service.close()
