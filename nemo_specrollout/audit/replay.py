# SPDX-License-Identifier: Apache-2.0
"""Computes a recorded row again: Hugging Face's forward pass over its text, with the weights that made each part of it.

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
"""Positions of a forward pass. It bounds the memory of the logits: 150 MB for a vocabulary of 150,000."""
Model = Any
"""A causal language model of transformers."""


@dataclass(frozen=True)
class RowReplay:
    """What the policy samples in a row, beside what was recorded. All arrays have shape [T]."""

    row: RecordedRow
    token_ids: Array
    """The policy's own tokens, each after the recorded text before it."""
    gaps: Array
    """By how much the score of the recorded token is below the best one. 0 where it is the best."""
    logprobs: Array
    """Log-prob of the recorded token."""
    largest_logits: Array
    """Largest absolute logit of the position, which says how coarse its rounding is."""

    @property
    def differs(self) -> Array:
        """Whether the policy samples another token, bool, shape [T]."""
        return self.gaps > 0

    @property
    def logprob_differences(self) -> Array:
        """Absolute difference between the engine's log-probs and these, shape [T]; NaN where none was recorded."""
        difference: Array = np.abs(self.row.logprobs.astype(np.float64) - self.logprobs)
        return difference


@torch.inference_mode()
def replay(
    row: RecordedRow, model_of: Callable[[int], Model], noise: NoiseScheme, *, raw_logprobs: bool = False
) -> RowReplay:
    """Computes what the policy samples at each position of a row.

    Tokens of several policies are computed piece by piece. The first piece reads the whole prompt, and each later one reads
    the keys and values that the earlier weights left, as it did in the engine.

    Args:
        row: the recorded row, with at least one token.
        model_of: returns the model with the weights of a policy version.
        noise: how the run's vLLM derives the noise.
        raw_logprobs: whether the engine's log-probs are those of unprocessed logits.
    """
    parts = list[Sampled]()
    largest = list[Array]()
    for first, logits_PV in _logits(row, model_of):
        largest.append(np.abs(logits_PV).max(axis=1))
        parts.append(sample(row, first, logits_PV, noise, raw_logprobs=raw_logprobs))
    return RowReplay(
        row,
        token_ids=np.concatenate([part.token_ids_P for part in parts]),
        gaps=np.concatenate([part.gap_P for part in parts]),
        logprobs=np.concatenate([part.logprob_P for part in parts]),
        largest_logits=np.concatenate(largest),
    )


class Piece(NamedTuple):
    """Part of a row's text that one policy reads to sample the tokens after it."""

    version: int
    begin: int
    """First token whose logits are needed."""
    end: int
    is_read_again: bool
    """True if the policy reads the whole text before it, too."""


def pieces(row: RecordedRow) -> list[Piece]:
    """Returns the pieces of a row.

    A policy that samples position p reads the token at p - 1. The last token is read by none.
    """
    starts = [first - 1 for _, first in row.policy_spans]
    ends = [*starts[1:], len(row.text) - 1]
    spans = zip(row.policy_spans, starts, ends, strict=True)
    found = [Piece(version, start, end, first in row.read_again) for (version, first), start, end in spans]
    return [found[0]._replace(is_read_again=True), *(piece for piece in found[1:] if piece.begin < piece.end)]


def _logits(row: RecordedRow, model_of: Callable[[int], Model]) -> Iterator[tuple[int, Array]]:
    """Yields the number of a token of the response, and the logits of it and the next ones, float32, shape [P, V]."""
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
                yield first - last_of_prompt, output.logits[0, first - start :].float().cpu().numpy()
