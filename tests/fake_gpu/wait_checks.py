# SPDX-License-Identifier: Apache-2.0
"""The host waits for an event of the device only where vLLM's check of waits (`VLLM_GPU_SYNC_CHECK`) allows it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_step import HEAD, TEXT, DecodeStep, L, S, zeros
from device import GPU, FakeGpu, Waits, fake_gpu
from vllm.utils import gpu_sync_debug

from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity
from nemo_specrollout.generation.step.near_ties import NearTies


class Event:
    """A CUDA event that counts waits. A wait raises `Waits` unless vLLM allows it."""

    num_waits = 0

    def __init__(self, *_: Any, blocking: bool = False, **__: Any) -> None:
        self._sleeps = blocking

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        if not gpu_sync_debug._allow_depth.get():
            raise Waits("wrap it in gpu_sync_allowed()")
        assert self._sleeps, "the host would poll the driver"
        Event.num_waits += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu() as fake:
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
        yield fake


@pytest.mark.parametrize("drafters", [TEXT, (*TEXT, HEAD)], ids=["text", "all"])
def test_waits_of_a_step_are_allowed(gpu: FakeGpu, drafters: Any) -> None:
    step = DecodeStep(drafters)
    Event.num_waits = 0
    step.draft(step.verify())
    assert Event.num_waits > 0


def test_near_ties_leave_their_slots_without_a_wait(gpu: FakeGpu) -> None:
    """What a request leaves behind is copied while the steps go on, and waited for when it is taken."""
    ties = NearTies(S, L, GPU)
    lengths_S = zeros(S)
    Event.num_waits = 0
    with gpu.step():
        ties.open([NewRequest(b, RequestIdentity(1, 2, ties=b), 10, range(12), 100) for b in range(3)])
        ties.close([0, 2], lengths_S)
    assert Event.num_waits == 0
    assert [left[0].arrived is not None for left in ties._left.values()] == [True, True]


def test_a_wait_that_is_not_allowed_is_noticed(gpu: FakeGpu) -> None:
    with pytest.raises(Waits):
        torch.cuda.Event(blocking=True).synchronize()
