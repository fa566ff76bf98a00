# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of the draft head in a running engine. It reads every weight, so it runs only after an alarm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_specrollout.config.drafter_configs import BLOCK_DRAFTERS
from nemo_specrollout.generation.head_loading import aux_layer_ids
from nemo_specrollout.generation.head_rope import head_context, rope_difference
from nemo_specrollout.generation.shared_modules import EMBEDDING, LM_HEAD, shared_modules
from nemo_specrollout.scheduling.heads.canary import HeadHealth
from nemo_specrollout.training.head.head_facts import read_head_facts, read_head_tensors

ZERO_IF_UNUSED = (".bias", "mask_embedding")
"""Endings of parameters that may be zero in a sound head: DFlash and DSpark embed masks apart from the vocabulary."""
SAME_WEIGHT = 0.5
"""Cosine above which a weight is recognized as a later version of another."""

Tensors = Mapping[str, torch.Tensor]


def head_health(runner: Any, folder: Path | None, previous: Path | None, age_in_versions: int) -> HeadHealth:
    """Returns what is wrong with the engine's head, found without drafting.

    The engine should have the head of `folder`, published after the head of `previous`. A kernel may have repacked a weight in
    the engine; then only the weight's file is checked.
    """
    draft = runner.speculator.model
    owned = {id(p) for p in runner.model.parameters()}
    own = {name: p.detach() for name, p in draft.named_parameters() if id(p) not in owned and p.numel()}
    facts = None if folder is None else read_head_facts(folder)
    published = {} if folder is None else read_head_tensors(folder)
    before = {} if previous is None else read_head_tensors(previous)
    floats = [(name, t) for name, t in (*own.items(), *published.items()) if t.is_floating_point()]
    in_use, intended = aux_layer_ids(runner), facts.layer_ids if facts else ()
    has_other_layers = in_use is not None and bool(intended) and in_use != intended
    method = runner.speculative_config.method
    configs = (runner.speculative_config.draft_model_config, runner.model_config)
    head_config, policy_config = (c.hf_text_config.to_dict() for c in configs)
    meant_to_share = (EMBEDDING, LM_HEAD) if method in ("mtp", *BLOCK_DRAFTERS) else (EMBEDDING,)
    return HeadHealth(
        non_finite=any(not bool(torch.isfinite(t).all()) for _, t in floats),
        all_zero=any(not bool(t.any()) for name, t in floats if not name.endswith(ZERO_IF_UNUSED)),
        shares_target_tensors=tuple(p for p in shared_modules(runner.model, draft) if not p.endswith(meant_to_share)),
        differs_from_published=not _holds(own, published),
        layer_ids_wrong=has_other_layers or _are_layers_swapped(published, before),
        qkv_interleaved=_is_interleaved(published, before),
        head_context=head_context(folder, runner.model_config.max_model_len),
        rope_difference=rope_difference(head_config, policy_config) if method == "eagle3" else "",
        age_in_versions=age_in_versions,
    )


def _holds(own: Tensors, published: Tensors) -> bool:
    """Returns whether the engine's tensors equal the published ones, where they kept their names and shapes."""
    for name, tensor in published.items():
        mine = next((t for n, t in own.items() if n in (name, f"model.{name}") and t.shape == tensor.shape), None)
        if mine is not None and not torch.equal(mine.cpu(), tensor.to(mine.dtype)):
            return False
    return True


def _are_layers_swapped(now: Tensors, before: Tensors) -> bool:
    """Returns whether a part of `fc` that reads one auxiliary layer resembles another layer's part in the previous head."""
    new, old = (_weight(tensors, "fc.weight") for tensors in (now, before))
    if new is None or old is None or new.shape != old.shape or new.shape[1] % new.shape[0]:
        return False
    new_A, old_A = (t.float().split(t.shape[0], dim=1) for t in (new, old))
    nearest = [max(range(len(old_A)), key=lambda i, part=part: _cosine(part, old_A[i])) for part in new_A]  # type: ignore[misc]
    return nearest != list(range(len(old_A)))


def _is_interleaved(now: Tensors, before: Tensors) -> bool:
    """Returns whether a projection resembles the previous head's only after its rows are regrouped.

    Megatron's layout looks so when it is read as Hugging Face's: attention heads and the elements of a head change places.
    """
    for projection in ("q_proj.weight", "k_proj.weight"):
        new, old = (_weight(tensors, projection) for tensors in (now, before))
        if new is None or old is None or new.shape != old.shape:
            continue
        as_it_is = _cosine(new, old)
        sizes = [n for n in range(2, len(new) // 2 + 1) if len(new) % n == 0]
        regrouped = (new.view(n, -1, new.shape[1]).transpose(0, 1).reshape(new.shape) for n in sizes)
        if as_it_is < SAME_WEIGHT and any(_cosine(t, old) > max(as_it_is, SAME_WEIGHT) for t in regrouped):
            return True
    return False


def _weight(tensors: Tensors, ending: str) -> torch.Tensor | None:
    return next((t for name, t in tensors.items() if name.endswith(ending)), None)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0))
