# SPDX-License-Identifier: Apache-2.0
"""When to ask the drafters at all: a router whose answer is "none" step after step should not be asked each step."""

from abc import ABC, abstractmethod

MAX_REST_STEPS, MAX_REST_STEPS_OF_MODEL = 16, 3
"""Where there are drafters that read text, which must catch up with it; where a model alone is planned for."""
REST_GROWTH = 1.25
PLAIN_PROBE_STEPS = 128
ENOUGH_PLAIN_SAMPLES = 3
PATIENCE = 4
"""Consultations in a row that find no drafts, where they come by themselves, before that is a refusal."""


class Rest:
    """Pauses after refusals, a quarter longer each time, up to `most` steps.

    Example: `rest.begin()` after a refusal; then while `rest.goes_on()`, asked once a step, nobody is asked anything.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._next = min(1.0, most)
        self._left = 0

    def begin(self) -> None:
        """After a refusal: the next steps are rested."""
        self._left = int(self._next)
        self._next = min(REST_GROWTH * self._next, self._most)

    def goes_on(self) -> bool:
        """Whether the step that begins is one of rest."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def end(self) -> None:
        """Cuts the pause short; the next is still longer than this one."""
        self._left = 0

    def forget(self) -> None:
        """Ends the pause, and the refusals before count no longer."""
        self._next, self._left = min(1.0, self._most), 0


class Pacer(ABC):
    """Decides, before a step's drafts are looked for, whether and how deep to look."""

    @abstractmethod
    def should_consult(self, num_requests: int) -> bool:
        """Whether to collect proposals this step."""

    @abstractmethod
    def should_probe(self, num_plain_samples: int) -> bool:
        """Whether to make this step plain so that its time becomes known."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many tokens a proposal is worth looking up."""

    @property
    def floor(self) -> float:
        """How likely a draft token must be to be worth looking up."""
        return 0.0

    def decided(  # noqa: B027
        self, num_requests: int, longest_found: int, longest_draft: int, least_survival: float
    ) -> None:
        """Tells how the consultation ended: the most draft tokens that were found for a request, and that one got, and what
        the least likely of all that were handed out was worth (`BudgetDecision`). A steady pacer does not care."""


class SteadyPacer(Pacer):
    """Asks for all that there is, each step: for budgets that do not weigh what drafts cost."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def should_consult(self, num_requests: int) -> bool:
        return True

    def should_probe(self, num_plain_samples: int) -> bool:
        return False

    @property
    def depth(self) -> int:
        return self._max_tokens


class AdaptivePacer(Pacer):
    """Rests a quarter longer after each refusal, up to `max_rest` steps; wakes when the batch shrinks or grows by a quarter.

    Proposals are asked for no deeper, and of no lesser hope, than they were used of late; unless drafts come by themselves:
    then depth costs nothing, and to find none may be a step's bad luck. It also asks for two steps without drafts now and
    then, of which the second is timed: the counterfactual needs them.
    """

    def __init__(self, max_tokens: int, max_rest: int = MAX_REST_STEPS, *, drafts_come: bool = False) -> None:
        self._max_tokens = max_tokens
        self._drafts_come = drafts_come
        self._num_empty = 0
        self._longest = max_tokens
        self._least_survival = 0.0
        self._rest = Rest(max_rest)
        self._batch_at_refusal = 0
        self._since_probe = 0
        self._is_warming_up = False

    def should_consult(self, num_requests: int) -> bool:
        if abs(num_requests - self._batch_at_refusal) * 4 >= self._batch_at_refusal:
            self._rest.end()
        return not self._rest.goes_on()

    def should_probe(self, num_plain_samples: int) -> bool:
        """Two steps in a row, of which the first warms up: at most every 128 steps once some are known, every 64 before."""
        if self._is_warming_up:
            self._is_warming_up = False
            return True
        self._since_probe += 1
        is_known = num_plain_samples >= ENOUGH_PLAIN_SAMPLES
        if self._since_probe < (PLAIN_PROBE_STEPS if is_known else PLAIN_PROBE_STEPS // 2):
            return False
        self._since_probe, self._is_warming_up = 0, True
        return True

    @property
    def depth(self) -> int:
        """Two more than the longest draft of the last decision."""
        return self._max_tokens if self._drafts_come else min(self._max_tokens, self._longest + 2)

    @property
    def floor(self) -> float:
        """A quarter of what the last token handed out was worth: a request may be easier than its evidence says."""
        return self._least_survival / 4

    def decided(self, num_requests: int, longest_found: int, longest_draft: int, least_survival: float) -> None:
        self._num_empty = 0 if longest_found > 0 else self._num_empty + 1
        if self._drafts_come and 0 < self._num_empty < PATIENCE:
            return
        self._num_empty = 0
        self._longest, self._least_survival = longest_draft, least_survival
        if longest_draft > 0:
            self._rest.forget()
            return
        self._rest.begin()
        self._batch_at_refusal = num_requests


def build_pacer(budget_policy: str, max_tokens: int, *, reads_text: bool, drafts_come: bool = False) -> Pacer:
    """The pacer that suits a budget policy of that name, and drafters that read text or a model alone, or whose drafts come
    from elsewhere."""
    if budget_policy != "auto":
        return SteadyPacer(max_tokens)
    most = MAX_REST_STEPS if reads_text else MAX_REST_STEPS_OF_MODEL
    return AdaptivePacer(max_tokens, most, drafts_come=drafts_come)
