# SPDX-License-Identifier: Apache-2.0
"""The record of a run, with its responses and what each drafter proposed at each of their positions.

Shapes: R responses, P positions of all responses, D drafters, K draft positions, E kinds of evidence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Record:
    """Responses, and what drafters proposed for them. The positions of a response are consecutive, from its first token on."""

    names: list[str]
    """Types of the drafters."""
    model: int
    """Number of the drafter with weights, or -1 without one."""
    priors_DE: np.ndarray
    """Acceptance rate that is assumed for each drafter and kind of evidence, float32."""
    batch_R: np.ndarray
    """Number of the batch of each response, int64."""
    group_R: np.ndarray
    """Number of the prompt of each response, int64."""
    start_R: np.ndarray
    """First position of each response, int64 [R + 1], where the last entry is P."""
    tokens_P: np.ndarray
    """Sampled tokens, int32."""
    drafts_PDK: np.ndarray
    """Tokens that each drafter proposed for each position and the positions after it, int32."""
    levels_PDK: np.ndarray
    """Evidence level of each proposed token, int8."""
    found_PD: np.ndarray
    """Number of tokens that each drafter proposed at each position, int8."""

    def save(self, path: Path) -> None:
        """Writes the record to a compressed file.

        Right drafts are stored as 0, which saves space because most drafts are right.
        """
        wrong_PDK = np.where(self.drafts_PDK == self.right_PK()[:, None, :], 0, self.drafts_PDK + 1)
        arrays: dict[str, Any] = {
            k: v for k, v in vars(self).items() if isinstance(v, np.ndarray) and k != "drafts_PDK"
        }
        arrays |= {
            "names": np.array(self.names),
            "model": np.array(self.model),
            "wrong_PDK": wrong_PDK.astype(np.uint16),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Reads a record that `save` has written."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        wrong_PDK = arrays.pop("wrong_PDK").astype(np.int32)
        names = arrays.pop("names").tolist()
        model = int(arrays.pop("model"))
        found = cls(names=names, model=model, drafts_PDK=wrong_PDK, **arrays)
        drafts_PDK = np.where(wrong_PDK == 0, found.right_PK()[:, None, :], wrong_PDK - 1)
        return cls(**{**vars(found), "drafts_PDK": drafts_PDK.astype(np.int32)})

    def right_PK(self) -> np.ndarray:
        """Returns the K tokens of the response from each position on, with -1 beyond the response's end, [P, K]."""
        num_positions = self.drafts_PDK.shape[2]
        ends_P = np.repeat(self.start_R[1:], np.diff(self.start_R))
        index_PK = np.arange(len(self.tokens_P))[:, None] + np.arange(num_positions)
        tokens = np.append(self.tokens_P, np.full(num_positions, -1, np.int32))
        return np.where(index_PK < ends_P[:, None], tokens[index_PK], -1)


@dataclass
class Recorder:
    """Collects drafters' proposals while an engine decodes without speculation. Owns them until `record` returns them."""

    names: list[str] = field(default_factory=list)
    priors_DE: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    model: int = -1
    _of_slot: dict[int, tuple[int, int]] = field(default_factory=dict)
    _proposals: dict[int, dict[int, tuple[np.ndarray, ...]]] = field(default_factory=dict)
    _ended: list[tuple[Any, ...]] = field(default_factory=list)

    def open(self, requests: Iterable[tuple[int, int, int]]) -> None:
        """Notes new requests, each as slot, seed and number of prompt tokens."""
        for slot, seed, prompt_length in requests:
            self._of_slot[slot] = seed, prompt_length
            self._proposals[seed] = {}

    def proposed(self, slots_B: Sequence[int], lengths_S: Sequence[int], *proposals: np.ndarray) -> None:
        """Adds the proposals of an engine step, which are tokens and levels [D, B, K] and numbers of tokens [D, B]."""
        for row, slot in enumerate(slots_B):
            if slot in self._of_slot:
                seed, prompt_length = self._of_slot[slot]
                self._proposals[seed][lengths_S[slot] - prompt_length] = tuple(
                    table[:, row].copy() for table in proposals
                )

    def ended(self, batch: int, group: int, seed: int, token_ids: Sequence[int]) -> None:
        """Adds a response that has ended."""
        self._ended.append((batch, group, list(token_ids), self._proposals.pop(seed)))

    def record(self) -> Record:
        """Returns the record of the responses that have ended."""
        lengths = [len(tokens) for _, _, tokens, _ in self._ended]
        first = next(iter(self._ended[0][3].values()))
        nothing = (np.zeros_like(first[0]), np.zeros_like(first[1]), np.zeros_like(first[2]))
        rows = [of.get(p, nothing) for _, _, tokens, of in self._ended for p in range(len(tokens))]
        drafts_PDK, levels_PDK, found_PD = (np.stack([row[i] for row in rows]) for i in range(3))
        found_PD = np.maximum(found_PD, 0)
        is_draft_PDK = np.arange(drafts_PDK.shape[2]) < found_PD[:, :, None]
        return Record(
            self.names,
            self.model,
            self.priors_DE,
            np.array([e[0] for e in self._ended]),
            np.array([e[1] for e in self._ended]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.concatenate([e[2] for e in self._ended]).astype(np.int32),
            np.where(is_draft_PDK, drafts_PDK, 0).astype(np.int32),
            np.where(is_draft_PDK, levels_PDK, 0).astype(np.int8),
            found_PD.astype(np.int8),
        )
