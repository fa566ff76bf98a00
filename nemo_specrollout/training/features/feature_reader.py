# SPDX-License-Identifier: Apache-2.0
"""Reader of a feature store, for the process that trains a head."""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from safetensors import safe_open

from nemo_specrollout.training.features.feature_index import FeatureIndex, Shard
from nemo_specrollout.training.features.features import SequenceFeatures

INDEX = "index.json"
"""Name of the index in a store's folder."""


class FeatureReader:
    """Reads a store, which another process may be writing.

    Every call sees the shards that the index lists at that moment. A shard that the writer drops meanwhile is skipped.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index_path = folder / INDEX

    def index(self) -> FeatureIndex:
        """Returns the current index. Raises FileNotFoundError if there is none, ValueError if it is damaged."""
        return FeatureIndex.read(self._index_path)

    def shards(self, versions: Collection[int] | None = None) -> list[Shard]:
        """Returns the shards of the given policy versions, or of all, newest first."""
        shards = [s for s in self.index().shards if versions is None or s.policy_version in versions]
        return sorted(shards, key=lambda s: s.age_key, reverse=True)

    def data_hash(self) -> str:
        """Returns a hash of the contents of all shards, for the card of a head."""
        return hashlib.sha256("".join(sorted(s.digest for s in self.shards())).encode()).hexdigest()

    def sequences(self, held_out: bool, versions: Collection[int] | None = None) -> Iterator[SequenceFeatures]:
        """Yields the training or the held-out sequences, newest policy version first."""
        for shard in self.shards(versions):
            yield from self.read(shard, held_out)

    def read(self, shard: Shard, held_out: bool) -> Iterator[SequenceFeatures]:
        """Yields the training or the held-out sequences of a shard; none if the writer has dropped the shard."""
        try:
            file = safe_open(self.folder / shard.name, framework="pt")
        except (FileNotFoundError, RuntimeError):  # RuntimeError: the file vanished between two accesses of safetensors
            if shard in self.index().shards:
                raise
            return
        with file:
            names = set(file.keys())
            for i, facts in enumerate(json.loads(file.metadata()["sequences"])):
                if facts["held_out"] != held_out:
                    continue
                yield SequenceFeatures(
                    token_ids_T=file.get_tensor(f"{i}.token_ids"),
                    aux_TF=file.get_tensor(f"{i}.aux"),
                    final_TH=file.get_tensor(f"{i}.final"),
                    prompt_length=facts["prompt_length"],
                    policy_version=shard.policy_version,
                    first_position=facts["first_position"],
                    prompt_ids_P=file.get_tensor(f"{i}.prompt_ids") if f"{i}.prompt_ids" in names else None,
                )


def newest_sequences(
    stores: Sequence[FeatureReader], held_out: bool, max_tokens: int, versions: Collection[int] | None = None
) -> list[SequenceFeatures]:
    """Returns the training or the held-out sequences of several stores, newest policy version first.

    The last sequence is the one that reaches `max_tokens` tokens in total. `versions` limits the policy versions.
    """
    shards = [(shard, store) for store in stores for shard in store.shards(versions)]
    found: list[SequenceFeatures] = []
    num_tokens = 0
    for shard, store in sorted(shards, key=lambda pair: pair[0].age_key, reverse=True):
        for features in store.read(shard, held_out):
            found.append(features)
            num_tokens += features.num_tokens
            if num_tokens >= max_tokens:
                return found
    return found
