# SPDX-License-Identifier: Apache-2.0
"""A draft head made offline, from stored rollouts: features, training, judgement; each can be killed and gone on with.

Shapes: H hidden size, V vocabulary.
"""

import errno
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.training.features.feature_index import FeatureSource
from nemo_specrollout.training.features.feature_reader import FeatureReader
from nemo_specrollout.training.features.feature_store import SEQUENCE_OVERHEAD_BYTES, SHARD_OVERHEAD_BYTES, FeatureStore
from nemo_specrollout.training.features.features import SequenceFeatures, is_held_out
from nemo_specrollout.training.features.hf_features import hf_features, load_policy
from nemo_specrollout.training.features.rollout_checks import check_surprise, measure_surprise
from nemo_specrollout.training.features.rollout_files import RolloutText
from nemo_specrollout.training.head.head import DraftHead, load_eagle3_head, save_head
from nemo_specrollout.training.head.trainer import Budget, HeadTrainer, TrainingResult
from nemo_specrollout.training.refresh.head_card import CARD, write_card
from nemo_specrollout.training.refresh.refresh_round import Refresh
from nemo_specrollout.training.refresh.refresh_state import RefreshState

OnTrained = Callable[[int, int, float, int], None]
"""Told the step, the (estimated) total of steps, the loss, and the tokens trained on so far."""
SAVE_EVERY_S = 15.0
CHUNK_TEXTS = 64
"""Texts whose features are computed together. A text is always in the same chunk, so that a run that was killed ends with
the same features, bit for bit, as one that was not."""
CHECKED_SEQUENCES = 64
"""Of the first chunks, by which it is judged whether the rollouts are the policy's own."""


def feature_dtype(device: torch.device) -> torch.dtype:
    """Of the policy's forward pass and of the features."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def stored_bytes(num_tokens: int, num_texts: int, hidden_size: int, num_layers: int, dtype: torch.dtype) -> int:
    """The most disk space that features of `num_tokens` tokens in `num_texts` texts take."""
    per_token = 4 + (num_layers + 1) * hidden_size * dtype.itemsize
    return num_tokens * per_token + num_texts * (SEQUENCE_OVERHEAD_BYTES + SHARD_OVERHEAD_BYTES)


def newest_within(
    texts: Sequence[RolloutText], max_bytes: int, size_of: Callable[[int, int], int]
) -> list[RolloutText]:
    """The last texts that `size_of` (tokens, texts) finds to be at most `max_bytes`, in their order."""
    num_tokens = kept = 0
    for text in reversed(texts):
        num_tokens += len(text.token_ids)
        if size_of(num_tokens, kept + 1) > max_bytes:
            break
        kept += 1
    return list(texts[len(texts) - kept :])


def without_later_turns(texts: Sequence[RolloutText], share: float) -> list[RolloutText]:
    """Of conversations that are held out only the first turn: the samples of a prompt must count as one to the gate."""
    return [t for t in texts if t.is_first_turn or not is_held_out(t.first_prompt, share)]


def most_frequent_tokens(sequences: Sequence[tuple[Sequence[int], int]], count: int, vocab_size: int) -> list[int]:
    """The `count` token ids that were generated most often, of (ids, length of the prompt); filled up with the lowest."""
    counts: Counter[int] = Counter()
    for ids, prompt_length in sequences:
        counts.update(ids[prompt_length:])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return [*ranked, *(i for i in range(vocab_size) if i not in counts)][:count]


def capture_features(
    policy_folder: Path,
    texts: Sequence[RolloutText],
    store: FeatureStore,
    lm_head_VH: torch.Tensor,
    device: torch.device,
    on_progress: Callable[[int], None],
    temperature: float = 1.0,
    max_tokens: int = 8192,
) -> str | None:
    """Stores the features of `texts` that the store has not yet; returns a warning about the rollouts, or None.

    `on_progress` is told the number of texts that are done. Raises ValueError if the rollouts cannot be the policy's own.
    """
    done = sum(s.num_training + s.num_held_out for s in store.shards())
    if done >= len(texts):
        return None
    policy = load_policy(policy_folder, device, feature_dtype(device))
    layer_ids, vocab_size, warning = store.source.layer_ids, store.source.vocab_size, None
    flushed = time.monotonic()
    for start in range(done - done % CHUNK_TEXTS, len(texts), CHUNK_TEXTS):
        chunk = texts[start : start + CHUNK_TEXTS]
        found = hf_features(policy, [t.text for t in chunk], layer_ids, max_tokens)
        if start == 0:
            warning = check_surprise(measure_surprise(lm_head_VH, found[:CHECKED_SEQUENCES], temperature), vocab_size)
        with _no_room_for_features(store):
            for i, features in enumerate(found, start):
                if i >= done:
                    store.append(features, texts[i].first_prompt)
            if time.monotonic() - flushed > SAVE_EVERY_S or start + len(chunk) == len(texts):
                store.flush()
                flushed = time.monotonic()
        on_progress(start + len(chunk))
    return warning


def stored_sequences(reader: FeatureReader, held_out: bool, max_tokens: int | None = None) -> list[SequenceFeatures]:
    """Half of a store, in a random order that does not depend on how it was cut into shards; at most `max_tokens`."""
    found = sorted(reader.sequences(held_out), key=_shuffling_key)
    total = 0
    kept: list[SequenceFeatures] = []
    for features in found:
        total += features.num_tokens
        if max_tokens is not None and total > max_tokens and kept:
            break
        kept.append(features)
    return kept


def _shuffling_key(features: SequenceFeatures) -> tuple[bytes, int]:
    ids = features.token_ids_T.numpy().tobytes()
    return hashlib.blake2b(ids, digest_size=16).digest(), features.prompt_length


def train(
    trainer: HeadTrainer,
    sequences: Sequence[SequenceFeatures],
    budget: Budget,
    state: RefreshState,
    on_step: OnTrained,
    verifier: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> TrainingResult:
    """Trains and saves the candidate in `state`, going on from what is there; the trainer is saved every 15 s.

    `verifier`: the policy that the saved config names. `dtype`: of the saved tensors; the head is rounded to it, so that what
    is judged is what is saved. Raises FloatingPointError as the trainer does, OSError for a full disk.
    """
    if state.trainer.is_file():
        trainer.load(state.trainer)
    saved = time.monotonic()

    def stepped(step: int, total: int, loss: float) -> None:
        nonlocal saved
        if time.monotonic() - saved > SAVE_EVERY_S:
            with disk_errors(state.folder):
                trainer.save(state.trainer)
            saved = time.monotonic()
        on_step(step, total, loss, trainer.tokens_so_far)

    result = trainer.train(sequences, budget, stepped)
    save_candidate(trainer.head, state, verifier, dtype)
    write_atomically(state.trained, json.dumps(asdict(result)) + "\n")
    return result


@torch.no_grad()
def save_candidate(head: DraftHead, state: RefreshState, verifier: str | None, dtype: torch.dtype) -> None:
    for parameter in head.learned().values():
        parameter.copy_(parameter.to(dtype))
    head.model.config.speculators_config.verifier.name_or_path = verifier
    with disk_errors(state.folder):
        save_head(head, state.candidate, dtype)


def trained_already(
    state: RefreshState, policy_folder: Path, device: torch.device
) -> tuple[DraftHead, TrainingResult] | None:
    """The candidate, if an earlier process finished its training."""
    if not state.trained.is_file() or not state.candidate.is_dir():
        return None
    return load_eagle3_head(state.candidate, policy_folder, device), TrainingResult(
        **json.loads(state.trained.read_text())
    )


def conclude(
    refresh: Refresh,
    state: RefreshState,
    policy_folder: Path,
    trainer: HeadTrainer,
    *,
    policy: Path,
    policy_version: int,
    data: dict[str, Any],
) -> Path:
    """Writes the candidate's card and moves it to DIR or DIR.refused, which is returned. `policy`: as named by the user."""
    with disk_errors(state.folder):
        card = write_card(
            state.candidate, policy_folder, refresh, trainer.settings, policy_version=policy_version, data=data
        )
    card["policy"]["folder"] = str(policy)
    write_atomically(state.candidate / CARD, json.dumps(card, indent=1) + "\n")
    return state.put(refresh.published, refresh.reason)


def source_of(head: DraftHead, policy: Path, tokenizer: str) -> FeatureSource:
    """What the features of a head's policy must be."""
    model = head.model
    return FeatureSource(str(policy), tokenizer, model.verifier_vocab_size, model.hidden_size, head.layer_ids)


@contextmanager
def _no_room_for_features(store: FeatureStore) -> Iterator[None]:
    """The store's own sentence names a config key that this command has not."""
    try:
        yield
    except OSError as error:
        fix = "free some space and repeat the command, or lower --store-gb"
        raise OSError(error.errno, f"{os.strerror(error.errno or 0)}; {fix}", str(store.folder)) from error


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """torch.save and safetensors have errors of their own for a disk that is full; here it is OSError."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if not any(
            part in text for part in ("PytorchStreamWriter", "unexpected pos", "No space", "os error", "iostream")
        ):
            raise
        reason = f"{os.strerror(errno.ENOSPC)}; free some and repeat the command"
        raise OSError(errno.ENOSPC, reason, str(folder)) from error
