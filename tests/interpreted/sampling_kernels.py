# SPDX-License-Identifier: Apache-2.0
"""Each body that samples, scores or changes logits equals its kernel. Only log-probabilities may differ in the last bits.

For Gumbel sampling the sampled tokens are compared, because the rounding of logarithms changes the last bits of the noise.
"""

from collections.abc import Callable
from types import SimpleNamespace

import interpreter
import numpy as np
import pytest
import sampling_inputs
import text_inputs
import torch
from rows import SIZES, Rows, Size
from triton import jit
from triton import language as tl
from vllm.v1.worker.gpu.metrics import logits as nan_counts
from vllm.v1.worker.gpu.sample import gumbel as theirs

from lab.vllm_on_cpu.kernels import gumbel, logits, logprobs, noise
from lab.vllm_on_cpu.kernels.kernel_launch import BODIES

MODULES = {module.__name__ for module in (gumbel, logits, logprobs)}
BODIES = {name: body for name, body in BODIES.items() if body.__module__ in MODULES and "topk_topp" not in name}
"""All but top-k and top-p, whose body is vLLM's own sort."""
MAKERS = sampling_inputs.MAKERS | text_inputs.MAKERS
ROUNDED = {"vllm.v1.worker.gpu.sample.logprob._topk_log_softmax_kernel": 2e-6}


@jit
def _is_nan(x):  # type: ignore[no-untyped-def]
    return x != x  # noqa: PLR0124


# The interpreter has no libdevice.
nan_counts.libdevice = SimpleNamespace(isnan=_is_nan)

_uniform, _hash, _gumbel_tail = theirs.murmur3_uniform32, theirs.murmur3_hash32, theirs._log1p_neg_stable


def test_every_body_is_compared() -> None:
    assert set(MAKERS) == set(BODIES)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
@pytest.mark.parametrize("name", MAKERS, ids=lambda name: ".".join(name.split(".")[-2:]))
def test_a_body_equals_its_kernel(name: str, size: Size) -> None:
    def changes(make: Callable[[Rows], interpreter.Launch]) -> bool:
        return interpreter.compare(name, BODIES[name], lambda: make(Rows(size)), ROUNDED.get(name, 0.0), str(make))

    assert all(map(changes, MAKERS[name])), "the kernel changed nothing, so the inputs test nothing"


@jit
def _noise_kernel(seeds_ptr, positions_ptr, tokens_ptr, bits_ptr, uniforms_ptr, noise_ptr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    seed, position, token = tl.load(seeds_ptr + i), tl.load(positions_ptr + i), tl.load(tokens_ptr + i)
    uniform = _uniform(seed, position, token)
    tl.store(bits_ptr + i, _hash(seed, position, token).to(tl.int64))
    tl.store(uniforms_ptr + i, uniform)
    tl.store(noise_ptr + i, -tl.log(-_gumbel_tail(uniform)))


def test_noise_equals_that_of_vllm() -> None:
    num, rng = 4096, np.random.default_rng(0)
    seeds, positions = rng.integers(-(2**63), 2**63, num), rng.integers(0, 2**31, num)
    tokens = rng.integers(0, 2**18, num).astype(np.int32)
    seeds[:64], positions[:64], tokens[:64] = np.arange(64), 0, 0
    bits, uniforms, values = torch.zeros(num, dtype=torch.int64), torch.zeros(num), torch.zeros(num)
    _noise_kernel[(num // 1024,)](*map(torch.from_numpy, (seeds, positions, tokens)), bits, uniforms, values)
    where = list(zip(seeds, positions, tokens, strict=True))
    ours = [noise.token_bits(np.uint32(noise.row_state(s, p)), np.uint32(t)) for s, p, t in where]
    assert bits.tolist() == ours
    assert uniforms.tolist() == [noise.uniform32(*at) for at in where]
    torch.testing.assert_close(values, torch.tensor([noise.gumbel(*at) for at in where]), rtol=2e-6, atol=3e-7)
