# SPDX-License-Identifier: Apache-2.0
"""Depths of a head whose CUDA graph holds all positions after the first (vLLM 0.28 and later, with most attention backends).

vLLM replays the graph of all positions for every depth above one, so a lesser depth would save nothing. Here graphs are
captured for a few depths. All share vLLM's pool, so their activations take the memory of the deepest ones, which vLLM has
anyway. What remains are the graphs themselves, which hold the launches of their kernels. With the default of 8 positions these
are the launches of 11 positions beside vLLM's 7, for each size of a batch. When the engine starts, vLLM measures the memory of
these graphs with its own, and leaves as much less for the KV cache. No GPU has run them yet.

Shapes: B requests of the batch, K draft positions.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth

logger = logging.getLogger(__name__)
_GRAPHS = "specrollout_decode_graphs_"
"""Beginning of the attributes with the graphs of each depth. vLLM drops graphs that it finds among such attributes."""
_IS_FUSED = ("use_fused_multi_step_decode", "supports_decode_metadata_update")
"""Attributes of a speculator, by version, that say whether a graph holds all positions after the first."""


class GraphedDepth(DraftDepth):
    """The depth of a speculator that is told how many positions to draft. Owns its graphs for lesser depths."""

    def __init__(self, looping: Any) -> None:
        super().__init__(looping)
        self._most: int = looping.num_speculative_steps
        self._lesser = [depth for depth in graph_depths(self._most) if 1 < depth < self._most]
        self._depths: list[int] = list(range(self._most + 1))
        """What is drafted for each number that is wanted: it may be more where only some depths have a graph."""
        self._make_managers = looping.init_cudagraph_manager
        self._capture = looping.capture
        if hasattr(looping, "_generate_fused_drafts"):
            looping.init_cudagraph_manager = self._init_managers
            looping.capture = self._capture_all

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns drafts of the least depth that has a graph, by that graph."""
        depth = self._depths[wanted]
        looping = self._speculator
        native = looping.decode_cudagraph_manager
        looping.decode_cudagraph_manager = getattr(looping, f"{_GRAPHS}{depth}", native)
        try:
            return self._propose(*inputs, **{**options, "num_speculative_tokens": depth}), depth
        finally:
            looping.decode_cudagraph_manager = native

    def _forward(self, depth: int) -> Callable[..., None]:
        """Returns what a graph of `depth` positions records. vLLM names the number of all positions."""
        generate = self._speculator._generate_fused_drafts

        def generate_some(*args: Any, num_speculative_steps: int, **options: Any) -> None:
            generate(*args, **options, num_speculative_steps=depth)

        return generate_some

    def _init_managers(self, *args: Any) -> None:
        """Lets vLLM make its managers of graphs, and makes one more for each lesser depth."""
        self._make_managers(*args)
        looping = self._speculator
        native = looping.decode_cudagraph_manager
        for depth in self._lesser:
            made = type(native)(looping.vllm_config, looping.device, native.cudagraph_mode, decode_query_len=1)
            setattr(looping, f"{_GRAPHS}{depth}", made)

    def _capture_all(self) -> None:
        """Lets vLLM capture its graphs, then captures those of lesser depths. If that fails, the log says so."""
        self._capture()
        looping = self._speculator
        is_fused = next((getattr(looping, name) for name in _IS_FUSED if hasattr(looping, name)), True)
        if not (is_fused and looping.decode_cudagraph_manager.needs_capture()):
            return  # a graph holds one position, and serves all depths
        captured = [0, 1, self._most]
        try:
            for depth in self._lesser:
                self._capture_depth(depth)
        except Exception as error:  # of torch, Triton or the driver, and the head can draft all positions
            logger.warning("specrollout: the head drafts all positions or one, for lack of CUDA graphs: %s", error)
        else:
            captured = [0, 1, *self._lesser, self._most]
        self._depths = [next(depth for depth in captured if depth >= wanted) for wanted in range(self._most + 1)]

    def _capture_depth(self, depth: int) -> None:
        """Captures graphs of `depth` positions in the way in which vLLM captures those of all positions."""
        looping = self._speculator
        looping.on_multi_step_decode_begin(looping.max_num_reqs)
        getattr(looping, f"{_GRAPHS}{depth}").capture(
            self._forward(depth),
            looping.model_state,
            looping.input_buffers,
            looping.block_tables,
            looping.attn_groups,
            looping.kv_cache_config,
            progress_bar_desc=f"Capturing CUDA graphs of {depth} drafts",
        )
        looping.on_multi_step_decode_end(looping.max_num_reqs)


def graph_depths(most: int) -> list[int]:
    """Returns the depths from 0 to `most` for which there are graphs, where a graph holds all positions of its depth.

    A pass is cheap beside a step. So a depth between two of them, which takes the larger one, costs little.
    """
    depths = {0, 1, most}
    size = 2
    while size < most:
        depths |= {size, min(3 * size // 2, most)}
        size *= 2
    return sorted(depths)
