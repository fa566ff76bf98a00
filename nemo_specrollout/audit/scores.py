# SPDX-License-Identifier: Apache-2.0
"""Computes with numpy which token a policy samples at each position of a row (sample).

It starts from the policy's logits and applies the row's sampling parameters as vLLM does. vLLM's order is allowed tokens,
logit bias, minimum length, penalties, bad words, temperature, min-p, top-k and top-p. Then it adds the noise. The sum is the
score of a token, and the token with the best score is sampled.

Source: `vllm/v1/worker/gpu/sample/sampler.py` of vLLM 0.25.1 to 0.32.

Shapes: P positions, V vocabulary, T tokens of the response.
"""

from dataclasses import dataclass

import numpy as np

from nemo_specrollout.audit.noise import NoiseScheme
from nemo_specrollout.audit.rows import Array, RecordedRow, RowParams

_GREEDY_BELOW = 1e-5
"""A request with a temperature below this is sampled greedily. vLLM has the same bound."""


@dataclass(frozen=True)
class Sampled:
    """The tokens that the policy samples at P positions of a row, and scores and log-probs of the recorded tokens there."""

    token_ids_P: Array
    """The token with the best score, int64."""
    gap_P: Array
    """Best score minus the recorded token's score, float64.

    It is 0 if the recorded token has the best score, and inf if the sampling parameters exclude the recorded token.
    """
    logprob_P: Array
    """Log-prob of the recorded token, float64, after the sampling parameters, or before them if `raw_logprobs` was set."""


def sample(
    row: RecordedRow, first: int, logits_PV: Array, noise: NoiseScheme | None, *, raw_logprobs: bool = False
) -> Sampled:
    """Returns the tokens that the policy samples at P consecutive positions of a row, compared with the recorded ones.

    Args:
        row: the recorded row. Each token is sampled after the recorded text before it.
        first: index in the response of the first of the P tokens, from 0.
        logits_PV: the policy's logits for each of the P tokens, float32 or float64. The function changes this array.
        noise: the method by which the run's version of vLLM computes the noise, or None if only log-probs are needed.
        raw_logprobs: whether to return log-probs of `logits_PV` as given, before the sampling parameters are applied.
    """
    params = row.params
    recorded_P = row.token_ids[first : first + len(logits_PV)].astype(np.int64)
    raw_P = _logprobs(logits_PV, recorded_P) if raw_logprobs else None
    is_greedy = params.temperature < _GREEDY_BELOW
    numbers = range(first, first + len(logits_PV))
    for logits_V, number in zip(logits_PV, numbers, strict=True):
        _apply_text(logits_V, row, number)
    if not is_greedy and params.temperature != 1.0:
        logits_PV /= np.float32(params.temperature)
    _exclude_unlikely(logits_PV, params)
    scores_PV = logits_PV if is_greedy or noise is None else _noisy(logits_PV, row, first, recorded_P, noise)
    logprob_P = _logprobs(logits_PV, recorded_P) if raw_P is None else raw_P
    return _compared(scores_PV, recorded_P, logprob_P)


def _apply_text(logits_V: Array, row: RecordedRow, number: int) -> None:
    """Changes the logits of one position, in place, by all sampling parameters that come before the temperature.

    Each of these parameters depends on the row's text or is a list of tokens. `number` is the index of the position in the
    response.
    """
    params = row.params
    response = row.token_ids[:number]
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        kept = logits_V[allowed].copy()
        logits_V[:] = -np.inf
        logits_V[allowed] = kept
    for token, bias in params.logit_bias.items():
        logits_V[token] += np.float32(bias)
    if number < params.min_tokens:
        logits_V[list(params.stop_token_ids)] = -np.inf
    _apply_penalties(logits_V, row, response)
    for *before, last in params.bad_words:
        if len(before) <= number and response[number - len(before) :].tolist() == before:
            logits_V[last] = -np.inf


def _apply_penalties(logits_V: Array, row: RecordedRow, response: Array) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([row.prompt_token_ids, response]))
        penalty = np.float32(params.repetition_penalty)
        logits_V[seen] *= np.where(logits_V[seen] > 0, np.float32(1) / penalty, penalty)
    if params.frequency_penalty or params.presence_penalty:
        tokens, counts = np.unique(response, return_counts=True)
        logits_V[tokens] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits_V[tokens] -= np.float32(params.presence_penalty)


def _exclude_unlikely(logits_PV: Array, params: RowParams) -> None:
    """Sets the logits that min-p, top-k and top-p exclude to -inf, in place.

    If several tokens have the same logit as the k-th best one, top-k keeps all of them.
    """
    vocabulary = logits_PV.shape[1]
    if params.min_p > 0:
        bound_P1 = logits_PV.max(axis=1, keepdims=True) + np.float32(np.log(params.min_p))
        logits_PV[logits_PV < bound_P1] = -np.inf
    if 0 < params.top_k < vocabulary:
        kth_P1 = np.partition(logits_PV, vocabulary - params.top_k, axis=1)[:, [vocabulary - params.top_k]]
        logits_PV[logits_PV < kth_P1] = -np.inf
    if params.top_p < 1:
        order_PV = np.argsort(logits_PV, axis=1, kind="stable")
        sorted_PV = np.take_along_axis(logits_PV, order_PV, axis=1)
        is_out_PV = np.cumsum(_probabilities(sorted_PV), axis=1) <= 1 - params.top_p
        is_out_PV[:, -1] = False
        sorted_PV[is_out_PV] = -np.inf
        np.put_along_axis(logits_PV, order_PV, sorted_PV, axis=1)


def _probabilities(logits_PV: Array) -> Array:
    exponents_PV = np.exp(logits_PV.astype(np.float64) - logits_PV.max(axis=1, keepdims=True))
    probabilities_PV: Array = exponents_PV / exponents_PV.sum(axis=1, keepdims=True)
    return probabilities_PV


def _noisy(logits_PV: Array, row: RecordedRow, first: int, recorded_P: Array, scheme: NoiseScheme) -> Array:
    """Returns the scores, which are the logits plus the noise, float64, shape [P, V].

    To save time, tokens that cannot be the best get -inf instead of their score. For each position, the function first
    computes the score of the most likely token. Another token cannot be the best if its logit plus the largest possible noise
    is below that score. This excludes most of a large vocabulary. The recorded token always gets its score.
    """
    positions_P = len(row.prompt_token_ids) - 1 + np.arange(first, first + len(logits_PV))
    rows_P = np.arange(len(recorded_P))
    likeliest_P = logits_PV.argmax(axis=1)
    score_P = logits_PV[rows_P, likeliest_P] + scheme.noise(row.seed, positions_P, likeliest_P)
    is_possible_PV = (logits_PV >= score_P[:, None] - scheme.largest_noise) & np.isfinite(logits_PV)
    is_possible_PV[rows_P, recorded_P] |= np.isfinite(logits_PV[rows_P, recorded_P])
    places, tokens = np.nonzero(is_possible_PV)
    scores_PV = np.full(logits_PV.shape, -np.inf)
    scores_PV[places, tokens] = logits_PV[places, tokens] + scheme.noise(row.seed, positions_P[places], tokens)
    return scores_PV


def _logprobs(logits_PV: Array, recorded_P: Array) -> Array:
    largest_P = logits_PV.max(axis=1)
    sums_P = np.exp(logits_PV.astype(np.float64) - largest_P[:, None]).sum(axis=1)
    logprob_P: Array = logits_PV[np.arange(len(recorded_P)), recorded_P].astype(np.float64) - largest_P - np.log(sums_P)
    return logprob_P


def _compared(scores_PV: Array, recorded_P: Array, logprob_P: Array) -> Sampled:
    rows_P = np.arange(len(recorded_P))
    best_P = scores_PV.argmax(axis=1)
    gap_P = scores_PV[rows_P, best_P].astype(np.float64) - scores_PV[rows_P, recorded_P]
    return Sampled(token_ids_P=best_P, gap_P=gap_P, logprob_P=logprob_P)
