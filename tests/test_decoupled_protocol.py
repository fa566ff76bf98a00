# SPDX-License-Identifier: Apache-2.0
"""Both sides of the protocol over a faulty network: the output equals plain decoding in every schedule."""

import random
from typing import Any

import numpy as np
import pytest
from decoupled_world import MAX_AHEAD, MAX_LEN, VOCAB, FakeDrafter, FakeVerifier, Faults, Network, Request, plain_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_specrollout.remote.protocol import verifier_side
from nemo_specrollout.remote.protocol.drafter_side import DrafterSide, DraftModel
from nemo_specrollout.remote.protocol.messages import (
    COMMIT_ROW,
    DRAFT_ROW,
    MAX_ROWS,
    NO_SESSION,
    OPENED_BYTES,
    PROTOCOL,
    Drafts,
    Hello,
    Open,
    Refuse,
    Step,
    Welcome,
    column,
    decode,
    encode,
)
from nemo_specrollout.remote.protocol.peer import ANSWER_DEADLINE_S, LONGEST_PAUSE_S, PeerState
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest, VerifierSide

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


SESSION, DRAFTER = 5, 9
EVENTS = ("silence", "welcome", "refuse", "unreadable", "answer", "garbage", "flood", "no room")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0.0, 40.0)), max_size=12))
def test_a_drafter_in_any_state_is_found_again(events: list[tuple[str, float]]) -> None:
    """Whatever a drafter did, one that fits and answers at the same address is ready after the longest pause."""
    side = VerifierSide(SESSION, 1, 1, 4, PolicyModel(VOCAB))
    side.open(StreamRequest(0, 3, 1.0, 0, 1.0, 50))
    now_s = 0.0
    for event, seconds in events:
        now_s += seconds
        follow(side, now_s)
        happen(side, event, now_s)
    peer = side.peers[0]
    until_s = now_s + LONGEST_PAUSE_S + peer.patience_s + 2 * ANSWER_DEADLINE_S
    while now_s < until_s:
        now_s += 0.25
        for message in follow(side, now_s):
            if isinstance(message, Hello):
                side.receive(0, Welcome(SESSION, DRAFTER + 1, 64, 4), now_s)
            elif peer.drafter == DRAFTER + 1:
                side.receive(0, drafts(peer.last_number + 1, drafter=DRAFTER + 1, step=message.number), now_s)
    assert peer.state is PeerState.READY
    assert peer.reason == ""
    assert side.slots_of(0).tolist() == [0]


def follow(side: VerifierSide, now_s: float) -> list[Any]:
    """Takes a step of the engine; returns the messages to the drafter, as it reads them."""
    messages = side.follow(np.zeros((1, 64), np.int32), np.array([5]), now_s)
    return [decode(encode(message)) for _, message in messages]


def happen(side: VerifierSide, event: str, now_s: float) -> None:
    """Lets a drafter do something, or its connection break."""
    if event == "welcome":
        side.receive(0, Welcome(SESSION, DRAFTER, 64, 4), now_s)
    elif event == "no room":
        side.receive(0, Welcome(SESSION, DRAFTER, 64, 0), now_s)
    elif event == "refuse":
        side.receive(0, Refuse(SESSION, "another vocabulary"), now_s)
    elif event == "unreadable":
        side.receive(0, Refuse(NO_SESSION, "cannot be read"), now_s)
    elif event == "answer":
        side.receive(0, drafts(1), now_s)
    elif event == "flood":
        side.receive(0, drafts(1, drafts=np.zeros(60_000, DRAFT_ROW).tobytes()), now_s)
    elif event == "garbage":
        side.fail(0, "garbage", now_s)


def drafts(number: int, **parts: Any) -> Drafts:
    nothing = {"drafts": b"", "lacking": b"", "refused": b"", "reason": ""}
    told = {"session": SESSION, "drafter": DRAFTER, "step": 0, "token_s": 0.01, "num_shadows": 1, **nothing, **parts}
    return Drafts(number=number, **told)


def test_a_slow_drafter_gets_more_time_with_each_failure() -> None:
    """One that needs 5 s for a step is sound, and must not be told all texts again and again."""
    side = VerifierSide(SESSION, 1, 1, 4, PolicyModel(VOCAB))
    side.open(StreamRequest(0, 3, 1.0, 0, 1.0, 50))
    peer = side.peers[0]
    now_s = 0.0
    last_answer_s = 0.0
    for _ in range(600):
        now_s += 0.1
        for message in follow(side, now_s):
            if isinstance(message, Hello):
                side.receive(0, Welcome(SESSION, DRAFTER, 64, 4), now_s)
                last_answer_s = now_s
        if peer.state is PeerState.READY and now_s - last_answer_s > 5.0:
            last_answer_s = now_s
            side.receive(0, drafts(peer.last_number + 1), now_s)
    assert peer.state is PeerState.READY
    assert peer.num_failures <= 4
    assert "left a step unanswered" in peer.last_problem


def test_a_process_that_two_addresses_lead_to_serves_at_one() -> None:
    side = VerifierSide(SESSION, 1, 2, 4, PolicyModel(VOCAB))
    side.follow(np.zeros((1, 64), np.int32), np.array([5]), 0.0)
    for drafter in (0, 1):
        side.receive(drafter, Welcome(SESSION, DRAFTER, 64, 4), 0.0)
    assert [peer.state for peer in side.peers] == [PeerState.READY, PeerState.REFUSED]
    assert "the same process as drafter 0" in side.peers[1].reason


class Engine:
    """An engine of a drafter that refuses requests at negative temperatures, as vLLM does."""

    model = DraftModel(VOCAB, "", MAX_LEN)

    def __init__(self) -> None:
        self.num_opened = 0

    def open(self, shadow: int, opening: Open) -> None:
        if opening.temperature < 0:
            raise ValueError("temperature must be non-negative,\ngot -1.0")
        self.num_opened += 1

    def close_shadow(self, shadow: int) -> None:
        pass

    def correct(self, shadow: int, num_kept: int, tokens: list[int]) -> None:
        pass


def told(side: DrafterSide, step: Step) -> list[Drafts]:
    """Returns the drafter's answers to a step, as the verifier reads them."""
    side.receive("v", step, 0.0)
    answers = [decode(encode(answer)) for _, answer in side.outgoing()]
    assert all(isinstance(answer, Drafts) for answer in answers)
    return answers  # type: ignore[return-value]


def opening(request: int, temperature: float = 1.0, tokens: tuple[int, ...] = (1, 2, 3)) -> Open:
    return Open(request, 1, temperature, 0, 1.0, 50, MAX_AHEAD, np.array(tokens, np.int32).tobytes())


def greeted(num_shadows: int) -> DrafterSide:
    side = DrafterSide(Engine(), DRAFTER, num_shadows, MAX_AHEAD)
    side.receive("v", Hello(PROTOCOL, SESSION, VOCAB, "", []), 0.0)
    side.outgoing()
    return side


def commit(number: int, *rows: tuple[int, int, int]) -> Step:
    """Returns a step that continues texts of three tokens: numbers of requests, a new token of each, and its count."""
    commits = np.array([(request, 3, 0, count, MAX_AHEAD) for request, _, count in rows], COMMIT_ROW)
    tokens = np.repeat([token for _, token, _ in rows], [count for _, _, count in rows]).astype(np.int32)
    return Step(SESSION, number, [], b"", commits.tobytes(), tokens.tobytes())


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (opening(1, temperature=-1.0), "temperature must be non-negative, got -1.0"),
        (opening(1, tokens=(1, VOCAB)), f"token {VOCAB} is not among the {VOCAB} of the draft model"),
        (opening(1, tokens=()), "a text of 0 tokens"),
        (opening(1, tokens=(1,) * MAX_LEN), f"a text of {MAX_LEN} tokens"),
    ],
)
def test_the_verifier_hears_why_a_request_is_refused(odd: Open, reason: str) -> None:
    side = greeted(num_shadows=4)
    (answer,) = told(side, Step(SESSION, 1, [odd, opening(2)], b"", b"", b""))
    assert column(answer.refused, np.int64).tolist() == [1]
    assert reason in answer.reason
    assert (answer.step, answer.lacking, side.num_open) == (1, b"", 1)


def test_a_strange_token_costs_its_own_request_alone() -> None:
    side = greeted(num_shadows=4)
    told(side, Step(SESSION, 1, [opening(1), opening(2), opening(3)], b"", b"", b""))
    hash_of = {r: side.shadows.rings["prefix_hash"][s, 3] for s, r in enumerate(side._requests.tolist()) if r > 0}
    step = commit(2, (1, 4, 1), (2, VOCAB, 2), (3, 4, 1))
    rows = column(step.commits, COMMIT_ROW)
    rows["prefix_hash"] = [hash_of[1], hash_of[2], hash_of[3]]
    (answer,) = told(side, Step(SESSION, 2, [], b"", rows.tobytes(), step.tokens))
    assert column(answer.refused, np.int64).tolist() == [2]
    assert answer.lacking == b""
    assert sorted(side._requests[side._requests >= 0].tolist()) == [1, 3]
    assert sorted(side.shadows.state["committed"][side.shadows.state["limit"] > 0].tolist()) == [4, 4]


def test_a_full_drafter_says_at_once_which_requests_it_lacks() -> None:
    side = greeted(num_shadows=1)
    (answer,) = told(side, Step(SESSION, 1, [opening(1), opening(2)], b"", b"", b""))
    assert column(answer.lacking, np.int64).tolist() == [2]


def test_answers_are_split_when_a_message_cannot_hold_them() -> None:
    """Many steps may be read before one answer, when a drafter was busy."""
    side = greeted(num_shadows=1)
    for number, first in enumerate(range(1, 2 * MAX_ROWS, MAX_ROWS // 2), 1):
        rows = [(request, 0, 0) for request in range(first, first + MAX_ROWS // 2)]
        side.receive("v", commit(number, *rows), 0.0)
        side.receive("v", commit(number, *rows), 0.0)
    answers = [decode(encode(answer)) for _, answer in side.outgoing()]
    lacking = [r for answer in answers for r in column(answer.lacking, np.int64).tolist()]  # type: ignore[union-attr]
    assert lacking == list(range(1, 2 * MAX_ROWS + 1))
    assert [answer.number for answer in answers] == [1, 2]  # type: ignore[union-attr]
    assert side.outgoing() == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_schedules_equal_plain_decoding() -> None:
    rng = random.Random(0)
    for seed in range(10_000):
        faults = Faults(
            rng.choice([0, 0.02, 0.2]), rng.choice([0, 0.2]), rng.choice([0, 0.02, 0.3]), rng.random() < 0.5
        )
        assert_plain(run_world(seed, faults, rng.randint(1, 2), rng.randint(1, 2), rng.choice([0, 0.01, 0.1])))
