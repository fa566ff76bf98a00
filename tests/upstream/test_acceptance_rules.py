# SPDX-License-Identifier: Apache-2.0
"""The rates of docs/upstream/vllm-exact-verification.md: the closed forms are what drawing gives, and the page has them."""

import math

import numpy as np
import pytest
from acceptance_rules import DISTANCES, DRAFTERS, distance, pairs, rates, table
from proposals import DOCS

pytestmark = pytest.mark.unit
NUM_DRAWS = 20_000
MAX_Z = 4.0


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drawing_gives_the_closed_forms(kind: str) -> None:
    """Draws by Gumbel-max with shared and with independent noise, and by both ratio tests."""
    rng = np.random.default_rng(1)
    p_V, q_V = pairs(kind, 0.2)[0]
    noise_RV, other_RV = rng.gumbel(size=(2, NUM_DRAWS, len(p_V)))
    target_R = (np.log(p_V) + noise_RV).argmax(1)
    shared_R = (np.log(q_V) + noise_RV).argmax(1)
    independent_R = (np.log(q_V) + other_RV).argmax(1)
    uniform_R = rng.random(NUM_DRAWS)
    found = rates(p_V, q_V)
    for accepted_R, rate in (
        (target_R == independent_R, found.independent),
        (target_R == shared_R, found.shared),
        (target_R == q_V.argmax(), found.greedy),
        (uniform_R < p_V[q_V.argmax()], found.greedy),
        (uniform_R * q_V[independent_R] < p_V[independent_R], found.rejection),
    ):
        assert abs(accepted_R.mean() - rate) < MAX_Z * math.sqrt(rate * (1 - rate) / NUM_DRAWS)


@pytest.mark.parametrize("wanted", DISTANCES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_shared_noise_is_between_its_bound_and_the_rejection_test(kind: str, wanted: float) -> None:
    for p_V, q_V in pairs(kind, wanted):
        assert distance(p_V, q_V) == pytest.approx(wanted, abs=1e-3)
        found = rates(p_V, q_V)
        assert (1 - wanted) / (1 + wanted) - 1e-3 < found.shared < found.rejection
        assert found.independent < found.shared


def test_the_page_has_the_table() -> None:
    page = (DOCS / "vllm-exact-verification.md").read_text()
    assert "\n".join(table()) in page
