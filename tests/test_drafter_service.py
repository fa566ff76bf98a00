# SPDX-License-Identifier: Apache-2.0
"""The loop of a drafter process, driven by hand: its answers, and the messages that it refuses."""

import shutil
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import msgspec
import numpy as np
import pytest
import yaml
from conftest import STEP_ADDER

from nemo_specrollout.cli.main import main
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.remote.drafter.drafter_service import DrafterService
from nemo_specrollout.remote.drafter.drafter_spec import DrafterSpec
from nemo_specrollout.remote.protocol.messages import (
    COMMIT_ROW,
    DRAFT_ROW,
    PROTOCOL,
    Drafts,
    FrameError,
    Hello,
    Message,
    Open,
    Refuse,
    Step,
    Welcome,
    column,
    decode,
    encode,
)
from nemo_specrollout.remote.protocol.transport import DrafterSocket, VerifierSocket

pytestmark = pytest.mark.integration

TEXT = np.arange(5, 25, dtype=np.int32).tobytes()
NOTHING = {"closes": b"", "commits": b"", "tokens": b""}


def commits(*requests: int, count: int = 0) -> dict[str, bytes]:
    """Returns the field of a step whose requests have `count` new tokens each."""
    return {"commits": np.array([(request, 0, 0, count, 0) for request in requests], COMMIT_ROW).tobytes()}


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[DrafterService]:
    kwargs = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27}
    running = DrafterService(DrafterSpec(model=str(tiny_model), max_model_len=256, max_requests=4, vllm_kwargs=kwargs))
    yield running
    running.close()


@pytest.fixture
def socket(service: DrafterService) -> Iterator[VerifierSocket]:
    end = VerifierSocket(service.status.address, b"")
    yield end
    end.close()


def ask(service: DrafterService, socket: VerifierSocket, message: Message, turns: int = 4) -> list[Message]:
    """Sends a message, lets the service take some turns, and returns its answers."""
    sent = []

    def send(peer: Hashable, answer: Message) -> None:
        sent.append(answer)
        DrafterSocket.send(service._socket, peer, answer)

    socket.send(message)
    assert service._socket.wait(600.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service._socket, "send", send)
        for _ in range(turns):
            service.turn()
    num_ours = sum(answer.session == message.session for answer in sent)
    answers: list[Message] = []
    while len(answers) < num_ours:  # frames arrive one by one
        assert socket.wait(600.0)
        answers += socket.receive()
    return answers


def hello(session: int, vocab_size: int = 96) -> Hello:
    return Hello(PROTOCOL, session, vocab_size, "", [])


def opening(request: int, temperature: float = 1.0) -> Open:
    return Open(request, 1, temperature, 0, 1.0, 200, 4, TEXT)


def test_opened_requests_get_drafts(service: DrafterService, socket: VerifierSocket) -> None:
    assert isinstance(ask(service, socket, hello(1))[0], Welcome)
    answers = ask(service, socket, Step(1, 1, [opening(1 << 16)], **NOTHING), turns=8)
    positions = np.concatenate([column(a.drafts, DRAFT_ROW)["position"] for a in answers if isinstance(a, Drafts)])
    assert positions.tolist() == [20, 21, 22, 23]


def test_requests_that_vllm_refuses_get_no_drafts(service: DrafterService, socket: VerifierSocket) -> None:
    ask(service, socket, hello(2))
    opens = [opening(1 << 16, temperature=-1.0), opening(2 << 16 | 1)]
    answers = ask(service, socket, Step(2, 1, opens, **NOTHING), turns=8)
    requests = np.concatenate([column(a.drafts, DRAFT_ROW)["owner"] for a in answers if isinstance(a, Drafts)])
    assert set(requests.tolist()) == {2 << 16 | 1}


def test_a_full_drafter_lists_the_requests_it_lacks(service: DrafterService, socket: VerifierSocket) -> None:
    ask(service, socket, hello(3))
    opens = [opening(n << 16 | n) for n in range(1, 8)]
    ask(service, socket, Step(3, 1, opens, **NOTHING))
    answers = ask(service, socket, Step(3, 2, [], **{**NOTHING, **commits(*(o.request for o in opens))}))
    lacking = [r for a in answers if isinstance(a, Drafts) for r in column(a.lacking, np.int64).tolist()]
    assert opens[-1].request in lacking


def test_strangers_are_refused(service: DrafterService, socket: VerifierSocket) -> None:
    refusal = ask(service, socket, Step(99, 1, [], **NOTHING))[0]
    assert isinstance(refusal, Refuse) and "started again" in refusal.reason
    refusal = ask(service, socket, hello(4, vocab_size=97))[0]
    assert isinstance(refusal, Refuse) and "vocabulary has 96 ids, the policy's 97" in refusal.reason


def test_an_address_that_is_taken_raises_config_error(service: DrafterService, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        DrafterService(DrafterSpec(model=str(tiny_model), address=service.status.address))


@contextmanager
def running(service: DrafterService) -> Iterator[None]:
    """Lets the service take turns in another thread, because commands take signals and so need the main one."""
    ended = Event()

    def serve() -> None:
        while not ended.is_set():
            if not service.turn():
                service._socket.wait(0.05)

    thread = Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_publish_draft_gives_a_running_drafter_new_weights(
    service: DrafterService, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block: dict[str, object] = {"drafters": [{"type": "remote", "model": str(tiny_model), "workers": 1}]}
    for name in reversed(BLOCK_PATH.split(".")):
        block = {name: block}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(block))
    new = tmp_path / "new"
    shutil.copytree(tiny_model, new)
    command = ["publish-draft", str(config), "--address", service.status.address, "--weights"]
    with running(service):
        assert main([*command, str(tmp_path / "nowhere"), "--version", "4"]) == 2
        shown = capsys.readouterr()
        assert "is not a folder on the drafter's machine" in shown.out
        assert shown.err.count("\n") == 1
        assert "1 of 1 drafters did not take" in shown.err
        assert service.status.draft_version == 0
        assert main([*command, str(new), "--version", "5"]) == 0
        assert "version 5 is in use at 1 of 1 drafters" in capsys.readouterr().out
    assert service.status.draft_version == 5
    assert main(["publish-draft", str(config), "--weights", str(new)]) == 2
    assert "name where the drafters listen" in capsys.readouterr().err
    assert main([*command, "/weights\udcff"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_publish_draft_publishes_to_the_folder_that_drafters_look_at(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "published"
    drafter = {"type": "remote", "model": str(tiny_model), "workers": 1, "weights_from": str(folder)}
    block: dict[str, object] = {"drafters": [drafter]}
    for name in reversed(BLOCK_PATH.split(".")):
        block = {name: block}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(block))
    command = ["publish-draft", str(config), "--weights"]
    assert main([*command, str(STEP_ADDER)]) == 2
    assert "--weights:" in (said := capsys.readouterr().err) and "is not a checkpoint of the draft model" in said
    assert not folder.exists()
    assert main([*command, str(tiny_model), "--version", "5"]) == 0
    assert f"published {folder / 'version_5'}" in capsys.readouterr().out
    assert main([*command, str(tiny_model), "--version", "5"]) == 2
    assert "--version: 5 is not larger than 5" in capsys.readouterr().err
    kwargs = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27}
    spec = DrafterSpec(
        model=str(tiny_model), weights_from=str(folder), max_model_len=256, max_requests=4, vllm_kwargs=kwargs
    )
    service = DrafterService(spec)
    assert service.status.draft_version == 5
    assert main([*command, str(tiny_model)]) == 0
    while service.status.draft_version == 5:
        service.turn()
    assert service.status.draft_version > 1_700_000_000
    service.close()


@pytest.mark.parametrize(
    "change",
    [
        {"session": -1},
        {"session": 1 << 64},
        {"commits": b"1234567"},
        {"closes": bytes(7)},
        {"tokens": bytes(4)},
        commits(0, count=-1),
        commits(0, count=1),
        {"opens": [[1, 2]]},
        {"more": 1},
    ],
)
def test_invalid_steps_are_no_messages(change: dict[str, object]) -> None:
    valid = msgspec.to_builtins(Step(1, 1, [opening(5)], **NOTHING), builtin_types=(bytes,))
    assert decode(msgspec.msgpack.encode(valid)) == Step(1, 1, [opening(5)], **NOTHING)
    try:
        frame = msgspec.msgpack.encode({**valid, **change})
    except OverflowError:
        frame = encode(Step(1, 1, [], **NOTHING))[:-3]
    with pytest.raises(FrameError):
        decode(frame)
