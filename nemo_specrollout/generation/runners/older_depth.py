# SPDX-License-Identifier: Apache-2.0
"""How deep the speculators of vLLM before 0.32 draft, whose `propose` drafts all positions.

A head that drafts one position after another counts to an attribute of its own, which is set for a step here. Where one CUDA
graph holds all positions (vLLM 0.28 and later), graphs are captured for a few depths. All share vLLM's pool, so their
activations take the memory of the deepest ones, which vLLM has anyway. What remains are the graphs themselves, which hold the
launches of their kernels. With the default of 8 positions these are the launches of 11 positions beside vLLM's 7, for each
size of a batch. When the engine starts, vLLM measures the memory of these graphs with its own, and leaves as much less for the
KV cache. No GPU has run them yet.

Shapes: B requests of the batch, K draft positions.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth

logger = logging.getLogger(__name__)
_GRAPHS = "specrollout_decode_graphs_"
"""Beginning of the attributes with the graphs of each depth. vLLM drops graphs that it finds among such attributes."""

_IS_FUSED = ("use_fused_multi_step_decode", "supports_decode_metadata_update")
"""Attributes of a speculator, by version, that say whether a graph holds all positions after the first."""


class BlockDepth(DraftDepth):
    """The depth of a DFlash or DSpark before 0.32: one pass drafts all positions, and the first ones are used."""

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns drafts of all positions, of which as many count as are wanted."""
        return self._propose(*inputs, **options), wanted


class FullDepth(DraftDepth):
    """The depth of any other speculator before 0.32, such as the one for several MTP modules: all positions or none."""

    @property
    def least(self) -> int:
        """All positions."""
        return int(self._speculator.num_speculative_steps)

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns drafts of all positions, all of which count unless none are wanted."""
        return self._propose(*inputs, **options), self.least if wanted else 0


class LoopDepth(DraftDepth):
    """The depth of a speculator before 0.32 that drafts one position after another. Owns its graphs for lesser depths.

    Between steps the speculator has all positions, because vLLM measures and captures with them.
    """

    def __init__(self, looping: Any) -> None:
        super().__init__(looping)
        self._most: int = looping.num_speculative_steps
        self._lesser = [depth for depth in graph_depths(self._most) if 1 < depth < self._most]
        self._captured: list[int] = []
        """Depths that can be drafted, ascending, where a graph holds all positions of its depth; else empty."""
        self._make_managers = looping.init_cudagraph_manager
        self._capture = looping.capture
        if hasattr(looping, "_generate_fused_drafts"):
            looping.init_cudagraph_manager = self._init_managers
            looping.capture = self._capture_all

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns all positions, of which the loop writes the first ones. The first pass drafts one position, or reads."""
        depth = self.drafted(wanted)
        with self._limited_to(max(depth, 1)):
            self._propose(*inputs, **options)
        return self._speculator.draft_tokens[: inputs[0].num_reqs], depth

    def drafted(self, wanted: int) -> int:
        """Returns the least depth that has a graph. Without graphs of all positions every depth can be drafted."""
        return next(depth for depth in self._captured if depth >= wanted) if self._captured else wanted

    @contextmanager
    def _limited_to(self, depth: int) -> Iterator[None]:
        """Makes the speculator draft `depth` positions, by the graphs of this depth where there are any."""
        looping = self._speculator
        graphs = looping.decode_cudagraph_manager
        looping.num_speculative_steps = depth
        looping.decode_cudagraph_manager = getattr(looping, f"{_GRAPHS}{depth}", None) or graphs
        try:
            yield
        finally:
            looping.num_speculative_steps = self._most
            looping.decode_cudagraph_manager = graphs

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
        self._captured = [0, 1, self._most]
        try:
            for depth in self._lesser:
                self._capture_depth(depth)
        except Exception as error:  # of torch, Triton or the driver, and the head can draft all positions
            logger.warning("specrollout: the head drafts all positions or one, for lack of CUDA graphs: %s", error)
        else:
            self._captured = [0, 1, *self._lesser, self._most]

    def _capture_depth(self, depth: int) -> None:
        """Captures graphs of `depth` positions in the way in which vLLM captures those of all positions."""
        looping = self._speculator
        with self._limited_to(depth):
            looping.on_multi_step_decode_begin(looping.max_num_reqs)
            looping.decode_cudagraph_manager.capture(
                looping._generate_fused_drafts,
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


def older_depth(speculator: Any) -> DraftDepth:
    """Returns how a speculator of vLLM before 0.32 is asked for drafts of a depth."""
    if isinstance(speculator, DFlashSpeculator):
        return BlockDepth(speculator)
    return LoopDepth(speculator) if hasattr(speculator, "_multi_step_decode") else FullDepth(speculator)
