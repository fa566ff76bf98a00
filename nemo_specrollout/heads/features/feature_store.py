# SPDX-License-Identifier: Apache-2.0
"""Feature store on disk. Rollouts write the features that they compute to it, and the training of a draft head reads them.

A store has a bounded size and survives a crash at any moment. It consists of shards, which are files of features, and of
`index.json`, which describes the policy that computed the features.
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
    """Properties of the policy that computed the features of a store.

    All features of a store agree in these properties, except that `policy_name` may differ.
    """

    policy_name: str
    """Folder or name of the policy, for people who read the file."""
    tokenizer_hash: str
    """Hash of the tokenizer (`storage.model_folder.tokenizer_fingerprint`)."""
    vocab_size: int
    hidden_size: int
    layer_ids: tuple[int, ...]
    """Policy layers whose inputs are stored, in the order in which they are stored."""


class FeatureReader:
    """Reads a feature store, even while another process writes to it. Skips shards that the writer deletes meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> list[Path]:
        """Returns the paths of the store's shards, which are its files of features, newest policy version first."""
        return sorted(self.folder.glob("shard-*.safetensors"), key=_age, reverse=True)

    def sequences(self, held_out: bool) -> Iterator[SequenceFeatures]:
        """Yields the held-out sequences if `held_out` is true and otherwise the training ones, newest policy version first."""
        for shard in self.shards():
            yield from _read(shard, held_out)

    def num_sequences(self) -> int:
        num = 0
        for shard in self.shards():
            with safe_open(shard, framework="pt") as file:
                num += len(json.loads(file.metadata()["sequences"]))
        return num


def _age(shard: Path) -> tuple[int, int]:
    """Returns the policy version and the number of a shard, by which shards are sorted from old to new.

    Shards are numbered in the order in which they were written.
    """
    version, number = shard.stem.split("-")[1:]
    return int(version), int(number)


def _read(shard: Path, held_out: bool) -> Iterator[SequenceFeatures]:
    """Yields the held-out sequences of a shard if `held_out` is true, and otherwise its training sequences.

    Yields nothing if the writer of the store has deleted the shard meanwhile.
    """
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
    """Returns a hash of the tokens and policy versions of all sequences, for the head card.

    The hash does not depend on the order of the sequences.
    """
    contents = (f.token_ids_T.numpy().tobytes() + f.policy_version.to_bytes(8, "little") for f in sequences)
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(data).digest() for data in contents))).hexdigest()


def newest_sequences(stores: Sequence[FeatureReader], held_out: bool, max_tokens: int) -> list[SequenceFeatures]:
    """Returns the newest sequences of several stores, as many as are needed to have `max_tokens` tokens in total.

    They are the held-out sequences if `held_out` is true, and otherwise the training sequences. Those of the newest policy
    version come first. If there are too few tokens, all sequences are returned.
    """
    shards = sorted((shard for store in stores for shard in store.shards()), key=_age, reverse=True)
    return first_tokens((f for shard in shards for f in _read(shard, held_out)), max_tokens)


def first_tokens(sequences: Iterable[SequenceFeatures], max_tokens: int) -> list[SequenceFeatures]:
    """Returns as many of the first sequences as are needed to have `max_tokens` tokens, or all if there are fewer tokens."""
    found: list[SequenceFeatures] = []
    num_tokens = 0
    for features in sequences:
        found.append(features)
        num_tokens += features.num_tokens
        if num_tokens >= max_tokens:
            break
    return found


class FeatureStore(FeatureReader):
    """Writes a feature store. It can also read what is on disk. A store has only one writer at a time.

    At any moment, even if the process is killed, every shard is complete and all shards together take at most `max_bytes`. A
    full store drops whole shards, those of the oldest policy versions first. If the process is killed, the sequences since the
    last flush are lost. These are at most an eighth of `max_bytes`, or one longer sequence.
    """

    def __init__(self, folder: Path, max_bytes: int, source: FeatureSource, held_out_share: float = 0.1) -> None:
        """Opens or creates the store in `folder`, and removes unfinished files of a process that was killed.

        `max_bytes` limits the size of all shards. `held_out_share` is the share of prompts that are held out from training.
        Raises ValueError if the folder has features of another source or with another held-out share. Raises BlockingIOError
        if another process writes to it.
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
        """Copies a sequence into memory. The next flush writes it to disk. If the memory is full, it is flushed first.

        `prompt_ids` decide whether the sequence is held out. By default they are the sequence's own prompt. Raises ValueError
        if the features do not fit the source or the store, or if neither `prompt_ids` nor the features have the whole prompt.
        Raises OSError if a flush fails.
        """
        self._check(features)
        held_out = is_held_out(features.whole_prompt_P if prompt_ids is None else prompt_ids, self.held_out_share)
        num_bytes = features.num_bytes + SEQUENCE_OVERHEAD_BYTES
        if self._buffered_bytes + num_bytes > self.shard_bytes:
            self.flush()
        self._buffer.setdefault(features.policy_version, []).append((_copied(features), held_out))
        self._buffered_bytes += num_bytes

    def keep(self, captured: Iterable[SequenceFeatures]) -> None:
        """Appends the captured sequences from which a head can learn, leaves out the others, and flushes.

        A head can learn from a sequence that begins in its prompt and has at least one generated token.
        """
        for features in captured:
            if features.first_position < features.prompt_length < features.first_position + features.num_tokens:
                self.append(features)
        self.flush()

    def forget_after(self, version: int) -> None:
        """Deletes the features of policy versions above `version`.

        A resumed run calls this, because it continues from `version` and computes later versions again.
        """
        for shard in self.shards():
            if _age(shard)[0] > version:
                shard.unlink()

    def flush(self) -> None:
        """Writes to disk all sequences that were appended since the last flush.

        Raises OSError if that fails. Then some of these sequences are lost, but the rest of the store is intact.
        """
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
        """Writes `index.json`, or checks that the existing one agrees with this store.

        Removes unfinished files of a process that was killed.
        """
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
        """Writes sequences of one policy version as a new shard, and drops older shards if there is no room for it.

        If dropping all older shards would not make enough room, nothing is dropped and the sequences are lost.
        """
        number = max((_age(shard)[1] for shard in self.shards()), default=-1) + 1
        data = _serialized(sequences)
        file = self.folder / f"shard-{version:08d}-{number:08d}.safetensors"
        if self._make_room(len(data), _age(file)):
            write_atomically(file, data)

    def _make_room(self, num_bytes: int, age: tuple[float, float] = (math.inf, 0)) -> bool:
        """Drops the oldest shards until there is room for `num_bytes` more, and returns whether there is.

        Only shards older than `age`, which is a policy version and a shard's number, may be dropped. If dropping all of them
        would not be enough, none is dropped.
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
        """Raises ValueError if a sequence cannot be stored, because of its shapes, its dtypes or its size."""
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
    """Returns a copy of the features on the CPU.

    The features may be slices of larger tensors, which could not be freed without the copy.
    """
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
