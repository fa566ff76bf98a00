# SPDX-License-Identifier: Apache-2.0
"""vLLM's speculators on the simulated GPU: their own code samples and keeps the drafts, their networks return nothing.

Shapes: B requests, S request slots, K draft positions, V vocabulary of the drafter, H hidden.
"""

from types import SimpleNamespace
from typing import Any

import torch
from decode_step import K, S, V, zeros
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator


class Network:
    """A drafter's network, whose vocabulary may be a part of the target's."""

    lm_head = None
    model = SimpleNamespace()

    def __init__(self, reduced: bool) -> None:
        self.draft_id_to_target_id = zeros(V // 4, dtype=torch.int64) if reduced else None
        self._num_vocab = V // 4 if reduced else V

    def compute_logits(self, hidden_states: Tensor, *_: Any) -> Tensor:
        return hidden_states.new_empty(len(hidden_states), self._num_vocab)

    compute_draft_logits = markov_bias = compute_logits

    def logits_processor(self, _: None, hidden_states: Tensor) -> Tensor:
        return self.compute_logits(hidden_states)

    def markov_embed(self, tokens_B: Tensor) -> Tensor:
        return tokens_B.new_empty(len(tokens_B), 1, dtype=torch.bfloat16)

    def map_draft_to_target(self, drafts_B: Tensor) -> Tensor:
        return drafts_B


class _OneByOne:
    """Drafts one position after another."""

    def __init__(self, reduced: bool) -> None:
        self.model, self.acceptance_estimator, self.use_local_argmax_reduction = Network(reduced), None, False
        self._drafts_SK, self._columns_K = zeros(S, K, dtype=torch.int64), zeros(K, dtype=torch.int64)
        self._temperature_S, self._seeds_S = zeros(S, dtype=torch.float32), zeros(S, dtype=torch.int64)

    def propose(self, batch: Any, *inputs: Any, num_speculative_tokens: int = K, **_: Any) -> Tensor:
        hidden_BH, num_requests = inputs[2], batch.num_reqs
        for step in range(num_speculative_tokens):
            self._drafts_SK[:num_requests, step] = self.sample_draft(
                hidden_BH, batch.positions[:num_requests], batch.idx_mapping, self._temperature_S, self._seeds_S,
                self._columns_K[step], None,
            )  # fmt: skip
        return self._drafts_SK[:num_requests]


class _InBlocks:
    """Drafts all positions in one pass."""

    def __init__(self, reduced: bool) -> None:
        rows = {"dtype": torch.int64}
        self.model, self.acceptance_estimator, self.use_local_argmax_reduction = Network(reduced), None, False
        self.num_speculative_steps, self.draft_logits, self._draft_topk, self.use_confidence_head = K, None, None, False
        self.sample_indices, self.sample_pos, self.sample_idx_mapping = (zeros(S * K, **rows) for _ in range(3))
        self.sample_col, self._step_cols, self._anchor_idx = zeros(S * K), zeros(K), zeros(S, **rows)
        self.temperature, self.seeds = zeros(S, dtype=torch.float32), zeros(S, **rows)
        self.draft_tokens = zeros(S, K, **rows)
        self.input_buffers = SimpleNamespace(input_ids=zeros(S * K))

    def _run_model(self, num_rows: int, *_: Any) -> Tensor:
        return zeros(num_rows, 1, dtype=torch.bfloat16)

    def propose(self, batch: Any, *_: Any, **__: Any) -> Tensor:
        self._generate_draft(batch.num_reqs, batch.num_reqs * (K + 1), None, None, None)
        return self.draft_tokens[: batch.num_reqs]


CLASSES = {
    "eagle3": (_OneByOne, EagleSpeculator),
    "mtp": (_OneByOne, MTPSpeculator),
    "draft_model": (_OneByOne, StandaloneARSpeculator),
    "dflash": (_InBlocks, DFlashSpeculator),
    "dspark": (_InBlocks, DSparkSpeculator),
}
"""For each type of drafter with weights, how it drafts, and vLLM's class."""


def speculator(kind: str, reduced: bool = False) -> Any:
    """Returns vLLM's speculator for a type of drafter, without weights. `reduced` leaves out most of the vocabulary."""
    return type(kind, CLASSES[kind], {})(reduced)
