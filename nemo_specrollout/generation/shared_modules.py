# SPDX-License-Identifier: Apache-2.0
"""Modules that a drafter shares with the policy, and how to give the drafter copies of its own.

vLLM lets a drafter use the policy's embedding and LM head where its own are missing from the checkpoint or equal. Loading
draft weights into a shared module overwrites the policy (docs/upstream/nemo-rl-draft-refit.md).
"""

import copy
from collections.abc import Iterable

from torch import nn
from vllm.model_executor.model_loader.reload import layerwise

LM_HEAD = "lm_head"
EMBEDDING = "embed_tokens"


def shared_modules(policy: nn.Module, draft: nn.Module) -> list[str]:
    """Returns the paths in `draft` of the leaf modules whose parameters are the policy's own, sorted."""
    owned = {id(p) for p in policy.parameters()}
    return sorted(
        name
        for name, module in draft.named_modules(remove_duplicate=False)
        if any(id(p) in owned for p in module.parameters(recurse=False))
    )


def part_from_policy(policy: nn.Module, draft: nn.Module, weight_names: Iterable[str]) -> list[str]:
    """Copies each shared module that weights of these names would be loaded into. Returns the paths of the copies in `draft`.

    Loaders rename the modules above a leaf, so the leaf's name decides: `lm_head.weight` goes into any `lm_head`.
    """
    leaves = {parts[-2] for name in weight_names if len(parts := name.split(".")) > 1}
    paths = [path for path in shared_modules(policy, draft) if path.rpartition(".")[2] in leaves]
    for path in paths:
        parent_path, _, name = path.rpartition(".")
        parent = draft.get_submodule(parent_path)
        setattr(parent, name, copy.deepcopy(getattr(parent, name)))
    return paths


def own_lm_head(policy: nn.Module, draft: nn.Module) -> None:
    """Gives a head an LM head of its own where vLLM let it share the policy's.

    vLLM shares the two if they are equal at start, as they are in a head that was never trained. Loading a head later would
    then overwrite the policy's. The embedding stays shared: no head learns one.
    """
    originals = {path: draft.get_submodule(path) for path in shared_modules(policy, draft)}
    for path in part_from_policy(policy, draft, [f"{LM_HEAD}.weight"]):
        _copy_reload_record(originals[path], draft.get_submodule(path))


def _copy_reload_record(original: nn.Module, copied: nn.Module) -> None:
    """Tells vLLM's weight reloading that `copied` is made like `original`."""
    known, new = layerwise.get_layerwise_info(original), layerwise.get_layerwise_info(copied)
    new.restore_metadata, new.restore_device = known.restore_metadata, known.restore_device
