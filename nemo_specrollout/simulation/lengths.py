# SPDX-License-Identifier: Apache-2.0
"""How long responses are: a capped log-normal, drawn or fitted.

Shapes: P prompts, S samples of a prompt, N lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from nemo_specrollout.config.strict import ConfigError, bounded

# Quantiles by which a distribution is fitted: the ends of a sample say little.
_LOW, _HIGH = 0.02, 0.98


@dataclass(frozen=True)
class LengthConfig:
    """Tokens of a response."""

    median: float = bounded(above=0.0)
    """Before the cap."""

    sigma: float = bounded(low=0.0, high=3.0)
    """Standard deviation of the logarithm, before the cap."""

    max_tokens: int = bounded(low=1)
    """Longer ones end here, as at `max_new_tokens`."""

    group_share: float = bounded(0.5, low=0.0, high=1.0)
    """Share of that variance which lies between prompts; the rest is between samples of the same prompt."""

    def check(self, path: str) -> None:
        """Raises ConfigError if nearly all would be cut."""
        if self.median > self.max_tokens:
            raise ConfigError(
                f"{path}.median: {self.median:g} is above max_tokens {self.max_tokens}; lower it, or raise that"
            )

    def draw(self, num_prompts: int, num_samples: int, rng: np.random.Generator) -> np.ndarray:
        """Lengths, int64 [P, S]."""
        of_prompt_P1 = rng.standard_normal((num_prompts, 1))
        own_PS = rng.standard_normal((num_prompts, num_samples))
        score_PS = np.sqrt(self.group_share) * of_prompt_P1 + np.sqrt(1.0 - self.group_share) * own_PS
        tokens_PS = np.round(self.median * np.exp(self.sigma * score_PS))
        return np.clip(tokens_PS, 1, self.max_tokens).astype(np.int64)


def fitted(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> LengthConfig:
    """The distribution of lengths that were seen; those at `max_tokens` are only known to be at least that long.

    A line through the quantiles below the cap, against those of the normal distribution.
    """
    known_N = np.sort(np.asarray(lengths, float))
    ranks_N = (np.arange(len(known_N)) + 0.5) / len(known_N)
    use_N = (known_N < max_tokens) & (ranks_N > _LOW) & (ranks_N < _HIGH)
    if len(np.unique(known_N[use_N])) < 2:
        return LengthConfig(float(np.median(known_N)), 0.0, max_tokens)
    scores = np.array([NormalDist().inv_cdf(rank) for rank in ranks_N[use_N]])
    sigma, log_median = np.polyfit(scores, np.log(known_N[use_N]), 1)
    return LengthConfig(float(np.exp(log_median)), float(sigma), max_tokens)
