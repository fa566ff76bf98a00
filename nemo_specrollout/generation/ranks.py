# SPDX-License-Identifier: Apache-2.0
"""The ranks of an engine: which of them drafts, which of them vLLM listens to, and how all come to the same decisions."""

from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group


def may_draft() -> bool:
    """Returns whether vLLM builds a drafter on this rank."""
    return get_pp_group().is_last_rank


def is_output_rank() -> bool:
    """Returns whether vLLM takes this rank's outputs: the first tensor-parallel rank of the last pipeline stage."""
    return get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0


def agreed(decision: Any) -> Any:
    """Returns the decision of the first tensor-parallel rank. All ranks must act alike, but each has its own clock."""
    group = get_tp_group()
    return decision if group.world_size == 1 else group.broadcast_object(decision, src=0)


def copy_first_rank(*tensors: torch.Tensor) -> None:
    """Gives tensors on the device, in place, the values of the first tensor-parallel rank.

    All ranks must verify the same drafts, but their drafts may differ: kernels race for hash tables, and messages from remote
    drafters arrive at different times.
    """
    group = get_tp_group()
    for tensor in tensors if group.world_size > 1 else ():
        group.broadcast(tensor, src=0)
