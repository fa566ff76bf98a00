# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that is a remote drafter in NeMo-RL: its start, its secret, its death and its failure."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from lab.local.own_ray import OwnRay
from nemo_specrollout.config.addresses import is_loopback
from nemo_specrollout.config.drafter_configs import as_key, secret_of_run
from nemo_specrollout.nemo_rl.remote_drafters import SpecrolloutDrafter
from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport, DrafterSpec
from nemo_specrollout.remote.protocol.messages import PROTOCOL, FrameError, Hello, Welcome
from nemo_specrollout.remote.protocol.publishing import publish
from nemo_specrollout.remote.protocol.transport import VerifierSocket
from nemo_specrollout.storage import weights_folder

pytestmark = pytest.mark.integration

KWARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27}


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """Returns a function that starts the actor; Ray needs no CPU for it."""
    own, kind = OwnRay(), SpecrolloutDrafter
    yield lambda *arguments: kind.options(num_cpus=0).remote(*arguments)  # type: ignore[attr-defined]
    own.stop()


def status_when(actor: Any, is_there: Callable[[DrafterReport], bool]) -> DrafterReport:
    """Waits for a status. While Ray starts the actor again, its calls fail."""
    while True:
        try:
            status: DrafterReport = ray.get(actor.status.remote())
            if is_there(status):
                return status
        except ray.exceptions.ActorUnavailableError:
            pass
        time.sleep(0.1)


def test_a_killed_drafter_is_started_again_with_the_run_s_secret_and_takes_new_weights(
    start: Callable[..., Any], tiny_model: Path
) -> None:
    secret = secret_of_run()
    actor = start(
        DrafterSpec(model=str(tiny_model), max_model_len=256, max_requests=4, vllm_kwargs=KWARGS), "127.0.0.1", secret
    )
    first = status_when(actor, lambda status: bool(status.address))
    assert is_loopback(first.address)
    os.kill(ray.get(actor.__ray_call__.remote(lambda drafter: os.getpid())), signal.SIGKILL)
    second = status_when(actor, lambda status: status.process != first.process and status.is_up)
    stranger, verifier = (VerifierSocket(second.address, key) for key in (b"another secret, also long", as_key(secret)))
    for socket in (stranger, verifier):
        socket.send(Hello(PROTOCOL, 1, 96, "", []))
    assert verifier.wait(60.0) and [type(message) for message in verifier.receive()] == [Welcome]
    assert stranger.wait(60.0)
    with pytest.raises(FrameError, match="the drafter has another secret"):
        list(stranger.receive())
    stranger.close()
    verifier.close()
    assert publish([second.address], as_key(secret), str(tiny_model), 3) == {}
    status_when(actor, lambda status: status.draft_version == 3)
    ray.kill(actor)


def test_a_killed_drafter_starts_with_the_newest_published_weights(
    start: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    spec = DrafterSpec(
        model=str(tiny_model), weights_from=str(tmp_path), max_model_len=256, max_requests=4, vllm_kwargs=KWARGS
    )
    weights_folder.publish(tiny_model, tmp_path, 3)
    actor = start(spec, "127.0.0.1", secret_of_run())
    first = status_when(actor, lambda status: status.is_up)
    assert first.draft_version == 3
    weights_folder.publish(tiny_model, tmp_path, 4)
    status_when(actor, lambda status: status.draft_version == 4)
    (tmp_path / "version_5").mkdir()
    (tmp_path / "version_5" / "pytorch_model.bin").write_bytes(b"1")
    held = status_when(actor, lambda status: bool(status.weights_problem))
    assert "it has no *.safetensors file" in held.weights_problem and held.draft_version == 4
    os.kill(ray.get(actor.__ray_call__.remote(lambda drafter: os.getpid())), signal.SIGKILL)
    second = status_when(actor, lambda status: status.process != first.process and status.is_up)
    assert second.draft_version == 4
    ray.kill(actor)


def test_a_drafter_that_cannot_start_says_why(start: Callable[..., Any], tmp_path: Path) -> None:
    actor = start(DrafterSpec(model=str(tmp_path / "none"), vllm_kwargs=KWARGS), "127.0.0.1", secret_of_run())
    with pytest.raises(ray.exceptions.RayTaskError, match="none"):
        status_when(actor, lambda status: False)
    ray.kill(actor)
