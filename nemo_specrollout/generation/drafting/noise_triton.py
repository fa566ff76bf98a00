# SPDX-License-Identifier: Apache-2.0
"""The noise of the installed vLLM for our GPU kernels. It calls vLLM's own functions in the order of its `gumbel_sample`.

So our kernels and vLLM's get the same bits on any device, although devices compute logarithms differently. Since 0.31 vLLM
hashes seed, position and token with MurmurHash3. Before that it draws a seed for the position by Philox, and a number for the
token by Philox again.
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
        """Returns the noise of tokens, float32, for a request's seed and a position."""
        return -tl.log(-_log1p_of_negative(_uniform(seed, position, token)))

else:
    _philox = gumbel.tl_rand32

    @triton.jit
    def noise_of(seed, position, token):  # type: ignore[no-untyped-def]
        """Returns the noise of tokens, float32, for a request's seed and a position."""
        uniform = _philox(tl.randint(seed, position), token, includes_zero=False)
        return -tl.log(-tldevice.log1p(-uniform))
