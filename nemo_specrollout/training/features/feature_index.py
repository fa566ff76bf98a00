# SPDX-License-Identifier: Apache-2.0
"""`index.json` of a feature store: the policy whose features it holds, and the shards that belong to it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_specrollout.config.files import write_atomically

FORMAT = 1
"""Number of the file format. A store of another format cannot be read."""


@dataclass(frozen=True)
class FeatureSource:
    """Policy that computed the features of a store. All fields except the name must agree within a store."""

    policy_name: str
    """Folder or name of the policy, for people who read the file."""
    tokenizer_hash: str
    """Hash of the tokenizer (`rollout_files.tokenizer_hash`)."""
    vocab_size: int
    """Number of token ids of the policy."""
    hidden_size: int
    """Width of the policy's hidden states."""
    layer_ids: tuple[int, ...]
    """Auxiliary layers, in the order in which their states are stored."""

    def differences(self, other: "FeatureSource") -> list[str]:
        """Returns a phrase for each field that keeps features of the two sources from being mixed."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in asdict(self) if name != "policy_name"}
        return [f"{name} {one!r}, not {two!r}" for name, (one, two) in pairs.items() if one != two]


@dataclass(frozen=True)
class Shard:
    """File of sequences that one policy version computed."""

    number: int
    """Position in the order of writing. A store never uses a number twice."""
    policy_version: int
    """Version of the weights that computed the features."""
    num_bytes: int
    """Size of the file."""
    num_tokens: int
    """Tokens of all sequences."""
    num_training: int
    """Sequences to train on."""
    num_held_out: int
    """Sequences that are kept from training."""
    digest: str
    """SHA-256 of the file, hexadecimal."""

    @property
    def name(self) -> str:
        """File name in the store's folder."""
        return f"shard-{self.number:08d}.safetensors"

    @property
    def age_key(self) -> tuple[int, int]:
        """Sort key: a store reads the largest first and drops the smallest first."""
        return self.policy_version, self.number


@dataclass(frozen=True)
class FeatureIndex:
    """Content of `index.json`. Readers ignore every file that it does not list."""

    source: FeatureSource
    """Policy whose features the store holds."""
    held_out_share: float
    """Share of prompts whose sequences are kept from training."""
    next_number: int = 0
    """Number of the next shard."""
    shards: tuple[Shard, ...] = ()
    """Shards in the order of writing."""

    @classmethod
    def read(cls, path: Path) -> "FeatureIndex":
        """Reads the file `path`. Raises FileNotFoundError if it does not exist, ValueError if it is not an index."""
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tree.pop("format") != FORMAT:
                raise ValueError(f"{path}: another version of this package wrote it; remove {path.parent}")
            source = tree.pop("source")
            source["layer_ids"] = tuple(source["layer_ids"])
            shards = tuple(Shard(**shard) for shard in tree.pop("shards"))
            return cls(source=FeatureSource(**source), shards=shards, **tree)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not the index of a feature store ({error!r}); remove {path.parent}") from error

    def write(self, path: Path) -> None:
        """Replaces the file `path`. Raises OSError and leaves the old file if that fails."""
        write_atomically(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))
