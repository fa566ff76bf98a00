# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of drafting, which replace the many launches of an engine step's drafting by a single call.

On the machines that were measured, the host needs 65 to 170 us to launch one of this package's kernels from Python. Triton
inspects each of a kernel's arguments, which are some fifty tensors. In a graph the same kernels take 5 to 30 us of the GPU,
and the host makes one call for all of them (docs/developing/step-costs.md).

A graph reads the same memory in each replay. So everything that changes between engine steps is first written to buffers. A
graph serves all batches up to its size. Its surplus entries have no request, and the kernels skip them.

Shapes: B entries of a graph's batch, S request slots.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_specrollout.drafters.base import TRACED_STEPS, RowPrice, Texts
from nemo_specrollout.generation.engine.transfers import copy_to_device

logger = logging.getLogger(__name__)
_NUM_NUMBERS = 8
"""Number of elements before the request slots in the buffer. Three of them are unused, so that the slots begin at a multiple
of 16 bytes."""
_PRICE = slice(2, 5)
"""Slice of the buffer in which the price of a row is stored."""


class StepInputs(NamedTuple):
    """Inputs for the drafting of an engine step, in memory whose address never changes."""

    texts: Texts
    num_sampled_B: torch.Tensor
    """Number of tokens that were sampled for each request, int32. In an entry without a request it is undefined."""
    num_rejected_B: torch.Tensor
    """Number of each request's drafts that were rejected, int32. In an entry without a request it is undefined."""
    step: torch.Tensor
    """Number of the engine step modulo `TRACED_STEPS`, int32 [1]."""
    most_drafts: torch.Tensor
    """Largest number of draft tokens of a request, int32 [1]."""
    price: RowPrice
    """Price of one more row in an engine step. Each of its fields is a float32 [1]."""


Part = Callable[[StepInputs], None]
"""Function that launches a part of drafting. It must launch the same kernels for all inputs, and must not read the inputs on
the host."""


def graph_sizes(most_requests: int) -> list[int]:
    """Returns the batch sizes for which graphs are recorded, ascending.

    A batch of another size is padded to the next of these sizes. The padding is less than half of the batch.
    """
    sizes = {1, 2, most_requests}
    size = 4
    while size < most_requests:
        sizes |= {size, min(3 * size // 2, most_requests)}
        size *= 2
    return sorted(sizes)


class DraftingGraphs:
    """Replays an engine step's drafting, which may consist of several parts.

    Owns a graph for each part and batch size, and the buffers that the graphs read. In each engine step, call `load`, and then
    `replay` for each part that the step needs.
    """

    def __init__(self, parts: Mapping[str, Part], states: Any, num_slots: int, max_new: int) -> None:
        """Allocates the buffers, but records no graph yet.

        Args:
            parts: functions that launch the parts of drafting, by name.
            states: vLLM's states of requests, which have the requests' texts.
            num_slots: number of request slots of the engine (S).
            max_new: largest number of new tokens of a text that the parts can read.
        """
        self.max_new = max_new
        self._parts = parts
        self._states = states
        device = states.total_len.gpu.device
        self._numbers = torch.zeros(_NUM_NUMBERS + num_slots, dtype=torch.int32, device=device)
        self._outcomes_2S = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        sizes = graph_sizes(num_slots)
        self._size_of = [next(size for size in sizes if size >= num) for num in range(num_slots + 1)]
        self._graphs: dict[tuple[str, int], Any] = {}
        self._size = 0

    def capture(self) -> bool:
        """Records all graphs. Returns whether that succeeded. If it failed, the reason is logged and nothing can be replayed.

        Each part first runs once with a batch without requests, so that Triton compiles nothing while a graph is recorded.
        """
        try:
            self._load_nothing()
            for part in self._parts.values():
                part(self._inputs(1))
            pool = torch.cuda.graph_pool_handle()
            for size in sorted(
                set(self._size_of), reverse=True
            ):  # smaller graphs then fit into the larger ones' memory
                for name, part in self._parts.items():
                    self._graphs[name, size] = _record(part, self._inputs(size), pool)
        except Exception as error:  # any error of torch, Triton or the driver, because the engine can do without graphs
            logger.warning("specrollout: drafting is launched kernel by kernel, without CUDA graphs: %s", error)
            self._graphs.clear()
        return bool(self._graphs)

    def load(
        self,
        slots_B: np.ndarray,
        outcomes: tuple[torch.Tensor, torch.Tensor],
        step: int,
        most_drafts: int,
        price: RowPrice,
    ) -> None:
        """Writes the inputs of an engine step to the buffers. The host does not wait for the device.

        `outcomes` tells for each request how many tokens were sampled and how many of its drafts were rejected, int32 [B]
        each. The other arguments are as in `StepInputs`.
        """
        num = len(slots_B)
        self._size = self._size_of[num]
        numbers = np.full(_NUM_NUMBERS + self._size, -1, np.int32)
        numbers[0] = step % TRACED_STEPS
        numbers[1] = most_drafts
        numbers[_PRICE].view(np.float32)[:] = price
        numbers[_NUM_NUMBERS : _NUM_NUMBERS + num] = slots_B
        copy_to_device(numbers, self._numbers[: len(numbers)])
        sampled_S, rejected_S = self._outcomes_2S
        sampled_S[:num].copy_(outcomes[0])
        rejected_S[:num].copy_(outcomes[1])

    def replay(self, part: str) -> None:
        """Runs the part with this name on the inputs that `load` has written last."""
        self._graphs[part, self._size].replay()

    def _load_nothing(self) -> None:
        self._numbers[:_NUM_NUMBERS].fill_(0)
        self._numbers[_NUM_NUMBERS:].fill_(-1)

    def _inputs(self, size: int) -> StepInputs:
        """Returns the inputs that a graph for `size` entries reads, as views of the buffers."""
        slots_B = self._numbers[_NUM_NUMBERS : _NUM_NUMBERS + size]
        texts = Texts(slots_B, self._states.total_len.gpu, self._states.all_token_ids.gpu)
        sampled_S, rejected_S = self._outcomes_2S
        price = RowPrice(*self._numbers[_PRICE].view(torch.float32).split(1))
        step, most = self._numbers[:1], self._numbers[1:2]
        return StepInputs(texts, sampled_S[:size], rejected_S[:size], step, most, price)


def _record(part: Part, inputs: StepInputs, pool: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the GPU
            part(inputs)
    finally:
        torch.cuda.set_stream(stream)  # if recording fails, torch leaves the stream of the recording as the current one
    return graph
