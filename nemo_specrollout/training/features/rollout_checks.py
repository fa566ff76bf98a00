# SPDX-License-Identifier: Apache-2.0
"""Checks that rollouts or stored features come from the policy that they are used for.

Token ids of another tokenizer may be valid ids, and features may come from older weights: neither fails by itself.

Shapes: R generated tokens of a chunk, H hidden size, V vocabulary.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_specrollout.training.features.features import SequenceFeatures

CHUNK_ELEMENTS = 1 << 24
"""Approximate number of logits in memory at a time."""
MAX_EXCESS = 2.0
"""Excess of the surprise, nats per token, above which rollouts are refused."""
WARN_EXCESS = 0.5
"""Excess of the surprise, nats per token, above which a warning is given."""
MAX_STATE_CHANGE = 0.5
"""Relative change of the final hidden states above which stored features are refused."""
WARN_STATE_CHANGE = 0.1
"""Relative change of the final hidden states above which a warning is given. Rounding to bfloat16 gives about 0.01."""


@dataclass(frozen=True)
class Surprise:
    """Surprise of a policy at generated tokens. For its own samples, `mean_logprob` is about -`entropy`."""

    mean_logprob: float
    """Mean log-probability of the tokens, nats."""
    entropy: float
    """Mean entropy of the policy's distributions, nats."""

    @property
    def excess(self) -> float:
        """Nats per token by which the policy is more surprised than it expects to be."""
        return -self.mean_logprob - self.entropy


@torch.no_grad()
def measure_surprise(
    lm_head_VH: torch.Tensor, sequences: Sequence[SequenceFeatures], temperature: float = 1.0
) -> Surprise:
    """Returns the surprise at the generated tokens of `sequences`.

    Args:
        lm_head_VH: The policy's LM head.
        sequences: Features of the policy.
        temperature: Sampling temperature of the rollouts. 0 counts as 1.
    """
    rows = max(1, CHUNK_ELEMENTS // len(lm_head_VH))
    logprob = entropy = 0.0
    num_tokens = 0
    for features in sequences:
        for start in range(features.first_start, features.num_tokens - 1, rows):
            stop = min(start + rows, features.num_tokens - 1)
            logits_RV = (features.final_TH[start:stop].to(lm_head_VH) @ lm_head_VH.T).float()
            logprobs_RV = torch.log_softmax(logits_RV / (temperature or 1.0), -1)
            tokens_R = features.token_ids_T[start + 1 : stop + 1].long().to(logprobs_RV.device)
            logprob += float(logprobs_RV.gather(1, tokens_R[:, None]).sum())
            entropy -= float((logprobs_RV.exp() * logprobs_RV).sum())
            num_tokens += stop - start
    return Surprise(logprob / max(1, num_tokens), entropy / max(1, num_tokens))


def check_surprise(surprise: Surprise, vocab_size: int) -> str | None:
    """Returns a warning if the rollouts look like another policy's, else None.

    Raises ValueError if they cannot be the policy's: they are less likely than uniform guesses, or the policy is far
    more surprised than it expects to be.
    """
    uniform = -math.log(vocab_size)
    mean = f"the policy gives the generated tokens a mean log-prob of {surprise.mean_logprob:.2f}"
    expected = f"{mean} and expects {-surprise.entropy:.2f} of its own"
    if surprise.mean_logprob < uniform:
        raise ValueError(
            f"{mean}, worse than {uniform:.2f} of guessing: the rollouts are of another tokenizer or policy; give its own"
        )
    if surprise.excess > MAX_EXCESS:
        raise ValueError(f"{expected}: the rollouts are of another tokenizer or policy; give its own")
    return f"{expected}: the rollouts look like another policy's" if surprise.excess > WARN_EXCESS else None


def check_stored(stored: Sequence[SequenceFeatures], current: Sequence[SequenceFeatures]) -> str | None:
    """Returns a warning if stored features differ from the policy's current ones of the same tokens, else None.

    Raises ValueError if the difference is too large for two versions of one policy.
    """
    changes = [
        float((a.final_TH.float() - b.final_TH.float()).norm() / b.final_TH.float().norm())
        for a, b in zip(stored, current, strict=True)
    ]
    change = statistics.median_high(changes) if changes else 0.0
    difference = f"the stored features differ by {change:.0%} from what the policy computes now"
    if not change <= MAX_STATE_CHANGE:
        raise ValueError(
            f"{difference}, {MAX_STATE_CHANGE:.0%} at most: they are another policy's; give rollouts instead"
        )
    return f"{difference}: they are of older weights" if change > WARN_STATE_CHANGE else None
