# SPDX-License-Identifier: Apache-2.0
"""Checks that the folders of a run's policy and drafters have the files and the sizes that vLLM needs.

The package `heads/files` checks further whether a draft head fits its policy.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.model_families import families_of
from nemo_specrollout.config.nemo_rl_tree import (
    SPECULATIVE_CONFIG,
    VLLM_CFG,
    VLLM_KWARGS,
    Finding,
    Tree,
    at,
    named_drafters,
    native_drafts,
    parallel_sizes,
)
from nemo_specrollout.storage.model_folder import (
    check_model,
    check_tensors,
    has_mtp_layers,
    has_mtp_tensors,
    num_positions,
    read_object,
    rope_of,
    text_config,
)

_POLICY = "policy.model_name"
_MAX_LENGTH = f"{VLLM_CFG}.max_model_len"
_LONG_LENGTHS = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""Environment variable with which vLLM allows texts that are longer than `max_position_embeddings` of the policy."""
_CONFIG_OVERRIDES = ("policy.hf_config_overrides", f"{VLLM_KWARGS}.hf_overrides", f"{VLLM_KWARGS}.hf_config_path")
"""Keys of a config that replace values of the policy's config.json."""
_IN_THE_ENGINE = ("draft_model", "dflash", "dspark")
"""Types of drafters whose `max_position_embeddings` must be at least `max_model_len`, because they draft at every position.

The same holds for EAGLE-3 heads, but the package `heads/files` checks those.
"""
_NATIVE_HEADS = ("eagle", "eagle3")


@dataclass(frozen=True)
class _Model:
    """A model that a config names, which is the policy or the model of a drafter."""

    field: str
    name: Any
    """Folder of the model, or its name on the Hugging Face Hub."""
    kind: str
    """Type of the drafter, or empty for the policy."""

    @property
    def folder(self) -> Path | None:
        """The model's folder, or None if it is not on this machine."""
        is_here = isinstance(self.name, str) and self.name and Path(self.name).is_dir()
        return Path(self.name) if is_here else None


def model_findings(tree: Tree) -> Iterator[Finding]:
    """Yields findings about the models that a config names, and about the policy's layers for multi-token prediction (MTP)."""
    models = _models(tree)
    policy = models[0]
    found = [finding for model in models for finding in _loading(model, Path(policy.name))]
    yield from found
    if any(finding.kind == "error" for finding in found):
        return  # the checks below read the same files
    yield from _policy_length(tree, policy)
    for model in models:
        yield from _sizes(tree, model)
    yield from _mtp(tree, policy)


def _models(tree: Tree) -> list[_Model]:
    """Returns the models that a config names. The first is the policy, and the others are the models of drafters."""
    native = at(tree, SPECULATIVE_CONFIG) if native_drafts(tree) else {}
    drafters = [_Model(f"{SPECULATIVE_CONFIG}.model", native.get("model"), str(native.get("method")))]
    drafters += [_Model(f"{BLOCK_PATH}.drafters", d.get("model"), str(d.get("type"))) for d in named_drafters(tree)]
    return [_Model(_POLICY, str(at(tree, _POLICY)), ""), *(model for model in drafters if model.name)]


def _loading(model: _Model, policy: Path) -> Iterator[Finding]:
    """Yields an error if vLLM could not load the model's folder, or a note if its folder is not on this machine."""
    if model.folder is not None:
        try:
            check_model(model.folder, policy, model.kind)
        except ValueError as error:
            yield Finding(model.field, str(error), "error")
    elif isinstance(model.name, str) and model.name.startswith(("/", "./", "../")):
        yield Finding(
            model.field, f"{model.name} is not a folder here; each engine looks for it on its own machine", "note"
        )


def _layer_config(folder: Path) -> Mapping[str, Any]:
    """Returns the block with the sizes of the model's layers, from the config.json in `folder`.

    For a draft head it is the block of the head's layers, and for other models the block of the language model.
    """
    config = read_object(folder / "config.json")
    inner = config.get("transformer_layer_config")
    return inner if isinstance(inner, Mapping) else text_config(config)


def _sizes(tree: Tree, model: _Model) -> Iterator[Finding]:
    """Yields findings if a model has too few positions for the run, or if GPUs cannot share its attention heads equally."""
    if model.folder is None:
        return
    where = model.folder / "config.json"
    config = _layer_config(model.folder)
    try:
        positions = num_positions(config, where)
    except ValueError as error:
        yield Finding(model.field, str(error), "error")
        return
    length = at(tree, _MAX_LENGTH)
    is_native_head = model.field.startswith(SPECULATIVE_CONFIG) and model.kind in _NATIVE_HEADS
    is_short = isinstance(length, int) and positions is not None and positions < length
    if is_short and (model.kind in _IN_THE_ENGINE or is_native_head):
        text = f"{positions} is less than max_model_len {length}; raise it, or lower max_model_len"
        yield Finding(model.field, f"{where}: max_position_embeddings {text}", "error")
    elif is_short and model.kind == "remote":
        text = f"is made for {positions} tokens, and max_model_len is {length}: nothing is drafted beyond"
        yield Finding(model.field, f"{model.folder} {text}", "note")
    heads = config.get("num_attention_heads")
    tensor, _, _ = parallel_sizes(tree)
    if model.kind != "remote" and isinstance(heads, int) and heads % tensor:
        text = f"{tensor}; the {heads} attention heads of {model.folder} cannot be divided by it, so vLLM refuses it"
        yield Finding(f"{VLLM_CFG}.tensor_parallel_size", text, "error")


def _policy_length(tree: Tree, policy: _Model) -> Iterator[Finding]:
    """Yields an error if `max_model_len` is above the policy's `max_position_embeddings`, and no setting allows it."""
    length = at(tree, _MAX_LENGTH)
    allowed = os.environ.get(_LONG_LENGTHS) or at(tree, f"{VLLM_CFG}.env_vars.{_LONG_LENGTHS}")
    if policy.folder is None or allowed or not isinstance(length, int) or _is_overridden(tree):
        return
    config = _layer_config(policy.folder)
    where = policy.folder / "config.json"
    try:
        rope = rope_of(config, where)
        positions = num_positions(config, where)
    except ValueError:
        return  # `_sizes` reports it
    is_plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    if is_plain and positions is not None and length > positions:
        text = f"{length}; the policy's max_position_embeddings are {positions}, so vLLM refuses it: lower it"
        yield Finding(_MAX_LENGTH, text, "error")


def _is_overridden(tree: Tree) -> bool:
    """Tells whether a config replaces values of the policy's config.json."""
    return any(at(tree, key) for key in _CONFIG_OVERRIDES)


def _mtp(tree: Tree, policy: _Model) -> Iterator[Finding]:
    """Yields a finding if a run drafts with the policy's layers for multi-token prediction, but the policy has none."""
    native = at(tree, SPECULATIVE_CONFIG) if native_drafts(tree) else {}
    is_native = str(native.get("method", "")).endswith("mtp") and not native.get("model")
    if not is_native and not any(d.get("type") == "mtp" for d in named_drafters(tree)):
        return
    field = f"{SPECULATIVE_CONFIG}.method" if is_native else f"{BLOCK_PATH}.drafters"
    fix = "name another drafter"
    if policy.folder is None:
        if [row["name"] for row in families_of(str(policy.name), {})] == ["dense"]:
            text = f"mtp, but dense models such as {policy.name} have no layers for multi-token prediction: {fix}"
            yield Finding(field, text, "warning")
        return
    config = read_object(policy.folder / "config.json")
    if not has_mtp_layers(config) and not _is_overridden(tree):
        text = (
            f"mtp, but {policy.folder}/config.json has no num_nextn_predict_layers, and nothing else could draft: {fix}"
        )
        yield Finding(field, text, "error")
        return
    names = check_tensors(policy.folder)
    if names and not has_mtp_tensors(config, names) and not at(tree, "policy.megatron_cfg.mtp_num_layers"):
        text = f"mtp, but {policy.folder} has no tensor of the layers for multi-token prediction that its config.json names"
        yield Finding(
            field, f"{text}, as transformers saves such models: copy them from the original, or {fix}", "error"
        )
