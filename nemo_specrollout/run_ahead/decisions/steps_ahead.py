# SPDX-License-Identifier: Apache-2.0
"""Decides for how many coming steps texts are made. It depends on free slots, and on how much weight updates change the texts.

A text for the step after k weight updates is verified after each of them, and tokens that have changed are generated again. A
token of the text is useful if all k updates leave it unchanged.

A phase is the time between two updates. If texts are made for k coming steps, each text is made in k + 1 phases. So a phase
takes about 1 / (k + 1) of the engine steps of the longest text. The k-th coming step therefore saves 1/k - 1/(k + 1) of the
time of a rollout without drafts. So each further coming step saves less. But it costs no less, because each token is verified
once more, and one more update changes tokens.

This module decides only what is planned. An engine compares the gain of each planned request with the delay of its own
requests (`early_share.py`). So it costs little to plan one step too many. Most requests of this step are not started, and then
the next plan has one step less.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from nemo_specrollout.config.block import MOST_STEPS_AHEAD

_ASSUMED_KEPT = 0.95
"""Share of a text that a weight update is assumed to leave unchanged, before the first update is observed."""
_ASSUMED_PRICE = 0.15
"""Time of a verified row, as a share of the time that an accepted token saves. This value is assumed until the engines have
measured it."""
_NEW = 0.5
"""Weight of the latest weight update relative to all earlier ones, because updates change in size during a run."""


class Flight(NamedTuple):
    """How many requests of one coming step had been started when the weights changed."""

    num_rows: int
    """Number of requests of the coming step that may be started early."""
    num_begun: int
    """Number of requests of the coming step that have a text."""


class StepsAhead:
    """Chooses for how many coming steps texts are planned. Uses no clock and no engine, so that a simulator can use it too."""

    LEARNED: ClassVar = ("_reach", "kept", "price")

    def __init__(self, most: int = MOST_STEPS_AHEAD) -> None:
        """`most` is the largest number of coming steps."""
        self._most = most
        self._reach = 1
        """Number of coming steps for which engines had enough free slots to start at least one request."""
        self.kept = _ASSUMED_KEPT
        """Share of the tokens of a text that a weight update leaves unchanged."""
        self.price = _ASSUMED_PRICE
        """Time by which a verified row makes an engine step longer, as a share of the time that a token saves if it is
        accepted."""

    def is_sound(self) -> bool:
        """Returns whether fields that were loaded from a file are valid.

        Then the share is between 0 and 1, and the price is not negative.
        """
        return 0.0 <= self.kept <= 1.0 and self.price >= 0.0 and self._reach >= 1

    def observe_kept(self, num_made: int, num_right: int) -> None:
        """Learns that after an update `num_right` of the `num_made` tokens of a step's texts agreed with the responses."""
        if num_made > 0:
            share = min(num_right / num_made, 1.0)
            self.kept += _NEW * (share - self.kept)

    def observe_price(self, verify_row_s: float, token_s: float) -> None:
        """Learns two measured times in seconds.

        `verify_row_s` is the time by which a verified row makes an engine step longer. `token_s` is the mean time of a token
        in a rollout without drafts.
        """
        if token_s > 0.0:
            self.price = verify_row_s / token_s

    def observe_flights(self, flights: Sequence[Flight]) -> None:
        """Learns how many requests of each coming step had been started when the weights changed, the nearest step first.

        Engines start requests of nearer steps first. So if a request of a nearer step was not started, a farther step would
        get no slot.
        """
        all_begun = [flight.num_begun >= flight.num_rows for flight in flights]
        self._reach = (all_begun.index(False) if False in all_begun else len(all_begun)) + 1

    def gain(self, steps: int) -> float:
        """Returns what the last one of `steps` coming steps gains, as a share of the time of a rollout without drafts."""
        return self.kept**steps / (steps * (steps + 1)) - self.price - (1.0 - self.kept)

    @property
    def steps(self) -> int:
        """Number of coming steps to plan. It is at least 1.

        One step costs nothing, because engines start only requests that save time.
        """
        pays = next((k for k in range(1, self._most + 1) if self.gain(k) <= 0.0), self._most + 1) - 1
        return max(1, min(self._reach, pays, self._most))
