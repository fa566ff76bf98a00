# SPDX-License-Identifier: Apache-2.0
"""Both sides of the protocol over a faulty network: the output equals plain decoding in every schedule."""

import random

import pytest
from decoupled_world import FakeDrafter, FakeVerifier, Faults, Network, Request, plain_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_specrollout.remote.protocol import verifier_side
from nemo_specrollout.remote.protocol.messages import OPENED_BYTES

pytestmark = pytest.mark.unit


def run_world(seed: int, faults: Faults, num_verifiers: int, num_drafters: int, disasters: float) -> list[FakeVerifier]:
    """Runs a random schedule to its end, and checks after each step that the protocol knows the drafters' texts."""
    rng = random.Random(seed)
    network = Network(rng, faults)
    verifiers = [FakeVerifier(f"v{v}", rng, num_drafters, make_requests(rng)) for v in range(num_verifiers)]
    truth = {r.seed: plain_text(r.seed, r.prompt, r.limit) for v in verifiers for r in v.waiting}
    drafters = [FakeDrafter(d, rng, truth) for d in range(num_drafters)]
    now_s = 0.0
    while not all(v.is_done for v in verifiers):
        now_s += 0.01 * rng.random()
        actor = rng.choice([*drafters, *drafters, *drafters, *verifiers])
        if rng.random() < disasters:
            actor.restart()
        elif isinstance(actor, FakeDrafter) and rng.random() < disasters:
            actor.publish()
        actor.step(network, now_s)
        if isinstance(actor, FakeDrafter):
            actor.check()
    return verifiers


def make_requests(rng: random.Random) -> list[Request]:
    prompts = ([rng.randrange(1, 41) for _ in range(rng.randint(1, 9))] for _ in range(7))
    return [Request(rng.getrandbits(60), p, len(p) + rng.randint(1, 40)) for p in prompts]


def assert_plain(verifiers: list[FakeVerifier]) -> None:
    for verifier in verifiers:
        assert len(verifier.done) == 7
        for request in verifier.done:
            assert request.text == plain_text(request.seed, request.prompt, request.limit)


FAULTS = st.builds(
    Faults,
    loss=st.sampled_from([0.0, 0.02, 0.2]),
    duplication=st.sampled_from([0.0, 0.2]),
    delay_s=st.sampled_from([0.0, 0.02, 0.3]),
    reorders=st.booleans(),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    FAULTS,
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.01, 0.1]),
    st.sampled_from([OPENED_BYTES, 24]),  # 24 bytes are a text or two
)
def test_output_equals_plain_decoding_in_every_schedule(
    seed: int, faults: Faults, num_verifiers: int, num_drafters: int, disasters: float, opened_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier_side, "OPENED_BYTES", opened_bytes)
        assert_plain(run_world(seed, faults, num_verifiers, num_drafters, disasters))


@pytest.mark.parametrize(("faults", "least"), [(Faults(), 0.15), (Faults(loss=0.05), 0.1), (Faults(delay_s=0.02), 0.1)])
def test_drafts_are_used(faults: Faults, least: float) -> None:
    num_accepted = num_tokens = 0
    for seed in range(20):
        verifiers = run_world(seed, faults, num_verifiers=2, num_drafters=2, disasters=0.0)
        assert_plain(verifiers)
        num_accepted += sum(v.num_accepted for v in verifiers)
        num_tokens += sum(len(r.text) - len(r.prompt) for v in verifiers for r in v.done)
    assert num_accepted > least * num_tokens


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_schedules_equal_plain_decoding() -> None:
    rng = random.Random(0)
    for seed in range(10_000):
        faults = Faults(
            rng.choice([0, 0.02, 0.2]), rng.choice([0, 0.2]), rng.choice([0, 0.02, 0.3]), rng.random() < 0.5
        )
        assert_plain(run_world(seed, faults, rng.randint(1, 2), rng.randint(1, 2), rng.choice([0, 0.01, 0.1])))
