# SPDX-License-Identifier: Apache-2.0
"""Steps of all sizes launch the variants of kernels that the warm-up has launched, so that Triton compiles none in a rollout.

Triton compiles a kernel again for another type, for the number 1, and for numbers and addresses that 16 divides or does not.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compiling import specialized
from decode_step import HEAD, TEXT, DecodeStep, H, K, S, zeros
from device import FakeGpu, fake_gpu

from nemo_specrollout.drafters.base import NO_PRICE, Texts

SIZES = (1, 2, 3, 15, 16, 17, 31, S)
"""Numbers of requests: 1, multiples of 16 and others."""
DRAFTERS = {"text": TEXT, "head": (HEAD,), "all": (*TEXT, HEAD)}


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as fake:
        yield fake


def variants(gpu: FakeGpu) -> set[str]:
    """Returns the names of the recorded kernels, each with a hash of what Triton compiles them for."""
    found = ((launch.kernel.__name__, *specialized(launch)) for launch in gpu.launches)
    return {f"{name} {source.hash()} {sorted(options.items())}" for name, source, options in found}


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
                logits_indices=slots_B,
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
        step.drafting.board.choose(texts, NO_PRICE, step.drafting._lookups)
    assert (variants(gpu) <= warm) == (start == 0)
