# SPDX-License-Identifier: Apache-2.0
"""Reads the weights in checkpoints of Megatron-Core models, in one process and without building a model.

Each reader returns the tensor-parallel shards: for each rank a dict of Megatron names, with layers numbered over all
pipeline stages. Pickles are read without running their code: tensors, plain values and listed classes only.
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

from nemo_specrollout.config.model_folder import EMBEDDING, LM_HEAD
from nemo_specrollout.training.checkpoints.policy_shape import MEGATRON_EMBEDDING, MEGATRON_LM_HEAD, PolicyShape

Shard = dict[str, Tensor]

_POLICY_PREFIXES = ("embedding.", "decoder.", "output_layer.")
"""Prefixes of the policy's weights. A checkpoint may also hold optimizer states, a draft head and random states."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms that TransformerEngine stores in the linear layer after them, with their names in Megatron's own layers."""

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
"""Classes that the metadata of a distributed checkpoint needs, by module."""

_SAVE_PLAN_CLASSES = {
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}  # fmt: skip
"""Classes of records in the metadata that only saving needs, by module. They are read as `_Ignored`."""


def read_torch_dist(folder: Path) -> list[Shard]:
    """Reads a `torch_dist` iteration folder of any number of ranks. Returns one shard, which is the whole model.

    Raises ValueError for another backend, and for files that are missing, damaged or incomplete.
    """
    backend = json.loads((folder / "metadata.json").read_text()).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{folder} is a {backend!r} checkpoint: save it in torch_dist")
    reader = _SafeReader(folder)
    found = reader.read_metadata().state_dict_metadata
    whole = {
        name: _empty_tensor(name, item, folder)
        for name, item in found.items()
        if isinstance(item, TensorStorageMetadata) and name.startswith(_POLICY_PREFIXES)
    }
    if not whole:
        raise ValueError(f"{folder} holds no weights of a Megatron-Core GPTModel")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # reading in one process is intended
            dcp.load(dict(whole), storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder} is damaged or incomplete ({_first_line(error)}): use another checkpoint") from None
    return [{name: tensor for key, value in whole.items() for name, tensor in _by_layer(key, value)}]


class _SafeReader(dcp.FileSystemReader):
    """PyTorch's reader of distributed checkpoints. It reads tensors safely but unpickles metadata, so that is replaced."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({_first_line(error)}): use another checkpoint") from None
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        return metadata


def _empty_tensor(name: str, item: TensorStorageMetadata, folder: Path) -> Tensor:
    """Returns a tensor to load into. Raises ValueError if the checkpoint lacks a part of it."""
    if sum(chunk.sizes.numel() for chunk in item.chunks) != item.size.numel():
        raise ValueError(f"{folder} is incomplete: parts of {name} are missing; use another checkpoint")
    return torch.empty(item.size, dtype=item.properties.dtype)


def _by_layer(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of each layer from a tensor of all layers, [num_layers, ...]; other tensors as they are.

    Megatron-Core saves one tensor for all layers if they have equal shapes.
    """
    rest = name.removeprefix("decoder.layers.")
    if rest == name or rest.split(".")[0].isdigit():
        yield name, tensor
    else:
        yield from ((f"decoder.layers.{i}.{rest}", layer) for i, layer in enumerate(tensor))


def read_torch(folder: Path) -> list[Shard]:
    """Reads a legacy `torch` iteration folder: mp_rank_TT or mp_rank_TT_PPP, each with model_optim_rng.pt.

    Raises ValueError for missing ranks, virtual pipelines, expert parallelism, and files that cannot be read safely.
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
    return [_join_stages([_legacy_weights(parts[tp][pp]) for pp in stages[0]]) for tp in sorted(parts)]


def _legacy_weights(file: Path) -> Shard:
    state = _load_tensors(file)
    if "model0" in state:
        raise ValueError(f"{file} is of a virtual pipeline: save it in torch_dist")
    if not isinstance(state.get("model"), Mapping):
        raise ValueError(f"{file} has no weights of a Megatron-Core model under 'model'")
    return {
        name: tensor
        for name, tensor in state["model"].items()
        if isinstance(tensor, Tensor) and name.startswith(_POLICY_PREFIXES) and not name.endswith("_extra_state")
    }


def _join_stages(stages: list[Shard]) -> Shard:
    """Joins pipeline stages, each of which numbers its layers from 0."""
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
    """Reads a checkpoint of the local policy: rank_I_of_N.pt for each tensor-parallel rank.

    Raises ValueError for missing ranks, and for files that cannot be read safely.
    """
    files = sorted(folder.glob("rank_*_of_*.pt"), key=lambda file: int(file.name.split("_")[1]))
    wanted = [f"rank_{rank}_of_{len(files)}.pt" for rank in range(len(files))]
    if [file.name for file in files] != wanted:
        raise ValueError(f"{folder} is incomplete: it has {', '.join(file.name for file in files)}")
    return [dict(_load_tensors(file)["model"]) for file in files]


def hf_tensors(shards: list[Shard], shape: PolicyShape, folder: Path) -> dict[str, Tensor]:
    """Returns the whole Hugging Face tensors of a policy, in the checkpoint's dtype, without vocabulary padding.

    Args:
        shards: Tensor-parallel shards in the order of their ranks.
        shape: Shape of the policy.
        folder: Folder to name in errors.

    Raises ValueError, which names the tensor, for weights that do not fit the shape.
    """
    named = [_with_local_names(shard) for shard in shards]
    weights = shape.weights()
    _check_names(named, {weight.megatron for weight in weights}, folder)
    tensors: dict[str, Tensor] = {}
    for weight in weights:
        try:
            full = weight.unshard([shard[weight.megatron] for shard in named])
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{folder}: {weight.megatron} does not fit the config ({_first_line(error)})") from None
        for (name, wanted), tensor in zip(weight.hf.items(), full, strict=True):
            fitted = tensor[: shape.vocab_size] if name in (EMBEDDING, LM_HEAD) else tensor
            if tuple(fitted.shape) != wanted:
                raise ValueError(f"{folder}: {name} has shape {tuple(tensor.shape)}, but the config says {wanted}")
            tensors[name] = fitted.clone(memory_format=torch.contiguous_format)
    return tensors


def _with_local_names(shard: Shard) -> Shard:
    """Renames TransformerEngine's norms and joins halved gates, as Megatron's own layers have them."""
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
            continue  # the last pipeline stage has a copy of tied embeddings
        if surplus:
            raise ValueError(f"{folder} has {surplus[0]} ({len(surplus)} surplus): it does not fit the config")


def _load_tensors(file: Path) -> dict[str, Any]:
    """Returns the content of a torch file: tensors, plain values, and Megatron's arguments and random states.

    Raises ValueError if the file is missing, damaged, or has other objects.
    """
    try:
        with torch.serialization.safe_globals(_harmless_classes()):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: the checkpoint is incomplete") from None
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|Unsupported \w+|class) (\S+)", str(error))
        content = f"{found[1]} objects" if found else "no plain tensors"
        raise ValueError(f"{file} holds {content}, and reading them could run code: save it in torch_dist") from None
    except (RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged ({_first_line(error)}): use another checkpoint") from None


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; for a CheckpointException, of its first cause."""
    causes = getattr(error, "failures", None) or {0: (error,)}
    lines = str(next(iter(causes.values()))[0]).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _Ignored:
    """Stands for records that only saving needs."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _MetadataUnpickler(pickle.Unpickler):
    """Builds only the records of a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _SAVE_PLAN_CLASSES.get(module, ()):
            return _Ignored
        is_constant = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format)
        if is_constant or name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which checkpoint metadata has no need of")


def _harmless_classes() -> list[Any]:
    """Returns the classes that Megatron-LM stores beside tensors. Building them has no effect."""
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
