# SPDX-License-Identifier: Apache-2.0
"""Values and times that the host reads from the device without waiting, on a CPU, and on a GPU if there is one."""

import time

import numpy as np
import pytest
import torch

from nemo_specrollout.generation.engine.transfers import HostCopy, StageTimer

pytestmark = pytest.mark.unit

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_values_are_those_of_the_last_refresh_on_a_cpu() -> None:
    source = torch.arange(6.0).reshape(3, 2)
    copy = HostCopy(source)
    assert not copy.values.any()
    copy.refresh()
    source += 10
    assert np.array_equal(copy.values, [[0, 1], [2, 3], [4, 5]])
    copy.refresh()
    assert np.array_equal(copy.values, source.numpy())


def test_a_cpu_can_be_as_late_as_a_gpu() -> None:
    source = torch.zeros(3)
    copy = HostCopy(source, is_late=True)
    for step in range(1, 5):
        source.fill_(step)
        copy.refresh()
        assert copy.is_late and (copy.values == step - 1).all()


@pytest.mark.gpu
@gpu
def test_values_are_those_of_the_refresh_before_on_a_gpu() -> None:
    source = torch.zeros(1000, device="cuda")
    copy = HostCopy(source)
    for step in range(20):
        source.fill_(step)
        copy.refresh()
        assert (copy.values == max(step - 1, 0)).all()


def test_a_stage_is_timed_and_returned_once() -> None:
    timer = StageTimer(torch.device("cpu"))
    assert timer.finished() == []
    for tag in ("first", (2, 3)):
        timer.start()
        time.sleep(0.01)
        timer.stop(tag)
    (first, seconds), (second, _) = timer.finished()
    assert (first, second) == ("first", (2, 3)) and seconds >= 0.01
    assert timer.finished() == []


@pytest.mark.gpu
@gpu
def test_a_stage_on_a_gpu_is_returned_when_it_has_ended() -> None:
    timer, big = StageTimer(torch.device("cuda")), torch.rand(4096, 4096, device="cuda")
    for tag in range(3):
        timer.start()
        for _ in range(20):
            big = (big @ big).clamp_(0, 1)
        timer.stop(tag)
    torch.cuda.synchronize()
    told = timer.finished()
    assert [tag for tag, _ in told] == [0, 1, 2] and all(seconds > 1e-4 for _, seconds in told)
