# SPDX-License-Identifier: Apache-2.0
"""Measures which share of a head's draft tokens the policy would accept, on sequences that the head was not trained on.

The head runs as it does in vLLM. For its first draft token it reads the policy's hidden states, and for each later one the
hidden state that it has computed itself for the token before. The head drafts after each generated token of a sequence. A
generated token after which it drafts is called a *start*.

Let TV be the total variation distance between the policy's and the head's distribution of the next token. With shared noise
(`sampling/`), the probability that a draft token is accepted lies between (1 - TV) / (1 + TV) and 1 - TV (arXiv 2408.07978).
This module computes the upper bound 1 - TV. Heads rank by it as by their acceptance in the engine, but its values are slightly
too high.

Shapes: N sequences, R rows (starts), K draft positions, V the policy's vocabulary, D the head's, H hidden size,
F = auxiliary layers * H, C rows of a chunk, P positions to which a chunk attends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from nemo_specrollout.heads.features.features import CHUNK_ELEMENTS, SequenceFeatures
from nemo_specrollout.heads.training.head import DraftHead

MAX_CHUNK_ROWS = 512


@dataclass(frozen=True)
class Acceptance:
    """Sums from which the acceptance of a head follows, for each sequence and draft position. All arrays are float [N, K].

    The head drafts after each generated token of a sequence. Draft tokens beyond the end of the sequence are not counted.
    """

    count_NK: np.ndarray
    """Number of draft tokens that were counted at each position of each sequence."""
    accepted_NK: np.ndarray
    """Sum, over the draft tokens at each position, of the probability that a token is accepted if all before it are."""
    survived_NK: np.ndarray
    """Sum, over the draft tokens at each position, of the probability that a token and all before it are accepted."""

    @property
    def acceptance_rate_K(self) -> np.ndarray:
        """Mean probability at each draft position that the draft token is accepted if all before it are, float [K]."""
        return _ratio(self.accepted_NK.sum(0), self.count_NK.sum(0))

    @property
    def survival_rate_K(self) -> np.ndarray:
        """Mean probability at each draft position that the draft tokens up to this position are all accepted, float [K]."""
        return _ratio(self.survived_NK.sum(0), self.count_NK.sum(0))

    @property
    def expected_length(self) -> float:
        """Expected acceptance length over all sequences, in tokens per engine step.

        It includes the one token of each engine step that the policy samples itself.
        """
        return 1.0 + float(self.survival_rate_K.sum())

    @property
    def expected_length_N(self) -> np.ndarray:
        """Expected acceptance length in each sequence, in tokens per engine step, float [N].

        The values of two heads can be compared sequence by sequence.
        """
        return 1.0 + _ratio(self.survived_NK, self.count_NK).sum(1)


@torch.no_grad()
def measure_acceptance(
    head: DraftHead, sequences: Sequence[SequenceFeatures], num_drafts: int = 5, temperature: float = 1.0
) -> Acceptance:
    """Returns the expected acceptance of a head that drafts `num_drafts` tokens after each generated token of `sequences`.

    Policy and head sample at `temperature`.
    """
    assert num_drafts >= 1 and temperature >= 0.0
    acceptance = Acceptance(*(np.zeros((len(sequences), num_drafts)) for _ in range(3)))
    for n, features in enumerate(sequences):
        _measure(head, features, temperature, acceptance, n)
    return acceptance


def probabilities(logits_RV: Tensor, temperature: float) -> Tensor:
    """Returns the probability of each token at `temperature`, float32 [R, V].

    At temperature 0, the token with the largest logit has probability 1.
    """
    if temperature == 0.0:
        return torch.zeros_like(logits_RV, dtype=torch.float32).scatter_(-1, logits_RV.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits_RV.float() / temperature, dim=-1)


def overlap(policy_RD: Tensor, head_RD: Tensor) -> Tensor:
    """Returns 1 minus the total variation distance between the policy's and the head's distribution, float32 [R].

    `policy_RD` has the policy's probabilities of the D tokens that the head can draft. The probability of all other tokens
    counts as rejected, because the head never drafts them.
    """
    return torch.minimum(policy_RD, head_RD).sum(-1)


def draft_logits(
    head: DraftHead, features: SequenceFeatures, num_drafts: int, chunk_rows: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yields the logits of the head's draft tokens, chunk by chunk, as tuples (first row, draft position, logits [C, D]).

    A row is a position of the sequence after which the head drafts. Row t reads token t+1 and the policy's states at t. A
    chunk is `chunk_rows` successive rows, which are computed together.

    For its first draft token, a row attends to the keys that this row and all rows before it have for their first draft
    tokens. For a later draft token, it also attends to its own keys for the draft tokens since the first. Only the keys for
    first draft tokens stay cached for the next chunk.

    The logits equal those of the training forward pass of `speculators`, except with sliding-window attention. There the
    windows of `speculators` do not move on with the draft position.
    """
    model = head.model
    num_rows = features.num_tokens - 1
    tokens_T = features.token_ids_T.to(head.device).long()
    keys = DynamicCache()
    windows = [model.sliding_window if i in model.sliding_window_indices else None for i in range(len(model.layers))]
    for start in range(0, num_rows, chunk_rows):
        stop = min(start + chunk_rows, num_rows)
        hidden_1CH = _projected(model, features.aux_TF[None, start:stop].to(model.fc.weight))
        causal_CP = torch.ones(stop - start, stop, dtype=torch.bool, device=head.device).tril(start)
        for k in range(num_drafts):
            # Rows beyond the end of the sequence may have any token, because no caller uses their drafts.
            rows_C = torch.arange(start + 1 + k, stop + 1 + k, device=head.device)
            tokens_1C = tokens_T[rows_C.clamp(max=num_rows)][None]
            masks = [_mask(causal_CP, start, k, window) for window in windows]
            hidden_1CH = _draft_pass(model, tokens_1C, hidden_1CH, rows_C[None], masks, keys)
            normed_1CH = model.norm(hidden_1CH)
            yield start, k, model.lm_head(normed_1CH)[0]
            hidden_1CH = normed_1CH if model.config.norm_output else hidden_1CH
        if num_drafts > 1:
            keys.crop(-(num_drafts - 1) * (stop - start))


def _mask(causal_CP: Tensor, start: int, k: int, window: int | None) -> Tensor:
    """Returns which keys each row of a chunk may attend to, in one layer and at draft position `k`, bool [C, P].

    The chunk begins with row `start`. `causal_CP` is its mask at position 0 without a sliding window. `window` is the width of
    the layer's sliding window, or None. The window moves on with the draft position, as in vLLM.
    """
    own_CC = torch.eye(len(causal_CP), dtype=torch.bool, device=causal_CP.device)
    width = window or causal_CP.shape[1] + k + 1
    return torch.cat(
        [causal_CP.triu(start + k + 1 - width), *(own_CC & (age < width) for age in reversed(range(k)))], dim=1
    )


def _projected(model: Any, aux_1CF: Tensor) -> Tensor:
    """Returns what the head computes from the policy's hidden states as its input for the first draft token, [1, C, H]."""
    if model.input_norm is not None:
        aux_1CF = model.input_norm(aux_1CF)
    elif model.fc_norm is not None:
        parts = aux_1CF.chunk(len(model.fc_norm), dim=-1)
        aux_1CF = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
    return model.fc(aux_1CF)


def _draft_pass(
    model: Any, tokens_1C: Tensor, hidden_1CH: Tensor, positions_1C: Tensor, masks: list[Tensor], keys: DynamicCache
) -> Tensor:
    """Runs the head's layers once, and returns the hidden states after them, [1, C, H].

    Appends the keys and values of all rows to `keys`.
    """
    states = torch.cat([model.embed_tokens(tokens_1C), hidden_1CH], dim=-1)
    rotary = model.rotary_emb(states, positions_1C)
    for layer, mask_CP in zip(model.layers, masks, strict=True):
        states = layer(
            states,
            attention_mask=mask_CP[None, None],
            position_ids=positions_1C,
            past_key_values=keys,
            position_embeddings=rotary,
        )
    return states


def _measure(head: DraftHead, features: SequenceFeatures, temperature: float, acceptance: Acceptance, n: int) -> None:
    """Measures the acceptance on one sequence, and adds it to the entries of sequence `n` in `acceptance`.

    In row t, the head has read the sequence up to token t+1. Its first draft token (k = 0) is a proposal for token t+2, and
    its draft token at position k for token t+2+k.
    """
    num_drafts = acceptance.count_NK.shape[1]
    num_rows = features.num_tokens - 1
    chunk = max(1, min(MAX_CHUNK_ROWS, CHUNK_ELEMENTS // len(head.teacher_VH)))
    survival_C = policy_CD = torch.empty(0)
    for start, k, logits_CD in draft_logits(head, features, num_drafts, chunk):
        stop = start + len(logits_CD)
        begin = max(start, features.first_start)
        end = min(stop, num_rows - 1 - k)
        if begin >= end:
            continue
        if k == 0:  # once per chunk, where row i is the policy's distribution after token start + 1 + i
            survival_C = torch.ones(len(logits_CD), device=head.device)
            final_RH = features.final_TH[start + 1 : stop + num_drafts].to(head.teacher_VH)
            policy_CD = probabilities(final_RH @ head.teacher_VH.T, temperature)
            policy_CD = policy_CD if head.draft_token_ids is None else policy_CD[:, head.draft_token_ids]
        rows = slice(begin - start, end - start)
        judges = slice(begin - start + k, end - start + k)
        accepted_R = overlap(policy_CD[judges], probabilities(logits_CD[rows], temperature))
        survival_C[rows] *= accepted_R
        acceptance.count_NK[n, k] += end - begin
        acceptance.accepted_NK[n, k] += float(accepted_R.sum())
        acceptance.survived_NK[n, k] += float(survival_C[rows].sum())


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns `sums` divided by `counts`, and 0 where the count is 0."""
    return np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
