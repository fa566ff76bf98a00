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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth

_GRAPHS = "specrollout_decode_graphs_"
"""Beginning of the attributes with the graphs of each depth. vLLM drops graphs that it finds among such attributes."""


class BlockDepth(DraftDepth):
    """The depth of a DFlash or DSpark before 0.32: one pass drafts all positions, and the first ones are used."""

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], depth: int) -> torch.Tensor:
        """Returns drafts of all positions."""
        drafts_BK: torch.Tensor = self._propose(*inputs, **options)
        return drafts_BK


class FullDepth(BlockDepth):
    """The depth of any other speculator before 0.32, such as the one for several MTP modules: all positions or none."""

    @property
    def least(self) -> int:
        """All positions."""
        return int(self._speculator.num_speculative_steps)

    def drafted(self, wanted: int) -> int:
        """Returns the number of all positions, or 0."""
        return self.least if wanted else 0


class LoopDepth(DraftDepth):
    """The depth of a speculator before 0.32 that drafts one position after another. Owns its graphs for lesser depths.

    Between steps the speculator has all positions, because vLLM measures and captures with them.
    """

    def __init__(self, speculator: Any) -> None:
        super().__init__(speculator)
        self._most: int = speculator.num_speculative_steps
        self._make_managers = speculator.init_cudagraph_manager
        self._capture = speculator.capture
        if hasattr(speculator, "_generate_fused_drafts"):
            speculator.init_cudagraph_manager = self._init_managers
            speculator.capture = self._capture_depths

    def drafted(self, wanted: int) -> int:
        """Returns the least depth that has a graph. Without graphs of all positions every depth can be drafted."""
        return next(d for d in graph_depths(self._most) if d >= wanted) if self._is_fused else wanted

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], depth: int) -> torch.Tensor:
        """Returns all positions, of which the loop writes the first `depth`. The first pass drafts one position, or reads."""
        with self._limited_to(max(depth, 1)):
            self._propose(*inputs, **options)
        drafts_BK: torch.Tensor = self._speculator.draft_tokens[: inputs[0].num_reqs]
        return drafts_BK

    @property
    def _is_fused(self) -> bool:
        """Whether vLLM drafts all positions after the first in one graph."""
        speculator = self._speculator
        manager = speculator.decode_cudagraph_manager
        fuses = getattr(speculator, "use_fused_multi_step_decode", False)
        return bool(fuses and manager is not None and manager.needs_capture())

    @contextmanager
    def _limited_to(self, depth: int) -> Iterator[None]:
        """Makes the speculator draft `depth` positions, by the graphs of this depth where there are any."""
        speculator = self._speculator
        graphs = speculator.decode_cudagraph_manager
        speculator.num_speculative_steps = depth
        speculator.decode_cudagraph_manager = getattr(speculator, f"{_GRAPHS}{depth}", None) or graphs
        try:
            yield
        finally:
            speculator.num_speculative_steps = self._most
            speculator.decode_cudagraph_manager = graphs

    def _init_managers(self, *args: Any) -> None:
        """Lets vLLM make its managers of graphs, and makes one more for each lesser depth."""
        self._make_managers(*args)
        speculator = self._speculator
        native = speculator.decode_cudagraph_manager
        for depth in graph_depths(self._most):
            if 1 < depth < self._most:
                made = type(native)(
                    speculator.vllm_config, speculator.device, native.cudagraph_mode, decode_query_len=1
                )
                setattr(speculator, f"{_GRAPHS}{depth}", made)

    def _capture_depths(self) -> None:
        """Lets vLLM capture its graphs, then captures those of lesser depths in the same way."""
        self._capture()
        if not self._is_fused:
            return  # a graph holds one position, and serves all depths
        speculator = self._speculator
        for depth in graph_depths(self._most):
            if not 1 < depth < self._most:
                continue
            with self._limited_to(depth):
                speculator.on_multi_step_decode_begin(speculator.max_num_reqs)
                speculator.decode_cudagraph_manager.capture(
                    speculator._generate_fused_drafts,
                    speculator.model_state,
                    speculator.input_buffers,
                    speculator.block_tables,
                    speculator.attn_groups,
                    speculator.kv_cache_config,
                    progress_bar_desc=f"Capturing CUDA graphs of {depth} drafts",
                )
                speculator.on_multi_step_decode_end(speculator.max_num_reqs)


def graph_depths(most: int) -> list[int]:
    """Returns the depths from 0 to `most` that can be drafted where a graph holds all positions of its depth.

    A pass is cheap beside a step. So a depth between two of them, which takes the larger one, costs little: 4 and 6 have 5
    between them, 8 and 12 have three.
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
