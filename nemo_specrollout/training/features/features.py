# SPDX-License-Identifier: Apache-2.0
"""Features: the tokens of a sequence and the policy's hidden states at each, which a head learns from.

Shapes: T tokens of a sequence, P tokens of its prompt, A auxiliary layers, H hidden size, F = A * H.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SequenceFeatures:
    """Consecutive tokens of one sequence with the policy's hidden states; all tensors are on the CPU."""

    token_ids_T: torch.Tensor
    """Tokens at the positions `first_position` and above, int32 [T]."""
    aux_TF: torch.Tensor
    """Residual stream before each auxiliary layer, not normed, in the order of the layer ids, [T, F]."""
    final_TH: torch.Tensor
    """States after the final norm, [T, H]. The policy's LM head turns them into logits of the next token."""
    prompt_length: int
    """Tokens of the sequence that were given. A head learns to draft the tokens after them."""
    policy_version: int
    """Version of the weights that computed the features."""
    first_position: int = 0
    """Position of the first token in the sequence."""
    prompt_ids_P: torch.Tensor | None = None
    """The whole prompt, int32 [P]. Given if the KV cache held its first tokens, so that the features begin later."""

    def __post_init__(self) -> None:
        """Raises ValueError if the three tensors do not cover the same tokens."""
        if not len(self.token_ids_T) == len(self.aux_TF) == len(self.final_TH):
            lengths = f"{len(self.token_ids_T)} tokens, {len(self.aux_TF)} and {len(self.final_TH)} hidden states"
            raise ValueError(f"features must cover the same tokens, got {lengths}")

    @property
    def num_tokens(self) -> int:
        """Number of tokens with features."""
        return len(self.token_ids_T)

    @property
    def whole_prompt_P(self) -> torch.Tensor:
        """Tokens of the whole prompt, int32 [P]. Raises ValueError if they are unknown."""
        if self.prompt_ids_P is not None:
            return self.prompt_ids_P
        if self.first_position > 0 or self.num_tokens < self.prompt_length:
            raise ValueError("features that do not cover the whole prompt need prompt_ids_P")
        return self.token_ids_T[: self.prompt_length]

    @property
    def first_start(self) -> int:
        """Index in `token_ids_T` of the token before the first generated one, where a head starts to draft."""
        return max(0, self.prompt_length - self.first_position - 1)

    @property
    def num_draftable(self) -> int:
        """Number of generated tokens that a head can draft: all except the first, which the policy samples."""
        return max(0, self.num_tokens - 2 - self.first_start)

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors, bytes."""
        tensors = (self.token_ids_T, self.aux_TF, self.final_TH, self.prompt_ids_P)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def is_held_out(prompt_ids: torch.Tensor | Sequence[int], share: float) -> bool:
    """Returns whether sequences of this prompt are kept from training, which is the case for a `share` of all prompts.

    The answer depends on the prompt's content alone, so all samples of a prompt have the same.
    """
    data = np.ascontiguousarray(np.asarray(prompt_ids), dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") < share * 2**64


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Returns the auxiliary layers of a new head: an early, a middle and a late one.

    Unlike the defaults of vLLM and NeMo-RL, the three differ for shallow policies too. Raises ValueError for a policy
    of fewer than four layers.
    """
    if num_layers < 4:
        raise ValueError(f"a policy of {num_layers} layers is too shallow for default layer ids; name them yourself")
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 8 else (1, num_layers // 2, num_layers - 1)
