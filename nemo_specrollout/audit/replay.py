# SPDX-License-Identifier: Apache-2.0
"""Replays a recorded row (sample), which means it computes again which tokens the policy samples after the row's prompt.

It does so by forward passes of a transformers model over the row's text, with the weights that sampled each part of it.

Shapes: T tokens of the response, P positions of one piece, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_specrollout.audit.noise import NoiseScheme
from nemo_specrollout.audit.rows import Array, RecordedRow
from nemo_specrollout.audit.scores import Sampled, sample

POSITIONS_AT_ONCE = 256
"""Maximum number of positions in a forward pass. With a vocabulary of 150,000, their logits take at most 150 MB in float32."""
Model = Any
"""A causal language model of transformers, whose classes have no common type."""


@dataclass(frozen=True)
class RowReplay:
    """The replay of a recorded row, which has the tokens that the policy samples at the row's positions.

    All arrays have shape [T], with an element for each token of the response.
    """

    row: RecordedRow
    token_ids: Array
    """For each token of the response, the token that the policy samples after the recorded text before it."""
    gaps: Array
    """Best score minus the score of the recorded token. It is 0 if the recorded token has the best score."""
    logprobs: Array
    """Log-prob of the recorded token, as the audit computes it."""
    own_rounding: Array
    """Absolute difference between the audit's log-probs in the engine's precision and in a finer precision."""

    @property
    def differs(self) -> Array:
        """Whether the policy samples another token than the recorded one, bool, shape [T]."""
        return self.gaps > 0

    @property
    def logprob_differences(self) -> Array:
        """Absolute difference between the engine's log-prob of a token and the audit's, shape [T].

        It is NaN for tokens whose log-prob the engine did not record.
        """
        difference: Array = np.abs(self.row.logprobs.astype(np.float64) - self.logprobs)
        return difference


@torch.inference_mode()
def replay(
    row: RecordedRow,
    fine_model_of: Callable[[int], Model],
    coarse_model_of: Callable[[int], Model],
    noise: NoiseScheme,
    *,
    raw_logprobs: bool = False,
) -> RowReplay:
    """Computes which token the policy samples at each position of a row, and returns these tokens with the row.

    If several policy versions sampled the row, each version computes its piece of the text. The first one also reads the
    prompt. A later one continues with the KV cache that the earlier versions have left, because the engine did so too. The
    exceptions are the positions in `row.read_again`, where the engine recomputed the KV cache.

    Args:
        row: the recorded row, with at least one token.
        fine_model_of: function of a policy version that returns its model, in a finer precision than the engine's.
        coarse_model_of: function of a policy version that returns the same model in the engine's precision. The comparison of
            both models shows the effect of rounding alone.
        noise: the method by which the run's version of vLLM computes the noise.
        raw_logprobs: whether the engine's log-probs come from the logits before the sampling parameters were applied.
    """
    parts = _sampled(row, fine_model_of, noise, raw_logprobs)
    coarse = _sampled(row, coarse_model_of, None, raw_logprobs)
    logprobs = np.concatenate([part.logprob_P for part in parts])
    return RowReplay(
        row,
        token_ids=np.concatenate([part.token_ids_P for part in parts]),
        gaps=np.concatenate([part.gap_P for part in parts]),
        logprobs=logprobs,
        own_rounding=np.abs(np.concatenate([part.logprob_P for part in coarse]) - logprobs),
    )


def _sampled(
    row: RecordedRow, model_of: Callable[[int], Model], noise: NoiseScheme | None, raw_logprobs: bool
) -> list[Sampled]:
    return [
        sample(row, first, logits_PV, noise, raw_logprobs=raw_logprobs) for first, logits_PV in _logits(row, model_of)
    ]


class Piece(NamedTuple):
    """A part of a row's text. After each of its tokens, one policy version sampled the next token.

    So the piece begins and ends one token before the tokens that the version sampled. `begin` and `end` are counted from the
    start of the prompt, and `end` is exclusive.
    """

    version: int
    begin: int
    """Index of the first token of the piece. For the first piece of a row it may be in the prompt."""
    end: int
    is_read_again: bool
    """True if this policy version computes the KV cache of all text before the piece again."""


def pieces(row: RecordedRow) -> list[Piece]:
    """Divides a row's text into one piece for each span of a policy version, and returns those that are not empty.

    A policy version samples the token at position p from the logits of position p - 1. So the last token is in no piece.
    """
    starts = [first - 1 for _, first in row.policy_spans]
    ends = [*starts[1:], len(row.text) - 1]
    spans = zip(row.policy_spans, starts, ends, strict=True)
    found = [Piece(version, start, end, first in row.read_again) for (version, first), start, end in spans]
    return [found[0]._replace(is_read_again=True), *(piece for piece in found[1:] if piece.begin < piece.end)]


def _logits(row: RecordedRow, model_of: Callable[[int], Model]) -> Iterator[tuple[int, Array]]:
    """Yields the logits from which the tokens of a response are sampled, up to `POSITIONS_AT_ONCE` positions at a time.

    Each item has the index of a token in the response, and the logits for this token and the following ones, shape [P, V]. The
    logits are float64 if the model computes in float64, and otherwise float32.
    """
    text = torch.from_numpy(row.text.astype(np.int64))
    last_of_prompt = len(row.prompt_token_ids) - 1
    cache = None
    for piece in pieces(row):
        model = model_of(piece.version)
        if piece.is_read_again:
            cache = None
        for start in range(0 if piece.is_read_again else piece.begin, piece.end, POSITIONS_AT_ONCE):
            stop = min(start + POSITIONS_AT_ONCE, piece.end)
            output = model(input_ids=text[None, start:stop].to(model.device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            first = max(piece.begin, start, last_of_prompt)
            if first < stop:
                logits_PV = output.logits[0, first - start :]
                is_double = logits_PV.dtype is torch.float64
                yield first - last_of_prompt, logits_PV.to(torch.float64 if is_double else torch.float32).cpu().numpy()
