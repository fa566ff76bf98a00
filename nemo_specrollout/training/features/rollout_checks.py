# SPDX-License-Identifier: Apache-2.0
"""Are these the policy's own rollouts? Ids of another tokenizer may be valid, and features may be of older weights.

Shapes: R generated tokens of a chunk, H hidden size, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_specrollout.training.features.features import SequenceFeatures

CHUNK_ELEMENTS = 1 << 24
"""Logits that are in memory at a time, about."""
MAX_EXCESS = 2.0
"""Nats a token by which a policy may be more surprised by its own rollouts than it expects to be."""
WARN_EXCESS = 0.5
MAX_STATE_CHANGE, WARN_STATE_CHANGE = 0.5, 0.1
"""Relative change of the final hidden states since features were stored; bfloat16 makes about 0.01."""


@dataclass(frozen=True)
class Surprise:
    """Of a policy by generated tokens, nats a token: `mean_logprob` of what came, `entropy` of what it expected. On its own
    samples the first is about minus the second."""

    mean_logprob: float
    entropy: float
    num_tokens: int

    @property
    def excess(self) -> float:
        return -self.mean_logprob - self.entropy


@torch.no_grad()
def measure_surprise(
    lm_head_VH: torch.Tensor, sequences: Sequence[SequenceFeatures], temperature: float = 1.0
) -> Surprise:
    """Over the generated tokens of `sequences`, by the policy's LM head at `temperature`, where 0 counts as 1."""
    rows = max(1, CHUNK_ELEMENTS // len(lm_head_VH))
    logprob = entropy = 0.0
    num_tokens = 0
    for features in sequences:
        first = max(0, features.prompt_length - features.first_position - 1)
        for start in range(first, features.num_tokens - 1, rows):
            stop = min(start + rows, features.num_tokens - 1)
            logits_RV = (features.final_TH[start:stop].to(lm_head_VH) @ lm_head_VH.T).float()
            logprobs_RV = torch.log_softmax(logits_RV / (temperature or 1.0), -1)
            tokens_R = features.token_ids_T[start + 1 : stop + 1].long().to(logprobs_RV.device)
            logprob += float(logprobs_RV.gather(1, tokens_R[:, None]).sum())
            entropy -= float((logprobs_RV.exp() * logprobs_RV).sum())
            num_tokens += stop - start
    return Surprise(logprob / max(1, num_tokens), entropy / max(1, num_tokens), num_tokens)


def check_surprise(surprise: Surprise, vocab_size: int) -> str | None:
    """A warning, where the rollouts look like another policy's; None if all is well. Raises ValueError where they cannot be
    this policy's: worse than guessing, or far more surprising than the policy itself expects."""
    uniform = -math.log(vocab_size)
    figures = f"the policy gives the generated tokens a mean log-prob of {surprise.mean_logprob:.2f}"
    if surprise.mean_logprob < uniform:
        raise ValueError(
            f"{figures}, worse than {uniform:.2f} of guessing: the rollouts are of another tokenizer or policy; give its own"
        )
    if surprise.excess > MAX_EXCESS:
        raise ValueError(
            f"{figures} and expects {-surprise.entropy:.2f} of its own: the rollouts are of another tokenizer or policy; "
            "give its own"
        )
    if surprise.excess > WARN_EXCESS:
        return f"{figures} and expects {-surprise.entropy:.2f} of its own: the rollouts look like another policy's"
    return None


def check_stored(stored: Sequence[SequenceFeatures], now: Sequence[SequenceFeatures]) -> str | None:
    """Compares stored features with the present policy's of the same tokens: a warning, or None. Raises ValueError where they
    are another policy's."""
    changes = [
        float((a.final_TH.float() - b.final_TH.float()).norm() / b.final_TH.float().norm())
        for a, b in zip(stored, now, strict=True)
    ]
    change = sorted(changes)[len(changes) // 2] if changes else 0.0
    figures = f"the stored features differ by {change:.0%} from what the policy computes now"
    if not change <= MAX_STATE_CHANGE:
        raise ValueError(f"{figures}, {MAX_STATE_CHANGE:.0%} at most: they are another policy's; give rollouts instead")
    return f"{figures}: they are of older weights" if change > WARN_STATE_CHANGE else None
