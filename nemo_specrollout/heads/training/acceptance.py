# SPDX-License-Identifier: Apache-2.0
"""Expected acceptance of a head's drafts by the policy, on sequences that the head did not learn from.

The head runs as it does in vLLM, which means that it reads the policy's states for its first draft token and its own hidden
states for the others. A *start* is a token of a response after which the head drafts, and every token of the response is one.

Let TV be the total variation distance between the policy's and the head's distribution of a token. With shared noise
(`sampling/`), the probability that a draft is accepted is between (1 - TV) / (1 + TV) and 1 - TV (arXiv 2408.07978). This
module measures the upper bound, which ranks heads as the engine does but is slightly too high.

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
    """Sums over the starts of each sequence, by draft position. All arrays are float [N, K].

    A start near the end of its sequence counts for fewer positions.
    """

    count_NK: np.ndarray
    """Number of starts with a draft at this position."""
    accepted_NK: np.ndarray
    """Sum of the probability that the draft is accepted if all drafts before it are right."""
    survived_NK: np.ndarray
    """Sum of the probability that all drafts up to this position are accepted."""

    @property
    def acceptance_rate_K(self) -> np.ndarray:
        """Acceptance rate by draft position if all earlier drafts are right."""
        return _ratio(self.accepted_NK.sum(0), self.count_NK.sum(0))

    @property
    def survival_rate_K(self) -> np.ndarray:
        """Survival by draft position, which is the rate at which all drafts up to this position are accepted."""
        return _ratio(self.survived_NK.sum(0), self.count_NK.sum(0))

    @property
    def expected_length(self) -> float:
        """Expected acceptance length, in tokens per engine step, which counts the policy's own token too."""
        return 1.0 + float(self.survival_rate_K.sum())

    @property
    def expected_length_N(self) -> np.ndarray:
        """Expected acceptance length in each sequence, in tokens per engine step, for paired comparisons."""
        return 1.0 + _ratio(self.survived_NK, self.count_NK).sum(1)


@torch.no_grad()
def measure_acceptance(
    head: DraftHead, sequences: Sequence[SequenceFeatures], num_drafts: int = 5, temperature: float = 1.0
) -> Acceptance:
    """Returns the expected acceptance of `num_drafts` drafts after each generated token of `sequences`."""
    assert num_drafts >= 1 and temperature >= 0.0
    acceptance = Acceptance(*(np.zeros((len(sequences), num_drafts)) for _ in range(3)))
    for n, features in enumerate(sequences):
        _measure(head, features, temperature, acceptance, n)
    return acceptance


def probabilities(logits_RV: Tensor, temperature: float) -> Tensor:
    """Returns the distributions at `temperature`, float32 [R, V]. At temperature 0 the arg-max has probability 1."""
    if temperature == 0.0:
        return torch.zeros_like(logits_RV, dtype=torch.float32).scatter_(-1, logits_RV.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits_RV.float() / temperature, dim=-1)


def overlap(policy_RD: Tensor, head_RD: Tensor) -> Tensor:
    """Returns 1 - TV of the policy's and the head's distributions, float32 [R].

    `policy_RD` has the policy's probabilities of the D tokens that the head can draft. The rest of its probability counts as
    rejection, because the head never drafts the other tokens.
    """
    return torch.minimum(policy_RD, head_RD).sum(-1)


def draft_logits(
    head: DraftHead, features: SequenceFeatures, num_drafts: int, chunk_rows: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yields (first row, draft position, logits [C, D]) chunk by chunk. Row t reads token t+1 and the states at t.

    The logits equal those of the training forward of `speculators`, except with sliding-window attention, because its windows
    do not move on with the draft position. A row attends to the keys that all rows up to it have for their first drafts, and
    to its own keys for its later drafts. Only the keys for first drafts stay cached for the next chunk.
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
    """Returns which keys the rows of a chunk see in a layer at draft position `k`, bool [C, P]. `window` slides as in vLLM."""
    own_CC = torch.eye(len(causal_CP), dtype=torch.bool, device=causal_CP.device)
    width = window or causal_CP.shape[1] + k + 1
    return torch.cat(
        [causal_CP.triu(start + k + 1 - width), *(own_CC & (age < width) for age in reversed(range(k)))], dim=1
    )


def _projected(model: Any, aux_1CF: Tensor) -> Tensor:
    """Returns the hidden states [1, C, H] that the head computes from the policy's auxiliary states, for the first draft."""
    if model.input_norm is not None:
        aux_1CF = model.input_norm(aux_1CF)
    elif model.fc_norm is not None:
        parts = aux_1CF.chunk(len(model.fc_norm), dim=-1)
        aux_1CF = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
    return model.fc(aux_1CF)


def _draft_pass(
    model: Any, tokens_1C: Tensor, hidden_1CH: Tensor, positions_1C: Tensor, masks: list[Tensor], keys: DynamicCache
) -> Tensor:
    """Returns the hidden states after the head's layers, [1, C, H], and appends the rows' keys to `keys`."""
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
    """Adds the sums of a sequence to row `n` of `acceptance`.

    The start in row t is token t+1, and its k-th draft is for token t+2+k.
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
    """Returns sums divided by counts, and 0 where nothing was counted."""
    return np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
