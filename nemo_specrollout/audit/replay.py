# SPDX-License-Identifier: Apache-2.0
"""Computes a recorded row again: Hugging Face's forward pass over its text, with the weights that made each part of it.

Shapes: T tokens of the response, P positions of one piece, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
        """Absolute difference between the engine's log-probs and these, shape [T]; empty if none were recorded."""
        recorded = self.row.logprobs.astype(np.float64)
        return np.abs(recorded - self.logprobs) if recorded.size else recorded


@torch.inference_mode()
def replay(row: RecordedRow, model_of: Callable[[int], Model], noise: NoiseScheme) -> RowReplay:
    """Computes what the policy samples at each position of a row.

    Tokens of several policies are computed piece by piece. The first piece reads the whole prompt, and each later one reads
    the keys and values that the earlier weights left, as it did in the engine.

    Args:
        row: the recorded row, with at least one token.
        model_of: returns the model with the weights of a policy version.
        noise: how the run's vLLM derives the noise.
    """
    parts = list[Sampled]()
    largest = list[Array]()
    for first, logits_PV in _logits(row, model_of):
        largest.append(np.abs(logits_PV).max(axis=1))
        parts.append(sample(row, first, logits_PV, noise))
    return RowReplay(
        row,
        token_ids=np.concatenate([part.token_ids_P for part in parts]),
        gaps=np.concatenate([part.gap_P for part in parts]),
        logprobs=np.concatenate([part.logprob_P for part in parts]),
        largest_logits=np.concatenate(largest),
    )


def pieces(row: RecordedRow) -> list[tuple[int, int, int]]:
    """Returns the policy version of each piece of a row, and the begin and end of the text that it reads.

    A policy that samples position p reads the token at p - 1. The last token is read by none.
    """
    starts = [max(first - 1, 0) for _, first in row.policy_spans]
    starts[0] = 0
    ends = [*starts[1:], len(row.text) - 1]
    spans = zip(row.policy_spans, starts, ends, strict=True)
    return [(version, start, end) for (version, _), start, end in spans if start < end]


def _logits(row: RecordedRow, model_of: Callable[[int], Model]) -> Iterator[tuple[int, Array]]:
    """Yields the number of a token of the response, and the logits of it and the next ones, float32, shape [P, V]."""
    text = torch.from_numpy(row.text.astype(np.int64))
    last_of_prompt = len(row.prompt_token_ids) - 1
    cache = None
    for version, begin, end in pieces(row):
        model = model_of(version)
        for start in range(begin, end, POSITIONS_AT_ONCE):
            stop = min(start + POSITIONS_AT_ONCE, end)
            ids = text[None, start:stop].to(model.device)
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            unsampled = max(last_of_prompt - start, 0)
            if start + unsampled < stop:
                logits_PV = output.logits[0, unsampled:].float().cpu().numpy()
                yield start + unsampled - last_of_prompt, logits_PV
