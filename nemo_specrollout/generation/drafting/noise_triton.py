# SPDX-License-Identifier: Apache-2.0
"""Computes the noise of the installed vLLM for this package's GPU kernels, by calling vLLM's own functions.

Devices compute logarithms differently. Because this package calls vLLM's functions, its kernels get the same bits as vLLM's
kernels on each device. Since 0.31 vLLM hashes seed, position and token with MurmurHash3. Older versions use Philox twice,
first to draw a seed for the position, and then to draw a number for the token.
"""

import triton
import triton.language as tl
from vllm.triton_utils import tldevice
from vllm.v1.worker.gpu.sample import gumbel

from nemo_specrollout.generation.engine.compat import HAS_MURMUR_NOISE

if HAS_MURMUR_NOISE:
    _uniform, _log1p_of_negative = gumbel.murmur3_uniform32, gumbel._log1p_neg_stable

    @triton.jit
    def noise_of(seed, position, token):  # type: ignore[no-untyped-def]
        """Returns the noise of tokens at one position of a request, float32. It depends on the request's seed."""
        return -tl.log(-_log1p_of_negative(_uniform(seed, position, token)))

else:
    _philox = gumbel.tl_rand32

    @triton.jit
    def noise_of(seed, position, token):  # type: ignore[no-untyped-def]
        """Returns the noise of tokens at one position of a request, float32. It depends on the request's seed."""
        uniform = _philox(tl.randint(seed, position), token, includes_zero=False)
        return -tl.log(-tldevice.log1p(-uniform))
