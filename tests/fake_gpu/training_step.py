# SPDX-License-Identifier: Apache-2.0
"""A training step of the local runner on a simulated CUDA device.

Tensors have no contents (torch's FakeTensorMode), and an operation that mixes tensors of the CPU and of the GPU raises an
error. Where the host reads a number, such as a loss, it reads 1. Gradients are
left out, because autograd in a CPU build of torch cannot follow tensors of a GPU.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from device import GPU, FakeGpu, _NoDriver
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

from lab.local import megatron_model
from lab.local.device import deterministic_kernels
from lab.local.grpo import LossInputs
from lab.local.megatron_model import TokenBatch, build_model
from lab.local.policy import MegatronPolicy
from lab.local.policy_shape import PolicyShape
from lab.local.run_sections import LossConfig, OptimizerConfig
from nemo_specrollout.storage.model_folder import read_object

pytestmark = pytest.mark.integration
POLICY = Path(__file__).parents[2] / "examples" / "models" / "step_adder"


@pytest.fixture
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Allows tensors on `GPU`; those on the CPU are without contents too, but for the rows of a batch."""
    with ExitStack() as stack:
        for name in ("set_device", "synchronize", "_lazy_init"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=GPU))
        stack.enter_context(mock.patch.dict(megatron_model._BACKENDS, cuda="fake"))
        stack.enter_context(mock.patch.object(torch.Tensor, "backward"))
        stack.enter_context(mock.patch.object(FakeTensor, "__float__", lambda self: 1.0))
        stack.enter_context(_NoDriver(FakeGpu()))
        yield FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_step_stays_on_one_device(fake_gpu: FakeTensorMode, dtype: torch.dtype) -> None:
    megatron_model.install(GPU)
    shape = PolicyShape.from_hf(read_object(POLICY / "config.json"))
    model = build_model(shape, dtype)
    batch, inputs = _batch()
    rows_b = torch.tensor([0, 1])
    with fake_gpu:
        policy = MegatronPolicy(model.to(GPU), shape, OptimizerConfig(lr=1e-4))
        with mock.patch.object(TokenBatch, "micro_batches", lambda *_: iter([(rows_b, 7)])):
            logprobs_BT = policy.logprobs(batch)
            with torch.no_grad():
                _, trained_BT = policy.train_step(batch, inputs, LossConfig(reference_policy_kl_penalty=0.1))
        policy.wait()
        refit_to = {tensor.device for _, tensor in policy.hf_tensors()}
    assert logprobs_BT.device.type == trained_BT.device.type == "cpu"
    assert {p.device for p in policy.model.parameters()} == refit_to == {GPU}


def _batch() -> tuple[TokenBatch, LossInputs]:
    batch = TokenBatch(torch.ones(2, 7, dtype=torch.int64), torch.tensor([7, 7]), torch.tensor([3, 3]))
    scores_BT = torch.zeros(2, 7)
    return batch, LossInputs(batch.response_mask_BT, torch.ones(2), scores_BT, scores_BT, scores_BT)


def test_deterministic_kernels_end_with_the_block() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), deterministic_kernels(GPU):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
