# SPDX-License-Identifier: Apache-2.0
"""The requests of a simulated rollout, with their response lengths and the acceptance of each draft method.

Lengths are drawn at random or read from a trace.

Shapes: R requests, P prompts, S samples of a prompt, M draft methods, N lengths.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from lab.placement.pipeline import coupled_tokens
from nemo_specrollout.config.strict import ConfigError, bounded, build
from nemo_specrollout.storage.text_files import json_lines, whole_number

_SURE = 1.0 - 1e-6
"""Largest acceptance that a request may have."""
_KV_BLOCK = 16
"""Default number of tokens in a block of vLLM's KV cache. Samples of a prompt share its full blocks."""
_LOW_QUANTILE = 0.02
_HIGH_QUANTILE = 0.98
"""Highest quantile to which a distribution is fitted. With `_LOW_QUANTILE` it leaves out the unreliable ends of a sample."""


@dataclass(frozen=True)
class LengthConfig:
    """Log-normal distribution of response lengths in tokens, which are cut at `max_tokens`."""

    median: float = bounded(above=0.0)
    """Median of the lengths before they are cut."""
    sigma: float = bounded(low=0.0, high=3.0)
    """Standard deviation of the logarithm of the lengths before they are cut."""
    max_tokens: int = bounded(low=1)
    """Maximum length, like `max_new_tokens`."""
    group_share: float = bounded(0.5, low=0.0, high=1.0)
    """Share of the variance that is between prompts. The rest is between samples of a prompt."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the median is above `max_tokens`."""
        if self.median > self.max_tokens:
            raise ConfigError(
                f"{path}.median: {self.median:g} is above max_tokens {self.max_tokens}; lower it, or raise that"
            )

    def draw(self, num_prompts: int, num_samples: int, rng: np.random.Generator) -> np.ndarray:
        """Returns random lengths, int64 [P, S]."""
        of_prompt_P1 = rng.standard_normal((num_prompts, 1))
        own_PS = rng.standard_normal((num_prompts, num_samples))
        score_PS = np.sqrt(self.group_share) * of_prompt_P1 + np.sqrt(1.0 - self.group_share) * own_PS
        tokens_PS = np.round(self.median * np.exp(self.sigma * score_PS))
        return np.clip(tokens_PS, 1, self.max_tokens).astype(np.int64)


def fitted(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> LengthConfig:
    """Returns the distribution that fits observed lengths best. Lengths of `max_tokens` count as at least that long.

    The fit is a line through the quantiles below `max_tokens`, against the same quantiles of the normal distribution.
    """
    known_N = np.sort(np.asarray(lengths, float))
    ranks_N = (np.arange(len(known_N)) + 0.5) / len(known_N)
    use_N = (known_N < max_tokens) & (ranks_N > _LOW_QUANTILE) & (ranks_N < _HIGH_QUANTILE)
    if len(np.unique(known_N[use_N])) < 2:
        return LengthConfig(float(np.median(known_N)), 0.0, max_tokens)
    scores = np.array([NormalDist().inv_cdf(rank) for rank in ranks_N[use_N]])
    sigma, log_median = np.polyfit(scores, np.log(known_N[use_N]), 1)
    return LengthConfig(float(np.exp(log_median)), float(sigma), max_tokens)


@dataclass(frozen=True)
class Workload:
    """The requests of a simulated rollout, in the order of their prompts."""

    prompt_R: np.ndarray
    """Number of each request's prompt, int64."""
    length_R: np.ndarray
    """Number of response tokens of each request, int64."""
    acceptance_RM: np.ndarray
    """Probability that a draft token is right if those before it are, by request and draft method, float64."""
    prompt_tokens: int
    """Number of tokens of each prompt."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all responses."""
        return int(self.length_R.sum())

    def part(self, rows_r: np.ndarray) -> "Workload":
        """Returns the requests at the indices `rows_r`."""
        return replace(
            self,
            prompt_R=self.prompt_R[rows_r],
            length_R=self.length_R[rows_r],
            acceptance_RM=self.acceptance_RM[rows_r],
        )

    def with_others(self, others: "Workload") -> "Workload":
        """Returns these requests followed by others, whose prompts must have as many tokens."""
        return replace(
            self,
            prompt_R=np.concatenate([self.prompt_R, others.prompt_R]),
            length_R=np.concatenate([self.length_R, others.length_R]),
            acceptance_RM=np.concatenate([self.acceptance_RM, others.acceptance_RM]),
        )

    def tokens_to_prefill(self, requests_b: np.ndarray) -> int:
        """Returns how many prompt tokens an engine computes when these requests begin.

        Samples of a prompt share its full KV cache blocks, which are computed once. The prompt's tokens after these blocks are
        computed for each request. The last token of the prompt is always among them.
        """
        shared = (self.prompt_tokens - 1) // _KV_BLOCK * _KV_BLOCK
        num_prompts = len(np.unique(self.prompt_R[requests_b]))
        return num_prompts * shared + len(requests_b) * (self.prompt_tokens - shared)


def workload(
    lengths_PS: np.ndarray,
    prompt_tokens: int,
    centres_M: np.ndarray,
    spreads_M: np.ndarray,
    shared: float,
    rng: np.random.Generator,
) -> Workload:
    """Returns requests of these lengths, each with a random acceptance for each draft method.

    The log-odds of an acceptance are normally distributed. `centres_M` is the acceptance of the typical request, and
    `spreads_M` the standard deviation of the log-odds. `shared` is the correlation between two methods' log-odds on the same
    request.
    """
    num_prompts, num_samples = lengths_PS.shape
    num = lengths_PS.size
    common_R1 = rng.standard_normal((num, 1))
    own_RM = rng.standard_normal((num, len(centres_M)))
    score_RM = np.sqrt(shared) * common_R1 + np.sqrt(1.0 - shared) * own_RM
    acceptance_RM = _from_odds(_log_odds(centres_M) + spreads_M * score_RM)
    return Workload(np.repeat(np.arange(num_prompts), num_samples), lengths_PS.ravel(), acceptance_RM, prompt_tokens)


def acceptance_for(length: float, k: int, spread: float = 0.0) -> float:
    """Returns the acceptance of the typical request at which k drafts give an acceptance length of `length` over all requests.

    `length` is the number of tokens, including the policy's own, divided by the number of engine steps. So it is a harmonic
    mean over the requests. `spread` is the standard deviation of the log-odds of acceptance over requests.
    """
    # Midpoints of equal shares of the normal distribution
    scores = np.array([NormalDist().inv_cdf((i + 0.5) / 64) for i in range(64)]) if spread else np.zeros(1)
    low = 1e-9
    high = _SURE
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


_FIX = "give each prompt the same samples, from 0, as in a run's samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """The length of one response in a trace. A line of the trace has one or several of them."""

    prompt: int = bounded(low=0)
    sample: int = bounded(low=0)
    tokens: int = bounded(low=1, high=1 << 24)
    step: int = bounded(0, low=0)


def read_trace(path: Path, field: str) -> list[np.ndarray]:
    """Returns the response lengths of each step of a trace, int64 [P, S], in the order of the steps.

    The file is a run's `samples.jsonl`, or has lines of {prompt, sample, tokens}. Raises ConfigError with field, value and
    fix.
    """
    steps: dict[int, dict[tuple[int, int], int]] = {}
    try:
        for place, record in json_lines(path):
            where = f"{field}: {place}"
            for sample in _samples(record, where):
                tokens = steps.setdefault(sample.step, {})
                key = (sample.prompt, sample.sample)
                if key in tokens:
                    raise ConfigError(f"{where}: prompt {sample.prompt}, sample {sample.sample} occurs twice; {_FIX}")
                tokens[key] = sample.tokens
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error
    if not steps:
        raise ConfigError(f"{field}: {path} has no samples; name a run's samples.jsonl")
    return [_whole(steps[step], f"{field}: {path}, step {step}") for step in sorted(steps)]


def _samples(record: Any, where: str) -> Iterator[Sample]:
    records = [record]
    step = {}
    if isinstance(record, Mapping) and isinstance(record.get("samples"), list):
        records = record["samples"]
        step = {"step": record.get("step", 0)}
    keys = ("prompt", "sample", "tokens", "step")
    for one in records:
        if not isinstance(one, Mapping):
            raise ConfigError(f"{where}: {reprlib.repr(one)}; each line is an object with prompt, sample and tokens")
        known = {key: value for key, value in {**one, **step}.items() if key in keys}
        whole = {key: whole_number(value) for key, value in known.items()}
        yield build(Sample, {key: value if whole[key] is None else whole[key] for key, value in known.items()}, where)


def _whole(tokens: Mapping[tuple[int, int], int], where: str) -> np.ndarray:
    prompts = sorted({prompt for prompt, _ in tokens})
    num_samples = 1 + max(sample for _, sample in tokens)
    for prompt in prompts:
        # Stops at the first gap, because a wrong sample number may be so large that a list of all gaps does not fit.
        if (gap := next((s for s in range(num_samples) if (prompt, s) not in tokens), None)) is not None:
            raise ConfigError(f"{where}: prompt {prompt} has no sample {gap}, others have {num_samples}; {_FIX}")
    return np.array([[tokens[p, s] for s in range(num_samples)] for p in prompts], np.int64)
