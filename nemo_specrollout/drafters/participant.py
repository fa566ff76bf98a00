# SPDX-License-Identifier: Apache-2.0
"""The interface of everything that follows an engine's requests, which are drafters and observers of engine steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.drafters.device_index import Lookup

Put = Callable[[Any, Any], torch.Tensor]
"""Function of numbers and a NumPy type that returns the numbers as a tensor on the device, without waiting for the device."""


class DraftStep(NamedTuple):
    """An engine step whose tokens were sampled, as vLLM hands it to a speculator."""

    inputs: tuple[Any, ...]
    """Positional arguments of vLLM's `propose`, of which the batch is the first."""
    options: dict[str, Any]
    """Keyword arguments of vLLM's `propose`."""


class Participant:
    """Follows the requests of an engine. Methods that a subclass does not override do nothing.

    At the beginning of an engine step the router calls `ended` and `close` for requests that leave, and `open` for new ones.
    When the step's tokens are sampled, it calls `observe`, then `propose` of the drafters, and at last `end_step`.

    Invariant: what a participant does can never change a request's output, but only the time at which it arrives.
    """

    def open(self, slots: torch.Tensor, requests: Sequence[Any], put: Put) -> None:
        """Gives `slots`, int64, to `requests`, which are `generation.engine.requests.NewRequest`s."""

    def ended(self, slots: Sequence[int]) -> None:
        """Notes that the requests in `slots` have ended, before `close` is called for them. A preempted one has not ended."""

    def close(self, slots: Sequence[int]) -> None:
        """Forgets the requests in `slots`, which have ended or are preempted."""

    def observe(self, step: DraftStep) -> None:
        """Learns from an engine step, before the drafters propose."""

    def end_step(self, slots_B: np.ndarray, output: Any) -> Any:
        """Returns vLLM's `output` of an engine step, which it may extend. The requests of the step are in `slots_B`."""
        return output

    def weights_updated(self, version: int) -> None:
        """Notes that the RL policy now has the weights of policy version `version`."""

    def woke_up(self) -> None:
        """Prepares the participant for going on after the engine has slept."""


class Drafter(Participant):
    """Proposes continuations of the requests' texts, and owns whatever it remembers of texts."""

    name: str
    has_weights = False
    """True if a network in this engine proposes, so that its time is measured separately."""
    is_recordable = False
    """True if a CUDA graph may record what `propose` launches. Such a drafter implements `prepare` and `launch`."""

    def lookup(self, drafter: int) -> Lookup | None:
        """Returns the context index with which the board's kernels learn and propose for this drafter.

        `drafter` is the drafter's number on the board. Returns None for a drafter that proposes by itself.
        """
        return None

    def num_followed(self, slots_B: np.ndarray) -> int:
        """Returns the number of requests in these slots whose text the drafter must read in every engine step."""
        return 0

    def plan(self, depth: int) -> None:
        """Notes how many tokens per request the speculation policy wants from a drafter with weights."""

    def propose(self, texts: Texts, out: Proposals) -> None:
        """Writes proposals to `out`, by default none. The router calls this only for a drafter without a `lookup`."""

    def prepare(self, out: Proposals) -> bool:
        """Returns whether this engine step needs `launch`. If not, this method writes to `out` that there are no proposals."""
        raise NotImplementedError

    def launch(self, texts: Texts, out: Proposals) -> None:
        """Writes proposals to `out`. It launches the same kernels in every engine step, and does no other work on the host."""
        raise NotImplementedError
