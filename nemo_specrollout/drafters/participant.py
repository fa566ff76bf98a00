# SPDX-License-Identifier: Apache-2.0
"""The interface of drafters and of observers of engine steps, which both follow an engine's requests."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.drafters.device_index import Lookup

Put = Callable[[Any, Any], torch.Tensor]
"""Function that copies numbers to the device. It takes the numbers and a NumPy type, and returns a tensor without waiting for
the device."""


class DraftStep(NamedTuple):
    """What vLLM passes to a speculator after the tokens of an engine step were sampled."""

    inputs: tuple[Any, ...]
    """Positional arguments of vLLM's `propose`. The first one is the batch."""
    options: dict[str, Any]
    """Keyword arguments of vLLM's `propose`."""


class Participant:
    """Follows the requests of an engine. A method that a subclass does not override does nothing.

    The draft router calls these methods. At the beginning of an engine step it calls `ended` and `close` for requests that
    leave, and `open` for new ones. After the step's tokens are sampled, it calls `observe` of all participants, then `propose`
    of the drafters, and at last `end_step`.

    Invariant: a participant can change when a request's tokens arrive, but never which tokens they are.
    """

    def open(self, slots: torch.Tensor, requests: Sequence[Any], put: Put) -> None:
        """Starts to follow new requests. `slots` has the request slot of each of them, int64, on the device.

        `requests` are `generation.engine.requests.NewRequest`s. `put` copies numbers to the device.
        """

    def ended(self, slots: Sequence[int]) -> None:
        """Notes that the requests in `slots` have ended, before `close` is called for them.

        This method is not called for a request that is only preempted.
        """

    def close(self, slots: Sequence[int]) -> None:
        """Forgets the requests in `slots`, which have ended or were preempted."""

    def observe(self, step: DraftStep) -> None:
        """Learns from the tokens of an engine step. It is called before the drafters propose."""

    def end_step(self, slots_B: np.ndarray, output: Any) -> Any:
        """Returns `output`, which is vLLM's output of an engine step. A participant may extend it.

        `slots_B` are the request slots of the engine step's batch, on the host.
        """
        return output

    def weights_updated(self, version: int) -> None:
        """Notes that the RL policy has new weights, which are those of policy version `version`."""

    def woke_up(self) -> None:
        """Prepares for further engine steps after the engine has slept."""


class Drafter(Participant):
    """Proposes draft tokens for the engine's requests. Owns what it needs to remember of their texts."""

    name: str
    has_weights = False
    """Whether the drafter runs a network in this engine. The time of such a drafter is measured separately."""
    is_recordable = False
    """Whether a CUDA graph may record the kernels that the drafter launches. Such a drafter implements `prepare` and
    `launch`."""

    def lookup(self, drafter: int) -> Lookup | None:
        """Returns the drafter's context index, or None for a drafter that proposes by its method `propose`.

        The draft board's kernels update the index and propose from it. `drafter` is the index of the drafter on the board.
        """
        return None

    def num_followed(self, slots_B: np.ndarray) -> int:
        """Returns the number of requests in these slots whose text the drafter must read in every engine step."""
        return 0

    def plan(self, depth: int) -> None:
        """Tells a drafter with weights how many tokens it should draft for each request in this engine step.

        The number comes from the engine's `SpeculationPolicy`.
        """

    def propose(self, texts: Texts, out: Proposals) -> None:
        """Writes the drafter's proposals for all `texts` to `out`. By default it proposes nothing.

        The draft router calls this only for a drafter without a `lookup`.
        """

    def prepare(self, out: Proposals) -> bool:
        """Returns whether `launch` must run in this engine step. If not, writes to `out` that there are no proposals."""
        raise NotImplementedError

    def launch(self, texts: Texts, out: Proposals) -> None:
        """Writes the drafter's proposals for all `texts` to `out`, in a form that a CUDA graph can record.

        It launches the same kernels in every engine step, and does nothing else on the host.
        """
        raise NotImplementedError
