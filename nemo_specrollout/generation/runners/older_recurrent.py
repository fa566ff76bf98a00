# SPDX-License-Identifier: Apache-2.0
"""Makes recurrent layers of vLLM before 0.32 read the right state for requests without drafts.

After an engine step with drafts, the state of a request is in one of several slots. Which one it is depends on the number of
accepted tokens. In the next engine step, layers of the gated delta rule (Qwen3-Next, Qwen3.5) look for the right slot only if
the request has drafts again. For a request without drafts vLLM takes the first slot, which is right only if no draft was
accepted. Otherwise tokens would be computed from an outdated state.

If the host chooses the drafts, many requests have none. So this module makes every decoding request of an engine with drafts
count as one with drafts. vLLM does the same since 0.32. Mamba's layers read the right slot in every version.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from nemo_specrollout.generation.engine import compat

_builder: Any = GDNAttentionMetadataBuilder
_MARK = "reads_states_of_specrollout"


def read_reached_states(runner: Any) -> None:
    """Makes layers of the gated delta rule read the right state of every request, in all engines of this process.

    Raises RuntimeError if the policy has recurrent layers and vLLM lacks the names that this change needs.
    """
    if not runner.model_config.is_hybrid or hasattr(_builder, _MARK):
        return
    compat.require(_builder, ["build"], _builder.__name__)
    build = _builder.build
    if not compat.takes(build, "num_decode_draft_tokens_cpu"):
        raise RuntimeError(f"vLLM {compat.VLLM_VERSION}: {_builder.__name__}.build takes no numbers of drafts")

    def build_with_reached_states(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        rows = common_attn_metadata
        if num_decode_draft_tokens_cpu is not None:
            num_decode_draft_tokens_cpu = with_rows_without_drafts(
                num_decode_draft_tokens_cpu, rows.query_start_loc_cpu, rows.is_prefilling
            )
        return build(self, common_prefix_len, rows, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build)

    _builder.build = build_with_reached_states
    setattr(_builder, _MARK, True)


def with_rows_without_drafts(
    num_drafts_B: torch.Tensor, starts_B1: torch.Tensor, is_prefilling_B: torch.Tensor
) -> torch.Tensor:
    """Returns a copy of `num_drafts_B` that says 1 for each decoding request without drafts, where vLLM has -1.

    `num_drafts_B` has the number of drafts of each request, int32 [B], or -1 for none. The 1 does no harm, because vLLM tests
    only which numbers are above -1, and whether their sum is above 0. vLLM takes the number of rows of each request from
    `starts_B1`. These are the B + 1 indices at which the rows of the B requests begin and end in the engine step. All tensors
    are on the host.
    """
    is_plain_B = (starts_B1.diff()[: len(num_drafts_B)] == 1) & ~is_prefilling_B[: len(num_drafts_B)].cpu()
    return torch.where(is_plain_B & (num_drafts_B < 0), 1, num_drafts_B)
