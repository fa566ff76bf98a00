# SPDX-License-Identifier: Apache-2.0
"""Checks that the folder of a head is complete and fits its policy. Only `check_values` loads torch.

Shapes: D tokens that the head can draft.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_specrollout.training.head.head_facts import (
    LAYER_IDS_FIELD,
    HeadFacts,
    PolicyFacts,
    read_head_facts,
    read_head_tensors,
    read_policy_facts,
)

if TYPE_CHECKING:
    import torch


def check_head(folder: Path, policy_folder: Path, read_tensors: bool = True) -> HeadFacts:
    """Returns the facts of a head that fits the policy and is complete.

    Configs and headers are read in milliseconds. With `read_tensors`, all tensors are read and checked too.
    Raises ValueError with the field, its value and the fix.
    """
    facts, policy = read_head_facts(folder), read_policy_facts(policy_folder)
    _check_fit(facts, policy)
    _check_shapes(facts)
    if read_tensors:
        check_values(facts, read_head_tensors(facts))
    return facts


def misfit(head: str, policy: str) -> str | None:
    """Returns why a head does not fit a policy, by their headers; None if it fits or a name is no folder here."""
    if not (Path(head).is_dir() and Path(policy).is_dir()):
        return None
    try:
        check_head(Path(head), Path(policy), read_tensors=False)
    except ValueError as error:
        return str(error)
    return None


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int, where: str) -> None:
    """Raises ValueError, which begins with `where`, unless the ids are distinct layers of the policy."""
    if not layer_ids:
        raise ValueError(
            f"{where}: {LAYER_IDS_FIELD} is absent, and vLLM would guess; write the ids that the head was trained on"
        )
    if len(set(layer_ids)) < len(layer_ids) or min(layer_ids) < 0 or max(layer_ids) >= num_layers:
        ids = list(layer_ids)
        raise ValueError(f"{where}: {LAYER_IDS_FIELD} {ids}; name distinct layers of the policy, 0 to {num_layers - 1}")


def check_values(facts: HeadFacts, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Raises ValueError for tensors that are not finite, all zero, or no valid map of the vocabulary."""
    import torch

    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{facts.folder}: {name} has NaN or infinite values; go back to an earlier head")
        if not tensor.any() and not name.endswith(".bias"):
            raise ValueError(
                f"{facts.folder}: {name} is all zero, so it was never loaded or trained; write the head again"
            )
    if "d2t" not in tensors:
        return
    ids_D = tensors["d2t"] + torch.arange(facts.draft_vocab_size)
    if len(ids_D.unique()) < len(ids_D) or int(ids_D.min()) < 0 or int(ids_D.max()) >= facts.vocab_size:
        raise ValueError(f"{facts.folder}: d2t + index must be distinct ids below {facts.vocab_size}; write d2t again")
    if "t2d" in tensors and tensors["t2d"].nonzero().flatten().tolist() != sorted(ids_D.tolist()):
        raise ValueError(f"{facts.folder}: t2d and d2t name different tokens; write both again")


def _check_fit(facts: HeadFacts, policy: PolicyFacts) -> None:
    """Raises ValueError if the head's config does not fit the policy's."""
    where = f"{facts.folder}/config.json"
    for name in ("hidden_size", "vocab_size"):
        head, wanted = getattr(facts, name), getattr(policy, name)
        if head != wanted:
            raise ValueError(f"{where}: {name} {head}, the policy's is {wanted}; use a head made for this policy")
    if facts.max_position_embeddings < policy.max_position_embeddings:
        raise ValueError(
            f"{where}: max_position_embeddings {facts.max_position_embeddings} is less than the policy's "
            f"{policy.max_position_embeddings}; vLLM would shorten every context: set it to the policy's"
        )
    if not 0 < facts.draft_vocab_size <= facts.vocab_size:
        raise ValueError(f"{where}: draft_vocab_size {facts.draft_vocab_size}; it must be 1 to {facts.vocab_size}")
    check_layer_ids(facts.layer_ids, policy.num_layers, where)


def _check_shapes(facts: HeadFacts) -> None:
    """Raises ValueError unless the tensors are the ones that the config requires or allows."""
    expected, optional, found = facts.expected_shapes(), facts.optional_shapes(), facts.shapes
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys() - optional.keys())
    if missing or surplus:
        raise ValueError(f"{facts.folder}: tensors missing {missing}, surplus {surplus}; write the head again")
    for name, shape in found.items():
        wanted = (expected | optional)[name]
        if shape == wanted:
            continue
        if name == "fc.weight" and shape[1] % facts.hidden_size == 0:
            used = shape[1] // facts.hidden_size
            raise ValueError(
                f"{facts.folder}/config.json: {LAYER_IDS_FIELD} {list(facts.layer_ids)}, but fc.weight uses {used} layers; "
                f"name {used} ids"
            )
        raise ValueError(f"{facts.folder}: {name} is {list(shape)}, its config asks for {list(wanted)}")
