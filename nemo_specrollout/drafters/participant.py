# SPDX-License-Identifier: Apache-2.0
"""The interface of everything that follows an engine's requests, which are drafters and observers of its steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.drafters.device_index import Lookup

Put = Callable[[Any, Any], torch.Tensor]
"""Function that returns numbers as a tensor of a NumPy type on the device, without waiting for it."""


class DraftStep(NamedTuple):
    """A step after its tokens were sampled, as vLLM hands it to a speculator."""

    inputs: tuple[Any, ...]
    """Positional arguments of vLLM's `propose`, of which the batch is the first."""
    options: dict[str, Any]
    """Keyword arguments of vLLM's `propose`."""


class Participant:
    """Follows the requests of an engine.
    The calls of a step: `open`, `ended`, `close`, `observe`, `propose` of drafters, `end_step`.

    Invariant: nothing that a participant does can change a request's output, but only when it arrives. Methods that it does
    not override do nothing.
    """

    def open(self, slots: torch.Tensor, requests: Sequence[Any], put: Put) -> None:
        """Gives `slots`, int64, to `requests`, which are `generation.requests.NewRequest`s."""

    def ended(self, slots: Sequence[int]) -> None:
        """Is told of requests that have ended, before their slots are closed. A preempted request has not ended."""

    def close(self, slots: Sequence[int]) -> None:
        """Forgets the requests in `slots`, which have ended or are preempted."""

    def observe(self, step: DraftStep) -> None:
        """Is shown a step before drafters propose."""

    def end_step(self, slots_B: np.ndarray, output: Any) -> Any:
        """Returns a step's output, which it may extend. The requests of the step are in `slots_B`."""
        return output

    def weights_updated(self, version: int) -> None:
        """Notes that the policy has the weights of `version`."""

    def woke_up(self) -> None:
        """Prepares for going on after the engine has slept."""


class Drafter(Participant):
    """Proposes continuations of the requests' texts, and owns whatever it remembers of texts."""

    name: str
    has_weights = False
    """True if a network proposes, whose time is accounted for separately."""
    is_recordable = False
    """True if a CUDA graph may record what `propose` launches. Such a drafter implements `prepare` and `launch`."""

    def lookup(self, drafter: int) -> Lookup | None:
        """Returns how the board's kernels learn and propose for this drafter, which has the number `drafter` on the board.

        Returns None for a drafter that proposes by itself.
        """
        return None

    def num_followed(self, slots_B: np.ndarray) -> int:
        """Returns the number of requests in these slots whose text it must read in every step."""
        return 0

    def plan(self, depth: int) -> None:
        """Notes how many tokens per request the speculation policy wants from a model."""

    def propose(self, texts: Texts, out: Proposals) -> None:
        """Writes proposals to `out`, by default none. Only called for a drafter without a `lookup`."""

    def prepare(self, out: Proposals) -> bool:
        """Returns whether this step needs `launch`. If not, it has marked in `out` that there are no proposals."""
        raise NotImplementedError

    def launch(self, texts: Texts, out: Proposals) -> None:
        """Writes proposals to `out` with the same launches in every step, and without work on the host."""
        raise NotImplementedError
