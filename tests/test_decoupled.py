# SPDX-License-Identifier: Apache-2.0
"""Drafters in their own processes: tokens equal plain decoding, even if drafters are killed or hang meanwhile.

No test counts on the speed of a process. Each rolls out until what it waits for has happened; pytest's time limit ends one
for which it never does.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import STEP_ADDER
from test_equality import assert_equal, requests

from lab.local.drafter_pool import DrafterPool
from lab.local.engine import Generation, RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DraftModelDrafterConfig,
    NgramDrafterConfig,
    RemoteDrafterConfig,
)
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport, drafter_spec
from nemo_specrollout.remote.protocol import peer as peers
from nemo_specrollout.remote.protocol import publishing
from nemo_specrollout.remote.protocol.draft_buffers import COUNT
from nemo_specrollout.remote.protocol.messages import MAX_FRAME_BYTES, PROTOCOL, FrameError, Hello, Welcome
from nemo_specrollout.remote.protocol.peer import PeerState
from nemo_specrollout.remote.protocol.publishing import publish
from nemo_specrollout.remote.protocol.transport import VerifierSocket
from nemo_specrollout.remote.verifier.draft_stream import RemoteDrafter
from nemo_specrollout.storage import weights_folder

pytestmark = pytest.mark.integration

ALWAYS_3 = BudgetConfig("fixed", k=3)
PATIENT_S = 600.0
"""Silence at which a drafter counts as lost: on a busy machine a sound one may need minutes for an answer."""


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "ANSWER_DEADLINE_S", PATIENT_S)
        patch.setattr(publishing, "ANSWERS_WITHIN_S", PATIENT_S)
        yield


@pytest.fixture(scope="module")
def similar_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adds noise to the policy's weights: a drafter that is often, but not always, right."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("similar")
    shutil.copytree(STEP_ADDER, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    noisy = {n: t + 0.05 * t.std() * torch.randn_like(t) if t.ndim == 2 else t for n, t in tensors.items()}
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def pool(similar_model: Path) -> Iterator[DrafterPool]:
    remote = RemoteDrafterConfig(model=str(similar_model), workers=2, max_requests=48)
    drafters = DrafterPool([drafter_spec(remote, {"max_model_len": 512})] * 2)
    drafters.addresses()
    drafters.wait_until_up()
    yield drafters
    drafters.stop()


def served_by(pool: DrafterPool, model: Path, budget: BudgetConfig = ALWAYS_3) -> SpecrolloutConfig:
    remote = RemoteDrafterConfig(model=str(model), addresses=tuple(pool.addresses()))
    return SpecrolloutConfig(drafters=(remote,), budget=budget)


@pytest.fixture(scope="module")
def engine(pool: DrafterPool, similar_model: Path, start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, served_by(pool, similar_model))


SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "no top-k, as NeMo-RL writes it": {"temperature": 1.0, "top_k": -1},
    "T=0": {"temperature": 0.0},
    "T=0.7, top-p": {"temperature": 0.7, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    return {name: plain.generate(requests(8, 4), **sampling) for name, sampling in SAMPLINGS.items()}


def remote_of(engine: RolloutEngine) -> RemoteDrafter:
    core = engine._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.specrollout_router.remote


def wait_until_ready(engine: RolloutEngine, count: int = 2) -> None:
    """Rolls out until `count` drafters answer."""
    peers = remote_of(engine).side.peers
    while sum(peer.state is PeerState.READY for peer in peers) < count:
        assert PeerState.REFUSED not in {peer.state for peer in peers}, [peer.reason for peer in peers]
        engine.generate(requests(1, 1))
        time.sleep(0.1)


def let_drafts_come(remote: RemoteDrafter) -> None:
    """Waits a moment for drafts that reach beyond the tokens of the steps under way."""
    for _ in range(100):
        with remote._lock:
            remote._receive()
            remote.side.buffers.write(remote.stream.table_SX)
        if remote.stream.table_SX[:, COUNT].max() > 3:
            return
        time.sleep(0.002)


def rolled_out(engine: RolloutEngine, asked: list[RolloutRequest], sampling: dict[str, Any]) -> list[Rollout]:
    """Returns rollouts of an engine that lets drafts come before each step: it is as fast as its drafters otherwise."""
    under_way = Generation(engine, asked, sampling=sampling)
    while not under_way.is_done:
        let_drafts_come(remote_of(engine))
        under_way.advance(seconds=0.0)
    return under_way.rollouts


def roll_out_until(
    engine: RolloutEngine, expected: dict[str, list[Rollout]], happened: Callable[[], bool], name: str = "T=1"
) -> None:
    """Rolls out until something has happened. The tokens equal plain decoding's."""
    while not happened():
        assert_equal(rolled_out(engine, requests(8, 4), SAMPLINGS[name]), expected[name])


def midway(engine: RolloutEngine, name: str = "T=1") -> Generation:
    """Returns a rollout of 32 requests of which each has a few tokens."""
    under_way = Generation(engine, requests(8, 4), sampling=SAMPLINGS[name])
    while under_way.num_tokens < 100:
        under_way.advance(seconds=0.0)
    assert not under_way.is_done
    return under_way


def proposed_and_accepted(engine: RolloutEngine) -> np.ndarray:
    stats = engine.stats()
    assert stats is not None
    return np.array([np.sum(stats.proposed), np.sum(stats.accepted)])


def num_accepted(engine: RolloutEngine) -> int:
    return int(proposed_and_accepted(engine)[1])


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_equal_plain_decoding(engine: RolloutEngine, expected: dict[str, list[Rollout]], name: str) -> None:
    wait_until_ready(engine)
    before = num_accepted(engine)
    roll_out_until(engine, expected, lambda: num_accepted(engine) >= before + 20, name)


def test_tokens_equal_plain_decoding_with_a_coupled_drafter_too(
    pool: DrafterPool,
    similar_model: Path,
    expected: dict[str, list[Rollout]],
    start_engine: Callable[..., RolloutEngine],
) -> None:
    """Some requests get remote drafts, some get drafts of the model in the engine, and some get none."""
    block = served_by(pool, similar_model, RANDOM)
    both = (*block.drafters, DraftModelDrafterConfig(model=str(similar_model)), NgramDrafterConfig())
    engine = start_engine(STEP_ADDER, replace(block, drafters=both))
    wait_until_ready(engine)
    roll_out_until(engine, expected, lambda: bool(np.min(proposed_by_drafter(engine)) >= 50))


def proposed_by_drafter(engine: RolloutEngine) -> np.ndarray:
    stats = engine.stats()
    assert stats is not None
    return np.sum(stats.proposed, axis=1)


def test_requests_are_spread_over_drafters(engine: RolloutEngine) -> None:
    wait_until_ready(engine)
    under_way = Generation(engine, requests(8, 4))
    under_way.advance(seconds=0.0)
    assert all(len(remote_of(engine).side.slots_of(drafter)) > 8 for drafter in (0, 1))
    under_way.advance()


def test_two_verifiers_share_two_drafters(
    pool: DrafterPool,
    similar_model: Path,
    engine: RolloutEngine,
    expected: dict[str, list[Rollout]],
    start_engine: Callable[..., RolloutEngine],
) -> None:
    other = start_engine(STEP_ADDER, served_by(pool, similar_model, BudgetConfig("auto")))
    wait_until_ready(engine)
    wait_until_ready(other)
    generations = [Generation(e, requests(8, 4)) for e in (engine, other)]
    while not all(generation.is_done for generation in generations):
        for generation in generations:
            if not generation.is_done:
                generation.advance(seconds=0.0)
    for generation in generations:
        assert_equal(generation.rollouts, expected["T=1"])


def signal_mid_rollout(pool: DrafterPool, engine: RolloutEngine, number: signal.Signals) -> tuple[int, list[Rollout]]:
    """Signals the first drafter during a rollout; returns its process id and the rollouts."""
    wait_until_ready(engine)
    victim = pool.processes[0].pid
    assert victim is not None
    under_way = midway(engine)
    os.kill(victim, number)
    under_way.advance()
    return victim, under_way.rollouts


def test_a_killed_drafter_is_replaced(
    pool: DrafterPool, engine: RolloutEngine, expected: dict[str, list[Rollout]]
) -> None:
    wait_until_ready(engine)
    peer = remote_of(engine).side.peers[0]
    known, (victim, found) = peer.drafter, signal_mid_rollout(pool, engine, signal.SIGKILL)
    assert_equal(found, expected["T=1"])
    roll_out_until(engine, expected, lambda: peer.drafter != known)  # its replacement has been greeted
    assert pool.processes[0].pid != victim
    wait_until_ready(engine)
    before = num_accepted(engine)
    roll_out_until(engine, expected, lambda: num_accepted(engine) > before)


def test_a_hanging_drafter_is_dropped_until_it_answers(
    pool: DrafterPool,
    engine: RolloutEngine,
    expected: dict[str, list[Rollout]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = remote_of(engine).side.peers[0]
    victim, found = signal_mid_rollout(pool, engine, signal.SIGSTOP)
    assert_equal(found, expected["T=1"])
    monkeypatch.setattr(peers, "ANSWER_DEADLINE_S", 1.0)
    roll_out_until(engine, expected, lambda: peer.state is not PeerState.READY)
    # A rollout may last so long that the drafter is greeted again meanwhile, which it does not answer either.
    assert peer.reason.startswith(("left a step unanswered", "does not answer"))
    monkeypatch.setattr(peers, "ANSWER_DEADLINE_S", PATIENT_S)
    os.kill(victim, signal.SIGCONT)
    wait_until_ready(engine)
    assert_equal(engine.generate(requests(8, 4)), expected["T=1"])


def test_policy_weights_may_change_during_rollouts(
    engine: RolloutEngine, start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    """Drafts of the old weights are verified against the new ones."""
    from safetensors.torch import load_file

    own = load_file(STEP_ADDER / "model.safetensors")
    other = {name: t * 1.02 for name, t in own.items()}
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    wait_until_ready(engine)
    for e in (plain, engine):
        e.load_weights(other.items())
    assert_equal(engine.generate(requests(8, 4)), plain.generate(requests(8, 4)))
    under_way = midway(engine)
    engine.load_weights(own.items())
    under_way.advance()
    assert_equal(engine.generate(requests(8, 4)), expected["T=1"])


@pytest.mark.parametrize("name", ["T=1", "T=0"])
def test_draft_weights_may_change_during_a_rollout(
    pool: DrafterPool,
    similar_model: Path,
    engine: RolloutEngine,
    expected: dict[str, list[Rollout]],
    tmp_path: Path,
    name: str,
) -> None:
    """With the policy's own weights every draft is right. A drafter that refuses a folder goes on with them."""
    wait_until_ready(engine)
    under_way = midway(engine, name)
    assert publish(pool.addresses(), b"", str(STEP_ADDER), 5) == {}
    under_way.advance()
    assert_equal(under_way.rollouts, expected[name])
    refusals = publish(pool.addresses(), b"", str(tmp_path), 6)
    assert all("is not a checkpoint of the draft model" in refusals[address] for address in pool.addresses())
    wait_until_ready(engine)
    before = proposed_and_accepted(engine)
    roll_out_until(engine, expected, lambda: proposed_and_accepted(engine)[0] > before[0], name)
    proposed, accepted = proposed_and_accepted(engine) - before
    assert proposed == accepted
    assert publish(pool.addresses(), b"", str(similar_model), 7) == {}
    assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[name]), expected[name])


def roll_out_while_published(
    engine: RolloutEngine, expected: list[Rollout], publish_next: Callable[[], object], name: str
) -> None:
    """Publishes in the middle of a rollout, whose tokens equal plain decoding's."""
    under_way = midway(engine, name)
    publish_next()
    under_way.advance()
    assert_equal(under_way.rollouts, expected)


@pytest.mark.parametrize("name", ["T=1", "T=0"])
def test_published_weights_are_found_under_faults(
    similar_model: Path,
    start_engine: Callable[..., RolloutEngine],
    expected: dict[str, list[Rollout]],
    tmp_path: Path,
    name: str,
) -> None:
    """Sound, half-written and damaged weights appear in the middle of rollouts, and the drafter is killed."""
    folder = tmp_path / "published"
    remote = RemoteDrafterConfig(model=str(similar_model), weights_from=str(folder))
    drafters = DrafterPool([drafter_spec(remote, {"max_model_len": 512})])
    process = drafters.processes[0]
    try:
        drafters.addresses()
        drafters.wait_until_up()
        engine = start_engine(STEP_ADDER, served_by(drafters, similar_model))
        wait_until_ready(engine, 1)

        def status() -> DrafterReport:
            return process.status or DrafterReport("")

        def until(happened: Callable[[], bool]) -> None:
            roll_out_until(engine, expected, happened, name)

        def half_written() -> None:
            shutil.copytree(STEP_ADDER, folder / "version_6")
            whole = (STEP_ADDER / "model.safetensors").read_bytes()
            (folder / "version_6" / "model.safetensors").write_bytes(whole[: len(whole) // 2])

        roll_out_while_published(engine, expected[name], lambda: weights_folder.publish(STEP_ADDER, folder, 5), name)
        until(lambda: status().draft_version == 5)
        wait_until_ready(engine, 1)
        before = proposed_and_accepted(engine)
        until(lambda: proposed_and_accepted(engine)[0] > before[0] + 100)
        proposed, accepted = proposed_and_accepted(engine) - before
        assert accepted > 0.8 * proposed, "with the policy's own weights nearly every draft is right"
        roll_out_while_published(engine, expected[name], half_written, name)
        until(lambda: "not a whole safetensors file" in status().weights_problem)
        assert status().draft_version == 5 and drafters.take_deaths()[0].startswith("drafter process 0 goes on with")
        killed = process.pid
        assert killed is not None
        roll_out_while_published(engine, expected[name], lambda: os.kill(killed, signal.SIGKILL), name)
        until(lambda: status().is_up and process.pid not in (None, killed))
        assert status().draft_version == 5, "a drafter that starts again has the newest sound weights at once"
        weights_folder.publish(similar_model, folder, 7)
        until(lambda: status().draft_version == 7 and not status().weights_problem)
    finally:
        drafters.stop()


def test_garbage_and_oversized_frames_are_ignored(
    pool: DrafterPool, engine: RolloutEngine, expected: dict[str, list[Rollout]]
) -> None:
    wait_until_ready(engine)
    rogue = zmq.Context.instance().socket(zmq.DEALER)
    rogue.setsockopt(zmq.LINGER, 0)
    rogue.connect(pool.addresses()[0])
    under_way = Generation(engine, requests(8, 4))
    for frame in (b"", b"garbage", os.urandom(1000), b"\x81" * 5000, bytes(MAX_FRAME_BYTES + 1000)):
        rogue.send(frame)
        rogue.send_multipart([frame, frame])
    under_way.advance()
    assert_equal(under_way.rollouts, expected["T=1"])
    wait_until_ready(engine)
    rogue.close()


def test_a_drafter_that_sends_garbage_is_dropped(
    start_engine: Callable[..., RolloutEngine], similar_model: Path, expected: dict[str, list[Rollout]]
) -> None:
    liar = zmq.Context.instance().socket(zmq.ROUTER)
    liar.setsockopt(zmq.LINGER, 0)
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    remote = RemoteDrafterConfig(model=str(similar_model), addresses=(f"tcp://127.0.0.1:{port}",))
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(remote,), budget=ALWAYS_3))
    under_way = midway(engine)
    peer = liar.recv_multipart()[0]
    for _ in range(50):
        liar.send_multipart([peer, os.urandom(200)])
    under_way.advance()
    assert_equal(under_way.rollouts, expected["T=1"])
    known = remote_of(engine).side.peers[0]
    roll_out_until(engine, expected, lambda: known.num_failures > 0)
    assert "secret" in known.reason
    liar.close()


def test_drafters_may_move_and_be_without_address(
    pool: DrafterPool, engine: RolloutEngine, expected: dict[str, list[Rollout]]
) -> None:
    """NeMo-RL needs this, because Ray places drafters and may restart one on another node."""
    wait_until_ready(engine)
    first, second = pool.addresses()
    failures = [p.num_failures for p in remote_of(engine).side.peers]
    for addresses, states in (
        (["", ""], [PeerState.AWAY] * 2),
        ([second, ""], [PeerState.READY, PeerState.AWAY]),
        ([first, second], [PeerState.READY] * 2),
    ):
        engine._llm.collective_rpc(WorkerCalls.specrollout_drafters_at.__name__, args=(addresses, ""))
        wait_until_ready(engine, states.count(PeerState.READY))
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS["T=1"]), expected["T=1"])
        assert [p.state for p in remote_of(engine).side.peers] == states
    assert [p.num_failures for p in remote_of(engine).side.peers] == failures, "a move is no failure"


def test_a_wrong_secret_gets_no_welcome(pool: DrafterPool) -> None:
    hello = Hello(PROTOCOL, 1, 96, "", [])
    wrong, right = (VerifierSocket(pool.addresses()[0], secret) for secret in (b"not the secret", b""))
    wrong.send(hello)
    right.send(hello)
    assert right.wait(PATIENT_S)
    assert [type(answer) for answer in right.receive()] == [Welcome]
    assert wrong.wait(PATIENT_S)
    with pytest.raises(FrameError, match="the drafter has another secret"):
        list(wrong.receive())
    for socket in (wrong, right):
        socket.close()


def test_a_drafter_of_another_vocabulary_is_refused(
    pool: DrafterPool, tiny_model: Path, start_engine: Callable[..., RolloutEngine], tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    engine = start_engine(folder, served_by(pool, folder))
    plain = start_engine(folder, SpecrolloutConfig(drafters=()))
    peer = remote_of(engine).side.peers[0]
    while peer.state is not PeerState.REFUSED:
        found = engine.generate(requests(2, 2))
    assert "tokenizer" in peer.reason
    assert_equal(found, plain.generate(requests(2, 2)))
