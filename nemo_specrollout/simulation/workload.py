# SPDX-License-Identifier: Apache-2.0
"""The requests of a rollout: how long each will be, and how well each method drafts for it. The core alone may
look ahead.

Shapes: R requests, P prompts, S samples of a prompt, M draft methods.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from nemo_specrollout.scheduling.placement.pipeline import coupled_tokens

_SURE = 1.0 - 1e-6
# Tokens of a block of vLLM's KV cache, by default; samples of a prompt share blocks that are full of it.
_KV_BLOCK = 16


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their prompts."""

    prompt_R: np.ndarray
    """Which prompt, int64."""
    length_R: np.ndarray
    """Tokens of the response, int64."""
    acceptance_RM: np.ndarray
    """P(a draft token is right | those before it were), float64."""
    prompt_tokens: int
    """Of each prompt."""

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return int(self.length_R.sum())

    def tokens_to_prefill(self, requests_b: np.ndarray) -> int:
        """Prompt tokens that an engine computes when these requests begin in it: what samples of a prompt share once for all
        of them, the rest for each, and so the last token in any case."""
        shared = (self.prompt_tokens - 1) // _KV_BLOCK * _KV_BLOCK
        num_prompts = len(np.unique(self.prompt_R[requests_b]))
        return num_prompts * shared + len(requests_b) * (self.prompt_tokens - shared)


@dataclass(frozen=True)
class AcceptanceTerms:
    """How one method's acceptance is distributed over requests: normal in log-odds."""

    centre: float
    """P(right) of the typical request."""
    spread: float
    """Standard deviation of the log-odds."""


def workload(
    lengths_PS: np.ndarray, prompt_tokens: int, methods: tuple[AcceptanceTerms, ...], shared: float,
    rng: np.random.Generator,
) -> Workload:  # fmt: skip
    """Requests of those lengths; `shared` is the correlation of two methods' log-odds on the same request."""
    num_prompts, num_samples = lengths_PS.shape
    num = lengths_PS.size
    common_R1, own_RM = rng.standard_normal((num, 1)), rng.standard_normal((num, len(methods)))
    score_RM = np.sqrt(shared) * common_R1 + np.sqrt(1.0 - shared) * own_RM
    centres_M, spreads_M = np.array([m.centre for m in methods]), np.array([m.spread for m in methods])
    acceptance_RM = _from_odds(_log_odds(centres_M) + spreads_M * score_RM)
    return Workload(np.repeat(np.arange(num_prompts), num_samples), lengths_PS.ravel(), acceptance_RM, prompt_tokens)


def acceptance_for(length: float, k: int, spread: float = 0.0) -> float:
    """The typical P(right) at which k drafts a step emit `length` tokens, the verifier's own included, over all requests.

    An acceptance length is tokens over rounds, and a request has as many rounds as it needs: the harmonic mean over requests.
    """
    # Midpoints of equal shares of the normal distribution.
    scores = np.array([NormalDist().inv_cdf((i + 0.5) / 64) for i in range(64)]) if spread else np.zeros(1)
    low, high = 1e-9, _SURE
    for _ in range(60):
        middle = (low + high) / 2
        shares = _from_odds(_log_odds(np.array([middle])) + spread * scores)
        emitted = 1.0 / float(np.mean([1.0 / coupled_tokens(p, k) for p in shares]))
        low, high = (middle, high) if emitted < length else (low, middle)
    return (low + high) / 2


def _log_odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-9, _SURE)
    return np.log(p / (1.0 - p))


def _from_odds(log_odds: np.ndarray) -> np.ndarray:
    return np.minimum(1.0 / (1.0 + np.exp(-log_odds)), _SURE)
