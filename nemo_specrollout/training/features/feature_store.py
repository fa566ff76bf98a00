# SPDX-License-Identifier: Apache-2.0
"""Feature store on disk, between the rollouts that compute features and the training of a head.

A store has a bounded size and survives a crash at any moment. Shapes: as in `features.py`.
"""

import dataclasses
import fcntl
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from safetensors.torch import save

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.training.features.feature_index import FeatureIndex, FeatureSource, Shard
from nemo_specrollout.training.features.feature_reader import INDEX, FeatureReader
from nemo_specrollout.training.features.features import SequenceFeatures, is_held_out

logger = logging.getLogger(__name__)

SHARD_BYTES = 64 << 20
"""Default size of a shard, bytes."""
SEQUENCE_OVERHEAD_BYTES = 512
"""Most bytes that a sequence takes in a shard beyond its tensors."""
SHARD_OVERHEAD_BYTES = 1024
"""Most bytes that a shard takes beyond its sequences."""
DTYPES = (torch.float32, torch.bfloat16)
"""Types of hidden states that a store accepts."""


class FeatureStore(FeatureReader):
    """The only writer of a store, which also reads what it has flushed.

    The folder holds the index, the shards that it lists, and a lock file. At any moment, even if the process is killed,
    every listed shard is complete and all shards together take at most `max_bytes`. A kill loses what was appended
    since the last flush: at most an eighth of `max_bytes`, or one sequence. A full store drops whole shards of the
    oldest policy versions.

    Example: `store = FeatureStore(folder, 1 << 30, source); store.append(features); store.flush()`.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        source: FeatureSource,
        held_out_share: float = 0.1,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Opens the store and repairs what a killed process left.

        Raises ValueError if the folder holds features of another source or with another held-out share, and
        BlockingIOError if another process writes to it.
        """
        super().__init__(folder)
        self.source = source
        self.max_bytes = max_bytes
        self.held_out_share = held_out_share
        self.shard_bytes = min(shard_bytes, max_bytes // 8)
        self._buffer: dict[int, list[tuple[SequenceFeatures, bool]]] = {}
        self._buffered_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_file(folder / ".lock")
        try:
            self._recover()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Flushes, and lets another process write."""
        try:
            self.flush()
        finally:
            self._lock.close()

    def append(self, features: SequenceFeatures, prompt_ids: torch.Tensor | Sequence[int] | None = None) -> None:
        """Keeps a copy of a sequence, which is on disk after the next flush.

        Args:
            features: The sequence.
            prompt_ids: The prompt that decides whether the sequence is held out; by default the sequence's own.

        Raises ValueError if the features do not fit the source or the store, or if their prompt is unknown. Raises
        OSError as `flush` does.
        """
        self._check(features)
        prompt_ids = features.whole_prompt_P if prompt_ids is None else prompt_ids
        num_bytes = features.num_bytes + SEQUENCE_OVERHEAD_BYTES
        if self._buffered_bytes + num_bytes > self.shard_bytes:
            self.flush()
        held_out = is_held_out(prompt_ids, self.held_out_share)
        self._buffer.setdefault(features.policy_version, []).append((_copied(features), held_out))
        self._buffered_bytes += num_bytes

    def keep(self, captured: Iterable[SequenceFeatures]) -> None:
        """Stores the sequences that begin in the prompt and have a generated token; a head cannot learn from others.

        Raises as `append` and `flush` do.
        """
        for features in captured:
            if features.first_position < features.prompt_length < features.first_position + features.num_tokens:
                self.append(features)
        self.flush()

    def forget_after(self, version: int) -> None:
        """Drops features of policy versions above `version`, from which a resumed run goes on."""
        index = self.index()
        kept = [s for s in index.shards if s.policy_version <= version]
        if len(kept) < len(index.shards):
            self._commit(index, kept)

    def flush(self) -> None:
        """Writes what was appended.

        Raises OSError if that fails, e.g. because the disk is full. The store then lacks some or all of what was
        appended, and is intact otherwise.
        """
        buffer, self._buffer, self._buffered_bytes = self._buffer, {}, 0
        for version, sequences in sorted(buffer.items()):
            try:
                self._add_shard(version, sequences)
            except OSError as error:
                used = sum(s.num_bytes for s in self.shards())
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {len(sequences)} sequences of policy version {version} could not be stored; free "
                    f"some space, or lower draft_refresh.store_bytes from {self.max_bytes} (the store holds {used})",
                    str(self.folder),
                ) from error

    def _recover(self) -> None:
        """Starts the index, or checks it and drops damaged shards and unlisted files."""
        try:
            index = self.index()
        except FileNotFoundError:
            index = FeatureIndex(self.source, self.held_out_share)
        differences = self.source.differences(index.source)
        if index.held_out_share != self.held_out_share:
            differences.append(f"held_out_share {self.held_out_share}, not {index.held_out_share}")
        if differences:
            raise ValueError(f"{self.folder} holds other features ({'; '.join(differences)}); choose another folder")
        intact = [s for s in index.shards if _file_size(self.folder / s.name) == s.num_bytes]
        if len(intact) < len(index.shards):
            logger.warning("%s: dropped %d damaged shards", self.folder, len(index.shards) - len(intact))
        self._commit(index, _newest_within(intact, self.max_bytes))

    def _add_shard(self, version: int, sequences: list[tuple[SequenceFeatures, bool]]) -> None:
        """Makes room for a shard, writes it, and lists it, in this order."""
        data = _serialized(sequences)
        index, num_held_out = self.index(), sum(held_out for _, held_out in sequences)
        shard = Shard(
            number=index.next_number,
            policy_version=version,
            num_bytes=len(data),
            num_tokens=sum(f.num_tokens for f, _ in sequences),
            num_training=len(sequences) - num_held_out,
            num_held_out=num_held_out,
            digest=hashlib.sha256(data).hexdigest(),
        )
        kept = _newest_within([*index.shards, shard], self.max_bytes)
        if shard not in kept:
            return
        others = [s for s in kept if s != shard]
        if len(others) < len(index.shards):
            index = self._commit(index, others)
        try:
            write_atomically(self.folder / shard.name, data)
            self._commit(index, kept)
        except OSError:
            (self.folder / shard.name).unlink(missing_ok=True)
            raise

    def _commit(self, index: FeatureIndex, shards: list[Shard]) -> FeatureIndex:
        """Lists `shards`, and removes the files of all others only after that."""
        next_number = max([index.next_number, *(s.number + 1 for s in shards)])
        committed = FeatureIndex(index.source, index.held_out_share, next_number, tuple(shards))
        committed.write(self._index_path)
        listed = {s.name for s in shards}
        for path in self.folder.iterdir():
            if path.name not in listed and path.name.startswith(("shard-", ".shard-", f".{INDEX}.")):
                with suppress(OSError):  # the next commit tries again
                    path.unlink()
        return committed

    def _check(self, features: SequenceFeatures) -> None:
        """Raises ValueError if a sequence cannot be stored."""
        hidden_size, num_layers = self.source.hidden_size, len(self.source.layer_ids)
        shapes = (tuple(features.aux_TF.shape), tuple(features.final_TH.shape))
        expected = ((features.num_tokens, num_layers * hidden_size), (features.num_tokens, hidden_size))
        if shapes != expected:
            raise ValueError(f"features of {num_layers} layers must have shapes {expected}, got {shapes}")
        dtypes = {features.aux_TF.dtype, features.final_TH.dtype}
        if not dtypes <= set(DTYPES) or features.token_ids_T.dtype != torch.int32:
            raise ValueError(f"features must be float32 or bfloat16, and their tokens int32, got {dtypes}")
        if features.num_tokens == 0:
            raise ValueError("features of no tokens cannot be stored")
        low, high = int(features.token_ids_T.min()), int(features.token_ids_T.max())
        if low < 0 or high >= self.source.vocab_size:
            raise ValueError(f"tokens {low} to {high} are not in a vocabulary of {self.source.vocab_size}")
        needed = features.num_bytes + SEQUENCE_OVERHEAD_BYTES + SHARD_OVERHEAD_BYTES
        if needed > self.max_bytes:
            raise ValueError(f"a sequence of {needed} bytes does not fit draft_refresh.store_bytes {self.max_bytes}")


def _copied(features: SequenceFeatures) -> SequenceFeatures:
    """Returns features whose tensors own exactly the memory that they show."""
    names = ("token_ids_T", "aux_TF", "final_TH", *(() if features.prompt_ids_P is None else ("prompt_ids_P",)))
    copies = {n: getattr(features, n).detach().cpu().clone(memory_format=torch.contiguous_format) for n in names}
    return dataclasses.replace(features, **copies)


def _serialized(sequences: list[tuple[SequenceFeatures, bool]]) -> bytes:
    """Returns the content of a shard from sequences, each with whether it is held out."""
    tensors, facts = {}, []
    for i, (features, held_out) in enumerate(sequences):
        tensors[f"{i}.token_ids"] = features.token_ids_T
        tensors[f"{i}.aux"] = features.aux_TF
        tensors[f"{i}.final"] = features.final_TH
        if features.prompt_ids_P is not None:
            tensors[f"{i}.prompt_ids"] = features.prompt_ids_P
        place = {"prompt_length": features.prompt_length, "first_position": features.first_position}
        facts.append({**place, "held_out": held_out})
    return save(tensors, {"sequences": json.dumps(facts)})


def _newest_within(shards: list[Shard], max_bytes: int) -> list[Shard]:
    """Returns the newest shards that take at most `max_bytes` together, in the order given."""
    by_age = sorted(shards, key=lambda s: s.age_key, reverse=True)
    totals = np.cumsum([s.num_bytes for s in by_age])
    dropped = {s.number for s, total in zip(by_age, totals, strict=True) if total > max_bytes}
    return [s for s in shards if s.number not in dropped]


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _lock_file(path: Path) -> TextIO:
    """Returns an open file that is locked until it is closed. Raises BlockingIOError if another process holds the lock."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise BlockingIOError(error.errno, "another process writes to this feature store", str(path.parent)) from error
    except OSError:
        logger.warning("%s: this file system has no locks; make sure that only one process writes", path.parent)
    return file
