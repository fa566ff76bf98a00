# SPDX-License-Identifier: Apache-2.0
"""Feature store on disk, between the rollouts that compute features and the training of a head.

A store has a bounded size and survives a crash at any moment. `index.json` describes the source of the features.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from nemo_specrollout.config.nemo_rl_tree import at
from nemo_specrollout.config.strict import differences
from nemo_specrollout.heads.features.features import SequenceFeatures, is_held_out
from nemo_specrollout.storage.files import lock_folder, write_atomically
from nemo_specrollout.storage.model_folder import read_object

FORMAT = 2
"""Version of the file format. A store in another format cannot be used."""
INDEX = "index.json"
SHARD_BYTES = 64 << 20
SEQUENCE_OVERHEAD_BYTES = 512
"""Maximum number of bytes that a sequence takes in a shard in addition to its tensors."""
SHARD_OVERHEAD_BYTES = 1024
"""Maximum number of bytes that a shard takes in addition to its sequences."""


@dataclass(frozen=True)
class FeatureSource:
    """The policy that computed the features of a store. All fields except the name are the same for all of them."""

    policy_name: str
    """Folder or name of the policy, for people who read the file."""
    tokenizer_hash: str
    """Hash of the tokenizer (`storage.model_folder.tokenizer_fingerprint`)."""
    vocab_size: int
    hidden_size: int
    layer_ids: tuple[int, ...]
    """Auxiliary layers, in the order in which their states are stored."""


class FeatureReader:
    """Reads a store, to which another process may be writing. A shard that the writer drops in the meantime is skipped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> list[Path]:
        """Returns the store's shards, which are its files of features, newest policy version first."""
        return sorted(self.folder.glob("shard-*.safetensors"), key=_age, reverse=True)

    def sequences(self, held_out: bool) -> Iterator[SequenceFeatures]:
        """Yields the training or the held-out sequences, newest policy version first."""
        for shard in self.shards():
            yield from _read(shard, held_out)

    def num_sequences(self) -> int:
        num = 0
        for shard in self.shards():
            with safe_open(shard, framework="pt") as file:
                num += len(json.loads(file.metadata()["sequences"]))
        return num


def _age(shard: Path) -> tuple[int, int]:
    """Returns policy version and number of a shard. Shards are numbered in the order of writing."""
    version, number = shard.stem.split("-")[1:]
    return int(version), int(number)


def _read(shard: Path, held_out: bool) -> Iterator[SequenceFeatures]:
    """Yields the training or the held-out sequences of a shard, or none if the writer has dropped the shard."""
    try:
        file = safe_open(shard, framework="pt")
    except (FileNotFoundError, RuntimeError):  # RuntimeError: the file vanished between two accesses of safetensors
        if shard.exists():
            raise
        return
    with file:
        names = set(file.keys())
        for i, facts in enumerate(json.loads(file.metadata()["sequences"])):
            if facts["held_out"] == held_out:
                tokens, aux, final = (file.get_tensor(f"{i}.{name}") for name in ("token_ids", "aux", "final"))
                prompt_ids = file.get_tensor(f"{i}.prompt_ids") if f"{i}.prompt_ids" in names else None
                place = facts["prompt_length"], _age(shard)[0], facts["first_position"]
                yield SequenceFeatures(tokens, aux, final, *place, prompt_ids)


def data_hash(sequences: Iterable[SequenceFeatures]) -> str:
    """Returns a hash of tokens and policy versions, for the head card. It does not depend on the order of the sequences."""
    contents = (f.token_ids_T.numpy().tobytes() + f.policy_version.to_bytes(8, "little") for f in sequences)
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(data).digest() for data in contents))).hexdigest()


def newest_sequences(stores: Sequence[FeatureReader], held_out: bool, max_tokens: int) -> list[SequenceFeatures]:
    """Returns the `first_tokens` of the training or the held-out sequences of several stores, newest policy version first."""
    shards = sorted((shard for store in stores for shard in store.shards()), key=_age, reverse=True)
    return first_tokens((f for shard in shards for f in _read(shard, held_out)), max_tokens)


def first_tokens(sequences: Iterable[SequenceFeatures], max_tokens: int) -> list[SequenceFeatures]:
    """Returns the first sequences, up to and including the one that reaches `max_tokens` tokens in total."""
    found: list[SequenceFeatures] = []
    num_tokens = 0
    for features in sequences:
        found.append(features)
        num_tokens += features.num_tokens
        if num_tokens >= max_tokens:
            break
    return found


class FeatureStore(FeatureReader):
    """The only writer of a store, which can also read what it has flushed.

    At any moment, even if the process is killed, every shard is complete and all shards together take at most `max_bytes`.
    A kill loses what was appended since the last flush, which is at most an eighth of `max_bytes` or one sequence. A full
    store drops whole shards of the oldest policy versions.
    """

    def __init__(self, folder: Path, max_bytes: int, source: FeatureSource, held_out_share: float = 0.1) -> None:
        """Opens the store and repairs what a killed process has left.

        Raises ValueError if the folder has features of another source or with another held-out share, and BlockingIOError if
        another process writes to it.
        """
        super().__init__(folder)
        self.source = source
        self.max_bytes = max_bytes
        self.held_out_share = held_out_share
        self.shard_bytes = min(SHARD_BYTES, max_bytes // 8)
        self._buffer: dict[int, list[tuple[SequenceFeatures, bool]]] = {}
        self._buffered_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(folder)
        try:
            self._recover()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Flushes the store, and lets another process write to it."""
        try:
            self.flush()
        finally:
            self._lock.close()

    def append(self, features: SequenceFeatures, prompt_ids: torch.Tensor | Sequence[int] | None = None) -> None:
        """Keeps a copy of a sequence, which the next flush writes to disk.

        `prompt_ids` decides whether the sequence is held out, and is by default the sequence's own prompt. Raises ValueError
        if the features do not fit the source or the store, or if their prompt is unknown, and OSError as `flush` does.
        """
        self._check(features)
        held_out = is_held_out(features.whole_prompt_P if prompt_ids is None else prompt_ids, self.held_out_share)
        num_bytes = features.num_bytes + SEQUENCE_OVERHEAD_BYTES
        if self._buffered_bytes + num_bytes > self.shard_bytes:
            self.flush()
        self._buffer.setdefault(features.policy_version, []).append((_copied(features), held_out))
        self._buffered_bytes += num_bytes

    def keep(self, captured: Iterable[SequenceFeatures]) -> None:
        """Stores those sequences that begin in the prompt and have a generated token, because a head needs both to learn."""
        for features in captured:
            if features.first_position < features.prompt_length < features.first_position + features.num_tokens:
                self.append(features)
        self.flush()

    def forget_after(self, version: int) -> None:
        """Drops the features of policy versions above `version`, when a resumed run continues from `version`."""
        for shard in self.shards():
            if _age(shard)[0] > version:
                shard.unlink()

    def flush(self) -> None:
        """Writes what was appended since the last flush. After an OSError, some of it is missing, but the rest is intact."""
        buffer = self._buffer
        self._buffer = {}
        self._buffered_bytes = 0
        for version, sequences in sorted(buffer.items()):
            try:
                self._add_shard(version, sequences)
            except OSError as error:
                used = sum(shard.stat().st_size for shard in self.shards())
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {len(sequences)} sequences of policy version {version} could not be stored; free "
                    f"some space, or lower draft_refresh.store_bytes from {self.max_bytes} (the store holds {used})",
                    str(self.folder),
                ) from error

    def _recover(self) -> None:
        """Writes the index or checks it, and removes what a killed process has left unfinished."""
        index = self.folder / INDEX
        source = {**asdict(self.source), "layer_ids": list(self.source.layer_ids)}
        own = {"format": FORMAT, "source": source, "held_out_share": self.held_out_share}
        if not index.exists():
            write_atomically(index, json.dumps(own, indent=1))
        found = read_object(index)
        if names := sorted(differences(own, found) - {"source.policy_name"}):
            words = "; ".join(f"{name} {at(own, name)!r}, not {at(found, name)!r}" for name in names)
            raise ValueError(f"{self.folder} holds other features ({words}); choose another folder, or remove it")
        for leftover in (*self.folder.glob(".shard-*"), *self.folder.glob(f".{INDEX}.*")):
            leftover.unlink()
        self._make_room(0)

    def _add_shard(self, version: int, sequences: list[tuple[SequenceFeatures, bool]]) -> None:
        """Makes room for a shard and writes it, unless newer shards leave no room for its version."""
        number = max((_age(shard)[1] for shard in self.shards()), default=-1) + 1
        data = _serialized(sequences)
        file = self.folder / f"shard-{version:08d}-{number:08d}.safetensors"
        if self._make_room(len(data), _age(file)):
            write_atomically(file, data)

    def _make_room(self, num_bytes: int, age: tuple[float, float] = (math.inf, 0)) -> bool:
        """Drops the oldest shards until `num_bytes` more fit.

        If this would drop shards that are newer than `age`, it drops none and returns False.
        """
        shards = [(shard, shard.stat().st_size) for shard in self.shards()]
        older = [(shard, size) for shard, size in shards if _age(shard) < age]
        excess = num_bytes - self.max_bytes + sum(size for _, size in shards)
        if excess > sum(size for _, size in older):
            return False
        while excess > 0:
            shard, size = older.pop()
            shard.unlink()
            excess -= size
        return True

    def _check(self, features: SequenceFeatures) -> None:
        """Raises ValueError if a sequence cannot be stored."""
        hidden_size = self.source.hidden_size
        num_layers = len(self.source.layer_ids)
        shapes = (tuple(features.aux_TF.shape), tuple(features.final_TH.shape))
        expected = ((features.num_tokens, num_layers * hidden_size), (features.num_tokens, hidden_size))
        if shapes != expected:
            raise ValueError(f"features of {num_layers} layers must have shapes {expected}, got {shapes}")
        dtypes = {features.aux_TF.dtype, features.final_TH.dtype}
        if not dtypes <= {torch.float32, torch.bfloat16}:
            raise ValueError(f"features must be float32 or bfloat16, got {dtypes}")
        needed = features.num_bytes + SEQUENCE_OVERHEAD_BYTES + SHARD_OVERHEAD_BYTES
        if needed > self.max_bytes:
            raise ValueError(f"a sequence of {needed} bytes does not fit draft_refresh.store_bytes {self.max_bytes}")


def _copied(features: SequenceFeatures) -> SequenceFeatures:
    """Returns a copy on the CPU, so that the larger tensors of which the features are slices can be freed."""
    names = ("token_ids_T", "aux_TF", "final_TH", *(() if features.prompt_ids_P is None else ("prompt_ids_P",)))
    copies = {n: getattr(features, n).detach().cpu().clone(memory_format=torch.contiguous_format) for n in names}
    return dataclasses.replace(features, **copies)


def _serialized(sequences: list[tuple[SequenceFeatures, bool]]) -> bytes:
    """Returns the content of a shard. `sequences` are pairs of a sequence and whether it is held out."""
    tensors: dict[str, torch.Tensor] = {}
    facts = []
    for i, (f, held_out) in enumerate(sequences):
        named = {"token_ids": f.token_ids_T, "aux": f.aux_TF, "final": f.final_TH, "prompt_ids": f.prompt_ids_P}
        tensors |= {f"{i}.{name}": tensor for name, tensor in named.items() if tensor is not None}
        facts.append({"prompt_length": f.prompt_length, "first_position": f.first_position, "held_out": held_out})
    return save(tensors, {"sequences": json.dumps(facts)})
