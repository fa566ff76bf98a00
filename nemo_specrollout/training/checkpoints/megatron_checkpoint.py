# SPDX-License-Identifier: Apache-2.0
"""Weights out of checkpoints of Megatron-Core models, in one process, without a model and without running a pickle.

Each reader returns the tensor-parallel shards: a dict of Megatron names, layers numbered globally, for each rank. Files
are never unpickled freely: tensors go through `torch.load(weights_only=True)`, metadata through a list of plain classes.
"""

import argparse
import enum
import io
import json
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from nemo_specrollout.training.checkpoints.policy_shape import PolicyShape
from nemo_specrollout.training.checkpoints.weight_map import (
    EMBEDDING,
    LM_HEAD,
    MEGATRON_EMBEDDING,
    MEGATRON_LM_HEAD,
    weights_of_shape,
)

Shard = dict[str, Tensor]

_POLICY_PREFIXES = ("embedding.", "decoder.", "output_layer.")
"""What belongs to the policy; a checkpoint may hold more: optimizer state, a draft head, random states."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""TransformerEngine keeps these norms in the linear layer behind them."""

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple"},
}  # fmt: skip


_SAVE_PLAN_CLASSES = {
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}  # fmt: skip


def read_torch_dist(folder: Path) -> list[Shard]:
    """A `torch_dist` iteration folder, saved over any number of ranks: one shard, the whole model.

    Raises ValueError for another backend, and for files that are missing, cut short or incomplete.
    """
    backend = json.loads((folder / "metadata.json").read_text()).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{folder} is a {backend!r} checkpoint: save it in torch_dist")
    reader = _TensorReader(folder)
    whole = {name: _empty(name, item, folder) for name, item in _policy_tensors(reader.read_metadata(), folder)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # one process is what we want
            dcp.load(dict(whole), storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder} is damaged or incomplete ({_first_line(error)}): use another checkpoint") from None
    return [{name: tensor for key, value in whole.items() for name, tensor in _unstacked(key, value)}]


class _TensorReader(dcp.FileSystemReader):
    """PyTorch's reader, whose tensors are read safely; its metadata is a pickle, and that is made safe here."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({_first_line(error)}): use another checkpoint") from None
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        return metadata


class _Ignored:
    """Takes the place of records that only saving needs."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _MetadataUnpickler(pickle.Unpickler):
    """Builds plain records of a checkpoint's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _SAVE_PLAN_CLASSES.get(module, ()):
            return _Ignored
        is_constant = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format)
        if is_constant or name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which checkpoint metadata has no need of")


def _policy_tensors(metadata: Metadata, folder: Path) -> Iterator[tuple[str, TensorStorageMetadata]]:
    found = False
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata) and name.startswith(_POLICY_PREFIXES):
            found = True
            yield name, item
    if not found:
        raise ValueError(f"{folder} holds no weights of a Megatron-Core GPTModel")


def _empty(name: str, item: TensorStorageMetadata, folder: Path) -> Tensor:
    if sum(chunk.sizes.numel() for chunk in item.chunks) != item.size.numel():
        raise ValueError(f"{folder} is incomplete: parts of {name} are missing; use another checkpoint")
    return torch.empty(item.size, dtype=item.properties.dtype)


def _unstacked(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A model of equal layers is saved with one tensor for all layers, [num_layers, ...]; others layer by layer."""
    rest = name.removeprefix("decoder.layers.")
    if rest == name or rest.split(".")[0].isdigit():
        yield name, tensor
    else:
        yield from ((f"decoder.layers.{i}.{rest}", layer) for i, layer in enumerate(tensor))


def read_torch(folder: Path) -> list[Shard]:
    """A legacy `torch` iteration folder: mp_rank_TT or mp_rank_TT_PPP, each with model_optim_rng.pt.

    Raises ValueError for missing ranks, virtual pipelines, and files that are damaged or hold more than plain data.
    """
    parts: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        if not (match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.name)):
            raise ValueError(f"{path}: checkpoints of expert-parallel models are not supported")
        parts.setdefault(int(match[1]), {})[int(match[2] or 0)] = path / "model_optim_rng.pt"
    stages = [sorted(by_stage) for by_stage in parts.values()]
    if sorted(parts) != list(range(len(parts))) or any(s != list(range(len(stages[0]))) for s in stages):
        raise ValueError(
            f"{folder} is incomplete: it has {', '.join(sorted(p.name for p in folder.glob('mp_rank_*')))}"
        )
    return [_join_stages([_legacy_model(parts[tp][pp]) for pp in stages[0]]) for tp in sorted(parts)]


def _legacy_model(file: Path) -> Shard:
    state = _load_tensors(file)
    if "model0" in state:
        raise ValueError(f"{file} is of a virtual pipeline: save it in torch_dist")
    if not isinstance(state.get("model"), Mapping):
        raise ValueError(f"{file} has no weights of a Megatron-Core model under 'model'")
    return {name: t for name, t in state["model"].items() if isinstance(t, Tensor) and _is_policy_weight(name)}


def _is_policy_weight(name: str) -> bool:
    return name.startswith(_POLICY_PREFIXES) and not name.endswith("_extra_state")


def _join_stages(stages: list[Shard]) -> Shard:
    """Pipeline stages number their layers from 0 each."""
    joined: Shard = {}
    offset = 0
    for stage in stages:
        num_layers = 0
        for name, tensor in stage.items():
            if match := _LAYER.match(name):
                joined[f"decoder.layers.{offset + int(match[1])}.{match[2]}"] = tensor
                num_layers = max(num_layers, int(match[1]) + 1)
            else:
                joined[name] = tensor
        offset += num_layers
    return joined


def read_local(folder: Path) -> list[Shard]:
    """A checkpoint of the local policy: rank_I_of_N.pt for each tensor-parallel rank. Raises ValueError as above."""
    files = sorted(folder.glob("rank_*_of_*.pt"), key=lambda file: int(file.name.split("_")[1]))
    wanted = [f"rank_{rank}_of_{len(files)}.pt" for rank in range(len(files))]
    if [file.name for file in files] != wanted:
        raise ValueError(f"{folder} is incomplete: it has {', '.join(file.name for file in files)}")
    return [dict(_load_tensors(file)["model"]) for file in files]


def _load_tensors(file: Path) -> dict[str, Any]:
    """A torch file of tensors and plain values; beside torch's own list, Megatron's arguments and random states."""
    try:
        with torch.serialization.safe_globals(_harmless_classes()):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: the checkpoint is incomplete") from None
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|Unsupported \w+|class) (\S+)", str(error))
        what = f"{found[1]} objects" if found else "no plain tensors"
        raise ValueError(f"{file} holds {what}, and reading them could run code: save it in torch_dist") from None
    except (RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged ({_first_line(error)}): use another checkpoint") from None


def _harmless_classes() -> list[Any]:
    """What Megatron-LM stores beside tensors and does nothing when it is built: arguments, enums, numpy's states."""
    reconstruct = np.zeros(1).__reduce__()[0]
    dtypes = [type(np.dtype(kind)) for kind in ("uint32", "int64", "float64")]
    plain = [argparse.Namespace, io.BytesIO, reconstruct, np.ndarray, np.dtype, *dtypes]
    try:
        from megatron.core import enums
        from megatron.core.transformer import enums as transformer_enums
    except ImportError:
        return plain
    found = [value for module in (enums, transformer_enums) for value in vars(module).values()]
    return plain + [value for value in found if isinstance(value, type) and issubclass(value, enum.Enum)]


def hf_tensors(shards: list[Shard], shape: PolicyShape, folder: Path) -> dict[str, Tensor]:
    """The Hugging Face tensors of a Qwen3, whole, in the checkpoint's dtype; rows that pad the vocabulary are dropped.

    Raises ValueError, naming the tensor, for weights that do not fit the shape; `folder` is named in it.
    """
    named = [_local_names(shard) for shard in shards]
    weights, shapes = weights_of_shape(shape), shape.hf_shapes()
    _check_names(named, {weight.megatron for weight in weights}, folder)
    tensors: dict[str, Tensor] = {}
    for weight in weights:
        try:
            full = weight.layout.unshard([shard[weight.megatron] for shard in named])
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{folder}: {weight.megatron} does not fit the config ({_first_line(error)})") from None
        for name, tensor in zip(weight.hf, full, strict=True):
            fitted = tensor[: shape.vocab_size] if name in (EMBEDDING, LM_HEAD) else tensor
            if tuple(fitted.shape) != shapes[name]:
                raise ValueError(
                    f"{folder}: {name} has shape {tuple(tensor.shape)}, but the config says {shapes[name]}"
                )
            tensors[name] = fitted.clone(memory_format=torch.contiguous_format)
    return tensors


def _local_names(shard: Shard) -> Shard:
    """Names as a model of Megatron's local layers has them, from TransformerEngine's and from halved gates."""
    renamed = dict(shard)
    for name in shard:
        if (match := _LAYER.match(name)) and match[2] in _FUSED_NORMS:
            renamed[f"decoder.layers.{match[1]}.{_FUSED_NORMS[match[2]]}"] = renamed.pop(name)
        elif name.endswith("linear_fc1.weight_w") and (other := f"{name[:-1]}v") in shard:
            renamed[name.removesuffix("_w")] = torch.cat([renamed.pop(name), renamed.pop(other)])
    return renamed


def _check_names(shards: list[Shard], wanted: set[str], folder: Path) -> None:
    for shard in shards:
        if missing := sorted(wanted - shard.keys()):
            raise ValueError(f"{folder} lacks {missing[0]} ({len(missing)} missing): it does not fit the config")
        surplus = sorted(shard.keys() - wanted)
        if surplus == [MEGATRON_LM_HEAD] and torch.equal(shard[MEGATRON_LM_HEAD], shard[MEGATRON_EMBEDDING]):
            continue  # a last pipeline stage's copy of tied embeddings
        if surplus:
            raise ValueError(f"{folder} has {surplus[0]} ({len(surplus)} surplus): it does not fit the config")


def _first_line(error: BaseException) -> str:
    causes = getattr(error, "failures", None) or {0: (error,)}
    lines = str(next(iter(causes.values()))[0]).strip().splitlines()
    return lines[0] if lines else type(error).__name__
