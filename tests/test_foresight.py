# SPDX-License-Identifier: Apache-2.0
"""What the host foretells of drafts from rates that are a step old.

Shapes: B requests of a step, K draft positions, S request slots.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_specrollout.speculation.decision import likeliest, survival_of
from nemo_specrollout.speculation.foresight import Foresight, Kind

pytestmark = pytest.mark.unit
S, K = 8, 4
SLOTS = np.arange(S)


def known(num_positions: int = K, text_rate: float = 0.98) -> Foresight:
    """Returns a foresight whose requests all have drafts already."""
    foresight = Foresight(S, num_positions, text_rate)
    foresight.opened(SLOTS.tolist(), [Kind.KNOWN] * S)
    return foresight


def rates(seed: int, num_positions: int = K) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 1.0, (S, num_positions)).astype(np.float32)


def test_what_stays_as_it_was_is_foretold_as_it_was() -> None:
    foresight = known()
    for _ in range(50):
        survival_BK = foresight.survival(rates(0), SLOTS)
    assert foresight.persistence > 0.95
    np.testing.assert_allclose(survival_BK, survival_of(rates(0)), atol=0.02)


def test_what_changes_in_each_step_is_foretold_by_the_mean() -> None:
    foresight = known()
    for seed in range(200):
        survival_BK = foresight.survival(rates(seed), SLOTS)
    assert foresight.persistence < 0.2
    mean_BK = np.broadcast_to(survival_of(rates(199)).mean(axis=0), (S, K))
    np.testing.assert_allclose(survival_BK, mean_BK, atol=0.15)


def test_requests_that_end_teach_what_became_of_their_last_drafts() -> None:
    """The drafts of slot 7 were verified in its last step, whose rates arrive when it has ended."""
    ended, alone = known(), known()
    for step in range(60):
        rates_SK = rates(0)
        rates_SK[7] = step % 2  # what looked sure in its last step came to nothing
        ended.survival(rates_SK, SLOTS if step % 2 else SLOTS[:7])
        alone.survival(rates_SK, SLOTS[:7])
    assert ended.persistence < alone.persistence - 0.1


def test_a_new_request_is_not_taken_for_the_one_that_had_its_slot() -> None:
    foresight = known()
    sure_SK = np.ones((S, K), np.float32)
    foresight.survival(sure_SK, SLOTS)
    foresight.opened([2, 3, 4], [Kind.NEW, Kind.NEW_WITH_TEXT, Kind.SILENT])
    first_BK = foresight.survival(sure_SK, SLOTS)
    assert not first_BK[[2, 4]].any()
    np.testing.assert_allclose(first_BK[3], 0.98 ** np.arange(1, K + 1), rtol=1e-5)
    second_BK = foresight.survival(sure_SK, SLOTS)
    assert (second_BK[[2, 3]] > 0.95).all() and not second_BK[4].any(), "its own rates have arrived"


def test_first_drafts_are_foretold_from_those_of_earlier_requests() -> None:
    """Requests without a text turn out to be good, those with one to be bad."""
    foresight = Foresight(S, K, 0.98)
    for _ in range(10):
        foresight.opened(SLOTS.tolist(), [Kind.NEW, Kind.NEW_WITH_TEXT] * (S // 2))
        first_BK = foresight.survival(np.zeros((S, K), np.float32), SLOTS)
        came_SK = np.where(SLOTS[:, None] % 2, 0.1, 0.9).astype(np.float32) * np.ones(K, np.float32)
        foresight.survival(came_SK, SLOTS)
    assert first_BK[0, 0] == pytest.approx(0.9, abs=0.05) and first_BK[1, 0] == pytest.approx(0.1, abs=0.05)


@given(st.integers(0, 10_000))
def test_survival_is_a_probability_and_never_rises(seed: int) -> None:
    rng = np.random.default_rng(seed)
    foresight = Foresight(S, K, 0.98)
    for step in range(6):
        foresight.opened([int(rng.integers(S))], [Kind(int(rng.integers(4)))])
        slots_B = rng.permutation(S)[: rng.integers(1, S + 1)]
        survival_BK = foresight.survival(rates(seed + step) * (rng.random((S, K)) < 0.7), slots_B)
        assert survival_BK.shape == (len(slots_B), K)
        assert (survival_BK >= 0.0).all() and (survival_BK <= 1.0).all()
        assert (np.diff(survival_BK, axis=1) <= 1e-6).all()


def test_a_request_with_a_right_text_drafts_as_far_as_it_may() -> None:
    """From its first step on, while the others draft few tokens."""
    foresight = known(32)
    others_SK = np.zeros((S, 32), np.float32)
    others_SK[:, :3] = 0.5
    foresight.survival(others_SK, SLOTS)
    foresight.opened([5], [Kind.NEW_WITH_TEXT])
    for step in range(8):
        counts_B = likeliest(foresight.survival(others_SK, SLOTS), np.full(S, 32), 45)
        assert counts_B[5] == 32 and counts_B.sum() == 45 and np.delete(counts_B, 5).max() <= 3, step
        others_SK[5] = 0.98  # its own rates, from the second step on


def test_steps_may_have_fewer_drafts_than_positions() -> None:
    """The host reads no more columns than a step has drafts, and their number changes as requests come and go."""
    rng = np.random.default_rng(4)
    wide, narrow = Foresight(S, K, 0.98), Foresight(S, K, 0.98)
    slots_B = np.arange(S)
    for foresight in (wide, narrow):
        foresight.opened(slots_B.tolist(), [Kind.NEW_WITH_TEXT, *[Kind.NEW] * (S - 1)])
    for step in range(6):
        rates_SK = rng.random((S, K), np.float32)
        width = 1 + step % K
        found = narrow.survival(rates_SK[:, :width], slots_B)
        assert found.shape == (S, width) and np.isfinite(found).all()
        expected = wide.survival(rates_SK, slots_B)
        if step == 0:
            np.testing.assert_array_equal(found, expected[:, :width])
