# SPDX-License-Identifier: Apache-2.0
"""Steps of all sizes launch the variants of kernels that the warm-up has launched, so that Triton compiles none in a rollout.

Triton compiles a kernel again for another type, for the number 1, and for numbers and addresses that 16 divides or does not.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decode_step import HEAD, TEXT, DecodeStep, H, K, S, zeros
from device import FakeGpu, Launch, fake_gpu
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from nemo_specrollout.drafters.base import Texts

SIZES = (1, 2, 3, 15, 16, 17, 31, S)
"""Numbers of requests: 1, multiples of 16 and others."""
DRAFTERS = {"text": TEXT, "head": (HEAD,), "all": (*TEXT, HEAD)}
H100 = CUDABackend(GPUTarget("cuda", 90, 32))


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as fake:
        yield fake


def variants(gpu: FakeGpu) -> set[str]:
    """Returns the names of the recorded kernels, each with the key of Triton's cache of compiled kernels."""
    return {f"{launch.kernel.__name__}{key_of(launch)}" for launch in gpu.launches}


def key_of(launch: Launch) -> list[Any]:
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, H100)
    _, specialization, options = bind(
        *map(placed, launch.args), **{name: placed(v) for name, v in launch.options.items()}
    )
    return [specialization, sorted(options.items())]


def placed(value: Any) -> Any:
    """Returns an argument with an address: torch allocates at multiples of 512 bytes."""
    if isinstance(value, torch.Tensor):
        address = 512 + value.storage_offset() * value.itemsize
        return SimpleNamespace(dtype=value.dtype, data_ptr=lambda: address)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(placed, value))
    return tuple(map(placed, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_step_needs_another_variant_of_a_kernel(gpu: FakeGpu, name: str) -> None:
    step = DecodeStep(DRAFTERS[name])
    with gpu.step():
        step.drafting.warm_up()
    warm = variants(gpu)
    with gpu.step():
        for num_requests in SIZES:
            slots_B = zeros(num_requests, dtype=torch.int64)
            step.batch = SimpleNamespace(
                idx_mapping=slots_B,
                idx_mapping_np=np.arange(num_requests),
                num_reqs=num_requests,
                num_tokens=num_requests,
            )
            step._hidden_BH, step._num_rejected = zeros(num_requests, H, dtype=torch.bfloat16), zeros(num_requests)
            for num_drafts in (K, 0):
                step.draft(zeros(num_requests), num_drafts)
    assert variants(gpu) <= warm


def test_a_head_samples_any_number_of_rows_with_one_variant(gpu: FakeGpu) -> None:
    """vLLM warms the head up, and captures its CUDA graphs."""
    step = DecodeStep((HEAD,))
    with gpu.step():
        for num_rows in SIZES:
            step._hidden_BH = zeros(num_rows, H, dtype=torch.bfloat16)
            step.sample_drafts()
    assert len(gpu.launches) == 2 * len(SIZES) and len(variants(gpu)) == 2


@pytest.mark.parametrize("start", [0, 1])
def test_another_variant_is_noticed(gpu: FakeGpu, start: int) -> None:
    """A batch whose slots begin between two multiples of 16 bytes needs another."""
    step = DecodeStep(TEXT)
    with gpu.step():
        step.drafting.warm_up()
    warm = variants(gpu)
    states = step.runner.req_states
    texts = Texts(zeros(3, dtype=torch.int64)[start:], states.total_len.gpu, states.all_token_ids.gpu)
    with gpu.step():
        step.drafting.board.choose(texts, 0.0, step.drafting._lookups)
    assert (variants(gpu) <= warm) == (start == 0)
