# SPDX-License-Identifier: Apache-2.0
"""What a second is worth: the tokens that a batch of a size makes in one, of late, against plain decoding's."""

from collections import defaultdict

from nemo_specrollout.scheduling.step_time import StepCosts

DECAY = 1 / 64
MOST = 8.0


class GoingRate:
    """A rollout is fastest where each further second of a step yields tokens at the rate at which the others do. A step that
    asked for the most tokens a second of its own would spend too much where drafts are poor, too little where they are rich.

    Rates are kept as multiples of plain decoding's, by bits of the batch's size: of all steps, and of those that asked no
    model, which may be the faster ones. Source: Dinkelbach 1967, for the ratio of the sums of tokens and seconds.
    """

    def __init__(self) -> None:
        self._of_all: dict[int, _Sums] = defaultdict(_Sums)
        self._of_cheap: dict[int, _Sums] = defaultdict(_Sums)

    def observe(
        self, num_requests: int, num_tokens: int, seconds: float, costs: StepCosts | None, *, asked_model: bool
    ) -> None:
        """A decode step, drafting included, took `seconds` and gave `num_requests` requests so many tokens."""
        if costs is None or seconds <= 0.0:
            return
        plain_s = num_tokens * float(costs.plain_s[num_requests]) / num_requests
        size = num_requests.bit_length()
        self._of_all[size].add(plain_s, seconds)
        if not asked_model:
            self._of_cheap[size].add(plain_s, seconds)

    def of(self, num_requests: int, costs: StepCosts | None) -> float:
        """Tokens a second of a batch of that size: the higher of the two rates, and never less than plain's; 0 while nothing
        is known of costs."""
        if costs is None:
            return 0.0
        size = num_requests.bit_length()
        multiple = max(self._of_all[size].ratio, self._of_cheap[size].ratio, 1.0)
        return min(multiple, MOST) * num_requests / float(costs.plain_s[num_requests])


class _Sums:
    """Decayed sums of the seconds that plain decoding would have taken, and of those taken."""

    def __init__(self) -> None:
        self._plain_s = self._taken_s = 0.0

    def add(self, plain_s: float, taken_s: float) -> None:
        self._plain_s += plain_s - DECAY * self._plain_s
        self._taken_s += taken_s - DECAY * self._taken_s

    @property
    def ratio(self) -> float:
        return self._plain_s / self._taken_s if self._taken_s > 0.0 else 0.0
