# SPDX-License-Identifier: Apache-2.0
"""Evaluates a small policy by one sample per problem at temperature 1.

Shapes: B requests, T positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lab.local.step_addition import encode_prompt, make_problems, reward_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

MAX_NEW_TOKENS = 768
EVALUATION_SEED = 1_000_003


@dataclass(frozen=True)
class Evaluation:
    """Figures of one sample per problem at temperature 1.

    Rates are from 0 to 1, entropy is in nats, and lengths are in tokens, including the end token.
    """

    num_samples: int
    accuracy: float
    ended_rate: float
    entropy_per_token: float
    median_length: int
    p95_length: int
    max_length: int


@torch.inference_mode()
def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_samples: int, batch_size: int = 64
) -> Evaluation:
    """Evaluates one sample at temperature 1 for each of `num_samples` problems that training never sees."""
    torch.manual_seed(EVALUATION_SEED)
    problems = sorted(make_problems(EVALUATION_SEED, num_samples), key=lambda problem: len(problem.terms))
    rewards: list[float] = []
    lengths: list[int] = []
    entropy, num_ended = 0.0, 0
    model.eval()
    for first in range(0, num_samples, batch_size):
        chunk = problems[first : first + batch_size]
        ids_BT, entropy_BT = sample(model, tokenizer, [encode_prompt(problem, tokenizer) for problem in chunk])
        ended_BT = ids_BT == tokenizer.eos_token_id
        live_BT = ended_BT.long().cumsum(1) - ended_BT.long() == 0
        rewards += [reward_of_ids(p, ids, tokenizer) for p, ids in zip(chunk, ids_BT.tolist(), strict=True)]
        lengths += live_BT.sum(1).tolist()
        entropy += float((entropy_BT * live_BT).sum())
        num_ended += int(ended_BT.any(1).sum())
    lengths.sort()
    return Evaluation(
        num_samples=num_samples,
        accuracy=sum(rewards) / num_samples,
        ended_rate=num_ended / num_samples,
        entropy_per_token=entropy / sum(lengths),
        median_length=lengths[num_samples // 2],
        p95_length=lengths[int(0.95 * num_samples)],
        max_length=lengths[-1],
    )


def sample(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids_BT, entropy_BT) of one response per prompt at temperature 1. Ids after the end token are padding."""
    padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt", padding_side="left")
    policy: Any = model  # transformers types `generate` for protocols that its own models do not meet
    output = policy.generate(
        **padded,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits_BTV = torch.stack(output.logits, dim=1).float()
    entropy_BT = torch.distributions.Categorical(logits=logits_BTV).entropy()
    return output.sequences[:, padded["input_ids"].shape[1] :], entropy_BT
