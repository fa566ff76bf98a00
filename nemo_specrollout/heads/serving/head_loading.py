# SPDX-License-Identifier: Apache-2.0
"""Loads the weights of a draft head into a running engine, and compares its modules and its RoPE with the policy's.

If a drafter's checkpoint has no embedding or LM head, or the same one as the policy, vLLM lets the drafter use the policy's
module. Loading draft weights into such a shared module would overwrite the policy (docs/upstream/nemo-rl-draft-refit.md).
"""

import copy
import json
from collections.abc import Iterable, Mapping
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models import llama_eagle3, qwen3_eagle3
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

from nemo_specrollout.heads.files.head_facts import check_values, nested_layer_ids, read_head_facts, read_head_tensors

LM_HEAD = "lm_head"
EMBEDDING = "embed_tokens"
GATHERED_ROWS = 8192
"""Number of rows of the embedding or LM head that are gathered from all ranks at a time."""
_ROPE_DEFAULTS = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}


def shared_modules(policy: nn.Module, draft: nn.Module) -> list[str]:
    """Returns the paths of the modules in `draft` whose parameters are also parameters of the policy, sorted.

    Only parameters of a module itself count, and not those of the modules in it.
    """
    owned = {id(p) for p in policy.parameters()}
    return sorted(
        name
        for name, module in draft.named_modules(remove_duplicate=False)
        if any(id(p) in owned for p in module.parameters(recurse=False))
    )


def part_from_policy(policy: nn.Module, draft: nn.Module, weight_names: Iterable[str]) -> list[str]:
    """Gives `draft` its own copies of the modules that it shares with the policy and that `weight_names` would overwrite.

    Returns the module paths of the copies in `draft`. Weights are matched to modules by the module's own name alone, because a
    loader may rename the path before it. For example, `lm_head.weight` matches every module that is called `lm_head`.
    """
    leaves = {parts[-2] for name in weight_names if len(parts := name.split(".")) > 1}
    paths = [path for path in shared_modules(policy, draft) if path.rpartition(".")[2] in leaves]
    for path in paths:
        parent_path, _, name = path.rpartition(".")
        parent = draft.get_submodule(parent_path)
        setattr(parent, name, copy.deepcopy(getattr(parent, name)))
    return paths


def own_lm_head(policy: nn.Module, draft: nn.Module) -> None:
    """Gives a draft head an LM head of its own if vLLM lets it share the policy's.

    vLLM shares the policy's LM head with the draft head if the draft head's own is equal to it at the start. A draft head that
    was never trained has an equal one. Loading another draft head later would then overwrite the policy's LM head. The
    embedding stays shared, because draft heads do not learn one.
    """
    originals = {path: draft.get_submodule(path) for path in shared_modules(policy, draft)}
    for path in part_from_policy(policy, draft, [f"{LM_HEAD}.weight"]):
        # vLLM's weight reloading must treat the copy like the original.
        known, new = (layerwise.get_layerwise_info(module) for module in (originals[path], draft.get_submodule(path)))
        new.restore_metadata = known.restore_metadata
        new.restore_device = known.restore_device


def load_published_head(runner: Any, folder: Path) -> None:
    """Replaces the weights of an engine's draft head by those in `folder`. `runner` is the engine's vLLM model runner.

    Raises ValueError if the weights are broken or belong to another kind of head. The engine then keeps its present head.
    """
    facts = read_head_facts(folder)
    tensors = read_head_tensors(folder)
    check_values(facts, tensors)
    shared = {path.rpartition(".")[2] for path in shared_modules(runner.model, runner.speculator.model)}
    if LM_HEAD in shared:
        raise ValueError(f"the engine's head shares the policy's {LM_HEAD}, which {folder} would overwrite")
    if EMBEDDING in shared:
        tensors = {name: t for name, t in tensors.items() if EMBEDDING not in name}
    elif not any(EMBEDDING in name for name in tensors):
        tensors |= _policy_embedding(runner.model, facts.vocab_size)
    config = runner.speculative_config.draft_model_config.hf_config
    expected = config.draft_vocab_size
    found = next((len(t) for name, t in tensors.items() if name.startswith(LM_HEAD)), None)
    if found != expected:
        raise ValueError(f"{folder}: it drafts {found} tokens, the engine's {expected}; give the same draft vocabulary")
    if difference := rope_difference(layer_config(folder), config.to_dict(), "the engine's"):
        raise ValueError(f"{folder}: {difference}; RoPE is set at an engine's start: restart, or correct config.json")
    reload_draft_weights(runner, tensors)


def aux_layer_ids(runner: Any) -> tuple[int, ...] | None:
    """Returns the layers whose inputs the engine's policy hands to the head, or None if the policy's class does not tell."""
    model = getattr(runner.get_model(), "model", None)
    ids = getattr(model, "aux_hidden_state_layers", None)
    return None if ids is None else tuple(ids)


def policy_teachers(runner: Any) -> dict[str, torch.Tensor]:
    """Returns the policy's embedding and LM head by their Hugging Face names, on the CPU, with the rows of all ranks.

    All tensor-parallel ranks must call this together. An LM head that is tied to the embedding is left out. Raises ValueError
    for a model whose embedding is not split by rows in vLLM.
    """
    layers = [m for m in runner.get_model().modules() if isinstance(m, VocabParallelEmbedding)]
    embedding = next((m for m in layers if not isinstance(m, ParallelLMHead)), None)
    lm_head = next((m for m in layers if isinstance(m, ParallelLMHead)), embedding)
    if embedding is None or lm_head is None:
        raise ValueError(f"{type(runner.get_model()).__name__} has no embedding that vLLM splits by rows")
    names = {"model.embed_tokens.weight": embedding, "lm_head.weight": lm_head}
    if lm_head.weight is embedding.weight:
        del names["lm_head.weight"]
    return {name: _all_rows(layer) for name, layer in names.items()}


def _policy_embedding(model: nn.Module, vocab_size: int) -> dict[str, torch.Tensor]:
    """Returns the policy's embedding, to be loaded together with a published head that has no embedding.

    The result is a dict from the embedding's name in a head to the tensor. It is empty if this rank has only a part of the
    embedding. Then the engine's head keeps its present embedding.
    """
    found = (p for name, p in model.named_parameters() if name.endswith(f"{EMBEDDING}.weight"))
    weight = next(found, torch.empty(0))
    return {f"{EMBEDDING}.weight": weight.detach()[:vocab_size]} if len(weight) >= vocab_size else {}


def reload_draft_weights(runner: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Loads tensors of a checkpoint into the drafter's model, even if vLLM has repacked the weights there."""
    draft = runner.speculator.model
    with set_current_vllm_config(runner.vllm_config), torch.device(runner.device):
        layerwise.initialize_layerwise_reload(draft)
        draft.load_weights(iter(tensors.items()))
        layerwise.finalize_layerwise_reload(draft, runner.speculative_config.draft_model_config)


def _all_rows(layer: VocabParallelEmbedding) -> torch.Tensor:
    """Returns the rows of a layer's weight from all tensor-parallel ranks, as one tensor on the CPU.

    The rows are gathered in parts, because a device may not have room for all of them.
    """
    weight = layer.get_parameter("weight").detach()
    if layer.tp_size == 1:
        return weight[: layer.org_vocab_size].to("cpu", copy=True)
    rows = torch.empty(layer.tp_size, *weight.shape, dtype=weight.dtype)
    for start in range(0, len(weight), GATHERED_ROWS):
        part = weight[start : start + GATHERED_ROWS]
        gathered = get_tp_group().all_gather(part.contiguous(), dim=0)
        rows[:, start : start + GATHERED_ROWS] = gathered.view(layer.tp_size, *part.shape).cpu()
    return rows.flatten(0, 1)[: layer.org_vocab_size].clone()


def layer_config(folder: Path) -> Mapping[str, Any]:
    """Returns the part of a head's config.json that describes its decoder layer, or {} if the file cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config.get("transformer_layer_config") or config


def rope_difference(head: Mapping[str, Any], other: Mapping[str, Any], whose: str = "the policy's") -> str:
    """Describes which RoPE parameters of a head's config differ from those of the config `other`.

    An example is "its rope_theta is 5000.0, the policy's 10000.0". The words in `whose` say to whom `other` belongs. The
    result is empty if no parameter differs, or if the layers of one config have different RoPE parameters.
    """
    mine = rope_parameters(head)
    theirs = rope_parameters(other)
    if mine is None or theirs is None:
        return ""
    names = [n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n)]
    return ", ".join(f"its {n} is {mine.get(n)}, {whose} {theirs.get(n)}" for n in names)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a config's RoPE parameters by their names in transformers 5, or None if they differ between its layers.

    The config may have the names of this or of older versions of transformers.
    """
    named = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in named.values()):
        return None
    if "type" in named:
        named["rope_type"] = named.pop("type")
    flat = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    return {**_ROPE_DEFAULTS, **flat, **named}


def _load_weights(head: nn.Module, load: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Loads weights into a head with its own method `load`, but leaves out the vocabulary map `d2t` if the head needs none.

    A head that can draft all tokens needs no map. If its file has one, the map is all zero, and vLLM >= 0.32 fails on it.
    """
    has_map = head.draft_id_to_target_id is not None
    return load(head, (pair for pair in weights if has_map or "d2t" not in pair[0] or pair[1].any()))


def _layer_ids(find: Any, spec_config: Any) -> tuple[int, ...]:
    """Returns the ids of the policy layers whose inputs a head reads.

    `find` is vLLM's own function for this. If it finds none, the ids come from `eagle_config` in the head's config, which
    vLLM's V2 model runner ignores.
    """
    nested = getattr(spec_config.draft_model_config.hf_config, "eagle_config", None)
    num_layers = spec_config.target_model_config.get_total_num_hidden_layers()
    return find(spec_config) or nested_layer_ids(nested, num_layers)


def accept_published_heads() -> None:
    """Patches vLLM in this process, so that it accepts published heads.

    It must be called before a model is loaded. Further calls have no effect.
    """
    if getattr(eagle3_utils.get_eagle3_aux_layers_from_config, "func", None) is _layer_ids:
        return
    for head in (llama_eagle3.Eagle3LlamaForCausalLM, qwen3_eagle3.Eagle3Qwen3ForCausalLM):
        head.load_weights = partialmethod(_load_weights, head.load_weights)  # type: ignore[assignment, method-assign]
    eagle3_utils.get_eagle3_aux_layers_from_config = partial(_layer_ids, eagle3_utils.get_eagle3_aux_layers_from_config)
