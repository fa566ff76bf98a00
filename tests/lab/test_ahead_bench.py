# SPDX-License-Identifier: Apache-2.0
"""The bench of texts made ahead: where texts part, what branches foresee, and near-ties recomputed by a forward pass."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER
from safetensors.torch import load_file

from lab.bench.ahead_bench import MOST_PATHS, branched, partings, replayed_steps
from lab.bench.ahead_paths import TextPair, learn, num_followed, num_steps
from lab.bench.near_ties import TieFinder, Ties
from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.run_ahead.decisions.flips import FlipModel

LENGTH, VOCAB = 200, 12


class Weights:
    """A policy whose scores are random numbers of the last two tokens, which an update moves by a little."""

    def __init__(self, update: float) -> None:
        self._scores = np.random.default_rng(1).gumbel(size=(VOCAB, VOCAB, VOCAB))
        self._scores = self._scores + update * np.random.default_rng(2).standard_normal(self._scores.shape)

    def ties(self, text: list[int], seed: int) -> Ties:
        """Returns what this policy would sample after each beginning of a text."""
        noise_PV = np.random.default_rng(seed).gumbel(size=(LENGTH, VOCAB))
        scores_PV = (
            np.array([self._scores[tuple([0, 0, *text[:i]][-2:])] for i in range(len(text))]) + noise_PV[: len(text)]
        )
        order_PV = np.argsort(-scores_PV, axis=1)
        best_P, second_P = (np.take_along_axis(scores_PV, order_PV[:, [n]], axis=1)[:, 0] for n in (0, 1))
        return Ties(
            order_PV[:, 0].astype(np.int32), (best_P - second_P).astype(np.float32), order_PV[:, 1].astype(np.int32)
        )

    def text(self, seed: int, prefix: tuple[int, ...] = ()) -> list[int]:
        """Returns the text that this policy samples after a prefix."""
        text = list(prefix)
        while len(text) < LENGTH:
            text.append(int(self.ties([*text, 0], seed).token_P[-1]))
        return text


OLDER, NEWER = Weights(0.0), Weights(0.02)


def pair_of(seed: int) -> TextPair:
    older, newer = (weights.text(seed) for weights in (OLDER, NEWER))
    return TextPair(np.array(older), np.array(newer), OLDER.ties(older, seed), OLDER.ties(newer, seed))


PAIRS = list(map(pair_of, range(8)))
MODEL = FlipModel()
learn(MODEL, PAIRS)


@pytest.mark.unit
def test_the_first_flip_is_where_the_texts_part() -> None:
    for pair in PAIRS:
        differ = np.flatnonzero(pair.older_P != pair.newer_N)
        assert pair.parting == (differ[0] if len(differ) else None)
    figures = partings(PAIRS)
    assert figures["recomputed"] == 1.0 and figures["texts"] == 8
    assert 4 <= figures["parted"] == len(figures["ranks"]) == figures["to_runner_up"]
    assert 8 < figures["flips_to_runner_up"] <= figures["flips"]
    assert max(figures["ranks_so_far"]) <= max(figures["ranks"])


@pytest.mark.unit
def test_a_branch_with_the_new_token_is_the_newer_text_up_to_the_next_flip() -> None:
    """So no branch has to be decoded to know how far it is right."""
    for seed, pair in enumerate(PAIRS):
        for flip, next_flip in zip(pair.flips, [*pair.flips, LENGTH][1:], strict=True):
            branch = OLDER.text(seed, tuple(pair.newer_N[: flip + 1].tolist()))
            assert branch[:next_flip] == pair.newer_N[:next_flip].tolist()
            assert next_flip == LENGTH or branch[next_flip] != pair.newer_N[next_flip]


@pytest.mark.unit
def test_branches_without_end_foresee_all_flips_to_runners_up() -> None:
    followed = num_followed(PAIRS, MODEL, 60, 1_000)
    assert sum(followed) > 6
    for pair, number in zip(PAIRS, followed, strict=True):
        has_branch = [pair.flips_to_runner_up([flip]) == 1 for flip in pair.flips]
        assert number == (has_branch.index(False) if False in has_branch else len(has_branch))
        if number == len(pair.flips):
            assert np.flatnonzero(~pair.drafted_N(number)).tolist() == pair.flips
    right = [
        sum(pair.drafted_N(n).sum() for pair, n in zip(PAIRS, numbers, strict=True)) for numbers in ([0] * 8, followed)
    ]
    assert right[0] < right[1]


@pytest.mark.unit
def test_more_branches_foresee_more() -> None:
    right = [figures["right"] for figures in branched(PAIRS, MODEL)["branches"].values()]
    *numbered, best_first = right
    assert numbered == sorted(numbered) and numbered[0] < numbered[-1]
    assert best_first > numbered[1]
    assert num_followed(PAIRS, MODEL, 0, MOST_PATHS) == [0] * len(PAIRS)


@pytest.mark.unit
def test_steps_of_a_text_are_those_of_replaying_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        truth, draft = rng.integers(0, 2, (2, 40)).tolist()
        right_N = np.array(truth) == np.array(draft)
        assert num_steps(right_N, 4) == replayed_steps(truth, draft, 4)
    assert num_steps(np.ones(768, bool), 32) == 24


@pytest.mark.integration
def test_a_forward_pass_finds_the_engines_tokens(start_engine: Callable[..., RolloutEngine]) -> None:
    """With the request's own noise. Another noise would give other tokens."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    requests = [RolloutRequest([5, 6, 7 + i], i, 0, exact_length=40) for i in range(3)]
    rollouts = engine.generate(requests)
    finder = TieFinder(STEP_ADDER, torch.float32, 1.0)
    finder.load_weights(load_file(STEP_ADDER / "model.safetensors").items())
    for request, rollout in zip(requests, rollouts, strict=True):
        ties = finder.ties(request.prompt_token_ids, rollout.token_ids, request.noise_seed(7))
        assert ties.token_P.tolist() == rollout.token_ids
        assert (ties.gap_P > 0).all() and (ties.runner_up_P != ties.token_P).all()
        other = finder.ties(request.prompt_token_ids, rollout.token_ids, request.noise_seed(8))
        assert (other.token_P != ties.token_P).any()
    with pytest.raises(ValueError, match="unknown is not a tensor of the model"):
        finder.load_weights([("unknown", torch.zeros(1))])
