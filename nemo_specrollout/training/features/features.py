# SPDX-License-Identifier: Apache-2.0
"""What a head learns from: a sequence's tokens and what the policy computed of them. One format for all sources.

Shapes: T tokens of a sequence, A auxiliary layers, H hidden size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SequenceFeatures:
    """Consecutive tokens of one sequence, and the policy's hidden states at each; all tensors on the CPU.

    `token_ids_T` int32: the tokens at positions `first_position` and on.
    `aux_TF` [T, A * H]: the residual stream *before* each auxiliary layer, un-normed, in the order of the layer ids.
    `final_TH` [T, H]: after the final norm, so that the policy's LM head makes of it the logits of the *next* token.
    `prompt_length` tokens of the sequence were given, the rest was generated: a head is trained to draft the latter.
    `policy_version`: the weights that computed the features.
    `prompt_ids_P` int32: the whole prompt, if the KV cache held its first tokens, so that the features begin later.
    """

    token_ids_T: torch.Tensor
    aux_TF: torch.Tensor
    final_TH: torch.Tensor
    prompt_length: int
    policy_version: int
    first_position: int = 0
    prompt_ids_P: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if the three tensors do not cover the same tokens."""
        if not len(self.token_ids_T) == len(self.aux_TF) == len(self.final_TH):
            lengths = f"{len(self.token_ids_T)} tokens, {len(self.aux_TF)} and {len(self.final_TH)} hidden states"
            raise ValueError(f"features must cover the same tokens, got {lengths}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def whole_prompt_P(self) -> torch.Tensor:
        """The prompt's tokens, int32 [P]. Raises ValueError if they are not known."""
        if self.prompt_ids_P is not None:
            return self.prompt_ids_P
        if self.first_position > 0 or self.num_tokens < self.prompt_length:
            raise ValueError("features that do not cover the whole prompt need prompt_ids_P")
        return self.token_ids_T[: self.prompt_length]

    @property
    def first_start(self) -> int:
        """Index in `token_ids_T` of the token before the first generated one. A head drafts from there on."""
        return max(0, self.prompt_length - self.first_position - 1)

    @property
    def num_draftable(self) -> int:
        """Number of generated tokens that a head can draft: all but the first, which the policy samples."""
        return max(0, self.num_tokens - 2 - self.first_start)

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        tensors = (self.token_ids_T, self.aux_TF, self.final_TH, self.prompt_ids_P)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Auxiliary layers of a new head: early, middle and late ones, always three different, unlike vLLM's and NeMo-RL's
    defaults for shallow models. Raises ValueError for a policy of fewer than four layers."""
    if num_layers < 4:
        raise ValueError(f"a policy of {num_layers} layers is too shallow for default layer ids; name them yourself")
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 8 else (1, num_layers // 2, num_layers - 1)
