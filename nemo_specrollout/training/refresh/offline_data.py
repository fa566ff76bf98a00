# SPDX-License-Identifier: Apache-2.0
"""Data of an offline refresh: rollouts, their features, and the head that training starts from.

Shapes: V vocabulary of the policy, H hidden size.
"""

import errno
import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from nemo_specrollout.training.features.feature_store import (
    SEQUENCE_OVERHEAD_BYTES,
    SHARD_OVERHEAD_BYTES,
    FeatureReader,
    FeatureStore,
    data_hash,
    first_tokens,
    is_feature_store,
)
from nemo_specrollout.training.features.features import (
    SequenceFeatures,
    Text,
    check_stored,
    check_surprise,
    hf_features,
    is_held_out,
    load_policy,
)
from nemo_specrollout.training.features.rollout_files import RolloutText, held_out_share, read_rollouts
from nemo_specrollout.training.head.head import DraftHead, create_head, load_eagle3_head
from nemo_specrollout.training.head.head_facts import PolicyFacts
from nemo_specrollout.training.refresh.candidate import RefreshData, num_prompts
from nemo_specrollout.training.refresh.online_refresh import source_of
from nemo_specrollout.training.refresh.refresh_options import RefreshOptions
from nemo_specrollout.training.refresh.refresh_state import RefreshState

HELD_OUT_TOKENS = 60_000
"""Maximum number of held-out tokens that judge the heads."""
COMPARED_SEQUENCES = 8
"""Sequences of a feature store whose features are computed again, to check that they are the policy's."""
CHECKED_SEQUENCES = 64
"""Sequences that show whether rollouts are the policy's own."""
CHUNK_TEXTS = 64
"""Texts whose features are computed together. Chunks are the same after an interruption, so the features are too."""
FLUSH_EVERY_S = 15.0
"""Seconds between two writes of features."""
SMALLEST_STORE_BYTES = 1 << 24
"""Size limit of the feature store for few rollouts, bytes."""


@dataclass(frozen=True)
class RefreshJob:
    """One `refresh-draft` command: its options, its policy, and where its results and messages go."""

    options: RefreshOptions
    state: RefreshState
    view: Any
    """Output for the user, a `cli.refresh_draft.TerminalView`."""
    check: Callable[[], None]
    """Raises KeyboardInterrupt if the user asked to stop. Called between steps."""
    policy: Path
    facts: PolicyFacts
    device: torch.device

    @property
    def max_length(self) -> int:
        context = self.facts.max_position_embeddings
        return min(self.options.max_length or context, context)

    @property
    def feature_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


Loaded = tuple[RefreshData, dict[str, Any], DraftHead]
"""Features, the entries of the head's card about them, and the head that training starts from."""


def load_data(job: RefreshJob) -> Loaded:
    """Returns the features of a store, or of rollouts, with a head. The features of rollouts are stored in `job.state`.

    Raises ValueError for data that cannot be used, OSError for a full disk.
    """
    paths = [Path(path) for path in job.options.rollouts]
    stores = [path for path in paths if is_feature_store(path)]
    if stores and len(paths) > 1:
        raise ValueError(f"--rollouts {stores[0]} is a feature store; give it alone, or files and folders of rollouts")
    if stores:
        return _from_store(job, stores[0])
    texts, sentences = read_rollouts(paths, job.policy, job.facts.vocab_size, job.max_length)
    for sentence in sentences:
        job.view.say(sentence)
    return _from_texts(job, texts)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raises OSError with a fix for errors of writing; torch.save and safetensors have errors of their own for a full disk."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        signs = ("PytorchStreamWriter", "unexpected pos", "No space", "os error", "iostream")
        if not isinstance(error, OSError) and not any(sign in str(error) for sign in signs):
            raise
        number = getattr(error, "errno", None) or errno.ENOSPC
        raise OSError(number, f"{os.strerror(number)}; free some and repeat the command", str(folder)) from error


def _from_texts(job: RefreshJob, texts: list[RolloutText]) -> Loaded:
    """Computes and stores the features of as many texts as the store may hold."""
    options, folder = job.options, job.state.folder
    share = held_out_share((t.first_prompt for t in texts), options.held_out_share)
    # The gate counts all samples of a prompt as one, so later turns of a held-out conversation cannot be used.
    texts = [t for t in texts if t.is_first_turn or not is_held_out(t.first_prompt, share)]
    head = _starting_head(job, [t.text for t in texts])
    per_token = 4 + (len(head.layer_ids) + 1) * job.facts.hidden_size * job.feature_dtype.itemsize
    overhead = SEQUENCE_OVERHEAD_BYTES + SHARD_OVERHEAD_BYTES
    num_bytes = [len(t.token_ids) * per_token + overhead for t in texts]
    num_left_out = sum(total > options.store_gb * 1e9 for total in accumulate(reversed(num_bytes)))
    if num_left_out:
        texts, num_bytes = texts[num_left_out:], num_bytes[num_left_out:]
        job.view.say(f"{num_left_out} of the first texts are left out, to stay within --store-gb {options.store_gb}")
        held_out_share((t.first_prompt for t in texts), share)
    needed = sum(num_bytes)
    free = shutil.disk_usage(folder).free + sum(f.stat().st_size for f in folder.glob("features/shard-*"))
    if needed > free:
        raise ValueError(
            f"{folder}: the features take up to {needed / 1e6:,.0f} MB, and there is room for {free / 1e6:,.0f} MB; free "
            "some space, or lower --store-gb"
        )
    max_bytes = max(2 * needed, SMALLEST_STORE_BYTES)
    store = FeatureStore(job.state.features, max_bytes, source_of(head, job.policy), share)
    try:
        _capture(job, texts, store, head.teacher_VH)
    finally:
        with disk_errors(folder):
            store.close()
    return *_data_of(job, store), head


def _capture(job: RefreshJob, texts: Sequence[RolloutText], store: FeatureStore, lm_head_VH: torch.Tensor) -> None:
    """Stores the features that the store lacks. Raises ValueError if the rollouts cannot be the policy's own."""
    num_done = store.num_sequences()
    if num_done >= len(texts):
        return
    policy, flushed = load_policy(job.policy, job.device, job.feature_dtype), time.monotonic()
    with job.view.bar("features", len(texts)) as move:
        for start in range(num_done - num_done % CHUNK_TEXTS, len(texts), CHUNK_TEXTS):
            chunk = texts[start : start + CHUNK_TEXTS]
            found = hf_features(policy, [t.text for t in chunk], store.source.layer_ids)
            if start == 0:
                _warn(job, check_surprise(lm_head_VH, found[:CHECKED_SEQUENCES], job.options.temperature))
            with disk_errors(job.state.folder):
                for features, text in list(zip(found, chunk, strict=True))[max(0, num_done - start) :]:
                    store.append(features, text.first_prompt)
                if time.monotonic() - flushed > FLUSH_EVERY_S:
                    store.flush()
                    flushed = time.monotonic()
            job.check()
            move(start + len(chunk))


def _from_store(job: RefreshJob, folder: Path) -> Loaded:
    """Reads a feature store, and checks that its features are the policy's."""
    reader = FeatureReader(folder)
    stored = reader.index().source
    data, facts = _data_of(job, reader)
    texts = [(f.token_ids_T.tolist(), max(0, f.prompt_length - f.first_position)) for f in data.training]
    head = _starting_head(job, texts, stored.layer_ids)
    if differences := source_of(head, job.policy).differences(stored):
        raise ValueError(f"--rollouts {folder} does not fit the policy or head: {'; '.join(differences)}; give another")
    _warn(job, check_surprise(head.teacher_VH, data.held_out[:CHECKED_SEQUENCES], job.options.temperature))
    whole = [f for f in data.held_out if f.first_position == 0 and 0 < f.prompt_length < f.num_tokens]
    if whole := whole[:COMPARED_SEQUENCES]:
        policy = load_policy(job.policy, job.device, job.feature_dtype)
        current = hf_features(policy, [(f.token_ids_T.tolist(), f.prompt_length) for f in whole], stored.layer_ids)
        _warn(job, check_stored(whole, current))
    return data, facts, head


def _warn(job: RefreshJob, warning: str | None) -> None:
    if warning is not None:
        job.view.warn(warning)


def _data_of(job: RefreshJob, reader: FeatureReader) -> tuple[RefreshData, dict[str, Any]]:
    """Reads a store. Raises ValueError if it has too little to train on or to judge by."""
    training = _shuffled(reader, held_out=False)
    held_out = first_tokens(_shuffled(reader, held_out=True), HELD_OUT_TOKENS)
    data = RefreshData(training, held_out)
    if (lacking := data.lacking) is not None:
        raise ValueError(f"{reader.folder}: {lacking}; give more rollouts")
    facts = {
        "hash": data_hash([*training, *held_out]),
        "rollouts": list(job.options.rollouts),
        "sequences": len(training),
        "tokens": sum(f.num_tokens for f in training),
        "held_out_share": reader.index().held_out_share,
        "held_out_prompts": num_prompts(held_out),
        "temperature": job.options.temperature,
    }
    return data, facts


def _shuffled(reader: FeatureReader, held_out: bool) -> list[SequenceFeatures]:
    """Returns the training or the held-out sequences in a random order that does not depend on the shards."""

    def key(features: SequenceFeatures) -> tuple[bytes, int]:
        ids = features.token_ids_T.numpy().tobytes()
        return hashlib.blake2b(ids, digest_size=16).digest(), features.prompt_length

    return sorted(reader.sequences(held_out), key=key)


def _starting_head(job: RefreshJob, texts: Sequence[Text], layer_ids: tuple[int, ...] = ()) -> DraftHead:
    """Returns the head of `--draft`, or a new one that can draft the most frequent generated tokens of these texts."""
    options, vocab_size = job.options, job.facts.vocab_size
    if options.draft_folder is not None:
        return load_eagle3_head(options.draft_folder, job.policy, job.device)
    drafted = None
    if options.draft_vocab is not None:
        if options.draft_vocab > vocab_size:
            raise ValueError(f"--draft-vocab {options.draft_vocab}: the policy has {vocab_size} tokens; lower it")
        counts = Counter(token for ids, prompt_length in texts for token in ids[prompt_length:])
        drafted = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[: options.draft_vocab]
    return create_head(job.policy, options.layer_ids or layer_ids or None, drafted, job.device, options.seed)
