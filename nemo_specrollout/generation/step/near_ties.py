# SPDX-License-Identifier: Apache-2.0
"""Near-ties of early requests, which the row sampler records and the engine collects.

An early request decodes text of a coming training step with the present weights. A near-tie is a token whose score is hardly
higher than that of a second token, its runner-up. Newer weights may sample the runner-up there. This module keeps the score
gap and the runner-up of every token, and other modules pick the small gaps.

Shapes: S request slots, L longest text, N token positions.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from nemo_specrollout.generation.engine.requests import NewRequest
from nemo_specrollout.generation.engine.transfers import to_device, to_host
from nemo_specrollout.generation.step.sampled_rows import TieTables

logger = logging.getLogger(__name__)
MOST_KEPT = 4096
"""Largest number of requests that have left their slots and whose near-ties are kept until they are taken. If there are more,
the oldest are dropped."""


@dataclass(frozen=True)
class Ties:
    """Score gaps and runners-up of consecutive tokens of a request. A runner-up is the token with the second-best score."""

    first: int
    """Index of the first of the consecutive tokens, counted from the beginning of the prompt."""
    gaps_N: np.ndarray
    """Score gap of each of the tokens, float32. It is the token's score minus the second-best score at its position."""
    runners_up_N: np.ndarray
    """Runner-up of each of the tokens, int32."""

    def then(self, later: "Ties") -> "Ties":
        """Returns new `Ties`, which are this object's up to the first token of `later`, followed by those of `later`."""
        num_own = max(later.first - self.first, 0)
        return Ties(
            min(self.first, later.first),
            np.concatenate([self.gaps_N[:num_own], later.gaps_N]),
            np.concatenate([self.runners_up_N[:num_own], later.runners_up_N]),
        )

    def packed(self) -> tuple[int, bytes, bytes]:
        """Returns the index of the first token, the bytes of the gaps in float16, and the bytes of the runners-up in int32."""
        return self.first, self.gaps_N.astype(np.float16).tobytes(), self.runners_up_N.tobytes()


@dataclass
class _Live:
    """A request with near-ties that has a slot."""

    slot: int
    first: int
    """Index of the first token whose near-tie was not taken yet."""
    limit: int
    """Largest number of tokens that the request's text may have."""


@dataclass(frozen=True)
class _Left:
    """Near-ties of a request that has left its slot. They are being copied to the host."""

    first: int
    gaps_N: torch.Tensor
    runners_up_N: torch.Tensor
    lengths_S: torch.Tensor
    """Number of tokens of the text in each slot at the time when the request left its slot."""
    slot: int
    arrived: Any
    """CUDA event that is recorded after the copies, or None on a CPU."""

    def ties(self) -> Ties:
        """Waits for the copies, and returns the near-ties."""
        if self.arrived is not None:
            with gpu_sync_allowed():
                self.arrived.synchronize()
        num_tokens = max(int(self.lengths_S[self.slot]) - self.first, 0)
        return Ties(self.first, self.gaps_N[:num_tokens].numpy(), self.runners_up_N[:num_tokens].numpy())


class NearTies:
    """Keeps the score gap and the runner-up of each token that is sampled for a request whose identity has `ties`.

    Owns a table of score gaps and a table of runners-up, each with 4 bytes per slot and position. It also owns the near-ties
    of requests that have left their slots. An engine step in which no request asks for near-ties launches nothing extra. No
    engine step waits for the device, because the near-ties of a leaving request are copied while further steps run.
    """

    def __init__(self, num_slots: int, longest: int, device: torch.device) -> None:
        sizes = (num_slots, longest)
        self.tables = TieTables(
            torch.zeros(sizes, dtype=torch.float32, device=device),
            torch.zeros(sizes, dtype=torch.int32, device=device),
            torch.zeros(num_slots, dtype=torch.bool, device=device),
        )
        self._device = device
        self._is_wanted_S = np.zeros(num_slots, np.bool_)
        """Whether the request in each slot asks for near-ties. It is the host's copy of the table `wanted_S` on the device."""
        self._live: dict[int, _Live] = {}
        self._left: dict[int, list[_Left]] = {}

    def tables_for(self, slots_B: np.ndarray) -> TieTables | None:
        """Returns the tables for an engine step of the requests in these slots, or None if none of them asks for near-ties."""
        return self.tables if self._live and self._is_wanted_S[slots_B].any() else None

    def open(self, requests: Iterable[NewRequest]) -> None:
        """Notes requests that have taken slots. Call it before their first tokens are sampled."""
        changed = []
        for request in requests:
            is_wanted = self._begins(request)
            if self._is_wanted_S[request.slot] != is_wanted:
                self._is_wanted_S[request.slot] = is_wanted
                changed.append(request.slot)
        if changed:
            slots = to_device(changed, np.int64, self._device)
            self.tables.wanted_S[slots] = to_device(self._is_wanted_S[changed].tolist(), np.bool_, self._device)

    def _begins(self, request: NewRequest) -> bool:
        """Returns whether a request asks for its near-ties. If so, starts to follow the request."""
        name = request.identity.ties
        if name is None:
            return False
        if name in self._live:
            logger.error("specrollout: two live requests have the ties %d, so those of the second are not kept", name)
            return False
        self._live[name] = _Live(request.slot, request.num_tokens, request.limit)
        return True

    def close(self, slots: Sequence[int], lengths_S: torch.Tensor) -> None:
        """Starts to copy the near-ties of the requests in these slots to the host. The requests have ended or were preempted.

        `lengths_S` has the number of tokens of the text in each slot, int32, on the device.
        """
        leaving = [name for name, live in self._live.items() if live.slot in slots]
        if not leaving:
            return
        lengths_S = to_host(lengths_S)
        arrived = None
        left = list[tuple[int, torch.Tensor, torch.Tensor]]()
        for name in leaving:
            live = self._live[name]
            row = (live.slot, slice(live.first, live.limit))
            left.append((name, to_host(self.tables.gap_SL[row]), to_host(self.tables.runner_up_SL[row])))
        if self._device.type == "cuda":
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        for name, gaps_N, runners_up_N in left:
            live = self._live.pop(name)
            parts = self._left.setdefault(name, [])
            parts.append(_Left(live.first, gaps_N, runners_up_N, lengths_S, live.slot, arrived))
        while len(self._left) > MOST_KEPT:
            del self._left[next(iter(self._left))]

    def take(self, names: Sequence[int], lengths_S: torch.Tensor) -> dict[int, Ties]:
        """Returns the near-ties of the requests with these names, by name. Each near-tie is returned only once.

        Unknown names are left out of the result. `lengths_S` has the number of tokens of the text in each slot, int32, on the
        device. The call waits for the device.
        """
        with gpu_sync_allowed():
            found = self._of_live([name for name in names if name in self._live], lengths_S)
        for name in names:
            for part in reversed(self._left.pop(name, [])):
                ties = part.ties()
                found[name] = ties.then(found[name]) if name in found else ties
        return found

    def _of_live(self, names: Sequence[int], lengths_S: torch.Tensor) -> dict[int, Ties]:
        """Returns the near-ties of requests that still have slots, by name. Each near-tie is returned only once."""
        if not names:
            return {}
        lengths = lengths_S.tolist()
        longest = self.tables.gap_SL.shape[1]
        live = [self._live[name] for name in names]
        ends = [max(min(lengths[one.slot], longest), one.first) for one in live]
        places = [np.arange(one.first, end) + one.slot * longest for one, end in zip(live, ends, strict=True)]
        places_N = to_device(np.concatenate(places).tolist(), np.int64, self._device)
        gaps_N = self.tables.gap_SL.view(-1)[places_N].cpu().numpy()
        runners_up_N = self.tables.runner_up_SL.view(-1)[places_N].cpu().numpy()
        bounds = np.cumsum([0, *map(len, places)])
        found = {}
        for i, (name, one) in enumerate(zip(names, live, strict=True)):
            own = slice(bounds[i], bounds[i + 1])
            found[name] = Ties(one.first, gaps_N[own], runners_up_N[own])
            one.first = ends[i]
        return found

    def forget(self, lengths_S: torch.Tensor) -> None:
        """Forgets all near-ties up to now. Waits for the device.

        `lengths_S` has the number of tokens of the text in each slot, int32, on the device.
        """
        self._left.clear()
        lengths = lengths_S.tolist() if self._live else []
        for live in self._live.values():
            live.first = max(live.first, min(lengths[live.slot], live.limit))
