# SPDX-License-Identifier: Apache-2.0
"""Checks whether drafters with weights fit a policy, above all DFlash and DSpark heads, which draft a block of tokens at once.

The checks read the drafters' files and do not load torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import BlockDrafterConfig, DrafterConfig
from nemo_specrollout.heads.files.head_facts import misfit
from nemo_specrollout.storage.model_folder import layer_number, read_object, tensor_files, tensor_shapes

_ARCHITECTURES = {
    "dflash": ("DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"),
    "dspark": ("Qwen3DSparkModel", "Qwen3OmniDSparkModel", "DSparkDraftModel", "Gemma4DSparkModel", "K3DSparkModel"),
}
_OWN_SAMPLERS = {"DFlash2DraftModel", "DFlash2BeamDraftModel", "LiLiCorrDraftModel", "Qwen3XPressModel", "dflash2"}
"""Architectures that choose among candidate tokens in kernels of their own, which do not use the policy's noise."""


def drafter_misfits(block: SpecrolloutConfig, policy: str, length: Any) -> list[str]:
    """Returns why draft heads of the configuration `block` do not fit the policy or its texts, one sentence for each of these.

    `length` is the number of tokens of the longest text. It is ignored if it is not an int. A head or a policy that is given
    by its name on the Hub is not checked, because its files are not known.
    """
    found = list[str | None]()
    length = length if isinstance(length, int) else None
    if block.head is not None and (why := misfit(block.head, policy, length)):
        found.append(f"{BLOCK_PATH}.drafters: {why}")
    if Path(policy).is_dir():
        found += [misfit_of_block_drafter(drafter, Path(policy)) for drafter in block.drafters]
    return [reason for reason in found if reason is not None]


def misfit_of_block_drafter(drafter: DrafterConfig, policy: Path) -> str | None:
    """Returns a sentence that says why a DFlash or DSpark head cannot draft for `policy`, or None if it can.

    The result is also None for other drafters, and for a head that is given by its name on the Hub, whose files are not known.
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
        return None  # the policy contains its DSpark in a form of its own
    if not names & {drafter.type, *_ARCHITECTURES[drafter.type]}:
        samples = ", which samples in kernels of its own, without the policy's noise" if names & _OWN_SAMPLERS else ""
        what = " or ".join(sorted(names)) or "of no architecture"
        return f"{path}: it is {what}{samples}; name the checkpoint of a {drafter.type}"
    try:
        shapes = tensor_shapes(tensor_files(Path(drafter.model)))
    except ValueError as error:
        return f"{BLOCK_PATH}.drafters.model: {error}"
    reason = _config_misfit(config, target.get("text_config") or target) or _shape_misfit(config, shapes)
    return None if reason is None else f"{path}: {reason}; name a {drafter.type} made for {policy}"


def _names(config: Mapping[str, Any]) -> set[str]:
    """Returns the names that tell which kind of head a checkpoint has.

    If `speculators` wrote the checkpoint, this is the name of its algorithm. Otherwise it is the architectures in its config.
    """
    if "speculators_model_type" in config:
        return {str(config["speculators_model_type"])}
    return set(config.get("architectures") or ())


def _config_misfit(config: Mapping[str, Any], policy: Mapping[str, Any]) -> str | None:
    layer = config.get("transformer_layer_config") or config
    own = config.get("dflash_config") or {}
    hidden = config.get("target_hidden_size") or layer.get("hidden_size")
    if hidden != policy.get("hidden_size"):
        return f"it reads states of size {hidden}, but the policy's have size {policy.get('hidden_size')}"
    if (layer.get("vocab_size") or 0) < (policy.get("vocab_size") or 0):
        return f"it knows {layer.get('vocab_size')} tokens, the policy {policy.get('vocab_size')}"
    if not any(name in part for part in (own, config) for name in ("mask_token_id", "dspark_noise_token_id")):
        return "its config.json has no mask_token_id"
    deepest = max(_layers_read(config), default=0)
    num_layers = policy.get("num_hidden_layers") or 0
    return None if deepest < num_layers else f"it reads layer {deepest} of a policy of {num_layers} layers"


def _layers_read(config: Mapping[str, Any]) -> Sequence[int]:
    own = config.get("dflash_config") or {}
    return own.get("target_layer_ids") or config.get("target_layer_ids") or ()


def _shape_misfit(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns what is wrong with the tensors' shapes, or None.

    It is a fault if a layer has no tensor, or if the input width of `fc` contradicts the config.
    """
    layer = config.get("transformer_layer_config") or config
    wanted = layer.get("num_hidden_layers") or 0
    there = {number for name in shapes if (number := layer_number(name)) is not None}
    missing = sorted(set(range(wanted)) - there)
    if there and missing:
        return f"it has no tensor of layer {missing[0]} of its {wanted} layers"
    width = (config.get("target_hidden_size") or layer.get("hidden_size") or 0) * len(_layers_read(config))
    given = next((shape[1] for name, shape in shapes.items() if name.endswith("fc.weight") and len(shape) == 2), width)
    return None if not width or given == width else f"its fc.weight takes {given} numbers, its config.json says {width}"
