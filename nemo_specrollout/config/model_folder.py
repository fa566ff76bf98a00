# SPDX-License-Identifier: Apache-2.0
"""Reads facts about a model from the files of its Hugging Face folder, without transformers."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.drafter_configs import BlockDrafterConfig, DrafterConfig
from nemo_specrollout.config.files import read_regular

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
Tensor = TypeVar("Tensor")


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError, which names the file and its fault."""
    try:
        read = json.loads(read_regular(file).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; copy the folder again") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({str(error)[:100]}); copy or write it again") from error
    if not isinstance(read, dict):
        raise ValueError(f"{file}: not a JSON object but {str(read)[:40]!r}; copy or write it again")
    return read


def size_in(config: Mapping[str, Any], name: str, where: object, default: int | None = None) -> int:
    """Returns the whole number, at least 1, at `name` of a config; `default`, if given, for null or an absent key.

    Raises ValueError, which begins with `where`, the file of the config.
    """
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number, at least 1")
    return value


def tokenizer_fingerprint(folder: Path) -> str:
    """Returns a hash of the tokenizer's tokens and their ids; empty if the folder has no vocabulary.

    Other differences between tokenizers of one family, e.g. the chat template, do not matter.
    """
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if not vocabulary:
        return ""
    added = sorted((t["id"], t["content"]) for t in tokenizer.get("added_tokens", []))
    pairs = sorted(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary
    return hashlib.blake2b(json.dumps([pairs, added]).encode(), digest_size=16).hexdigest()


def stop_token_ids(folder: Path) -> list[int]:
    """Returns the ids that end a text, from generation_config.json if it exists. Raises ValueError if they are not ids."""
    file = folder / "generation_config.json"
    file = file if file.is_file() else folder / "config.json"
    found = _read(file).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{file}: eos_token_id is {found!r}; it must be a token id, or a list of them")
    return list(ids)


def longest_text(folder: Path) -> int | None:
    """Returns the length in tokens of the longest text that the model was made for, if its config says so."""
    return _read(folder / "config.json").get("max_position_embeddings")


def with_tied_lm_head(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns the tensors, with the embedding also under the LM head's name if the model of `folder` ties the two.

    vLLM >= 0.29 reloads each layer by itself: without the second name, the LM head would keep its old weights.
    """
    found = list(tensors)
    names = dict(found)
    if _read(folder / "config.json").get("tie_word_embeddings") and EMBEDDING in names and LM_HEAD not in names:
        found.append((LM_HEAD, names[EMBEDDING]))
    return found


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors in safetensors files, by name. Raises ValueError for an incomplete file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, "np") as opened:
                shapes |= {n: tuple(opened.get_slice(n).get_shape()) for n in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error}); copy or write it again") from error
    return shapes


def _read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


_ARCHITECTURES = {
    "dflash": ("DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"),
    "dspark": ("Qwen3DSparkModel", "Qwen3OmniDSparkModel", "DSparkDraftModel", "Gemma4DSparkModel", "K3DSparkModel"),
}
_OWN_SAMPLERS = {"DFlash2DraftModel", "DFlash2BeamDraftModel", "LiLiCorrDraftModel", "Qwen3XPressModel", "dflash2"}
"""Architectures that choose among candidates in kernels of their own, without the policy's noise."""


def misfit_of_block_drafter(drafter: DrafterConfig, policy: Path) -> str | None:
    """Returns a sentence if `drafter` is a DFlash or DSpark head that cannot draft for `policy`, else None.

    A head that is named by its name on the Hub passes, because its files are not known.
    """
    if not isinstance(drafter, BlockDrafterConfig) or not Path(drafter.model).is_dir():
        return None
    path = f"{BLOCK_PATH}.drafters.model: {Path(drafter.model)}"
    try:
        config, target = (read_object(f / "config.json") for f in (Path(drafter.model), policy))
    except ValueError as error:
        return f"{path}: its config.json or the policy's cannot be read ({error}); name another checkpoint"
    try:
        return _reason(drafter, policy, path, config, target)
    except (TypeError, AttributeError, LookupError) as error:
        return f"{path}: its config.json, or the policy's, has a value of a wrong type ({error})"


def _reason(
    drafter: BlockDrafterConfig, policy: Path, path: str, config: Mapping[str, Any], target: Mapping[str, Any]
) -> str | None:
    names = _names(config)
    if drafter.type == "dspark" and any(name.startswith("DeepseekV4") for name in names):
        return None  # a policy that contains its DSpark, in a form of its own
    if not names & {drafter.type, *_ARCHITECTURES[drafter.type]}:
        samples = ", which samples in kernels of its own, without the policy's noise" if names & _OWN_SAMPLERS else ""
        what = " or ".join(sorted(names)) or "of no architecture"
        return f"{path}: it is {what}{samples}; name the checkpoint of a {drafter.type}"
    try:
        shapes = tensor_shapes(sorted(Path(drafter.model).glob("*.safetensors")))
    except ValueError as error:
        return f"{BLOCK_PATH}.drafters.model: {error}"
    reason = _config_misfit(config, target.get("text_config") or target) or _shape_misfit(config, shapes)
    return None if reason is None else f"{path}: {reason}; name a {drafter.type} made for {policy}"


def _names(config: Mapping[str, Any]) -> set[str]:
    """Returns the names of a checkpoint's algorithm, if `speculators` wrote it, or else of its architectures."""
    if "speculators_model_type" in config:
        return {str(config["speculators_model_type"])}
    return set(config.get("architectures") or ())


def _config_misfit(config: Mapping[str, Any], policy: Mapping[str, Any]) -> str | None:
    layer, own = config.get("transformer_layer_config") or config, config.get("dflash_config") or {}
    hidden = config.get("target_hidden_size") or layer.get("hidden_size")
    if hidden != policy.get("hidden_size"):
        return f"it reads states of size {hidden}, but the policy's have size {policy.get('hidden_size')}"
    if (layer.get("vocab_size") or 0) < (policy.get("vocab_size") or 0):
        return f"it knows {layer.get('vocab_size')} tokens, the policy {policy.get('vocab_size')}"
    if not any(name in part for part in (own, config) for name in ("mask_token_id", "dspark_noise_token_id")):
        return "its config.json has no mask_token_id"
    deepest, num_layers = max(_layers_read(config), default=0), policy.get("num_hidden_layers") or 0
    return None if deepest < num_layers else f"it reads layer {deepest} of a policy of {num_layers} layers"


def _layers_read(config: Mapping[str, Any]) -> Sequence[int]:
    own = config.get("dflash_config") or {}
    return own.get("target_layer_ids") or config.get("target_layer_ids") or ()


def _shape_misfit(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns a sentence if the input width of the first layer contradicts the config."""
    layer = config.get("transformer_layer_config") or config
    width = (config.get("target_hidden_size") or layer.get("hidden_size") or 0) * len(_layers_read(config))
    given = next((shape[1] for name, shape in shapes.items() if name.endswith("fc.weight") and len(shape) == 2), width)
    return None if not width or given == width else f"its fc.weight takes {given} numbers, its config.json says {width}"
