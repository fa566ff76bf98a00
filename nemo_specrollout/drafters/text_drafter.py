# SPDX-License-Identifier: Apache-2.0
"""The interface of the drafters that need no weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.drafters.device_index import Lookup

Put = Callable[[Any, Any], torch.Tensor]
"""Function that returns numbers as a tensor of a NumPy type on the device, without waiting for it."""


class TextDrafter(ABC):
    """Proposes continuations of the requests' texts, and owns whatever it remembers of texts.

    Invariant: nothing that a drafter does can change a request's output, only when it arrives.
    """

    name: str

    @abstractmethod
    def open(self, slots: torch.Tensor, requests: Sequence[Any], put: Put) -> None:
        """Gives `slots`, int64, to `requests`, which are `generation.requests.NewRequest`s."""

    def lookup(self, drafter: int) -> Lookup | None:
        """Returns how the board's kernels learn and propose for this drafter, which is number `drafter` of the board.

        None for a drafter that proposes by itself.
        """
        return None

    def close(self, slots: Sequence[int]) -> None:
        """Forgets the requests in `slots`, which have ended or are preempted."""
        return None

    def propose(self, texts: Texts, out: Proposals) -> None:
        """Writes proposals to `out`. Only a drafter without a `lookup` is asked."""
        raise NotImplementedError
