# SPDX-License-Identifier: Apache-2.0
"""Puts a published EAGLE-3 head into a running engine, and looks whether it is there: vLLM says nothing if it is not."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from nemo_specrollout.generation import compat
from nemo_specrollout.generation.shared_tensors import part, shared_modules
from nemo_specrollout.scheduling.canary import HeadHealth

LM_HEAD, EMBEDDING = "lm_head", "embed_tokens"
_NOT_LEARNED = ("t2d", "d2t")


def own_lm_head(target: nn.Module, draft: nn.Module) -> bool:
    """Gives a head an LM head of its own where vLLM let it share the policy's; returns whether it did.

    vLLM shares the two if they are equal at start, as they are of a head that was never trained. The next head that is
    loaded would then overwrite the policy's. The embedding stays shared: no head learns one.
    """
    shared = [path for path in shared_modules(target, draft) if path.rpartition(".")[2] == LM_HEAD]
    for path in shared:
        original = draft.get_submodule(path)
        part(draft, path)
        compat.copy_reload_record(original, draft.get_submodule(path))
    return bool(shared)


def load_head(runner: Any, folder: Path) -> None:
    """Replaces the weights of the runner's head by those in `folder`, which `training.head_facts.check_head` has accepted.

    Raises ValueError if the folder's head does not have the tensors that the engine's has; the engine keeps its own then.
    """
    tensors = _read(folder)
    draft = runner.drafter.model
    shared = {path.rpartition(".")[2] for path in shared_modules(runner.model, draft)}
    if LM_HEAD in shared:
        raise ValueError(
            f"the engine's head shares the policy's {LM_HEAD}: loading {folder} would overwrite the policy"
        )
    if EMBEDDING in shared:
        tensors = {name: t for name, t in tensors.items() if EMBEDDING not in name}
    wanted = runner.speculative_config.draft_model_config.hf_config.draft_vocab_size
    given = next((len(t) for name, t in tensors.items() if name.startswith(LM_HEAD)), None)
    if given != wanted:
        raise ValueError(
            f"{folder}: its {LM_HEAD} drafts {given} tokens, the engine was started with a head of {wanted}; a head can only "
            "be replaced by one of the same draft vocabulary"
        )
    compat.reload_draft_weights(runner, tensors)


def head_health(runner: Any, folder: Path | None, age_in_versions: int) -> HeadHealth:
    """What can be seen of the engine's head, which should be that of `folder`, without drafting: slow, so only when
    something is wrong."""
    draft = runner.drafter.model
    owned = {id(p) for p in runner.model.parameters()}
    # What a kernel has repacked is empty here.
    own = {name: p.detach() for name, p in draft.named_parameters() if id(p) not in owned and p.numel()}
    floats = [t for t in own.values() if t.is_floating_point()]
    in_use, meant = compat.aux_layer_ids(runner), None if folder is None else _layer_ids(folder)
    return HeadHealth(
        non_finite=any(not bool(torch.isfinite(t).all()) for t in floats),
        all_zero=any(not bool(t.any()) for t in floats),
        shares_target_tensors=tuple(p for p in shared_modules(runner.model, draft) if not p.endswith(EMBEDDING)),
        differs_from_published=folder is not None and not _are_those_of(own, _read(folder)),
        layer_ids_wrong=None not in (in_use, meant) and in_use != meant,
        age_in_versions=age_in_versions,
    )


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def _layer_ids(folder: Path) -> tuple[int, ...] | None:
    ids = json.loads((folder / "config.json").read_text()).get("eagle_aux_hidden_state_layer_ids")
    return None if ids is None else tuple(ids)


def _are_those_of(own: Mapping[str, torch.Tensor], published: Mapping[str, torch.Tensor]) -> bool:
    """Whether the engine's tensors, as far as they keep their names and shapes there, are the published ones."""
    for name, tensor in published.items():
        mine = next((t for n, t in own.items() if n in (name, f"model.{name}") and t.shape == tensor.shape), None)
        if mine is not None and not torch.equal(mine.cpu(), tensor.to(mine.dtype)):
            return False
    return True
