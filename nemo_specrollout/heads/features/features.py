# SPDX-License-Identifier: Apache-2.0
"""Features from which a draft head learns. They are the tokens of a sequence and the policy's hidden states at each token.

Shapes: T tokens of a sequence, P tokens of its prompt, R generated tokens of a chunk, B texts of a micro-batch, H hidden size,
F = auxiliary layers * H, V vocabulary. An auxiliary layer is a policy layer whose input the head reads.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel

CHUNK_ELEMENTS = 1 << 24
"""Approximate maximum number of logits that are in memory at a time."""
MAX_EXCESS, WARN_EXCESS = 2.0, 0.5
"""Limits for the surprise of rollouts minus the policy's entropy, in nats per token.

The surprise is minus the mean log-prob that the policy gives to the generated tokens. It is about the entropy if the policy
has sampled them. Rollouts above the first limit are refused. Rollouts above the second one cause a warning."""

Text = tuple[Sequence[int], int]
"""Token ids of a prompt followed by its response, and the number of tokens of the prompt."""


@dataclass(frozen=True)
class SequenceFeatures:
    """Successive tokens of one sequence with the policy's hidden states at these tokens. All tensors are on the CPU."""

    token_ids_T: torch.Tensor
    """Token ids, int32 [T]. The first one is that of the token at `first_position`."""
    aux_TF: torch.Tensor
    """Residual stream before each auxiliary layer, without norm, [T, F]. The auxiliary layers are the policy layers whose
    inputs the head reads, in the order of the head's layer ids."""
    final_TH: torch.Tensor
    """States after the final norm, [T, H]. The policy's LM head turns them into logits of the next token."""
    prompt_length: int
    """Number of tokens of the prompt. A head learns to draft only the tokens after the prompt."""
    policy_version: int
    """Version of the weights that computed the features."""
    first_position: int = 0
    """Position in the sequence of the first token of `token_ids_T`. It is 0 if the features begin where the sequence
    begins."""
    prompt_ids_P: torch.Tensor | None = None
    """Token ids of the whole prompt, int32 [P], if the features do not begin where the sequence begins. This happens if the
    engine had the first tokens of the prompt in its KV cache. Otherwise None."""

    def __post_init__(self) -> None:
        assert len(self.token_ids_T) == len(self.aux_TF) == len(self.final_TH), "features must cover the same tokens"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def whole_prompt_P(self) -> torch.Tensor:
        """Token ids of the whole prompt, int32 [P]. Raises ValueError if they are not known."""
        if self.prompt_ids_P is not None:
            return self.prompt_ids_P
        if self.first_position > 0 or self.num_tokens < self.prompt_length:
            raise ValueError("features that do not cover the whole prompt need prompt_ids_P")
        return self.token_ids_T[: self.prompt_length]

    @property
    def first_start(self) -> int:
        """Index in `token_ids_T` of the last token of the prompt, or 0 if the features begin after the prompt.

        From the states at this index on, a head learns to draft.
        """
        return max(0, self.prompt_length - self.first_position - 1)

    @property
    def num_draftable(self) -> int:
        """Number of generated tokens that a head can draft.

        The first generated token is not counted, because the policy always samples it before the head drafts.
        """
        return max(0, self.num_tokens - 2 - self.first_start)

    @property
    def num_bytes(self) -> int:
        tensors = (self.token_ids_T, self.aux_TF, self.final_TH, self.prompt_ids_P)
        return sum(t.nbytes for t in tensors if t is not None)


def is_held_out(prompt_ids: torch.Tensor | Sequence[int], share: float) -> bool:
    """Returns whether the sequences of a prompt are held out from training.

    This depends only on a hash of the prompt, and is true for about `share` of all prompts.
    """
    data = np.ascontiguousarray(np.asarray(prompt_ids), dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") < share * 2**64


@contextmanager
def loading_faults(folder: Path, what: str, fix: str = "copy the folder again") -> Iterator[None]:
    """Context manager that turns every error of transformers for a damaged `folder` into a ValueError.

    The text of the ValueError has `folder`, the problem (`what`) and what to do about it (`fix`). The errors of transformers
    have many types. A damaged tokenizer even makes Rust code panic, which in Python is not an `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder}: {what} ({reason}); {fix}") from error


def load_policy(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Returns the policy in a Hugging Face folder as a model for inference, without its LM head.

    Raises ValueError if the folder is damaged.
    """
    with loading_faults(folder, "transformers cannot load it"):
        model = AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def hf_features(
    policy: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int], max_tokens: int = 8192
) -> list[SequenceFeatures]:
    """Computes the features of `texts` with forward passes in the policy's dtype, and returns them in the same order.

    Each text must have a generated token. The features have the residual stream before each of the policy's layers in
    `layer_ids`. A forward pass has at most `max_tokens` positions including padding, but a text that is longer gets a pass of
    its own.
    """
    found: dict[int, SequenceFeatures] = {}
    for batch in _micro_batches([len(ids) for ids, _ in texts], max_tokens):
        ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(texts[i][0]) for i in batch], batch_first=True)
        # Causal attention never sees padding on the right, so no mask is needed, and the fastest kernels can be used.
        output = policy(input_ids=ids_BT.to(policy.device), output_hidden_states=True, use_cache=False)
        aux_BTF = torch.cat([output.hidden_states[i] for i in layer_ids], dim=-1).cpu()
        final_BTH = output.last_hidden_state.cpu()
        for row, i in enumerate(batch):
            ids, prompt_length = texts[i]
            own = (row, slice(len(ids)))
            aux_TF = aux_BTF[own].clone()
            final_TH = final_BTH[own].clone()
            found[i] = SequenceFeatures(ids_BT[own].int(), aux_TF, final_TH, prompt_length, policy_version=0)
    return [found[i] for i in range(len(texts))]


def _micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Groups texts of similar lengths, and yields the indices of the texts in each group.

    If the texts of a group are padded to the longest one, they take at most `max_tokens` positions. A text that is longer is a
    group of its own.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@torch.no_grad()
def check_surprise(
    lm_head_VH: torch.Tensor, sequences: Sequence[SequenceFeatures], temperature: float = 1.0
) -> str | None:
    """Returns a warning if another policy has probably sampled the generated tokens, and otherwise None.

    Token ids of another tokenizer may be valid ids, so only their probabilities show that they are wrong. If the policy itself
    has sampled the tokens, their mean log-prob is about minus the policy's entropy. Temperature 0 counts as 1. Raises
    ValueError if the policy cannot have sampled the tokens, because they are less likely than uniform guesses, or far less
    likely than the entropy suggests.
    """
    rows = max(1, CHUNK_ELEMENTS // len(lm_head_VH))
    logprob = entropy = 0.0
    for features in sequences:
        for start in range(features.first_start, features.num_tokens - 1, rows):
            stop = min(start + rows, features.num_tokens - 1)
            logits_RV = (features.final_TH[start:stop].to(lm_head_VH) @ lm_head_VH.T).float()
            logprobs_RV = torch.log_softmax(logits_RV / (temperature or 1.0), -1)
            tokens_R = features.token_ids_T[start + 1 : stop + 1].long().to(logprobs_RV.device)
            logprob += float(logprobs_RV.gather(1, tokens_R[:, None]).sum())
            entropy -= float((logprobs_RV.exp() * logprobs_RV).sum())
    num_tokens = max(1, sum(features.num_tokens - 1 - features.first_start for features in sequences))
    logprob = logprob / num_tokens
    entropy = entropy / num_tokens
    uniform = -math.log(len(lm_head_VH))
    mean = f"the policy gives the generated tokens a mean log-prob of {logprob:.2f}"
    refusal = "the rollouts are of another tokenizer or policy; give its own"
    if logprob < uniform:
        raise ValueError(f"{mean}, worse than {uniform:.2f} of guessing: {refusal}")
    if (excess := -logprob - entropy) > MAX_EXCESS:
        raise ValueError(f"{mean} and expects {-entropy:.2f} of its own: {refusal}")
    warning = f"{mean} and expects {-entropy:.2f} of its own: the rollouts look like another policy's"
    return warning if excess > WARN_EXCESS else None
