# SPDX-License-Identifier: Apache-2.0
"""The interface of the drafters that need no weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.drafters.device_index import Lookup


class TextDrafter(ABC):
    """Proposes continuations of the requests' texts, and owns whatever it remembers of texts.

    Invariant: nothing that a drafter does can change a request's output, only when it arrives.
    """

    name: str

    @abstractmethod
    def start_of(self, identity: Any, num_tokens: int) -> tuple[int, int]:
        """Returns the salt of a new request, and the number of its first tokens that need no learning."""

    @abstractmethod
    def open(self, slots: torch.Tensor, salts: torch.Tensor, learned: torch.Tensor) -> None:
        """Gives `slots` to new requests; `salts` and `learned` come from `start_of`."""

    def lookup(self, drafter: int) -> Lookup | None:
        """Returns how the board's kernels learn and propose for this drafter, which is number `drafter` of the board.

        None for a drafter that proposes by itself.
        """
        return None

    def remember(self, requests: Sequence[Any], put: Callable[[Any, Any], torch.Tensor]) -> None:
        """Stores what new requests bring along; `put` returns numbers of a NumPy type as a tensor on the device."""
        return None

    def close(self, slots: Sequence[int]) -> None:
        """Forgets the requests in `slots`, which have ended or are preempted."""
        return None

    def propose(self, texts: Texts, out: Proposals) -> None:
        """Writes proposals to `out`. Only a drafter without a `lookup` is asked."""
        raise NotImplementedError
