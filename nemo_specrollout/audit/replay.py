# SPDX-License-Identifier: Apache-2.0
"""Replays a recorded row by transformers' forward pass over its text, with the weights that sampled each part of it.

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
"""Maximum number of positions in a forward pass, so that the logits take at most 150 MB for a vocabulary of 150,000."""
Model = Any
"""A causal language model of transformers."""


@dataclass(frozen=True)
class RowReplay:
    """What the policy samples in a row, compared with what was recorded. All arrays have shape [T]."""

    row: RecordedRow
    token_ids: Array
    """The tokens that the policy samples, each after the recorded text before it."""
    gaps: Array
    """Difference between the best score and that of the recorded token. It is 0 where the recorded token is the best."""
    logprobs: Array
    """Log-prob of the recorded token."""
    own_rounding: Array
    """Change of the log-prob if it is computed in the engine's precision instead of a finer one."""

    @property
    def differs(self) -> Array:
        """Whether the policy samples another token, bool, shape [T]."""
        return self.gaps > 0

    @property
    def logprob_differences(self) -> Array:
        """Absolute difference between the engine's log-probs and these, shape [T], and NaN where none was recorded."""
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
    """Computes what the policy samples at each position of a row.

    If several policy versions sampled the row, it is computed in pieces. The first piece reads the whole prompt. Each later
    one continues with the keys and values that the earlier weights have left, as in the engine.

    Args:
        row: the recorded row, with at least one token.
        fine_model_of: returns the model with the weights of a policy version, which computes in a finer precision than the
            engine.
        coarse_model_of: returns the same model in the precision of the engine, which shows the effect of rounding alone.
        noise: how the run's vLLM derives the noise.
        raw_logprobs: whether the engine's log-probs are those of the logits before the sampling parameters are applied.
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
    """Part of a row's text that one policy version reads in order to sample the tokens that follow."""

    version: int
    begin: int
    """First token whose logits are needed."""
    end: int
    is_read_again: bool
    """True if this policy version first computes all text before the piece again."""


def pieces(row: RecordedRow) -> list[Piece]:
    """Returns the pieces of a row.

    To sample position p, a policy version reads the token at p - 1. So none reads the last token.
    """
    starts = [first - 1 for _, first in row.policy_spans]
    ends = [*starts[1:], len(row.text) - 1]
    spans = zip(row.policy_spans, starts, ends, strict=True)
    found = [Piece(version, start, end, first in row.read_again) for (version, first), start, end in spans]
    return [found[0]._replace(is_read_again=True), *(piece for piece in found[1:] if piece.begin < piece.end)]


def _logits(row: RecordedRow, model_of: Callable[[int], Model]) -> Iterator[tuple[int, Array]]:
    """Yields the number of a token of the response, and the logits of that token and the next ones, shape [P, V].

    The logits are float64 if the model is, and otherwise float32.
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
