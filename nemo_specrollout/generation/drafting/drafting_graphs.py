# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of drafting, so that one call replays all of an engine step's drafting, which otherwise takes many launches.

Launching one of our kernels from Python takes 65 to 170 us of the host on the machines that were measured, because the
kernels take some fifty tensors, which Triton inspects one by one. In a graph the same kernels take 5 to 30 us of the GPU, and
the host makes one call for all of them (docs/developing/step-costs.md).

A graph reads the same memory in each replay, so what changes from step to step is written to buffers first. A graph serves
all batches up to its size. Its surplus rows have no request, and the kernels skip them.

Shapes: B rows of a graph, S request slots.
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
"""Count of the numbers before the slots in the buffer. Three are unused, so that the slots begin at a multiple of 16 bytes."""
_PRICE = slice(2, 5)
"""Place of a row's price among these numbers."""


class StepInputs(NamedTuple):
    """Inputs of an engine step's drafting, in memory whose address does not change."""

    texts: Texts
    num_sampled_B: torch.Tensor
    """Number of tokens that each request has sampled, int32. This field and the next are undefined in a row without a
    request."""
    num_rejected_B: torch.Tensor
    """Number of each request's drafts that were rejected, int32."""
    step: torch.Tensor
    """Number of the engine step modulo `TRACED_STEPS`, int32 [1]."""
    most_drafts: torch.Tensor
    """The most drafts of a request, int32 [1]."""
    price: RowPrice
    """The cost of one more row. Each of its fields is a float32 [1]."""


Part = Callable[[StepInputs], None]
"""Launches a part of drafting. It must launch the same kernels for all inputs, and must not read the inputs on the host."""


def graph_sizes(most_requests: int) -> list[int]:
    """Returns the row counts for which graphs are recorded. A batch is padded by less than half of its own size."""
    sizes = {1, 2, most_requests}
    size = 4
    while size < most_requests:
        sizes |= {size, min(3 * size // 2, most_requests)}
        size *= 2
    return sorted(sizes)


class DraftingGraphs:
    """Replays the parts of an engine step's drafting.

    Owns the graphs, one for each part and size, and the buffers that they read. In each step, call `load` and then `replay`
    for each part that the step needs.
    """

    def __init__(self, parts: Mapping[str, Part], states: Any, num_slots: int, max_new: int) -> None:
        """Allocates the buffers, but records nothing yet.

        Args:
            parts: the parts to replay, by name.
            states: vLLM's states of requests, with their texts.
            num_slots: number of request slots of the engine (S).
            max_new: upper bound of the new tokens per text that the parts can read.
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
        """Records all graphs, and returns whether that succeeded. If not, the reason is logged and nothing can be replayed.

        Each part first runs once with one row that has no request, so that Triton compiles nothing while a graph is recorded.
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
        """Writes a step's inputs to the buffers without waiting. `outcomes` are the two counts of `StepInputs`, int32 [B]."""
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
        """Runs a part with the inputs that were loaded last."""
        self._graphs[part, self._size].replay()

    def _load_nothing(self) -> None:
        self._numbers[:_NUM_NUMBERS].fill_(0)
        self._numbers[_NUM_NUMBERS:].fill_(-1)

    def _inputs(self, size: int) -> StepInputs:
        """Returns the inputs of a graph of `size` rows."""
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
