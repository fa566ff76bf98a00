# SPDX-License-Identifier: Apache-2.0
"""Lets a draft head draft fewer tokens than its maximum, although one CUDA graph of vLLM drafts almost all of them.

The depth is the number of tokens that are drafted for each request. In vLLM 0.28 and later, with most attention backends, one
CUDA graph holds all positions after the first. vLLM replays it for every depth above one, so a smaller depth would save
nothing. Therefore this module captures additional graphs for a few depths.

All graphs share vLLM's pool of memory. So activations need no more memory than with vLLM's own graph alone, which drafts the
most positions. Only the recorded kernel launches need more memory. With the default of 8 positions, vLLM's own graph of a
batch size records the kernels of 7 positions, and the additional graphs together record those of 11 more. When the engine
starts, vLLM measures the memory of all graphs, and makes the KV cache smaller by this amount. No GPU has run the additional
graphs yet.

Shapes: B requests of the batch, K draft positions.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth

logger = logging.getLogger(__name__)
_GRAPHS = "specrollout_decode_graphs_"
"""Prefix of the attributes that hold the graphs of each depth. vLLM recognizes attributes with graphs by their names."""
_IS_FUSED = ("use_fused_multi_step_decode", "supports_decode_metadata_update")
"""Names that one attribute of a speculator has in different versions of vLLM. The attribute is true if a graph holds all
positions after the first."""


class GraphedDepth(DraftDepth):
    """Asks a speculator that drafts one position after another for a given number of drafts (the depth).

    Owns additional CUDA graphs for depths between 1 and the largest.
    """

    def __init__(self, looping: Any) -> None:
        super().__init__(looping)
        self._most: int = looping.num_speculative_steps
        self._lesser = [depth for depth in graph_depths(self._most) if 1 < depth < self._most]
        self._depths: list[int] = list(range(self._most + 1))
        """For each wanted depth, the depth that is drafted. It may be larger, because only some depths have a graph."""
        self._make_managers = looping.init_cudagraph_manager
        self._capture = looping.capture
        if hasattr(looping, "_generate_fused_drafts"):
            looping.init_cudagraph_manager = self._init_managers
            looping.capture = self._capture_all

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns draft tokens, int64 [B, K], and how many of the K tokens of each request are new.

        This number is at least `wanted`, because the tokens come from the smallest CUDA graph that drafts `wanted` or more.
        """
        depth = self._depths[wanted]
        looping = self._speculator
        native = looping.decode_cudagraph_manager
        looping.decode_cudagraph_manager = getattr(looping, f"{_GRAPHS}{depth}", native)
        try:
            return self._propose(*inputs, **{**options, "num_speculative_tokens": depth}), depth
        finally:
            looping.decode_cudagraph_manager = native

    def _forward(self, depth: int) -> Callable[..., None]:
        """Returns the function that a graph of `depth` positions records.

        The returned function calls vLLM's function with `depth`, although vLLM asks for the largest depth.
        """
        generate = self._speculator._generate_fused_drafts

        def generate_some(*args: Any, num_speculative_steps: int, **options: Any) -> None:
            generate(*args, **options, num_speculative_steps=depth)

        return generate_some

    def _init_managers(self, *args: Any) -> None:
        """Lets vLLM make its managers of CUDA graphs, and makes another one for each additional depth."""
        self._make_managers(*args)
        looping = self._speculator
        native = looping.decode_cudagraph_manager
        for depth in self._lesser:
            made = type(native)(looping.vllm_config, looping.device, native.cudagraph_mode, decode_query_len=1)
            setattr(looping, f"{_GRAPHS}{depth}", made)

    def _capture_all(self) -> None:
        """Lets vLLM capture its CUDA graphs, and then captures those of the additional depths. An error is only logged."""
        self._capture()
        looping = self._speculator
        is_fused = next((getattr(looping, name) for name in _IS_FUSED if hasattr(looping, name)), True)
        if not (is_fused and looping.decode_cudagraph_manager.needs_capture()):
            return  # each graph holds one position, and serves all depths
        captured = [0, 1, self._most]
        try:
            for depth in self._lesser:
                self._capture_depth(depth)
        except Exception as error:  # any error of torch, Triton or the driver, because the head can draft all positions
            logger.warning("specrollout: the head drafts all positions or one, for lack of CUDA graphs: %s", error)
        else:
            captured = [0, 1, *self._lesser, self._most]
        self._depths = [next(depth for depth in captured if depth >= wanted) for wanted in range(self._most + 1)]

    def _capture_depth(self, depth: int) -> None:
        """Captures CUDA graphs that draft `depth` positions, in the way in which vLLM captures graphs for all positions."""
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
    """Returns the depths from 0 to `most` that have a CUDA graph of their own, in ascending order.

    It is for speculators of which one graph holds all draft positions. If another depth is wanted, the next larger one is
    drafted. This costs little, because a draft pass is cheap compared with an engine step.
    """
    depths = {0, 1, most}
    size = 2
    while size < most:
        depths |= {size, min(3 * size // 2, most)}
        size *= 2
    return sorted(depths)
