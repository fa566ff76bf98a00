# SPDX-License-Identifier: Apache-2.0
"""expand_kernel.py: what the CPU build of vLLM makes of a temperature for each request."""

import os

os.environ["NEMO_SPECROLLOUT_V2_ON_CPU"] = "0"  # vLLM's own platform: the laboratory's has kernels of its own

import torch
from outcome import report
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens


def main() -> None:
    CpuPlatform.register_triton_kernel_overrides()
    ends = torch.tensor([3, 5], dtype=torch.int32)
    # Memory that is handed out again, so that what nothing writes is not 0 by luck.
    torch.full((5,), 7.0)
    temperatures = expand_batch_to_tokens(torch.tensor([0.5, 2.0]), ends, 5)
    greedy = expand_batch_to_tokens(torch.tensor([0.0, 2.0]), ends, 5, replace_from=0, replace_to=1)
    top_k = expand_batch_to_tokens(torch.tensor([4, 9], dtype=torch.int32), ends, 5)
    is_right = (
        temperatures.tolist() == [0.5, 0.5, 0.5, 2.0, 2.0]
        and greedy.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
        and top_k.tolist() == [4, 4, 4, 9, 9]
        and top_k.dtype == torch.int32
    )
    report(is_right, "T = 0.5, 2.0 for 3 and 2 rows: " + ", ".join(f"{t:.3g}" for t in temperatures.tolist()))


if __name__ == "__main__":
    main()
