# SPDX-License-Identifier: Apache-2.0
"""Which modules a drafter shares with its target, and how to part them.

vLLM lets a drafter use the target's own embedding and lm_head where its own are missing from the checkpoint or equal.
Loading a trainer's draft weights into a shared one overwrites the policy (docs/upstream/nemo-rl-draft-refit.md).
"""

import copy
from collections.abc import Iterable

from torch import nn


def shared_modules(target: nn.Module, draft: nn.Module) -> list[str]:
    """Paths in `draft` of the leaf modules whose parameters are the target's own, sorted."""
    owned = {id(p) for p in target.parameters()}
    return sorted(
        name
        for name, module in draft.named_modules(remove_duplicate=False)
        if any(id(p) in owned for p in module.parameters(recurse=False))
    )


def part(draft: nn.Module, path: str) -> None:
    """Gives `draft` a copy of its own of the module at `path`."""
    parent_path, _, name = path.rpartition(".")
    parent = draft.get_submodule(parent_path)
    setattr(parent, name, copy.deepcopy(getattr(parent, name)))


def part_from_target(target: nn.Module, draft: nn.Module, weight_names: Iterable[str]) -> list[str]:
    """Parts every shared module that weights of these names would be loaded into; returns their paths.

    Loaders rename the modules above a leaf, so the leaf's name decides: `lm_head.weight` goes into any `lm_head`.
    """
    leaves = {parts[-2] for name in weight_names if len(parts := name.split(".")) > 1}
    paths = [path for path in shared_modules(target, draft) if path.rpartition(".")[2] in leaves]
    for path in paths:
        part(draft, path)
    return paths
