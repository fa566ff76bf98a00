# SPDX-License-Identifier: Apache-2.0
"""Reads the pickles of training checkpoints without running their code: tensors, plain values and listed classes only."""

import argparse
import enum
import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

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


def read_metadata(path: Path) -> Metadata:
    """Returns the metadata of a distributed checkpoint. Raises ValueError if the file is damaged or has other classes."""
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)}): use another checkpoint") from None
    metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
    return metadata


def load_tensors(file: Path) -> dict[str, Any]:
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
        raise ValueError(f"{file} is damaged ({first_line(error)}): use another checkpoint") from None


def first_line(error: BaseException) -> str:
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
