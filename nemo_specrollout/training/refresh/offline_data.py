# SPDX-License-Identifier: Apache-2.0
"""Data of an offline refresh: rollouts, their features, and the head that training starts from.

Shapes: V vocabulary of the policy, H hidden size.
"""

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_specrollout.training.features.feature_reader import FeatureReader
from nemo_specrollout.training.features.feature_store import (
    SEQUENCE_OVERHEAD_BYTES,
    SHARD_OVERHEAD_BYTES,
    FeatureStore,
)
from nemo_specrollout.training.features.features import SequenceFeatures, is_held_out
from nemo_specrollout.training.features.hf_features import Text, hf_features, load_policy
from nemo_specrollout.training.features.rollout_checks import check_stored, check_surprise, measure_surprise
from nemo_specrollout.training.features.rollout_files import (
    MIN_HELD_OUT_PROMPTS,
    RolloutText,
    held_out_share,
    is_feature_store,
    read_rollouts,
)
from nemo_specrollout.training.head.head import DraftHead, create_head, load_eagle3_head
from nemo_specrollout.training.head.head_facts import read_head_facts
from nemo_specrollout.training.refresh.candidate import RefreshData
from nemo_specrollout.training.refresh.online_refresh import source_of
from nemo_specrollout.training.refresh.refresh_job import RefreshJob

HELD_OUT_TOKENS = 60_000
"""Most tokens of held-out sequences by which heads are judged."""
COMPARED_SEQUENCES = 8
"""Sequences of a feature store whose features are computed again, to check that they are the policy's."""
CHECKED_SEQUENCES = 64
"""Sequences by which it is judged whether rollouts are the policy's own."""
CHUNK_TEXTS = 64
"""Texts whose features are computed together. Chunks are the same after an interruption, so the features are too."""
FLUSH_EVERY_S = 15.0
"""Seconds between two writes of features."""
SMALLEST_STORE_BYTES = 1 << 24
"""Size limit of the feature store for few rollouts, bytes."""


AnswerPrompts = Callable[[RefreshJob], None]
"""Writes the policy's responses to the prompts of `options.prompts` into `state.rollouts`."""


@dataclass(frozen=True)
class OfflineData(RefreshData):
    """Features for an offline refresh."""

    facts: dict[str, Any]
    """Entries of the head's card about the features."""


def load_data(job: RefreshJob, answer_prompts: AnswerPrompts) -> tuple[OfflineData, DraftHead]:
    """Returns the features to train on, and the untrained head or the one of `--draft`.

    The features come from a feature store, or are computed from rollouts and stored in `job.state`. Raises ValueError
    for data that cannot be used, OSError for a full disk.
    """
    options, paths = job.options, job.options.rollout_paths
    stores = [path for path in paths if is_feature_store(path)]
    if stores and len(paths) > 1:
        raise ValueError(f"--rollouts {stores[0]} is a feature store; give it alone, or files and folders of rollouts")
    if stores:
        return _from_store(job, stores[0])
    if options.prompts is not None:
        answer_prompts(job)
        paths = [job.state.rollouts]
    return _from_texts(job, _read_texts(job, paths))


def _read_texts(job: RefreshJob, paths: Sequence[Path]) -> list[RolloutText]:
    read = read_rollouts(paths, job.policy, job.facts.vocab_size, job.max_length)
    job.view.say(f"rollouts: {len(read.texts)} texts of {read.num_tokens} tokens in {read.num_files} files")
    for number, what in (
        (read.num_empty, "rollouts without a response were skipped"),
        (read.num_too_long, f"prompts fill the context of {job.max_length} tokens and were skipped"),
        (read.num_cut, f"texts were cut at {job.max_length} tokens"),
    ):
        if number:
            job.view.say(f"{number} {what}")
    return list(read.texts)


def _from_texts(job: RefreshJob, texts: list[RolloutText]) -> tuple[OfflineData, DraftHead]:
    """Computes and stores the features of as many texts as the store may hold."""
    options, state = job.options, job.state
    share = held_out_share((t.first_prompt for t in texts), options.held_out_share)
    # The gate counts all samples of a prompt as one, so later turns of a held-out conversation cannot be used.
    texts = [t for t in texts if t.is_first_turn or not is_held_out(t.first_prompt, share)]
    kept = _last_within(job, texts, int(options.store_gb * 1e9))
    if len(kept) < len(texts):
        job.view.say(
            f"{len(texts) - len(kept)} of the first texts are left out, to stay within --store-gb {options.store_gb}"
        )
        held_out_share((t.first_prompt for t in kept), share)
    head = _starting_head(job, [t.text for t in kept])
    needed = _stored_bytes(job, sum(len(t.token_ids) for t in kept), len(kept))
    _check_disk(state.folder, needed)
    max_bytes = max(2 * needed, SMALLEST_STORE_BYTES)
    store = FeatureStore(state.features, max_bytes, source_of(head, job.policy), share)
    try:
        warning = _capture(job, kept, store, head.teacher_VH)
    finally:
        store.close()
    if warning:
        job.view.warn(warning)
    return _data_of(job, store), head


def _last_within(job: RefreshJob, texts: Sequence[RolloutText], max_bytes: int) -> list[RolloutText]:
    """Returns the last texts whose features take at most `max_bytes`."""
    num_tokens = num_kept = 0
    for text in reversed(texts):
        num_tokens += len(text.token_ids)
        if _stored_bytes(job, num_tokens, num_kept + 1) > max_bytes:
            break
        num_kept += 1
    return list(texts[len(texts) - num_kept :])


def _stored_bytes(job: RefreshJob, num_tokens: int, num_texts: int) -> int:
    """Returns the most disk space that features take, in bytes."""
    draft = job.options.draft_folder
    num_layers = len(job.options.layer_ids) or 3 if draft is None else len(read_head_facts(draft).layer_ids)
    per_token = 4 + (num_layers + 1) * job.facts.hidden_size * job.feature_dtype.itemsize
    return num_tokens * per_token + num_texts * (SEQUENCE_OVERHEAD_BYTES + SHARD_OVERHEAD_BYTES)


def _check_disk(folder: Path, needed: int) -> None:
    """Raises ValueError unless the disk has `needed` bytes, including the features that are there."""
    free = shutil.disk_usage(folder).free + sum(f.stat().st_size for f in folder.glob("features/shard-*"))
    if needed > free:
        raise ValueError(
            f"{folder}: the features take up to {needed / 1e6:,.0f} MB, and there is room for {free / 1e6:,.0f} MB; free "
            "some space, or lower --store-gb"
        )


def _capture(
    job: RefreshJob, texts: Sequence[RolloutText], store: FeatureStore, lm_head_VH: torch.Tensor
) -> str | None:
    """Stores the features that the store lacks; returns a warning about the rollouts, or None.

    Raises ValueError if the rollouts cannot be the policy's own.
    """
    num_done = sum(s.num_training + s.num_held_out for s in store.shards())
    if num_done >= len(texts):
        return None
    policy, warning = load_policy(job.policy, job.device, job.feature_dtype), None
    flushed = time.monotonic()
    with job.view.bar("features", len(texts)) as move:
        for start in range(num_done - num_done % CHUNK_TEXTS, len(texts), CHUNK_TEXTS):
            chunk = texts[start : start + CHUNK_TEXTS]
            found = hf_features(policy, [t.text for t in chunk], store.source.layer_ids)
            if start == 0:
                surprise = measure_surprise(lm_head_VH, found[:CHECKED_SEQUENCES], job.options.temperature)
                warning = check_surprise(surprise, job.facts.vocab_size)
            is_due = time.monotonic() - flushed > FLUSH_EVERY_S or start + len(chunk) == len(texts)
            new = [(f, text) for i, (f, text) in enumerate(zip(found, chunk, strict=True), start) if i >= num_done]
            _store(store, new, is_due)
            flushed = time.monotonic() if is_due else flushed
            job.check()
            move(start + len(chunk))
    return warning


def _store(store: FeatureStore, new: Sequence[tuple[SequenceFeatures, RolloutText]], flush: bool) -> None:
    """Appends features. Raises OSError that names this command's flag, where the store names a config key."""
    try:
        for features, text in new:
            store.append(features, text.first_prompt)
        if flush:
            store.flush()
    except OSError as error:
        fix = "free some space and repeat the command, or lower --store-gb"
        raise OSError(error.errno, f"{os.strerror(error.errno or 0)}; {fix}", str(store.folder)) from error


def _from_store(job: RefreshJob, folder: Path) -> tuple[OfflineData, DraftHead]:
    """Reads a feature store, and checks that its features are the policy's."""
    reader = FeatureReader(folder)
    stored, data = reader.index().source, _data_of(job, reader)
    texts = [(f.token_ids_T.tolist(), max(0, f.prompt_length - f.first_position)) for f in data.training]
    head = _starting_head(job, texts, stored.layer_ids)
    source = source_of(head, job.policy)
    if differences := source.differences(stored):
        raise ValueError(f"--rollouts {folder} does not fit the policy or head: {'; '.join(differences)}; give another")
    surprise = measure_surprise(head.teacher_VH, data.held_out[:CHECKED_SEQUENCES], job.options.temperature)
    for warning in (check_surprise(surprise, job.facts.vocab_size), _compare(job, data.held_out, source.layer_ids)):
        if warning:
            job.view.warn(warning)
    return data, head


def _compare(job: RefreshJob, held_out: Sequence[SequenceFeatures], layer_ids: Sequence[int]) -> str | None:
    """Compares some stored features with the policy's current ones, as `check_stored` does."""
    whole = [f for f in held_out if f.first_position == 0 and 0 < f.prompt_length < f.num_tokens][:COMPARED_SEQUENCES]
    if not whole:
        return None
    policy = load_policy(job.policy, job.device, job.feature_dtype)
    return check_stored(
        whole, hf_features(policy, [(f.token_ids_T.tolist(), f.prompt_length) for f in whole], layer_ids)
    )


def _data_of(job: RefreshJob, reader: FeatureReader) -> OfflineData:
    """Reads a store. Raises ValueError if it has too little to train on or to judge by."""
    training = _shuffled(reader, held_out=False)
    held_out = first_tokens(_shuffled(reader, held_out=True), HELD_OUT_TOKENS)
    prompts = {tuple(f.token_ids_T[: f.prompt_length].tolist()) for f in held_out}
    if len(prompts) < MIN_HELD_OUT_PROMPTS or not training:
        raise ValueError(
            f"{reader.folder}: {len(training)} sequences to train on and {len(prompts)} held-out prompts are too few; "
            f"{MIN_HELD_OUT_PROMPTS} prompts are needed to judge by, give more rollouts"
        )
    facts = {
        "hash": reader.data_hash(),
        "rollouts": list(job.options.rollouts) or [f"generated from {job.options.prompts}"],
        "sequences": len(training),
        "tokens": sum(f.num_tokens for f in training),
        "held_out_share": reader.index().held_out_share,
        "held_out_prompts": len(prompts),
        "temperature": job.options.temperature,
    }
    return OfflineData(training, held_out, facts)


def _shuffled(reader: FeatureReader, held_out: bool) -> list[SequenceFeatures]:
    """Returns the training or the held-out sequences in a random order that does not depend on the shards."""

    def key(features: SequenceFeatures) -> tuple[bytes, int]:
        ids = features.token_ids_T.numpy().tobytes()
        return hashlib.blake2b(ids, digest_size=16).digest(), features.prompt_length

    return sorted(reader.sequences(held_out), key=key)


def first_tokens(sequences: Sequence[SequenceFeatures], max_tokens: int) -> list[SequenceFeatures]:
    """Returns the first sequences that have at most `max_tokens` tokens together, one at least."""
    kept: list[SequenceFeatures] = []
    num_tokens = 0
    for features in sequences:
        num_tokens += features.num_tokens
        if kept and num_tokens > max_tokens:
            break
        kept.append(features)
    return kept


def _starting_head(job: RefreshJob, texts: Sequence[Text], layer_ids: tuple[int, ...] = ()) -> DraftHead:
    """Returns the head of `--draft`, or a new one for these texts."""
    options, vocab_size = job.options, job.facts.vocab_size
    if options.draft_folder is not None:
        return load_eagle3_head(options.draft_folder, job.policy, job.device)
    drafted = None
    if options.draft_vocab is not None:
        if options.draft_vocab > vocab_size:
            raise ValueError(f"--draft-vocab {options.draft_vocab}: the policy has {vocab_size} tokens; lower it")
        drafted = _most_frequent_tokens(texts, options.draft_vocab, vocab_size)
    return create_head(job.policy, options.layer_ids or layer_ids or None, drafted, job.device, options.seed)


def _most_frequent_tokens(texts: Sequence[Text], count: int, vocab_size: int) -> list[int]:
    """Returns the `count` token ids that were generated most often, filled up with the lowest ids."""
    counts = Counter({i: 0 for i in range(vocab_size)})
    for ids, prompt_length in texts:
        counts.update(ids[prompt_length:])
    return sorted(counts, key=lambda token: (-counts[token], token))[:count]
