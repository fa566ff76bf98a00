# SPDX-License-Identifier: Apache-2.0
"""Puts a published EAGLE-3 head into a running engine, and looks whether it is there: vLLM says nothing if it is not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_specrollout.config.drafter_configs import BLOCK_DRAFTERS
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.head_rope import head_context, layer_config, rope_difference
from nemo_specrollout.generation.shared_tensors import part, shared_modules
from nemo_specrollout.scheduling.heads.canary import HeadHealth
from nemo_specrollout.training.head.head_checks import check_values
from nemo_specrollout.training.head.head_facts import read_head_facts, read_head_tensors

LM_HEAD, EMBEDDING = "lm_head", "embed_tokens"
ZERO_IF_UNUSED = (".bias", "mask_embedding")
"""Parameters that are zero in a sound head: DFlash and DSpark have an embedding for masks besides the vocabulary's."""


def own_lm_head(target: nn.Module, draft: nn.Module) -> None:
    """Gives a head an LM head of its own where vLLM let it share the policy's.

    vLLM shares the two if they are equal at start, as they are of a head that was never trained. The next head that is
    loaded would then overwrite the policy's. The embedding stays shared: no head learns one.
    """
    shared = [path for path in shared_modules(target, draft) if path.rpartition(".")[2] == LM_HEAD]
    for path in shared:
        original = draft.get_submodule(path)
        part(draft, path)
        compat.copy_reload_record(original, draft.get_submodule(path))


def load_head(runner: Any, folder: Path) -> None:
    """Replaces the weights of the runner's head by those in `folder`.

    Raises ValueError if they are broken, or not of a head like the engine's; the engine keeps its own then.
    """
    facts = read_head_facts(folder)
    tensors = read_head_tensors(facts)
    check_values(facts, tensors)
    draft = runner.speculator.model
    shared = {path.rpartition(".")[2] for path in shared_modules(runner.model, draft)}
    if LM_HEAD in shared:
        raise ValueError(
            f"the engine's head shares the policy's {LM_HEAD}: loading {folder} would overwrite the policy"
        )
    if EMBEDDING in shared:
        tensors = {name: t for name, t in tensors.items() if EMBEDDING not in name}
    elif not any(EMBEDDING in name for name in tensors):
        tensors |= _policy_embedding(runner.model, facts.vocab_size)
    config = runner.speculative_config.draft_model_config.hf_config
    wanted = config.draft_vocab_size
    given = next((len(t) for name, t in tensors.items() if name.startswith(LM_HEAD)), None)
    if given != wanted:
        raise ValueError(
            f"{folder}: its {LM_HEAD} drafts {given} tokens, the engine was started with a head of {wanted}; a head can only "
            "be replaced by one of the same draft vocabulary"
        )
    if difference := rope_difference(layer_config(folder), config.to_dict(), "the engine's"):
        raise ValueError(
            f"{folder}: {difference}; RoPE is set when an engine starts: start another, or mend config.json"
        )
    compat.reload_draft_weights(runner, tensors)


def _policy_embedding(model: nn.Module, vocab_size: int) -> dict[str, torch.Tensor]:
    """The policy's embedding, by the name of a head's: a head without one drafts with it. Nothing where this rank has a part
    of it only; the engine's head keeps its own then."""
    found = (p for name, p in model.named_parameters() if name.endswith(f"{EMBEDDING}.weight"))
    weight = next(found, torch.empty(0))
    return {f"{EMBEDDING}.weight": weight.detach()[:vocab_size]} if len(weight) >= vocab_size else {}


def head_health(runner: Any, folder: Path | None, previous: Path | None, age_in_versions: int) -> HeadHealth:
    """What can be seen of the engine's head, which should be that of `folder` and came after that of `previous`, without
    drafting: slow, so only when something is wrong.

    A kernel may have repacked a weight, which leaves nothing to see of it in the engine; the files tell then.
    """
    draft = runner.speculator.model
    owned = {id(p) for p in runner.model.parameters()}
    own = {name: p.detach() for name, p in draft.named_parameters() if id(p) not in owned and p.numel()}
    facts = None if folder is None else read_head_facts(folder)
    published = {} if facts is None else read_head_tensors(facts)
    before = {} if previous is None else read_head_tensors(read_head_facts(previous))
    floats = [(name, t) for name, t in (*own.items(), *published.items()) if t.is_floating_point()]
    in_use, meant = compat.aux_layer_ids(runner), facts.layer_ids if facts else ()
    method = runner.speculative_config.method
    configs = (runner.speculative_config.draft_model_config, runner.model_config)
    head_config, policy_config = (c.hf_text_config.to_dict() for c in configs)
    meant_to_share = (EMBEDDING, LM_HEAD) if method in ("mtp", *BLOCK_DRAFTERS) else (EMBEDDING,)
    return HeadHealth(
        non_finite=any(not bool(torch.isfinite(t).all()) for _, t in floats),
        all_zero=any(not bool(t.any()) for name, t in floats if not name.endswith(ZERO_IF_UNUSED)),
        shares_target_tensors=tuple(p for p in shared_modules(runner.model, draft) if not p.endswith(meant_to_share)),
        differs_from_published=not _are_those_of(own, published),
        layer_ids_wrong=(in_use is not None and bool(meant) and in_use != meant)
        or _are_layers_swapped(published, before),
        qkv_interleaved=_is_interleaved(published, before),
        head_context=head_context(folder, runner.model_config.max_model_len),
        rope_difference=rope_difference(head_config, policy_config) if method == "eagle3" else "",
        age_in_versions=age_in_versions,
    )


def _are_those_of(own: Mapping[str, torch.Tensor], published: Mapping[str, torch.Tensor]) -> bool:
    """Whether the engine's tensors, as far as they keep their names and shapes there, are the published ones."""
    for name, tensor in published.items():
        mine = next((t for n, t in own.items() if n in (name, f"model.{name}") and t.shape == tensor.shape), None)
        if mine is not None and not torch.equal(mine.cpu(), tensor.to(mine.dtype)):
            return False
    return True


def _are_layers_swapped(now: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> bool:
    """Whether the parts of `fc` that read each auxiliary layer are more like another layer's of the head before."""
    new, old = (_weight(tensors, "fc.weight") for tensors in (now, before))
    if new is None or old is None or new.shape != old.shape or new.shape[1] % new.shape[0]:
        return False
    new_A, old_A = (t.float().split(t.shape[0], dim=1) for t in (new, old))
    nearest = [max(range(len(old_A)), key=lambda i, part=part: _cosine(part, old_A[i])) for part in new_A]  # type: ignore[misc]
    return nearest != list(range(len(old_A)))


def _is_interleaved(now: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> bool:
    """Whether the rows of a projection are more like those of the head before once their heads change places with the
    elements of a head, which is how Megatron's layout looks when read as Hugging Face's."""
    for projection in ("q_proj.weight", "k_proj.weight"):
        new, old = (_weight(tensors, projection) for tensors in (now, before))
        if new is None or old is None or new.shape != old.shape:
            continue
        as_it_is = _cosine(new, old)
        sizes = [n for n in range(2, len(new) // 2 + 1) if len(new) % n == 0]
        turned = (new.view(n, -1, new.shape[1]).transpose(0, 1).reshape(new.shape) for n in sizes)
        if as_it_is < 0.5 and any(_cosine(t, old) > max(as_it_is, 0.5) for t in turned):
            return True
    return False


def _weight(tensors: Mapping[str, torch.Tensor], ending: str) -> torch.Tensor | None:
    return next((t for name, t in tensors.items() if name.endswith(ending)), None)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0))
