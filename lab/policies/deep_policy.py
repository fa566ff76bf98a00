# SPDX-License-Identifier: Apache-2.0
"""Makes a policy deeper without changing its outputs, so that a draft head has a realistic share of the cost.

A head of one layer costs a quarter as much as a policy of four layers, but only a thirty-sixth as much as one of 36 layers.
The deeper policy has additional layers that are as wide and as slow. The output weights of their attention and feed-forward
are zero, so they add nothing to the residual stream. Logits and hidden states stay the same.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lab.local.run_config import RunConfig
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.drafter_configs import BLOCK_DRAFTERS, Eagle3DrafterConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.heads.files.head_facts import LAYER_IDS_FIELD

MODEL_TYPES = ("llama", "qwen2", "qwen3")
LAYER = "model.layers."
# The products whose outputs a layer adds to the residual stream.
_LAST_PRODUCTS = ("o_proj.", "down_proj.")
_WEIGHTS = (".safetensors", ".safetensors.index.json")


def with_deep_policy(config: RunConfig, folder: Path) -> RunConfig:
    """Makes the policy of a config `bench.deepen` times as deep, and fits the head to it if the config has one.

    Writes both below `folder`, and returns a config that uses them. Raises ConfigError for a policy or a drafter that cannot
    be deepened.
    """
    block = config.policy.generation.specrollout
    factor = config.bench.deepen
    bound = next((d.type for d in block.drafters if d.type in ("mtp", *BLOCK_DRAFTERS)), None)
    if bound is not None:
        raise ConfigError(
            f"bench.deepen: {factor} with a drafter of type {bound}, which is made for the policy's own layers; set it to 1"
        )
    policy = folder / "policy"
    deepen_policy(Path(config.policy.model_name), policy, factor)
    drafters = block.drafters
    if block.head is not None:
        if block.head_folder is None:
            raise ConfigError(
                f"{BLOCK_PATH}.drafters: {block.head} is no folder here, as bench.deepen needs it; set that to 1"
            )
        deepen_head(block.head_folder, folder / "head", factor, policy)
        deep_head = str(folder / "head")
        drafters = tuple(replace(d, model=deep_head) if isinstance(d, Eagle3DrafterConfig) else d for d in drafters)
    generation = replace(config.policy.generation, specrollout=replace(block, drafters=drafters))
    return replace(config, policy=replace(config.policy, model_name=str(policy), generation=generation))


def deep_index(layer: int, factor: int) -> int:
    """Returns the index that layer `layer` of a policy has in the deeper policy.

    There, each layer of the policy comes after `factor - 1` layers without effect.
    """
    return layer * factor + factor - 1


def deepen_policy(source: Path, target: Path, factor: int, seed: int = 0) -> None:
    """Writes to `target` the policy of the Hugging Face folder `source` with `factor` times as many layers.

    Raises ConfigError for a model that is not built like Llama or Qwen3.
    """
    config = json.loads((source / "config.json").read_text())
    if config.get("model_type") not in MODEL_TYPES:
        raise ConfigError(
            f"bench.deepen: {source} is of model_type {config.get('model_type')!r}; it can be {', '.join(MODEL_TYPES)}: set "
            "bench.deepen to 1"
        )
    _copy_all_but_weights(source, target)
    files = sorted(source.glob("*.safetensors"))
    num_layers = config["num_hidden_layers"]
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    deep = {name: t for name, t in tensors.items() if not name.startswith(LAYER)}
    generator = torch.Generator().manual_seed(seed)
    template = _layer(tensors, 0)
    for layer in range(num_layers):
        place = deep_index(layer, factor)
        deep |= {f"{LAYER}{place}.{name}": t for name, t in _layer(tensors, layer).items()}
        for before in range(place - factor + 1, place):
            inert = _inert_layer(template, config.get("initializer_range", 0.02), generator)
            deep |= {f"{LAYER}{before}.{name}": t for name, t in inert.items()}
    save_file(deep, target / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = num_layers * factor
    if config.get("layer_types"):
        config["layer_types"] = [kind for kind in config["layer_types"] for _ in range(factor)]
    _write_json(target / "config.json", config)


def deepen_head(source: Path, target: Path, factor: int, policy: Path) -> None:
    """Copies the EAGLE-3 head of the folder `source` to `target`, and changes its config for the deepened `policy`.

    The copy reads the same hidden states there as the head does from the original policy. Raises ConfigError for a head whose
    config does not name the layers that it reads.
    """
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    holders = [c for c in (config, config.get("eagle_config") or {}) if c.get(LAYER_IDS_FIELD)]
    if not holders:
        raise ConfigError(
            f"{source}/config.json: {LAYER_IDS_FIELD} is absent; write the ids that the head was trained on"
        )
    for holder in holders:
        holder[LAYER_IDS_FIELD] = [deep_index(layer, factor) for layer in holder[LAYER_IDS_FIELD]]
    if "speculators_config" in config:
        config["speculators_config"]["verifier"]["name_or_path"] = str(policy)
    _write_json(target / "config.json", config)


def _inert_layer(
    template: Mapping[str, torch.Tensor], spread: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Returns a layer without effect that is shaped like `template`.

    Its output weights are zero, and the others are random.
    """
    layer = {}
    for name, like in template.items():
        if any(product in name for product in _LAST_PRODUCTS):
            layer[name] = torch.zeros_like(like)
        elif like.ndim == 1 and name.endswith("norm.weight"):
            layer[name] = torch.ones_like(like)
        else:
            layer[name] = (spread * torch.randn(like.shape, generator=generator)).to(like.dtype)
    return layer


def _layer(tensors: Mapping[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    prefix = f"{LAYER}{layer}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _copy_all_but_weights(source: Path, target: Path) -> None:
    """Copies tokenizer, generation config and other small files to `target`, which is emptied before."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copy(file, target / file.name)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
