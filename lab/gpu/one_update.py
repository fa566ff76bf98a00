# SPDX-License-Identifier: Apache-2.0
"""Computes weights that are one update older than a policy's, such as a training run would have had one step before.

The update's direction is the gradient of GRPO's objective on responses of the policy. AdamW's first step moves each weight by
the learning rate, whatever the size of its gradient, and later steps move most weights by less. A run keeps weights in float32
and serves them in bfloat16, where an update of 5e-6 changes few of them. Only the rounded weights are known here. So before a
weight is moved and rounded again, it gets a random float32 value among those that round to it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.local.grpo import group_normalized_advantages
from lab.policies.widened import read_policy
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
"""Number of binary digits of a number's significand."""


def one_update_older(
    folder: Path,
    requests: Sequence[RolloutRequest],
    rollouts: Sequence[Rollout],
    rewards: Sequence[float],
    learning_rate: float,
    device: str,
) -> dict[str, Tensor]:
    """Returns the policy's tensors as they were before an update that would have brought them to the weights in `folder`.

    The update is the one that these responses and their rewards would have caused. The tensors lie on the CPU.
    """
    gradients = _gradients(folder, requests, rollouts, _advantages(requests, rewards), device)
    generator = torch.Generator(device).manual_seed(0)
    _, tensors = read_policy(folder)
    moved = {}
    for name, weight in tensors.items():
        gradient = gradients.get(name)
        before = weight.to(device)
        older = before if gradient is None else _moved(before, gradient.sign() * learning_rate, generator)
        moved[name] = older.cpu()
    return moved


def _advantages(requests: Sequence[RolloutRequest], rewards: Sequence[float]) -> list[float]:
    group_B = torch.tensor([request.prompt_index for request in requests])
    advantages_B = group_normalized_advantages(torch.tensor(rewards), group_B, leave_one_out=False, normalize=True)
    return [float(advantage) for advantage in advantages_B]


def _gradients(
    folder: Path,
    requests: Sequence[RolloutRequest],
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    device: str,
) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device)
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    for request, rollout, advantage in zip(requests, rollouts, advantages, strict=True):
        if not advantage:
            continue
        ids = torch.tensor([[*request.prompt_token_ids, *rollout.token_ids]], device=device)
        start = len(request.prompt_token_ids)
        logits = model(ids, use_cache=False).logits[0, start - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, start:], reduction="sum")
        (advantage / num_tokens * loss).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _moved(weight: Tensor, change: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a weight plus a change, rounded to the weight's dtype.

    Before the change is added, the weight gets a random value among those that round to it.
    """
    exponent = torch.frexp(weight.float())[1]
    spacing = torch.ldexp(torch.ones_like(weight, dtype=torch.float64), exponent - _DIGITS[weight.dtype])
    place = torch.rand(weight.shape, dtype=torch.float64, device=weight.device, generator=generator) - 0.5
    moved = (weight.double() + place * spacing + change).to(weight.dtype)
    return torch.where(weight == 0, weight, moved)
