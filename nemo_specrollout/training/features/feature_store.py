# SPDX-License-Identifier: Apache-2.0
"""Features on disk, between the rollouts that give them and the training of a head: bounded, never half-written.

Shapes: T tokens of a sequence, A auxiliary layers, H hidden size, as in `features.py`.
"""

import dataclasses
import fcntl
import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.training.features.features import SequenceFeatures

logger = logging.getLogger(__name__)

FORMAT = 1
SHARD_BYTES = 64 << 20
DTYPES = (torch.float32, torch.bfloat16)
# What a sequence takes in a shard beyond its tensors, at most; and a shard beyond its sequences.
SEQUENCE_OVERHEAD_BYTES, SHARD_OVERHEAD_BYTES = 512, 1024


@dataclass(frozen=True)
class FeatureSource:
    """Whose features these are. A head learns of one policy only: all but the name must agree within a store."""

    policy_name: str
    tokenizer_hash: str
    vocab_size: int
    hidden_size: int
    layer_ids: tuple[int, ...]

    def mixes_with(self, other: "FeatureSource") -> list[str]:
        """A sentence part for each reason why features of the two must not meet."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in asdict(self) if name != "policy_name"}
        return [f"{name} {one!r}, not {two!r}" for name, (one, two) in pairs.items() if one != two]


@dataclass(frozen=True)
class Shard:
    """A file of sequences of one policy version. `number` grows and is never used again; `digest` is the file's SHA-256."""

    number: int
    policy_version: int
    num_bytes: int
    num_tokens: int
    num_training: int
    num_held_out: int
    digest: str

    @property
    def name(self) -> str:
        return f"shard-{self.number:08d}.safetensors"

    @property
    def age_key(self) -> tuple[int, int]:
        """Grows from what is dropped first to what is read first."""
        return self.policy_version, self.number

    def num_sequences(self, held_out: bool) -> int:
        return self.num_held_out if held_out else self.num_training


@dataclass(frozen=True)
class FeatureIndex:
    """The content of `index.json`: what the store holds. A file that is not listed does not exist to a reader."""

    source: FeatureSource
    held_out_share: float
    next_number: int = 0
    shards: tuple[Shard, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "FeatureIndex":
        """Raises FileNotFoundError where there is no store, ValueError where there is something else."""
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tree.pop("format") != FORMAT:
                raise ValueError(f"{path}: written by another version of this package; remove {path.parent}")
            source = tree.pop("source")
            source["layer_ids"] = tuple(source["layer_ids"])
            shards = tuple(Shard(**s) for s in tree.pop("shards"))
            return cls(source=FeatureSource(**source), shards=shards, **tree)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not the index of a feature store ({error!r}); remove {path.parent}") from error

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))


def is_held_out(prompt_ids: torch.Tensor | Sequence[int], share: float) -> bool:
    """Whether sequences of this prompt are kept from training: the same for all samples of it, everywhere and always."""
    data = np.ascontiguousarray(np.asarray(prompt_ids), dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") < share * 2**64


class FeatureReader:
    """Reads a store that another process may be writing. Every call sees what `index.json` lists then; a shard that the
    writer drops meanwhile is passed over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index_path = folder / "index.json"

    def index(self) -> FeatureIndex:
        """What the store holds now. Raises FileNotFoundError where there is no store, ValueError where it is another thing."""
        return FeatureIndex.read(self._index_path)

    def shards(self, versions: Collection[int] | None = None) -> list[Shard]:
        """Those of the given policy versions, or all; newest first."""
        shards = [s for s in self.index().shards if versions is None or s.policy_version in versions]
        return sorted(shards, key=lambda s: s.age_key, reverse=True)

    def num_sequences(self, held_out: bool, versions: Collection[int] | None = None) -> int:
        return sum(s.num_sequences(held_out) for s in self.shards(versions))

    def data_hash(self, versions: Collection[int] | None = None) -> str:
        """Names the contents of the shards of these versions, held-out sequences included: for the card of a head."""
        digests = sorted(s.digest for s in self.shards(versions))
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def sequences(
        self, held_out: bool, versions: Collection[int] | None = None, max_tokens: int | None = None
    ) -> Iterator[SequenceFeatures]:
        """The training or the held-out sequences, newest policy version first, until `max_tokens` tokens are reached."""
        yield from _read_until(((shard, self) for shard in self.shards(versions)), held_out, max_tokens)

    def sample(
        self, num_sequences: int, seed: int, held_out: bool = False, versions: Collection[int] | None = None
    ) -> list[SequenceFeatures]:
        """That many different sequences at random, each equally likely, in random order; fewer if there are not as many."""
        shards = [s for s in self.shards(versions) if s.num_sequences(held_out)]
        ends = np.cumsum([s.num_sequences(held_out) for s in shards])
        rng, found = np.random.default_rng(seed), []
        picked = rng.permutation(ends[-1] if len(ends) else 0)[:num_sequences]
        owners = np.searchsorted(ends, picked, side="right")
        for i in np.unique(owners):
            start = ends[i] - shards[i].num_sequences(held_out)
            found += list(self.read(shards[i], held_out, set((picked[owners == i] - start).tolist())))
        return [found[i] for i in rng.permutation(len(found))]

    def read(self, shard: Shard, held_out: bool, chosen: Collection[int] | None = None) -> Iterator[SequenceFeatures]:
        """Sequences of one half of a shard, those whose place in it is `chosen` or all; none if the shard is gone."""
        try:
            file = safe_open(self.folder / shard.name, framework="pt")
        except (FileNotFoundError, RuntimeError):  # the latter: it went after safetensors had looked, before torch did
            if shard in self.index().shards:
                raise
            return
        with file:
            facts = json.loads(file.metadata()["sequences"])
            places = [i for i, fact in enumerate(facts) if fact["held_out"] == held_out]
            names = set(file.keys())
            for i in places if chosen is None else [places[c] for c in sorted(chosen)]:
                yield SequenceFeatures(
                    token_ids_T=file.get_tensor(f"{i}.token_ids"),
                    aux_TF=file.get_tensor(f"{i}.aux"),
                    final_TH=file.get_tensor(f"{i}.final"),
                    prompt_length=facts[i]["prompt_length"],
                    policy_version=shard.policy_version,
                    first_position=facts[i]["first_position"],
                    prompt_ids_P=file.get_tensor(f"{i}.prompt_ids") if f"{i}.prompt_ids" in names else None,
                )


def newest_sequences(stores: Sequence[FeatureReader], held_out: bool, max_tokens: int) -> list[SequenceFeatures]:
    """Of several stores, the training or the held-out sequences of the newest policy versions, until `max_tokens` tokens are
    reached."""
    shards = [(shard, store) for store in stores for shard in store.shards()]
    by_age = sorted(shards, key=lambda pair: pair[0].age_key, reverse=True)
    return list(_read_until(by_age, held_out, max_tokens))


def _read_until(
    shards: Iterable[tuple[Shard, FeatureReader]], held_out: bool, max_tokens: int | None
) -> Iterator[SequenceFeatures]:
    """The sequences of one half of each shard in turn, until `max_tokens` tokens are reached."""
    num_tokens = 0
    for shard, store in shards:
        for features in store.read(shard, held_out):
            yield features
            num_tokens += features.num_tokens
            if max_tokens is not None and num_tokens >= max_tokens:
                return


class FeatureStore(FeatureReader):
    """The one writer of a store; a reader too, of what was flushed.

    Files: `index.json`, the shards that it lists, and a lock. Invariant, at any moment and whenever the process is
    killed: every listed shard is whole, and the shards together take at most `max_bytes`. What was appended since the last
    flush is lost with the process; it takes at most an eighth of `max_bytes`, or one sequence. Where there is no room, whole
    shards of the oldest policy versions go.

    Example: `store = FeatureStore(folder, 1 << 30, source); store.append(features); store.flush()`.

    Raises ValueError if the folder holds features of another source, or held out by another share; BlockingIOError if
    another process writes there.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        source: FeatureSource,
        held_out_share: float = 0.1,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        super().__init__(folder)
        self.source, self.max_bytes, self.held_out_share = source, max_bytes, held_out_share
        self.shard_bytes = min(shard_bytes, max_bytes // 8)
        self._buffer: dict[int, list[tuple[SequenceFeatures, bool]]] = {}
        self._buffered_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder / ".lock")
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
        """Keeps a copy of a sequence, on disk after the next `flush()`. It is held out by `prompt_ids`, or by its own prompt.

        Raises ValueError for features that do not fit the source, or the store, or of which the prompt is not known;
        OSError as `flush()` does.
        """
        self._check(features)
        prompt_ids = features.whole_prompt_P if prompt_ids is None else prompt_ids
        num_bytes = features.num_bytes + SEQUENCE_OVERHEAD_BYTES
        if self._buffered_bytes + num_bytes > self.shard_bytes:
            self.flush()
        kept = dataclasses.replace(
            features,
            token_ids_T=_copy(features.token_ids_T),
            aux_TF=_copy(features.aux_TF),
            final_TH=_copy(features.final_TH),
            prompt_ids_P=None if features.prompt_ids_P is None else _copy(features.prompt_ids_P),
        )
        held_out = is_held_out(prompt_ids, self.held_out_share)
        self._buffer.setdefault(features.policy_version, []).append((kept, held_out))
        self._buffered_bytes += num_bytes

    def keep(self, captured: Iterable[SequenceFeatures]) -> None:
        """Keeps, on disk, what can be learned from: sequences that begin in the prompt, with something generated. Raises as
        `append` and `flush` do."""
        for features in captured:
            if features.first_position < features.prompt_length < features.first_position + features.num_tokens:
                self.append(features)
        self.flush()

    def forget_after(self, version: int) -> None:
        """Drops what newer policies computed: the run goes on from `version`, and would hold them for its newest."""
        index = self.index()
        kept = [s for s in index.shards if s.policy_version <= version]
        if len(kept) < len(index.shards):
            self._commit(index, kept)

    def flush(self) -> None:
        """Writes what was appended. Raises OSError if it cannot be written, e.g. for want of disk space: that much is lost,
        and the store is as it was, or holds a part of it."""
        buffer, self._buffer, self._buffered_bytes = self._buffer, {}, 0
        for version, sequences in sorted(buffer.items()):
            try:
                self._add_shard(version, sequences)
            except OSError as error:
                held = sum(s.num_bytes for s in self.shards())
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {len(sequences)} sequences of policy version {version} could not be stored; free "
                    f"some space, or lower draft_refresh.store_bytes from {self.max_bytes} (the store holds {held})",
                    str(self.folder),
                ) from error

    def _recover(self) -> None:
        """Checks what an earlier process left, removes what it did not finish, and begins where there was nothing."""
        try:
            index = self.index()
        except FileNotFoundError:
            index = FeatureIndex(self.source, self.held_out_share)
        differences = self.source.mixes_with(index.source)
        if index.held_out_share != self.held_out_share:
            differences.append(f"held_out_share {self.held_out_share}, not {index.held_out_share}")
        if differences:
            raise ValueError(f"{self.folder} holds other features ({'; '.join(differences)}); choose another folder")
        whole = [s for s in index.shards if _size(self.folder / s.name) == s.num_bytes]
        if len(whole) < len(index.shards):
            logger.warning("%s: %d shards are damaged and dropped", self.folder, len(index.shards) - len(whole))
        self._commit(index, _newest(whole, self.max_bytes))

    def _add_shard(self, version: int, sequences: list[tuple[SequenceFeatures, bool]]) -> None:
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
        kept = _newest([*index.shards, shard], self.max_bytes)
        if shard not in kept:
            return
        others = [s for s in kept if s != shard]
        if len(others) < len(index.shards):
            index = self._commit(index, others)
        try:
            write_atomically(self.folder / shard.name, data)
            self._commit(index, [*others, shard])
        except OSError:
            (self.folder / shard.name).unlink(missing_ok=True)
            raise

    def _commit(self, index: FeatureIndex, shards: list[Shard]) -> FeatureIndex:
        """Lists `shards` and only then removes all others."""
        next_number = max([index.next_number, *(s.number + 1 for s in shards)])
        committed = FeatureIndex(index.source, index.held_out_share, next_number, tuple(shards))
        committed.write(self._index_path)
        listed = {"index.json", ".lock", *(s.name for s in shards)}
        for path in self.folder.iterdir():
            if path.name not in listed and path.name.startswith(("shard-", ".shard-", ".index.json.")):
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
            raise ValueError(f"tokens {low} to {high} are not of a vocabulary of {self.source.vocab_size}")
        needed = features.num_bytes + SEQUENCE_OVERHEAD_BYTES + SHARD_OVERHEAD_BYTES
        if needed > self.max_bytes:
            raise ValueError(f"a sequence of {needed} bytes does not fit draft_refresh.store_bytes {self.max_bytes}")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Owns its memory, and no more than that."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _serialized(sequences: list[tuple[SequenceFeatures, bool]]) -> bytes:
    """The content of a shard: sequences, each with whether it is held out."""
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


def _newest(shards: list[Shard], max_bytes: int) -> list[Shard]:
    """The newest that take at most `max_bytes` together, in the order given."""
    by_age = sorted(shards, key=lambda s: s.age_key, reverse=True)
    totals = np.cumsum([s.num_bytes for s in by_age])
    dropped = {s.number for s, total in zip(by_age, totals, strict=True) if total > max_bytes}
    return [s for s in shards if s.number not in dropped]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _locked(path: Path) -> TextIO:
    """The open file at `path`, locked until it is closed or the process ends. Raises BlockingIOError."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise BlockingIOError(error.errno, "another process writes to this feature store", str(path.parent)) from error
    except OSError:
        logger.warning("%s: this file system has no locks; see to it that one process writes", path.parent)
    return file
