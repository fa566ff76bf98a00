# SPDX-License-Identifier: Apache-2.0
"""Offline refresh, in which one command trains a draft head on stored rollouts. If it is killed, a repeated command continues.

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
from transformers.utils import logging as transformers_logging

from nemo_specrollout.heads.decisions.publish_gate import PublishGate
from nemo_specrollout.heads.features.feature_store import (
    SEQUENCE_OVERHEAD_BYTES,
    SHARD_OVERHEAD_BYTES,
    FeatureStore,
    data_hash,
    first_tokens,
)
from nemo_specrollout.heads.features.features import (
    SequenceFeatures,
    check_surprise,
    hf_features,
    is_held_out,
    load_policy,
)
from nemo_specrollout.heads.features.rollout_files import RolloutText, held_out_share, read_rollouts, rollout_files
from nemo_specrollout.heads.files.head_facts import PolicyFacts, read_policy_facts
from nemo_specrollout.heads.refresh.candidate import (
    Judge,
    Judgement,
    Refresh,
    RefreshData,
    num_prompts,
    write_card,
)
from nemo_specrollout.heads.refresh.online_refresh import source_of
from nemo_specrollout.heads.refresh.refresh_options import DEFAULT_MINUTES, RefreshOptions
from nemo_specrollout.heads.refresh.refresh_state import RefreshState
from nemo_specrollout.heads.training.acceptance import measure_acceptance
from nemo_specrollout.heads.training.head import DraftHead, create_head, load_eagle3_head, save_head
from nemo_specrollout.heads.training.trainer import (
    BATCH_TOKENS,
    Budget,
    HeadTrainer,
    OnStep,
    TrainingSettings,
    default_learning_rate,
)
from nemo_specrollout.storage.policy_checkpoint import hf_folder

SAVE_EVERY_S = 15.0
"""Minimum seconds between two writes of the trainer's state to disk."""
MEASURE_EVERY_S = 20.0
"""Minimum seconds between two measurements of acceptance during training."""
LIVE_TOKENS = 1_000
"""Maximum number of held-out tokens on which acceptance is measured during training."""
HELD_OUT_TOKENS = 60_000
"""Maximum number of held-out tokens on which the heads are judged."""
CHECKED_SEQUENCES = 64
"""Number of sequences on which a refresh checks whether the policy itself has sampled the rollouts."""
CHUNK_TEXTS = 64
"""Number of texts whose features are computed together. It is the same for all refreshes, so that a refresh that was
interrupted computes the same features when it continues."""
FLUSH_EVERY_S = 15.0
"""Minimum seconds between two writes of features to disk."""
SMALLEST_STORE_BYTES = 1 << 24
"""Minimum for the size limit of a feature store, in bytes."""


@dataclass(frozen=True)
class RefreshJob:
    """One `refresh-draft` command, with its options, its policy, and where its results and messages go."""

    options: RefreshOptions
    state: RefreshState
    view: Any
    """Output for the user, a `cli.refresh_draft.TerminalView`."""
    check: Callable[[], None]
    """Function that raises KeyboardInterrupt if the user asked to stop. It is called between training steps, and between
    chunks of texts while features are computed."""
    policy: Path
    facts: PolicyFacts
    device: torch.device

    @property
    def feature_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def refresh_offline(options: RefreshOptions, view: Any, check: Callable[[], None] = lambda: None) -> bool:
    """Trains a draft head on stored rollouts, and returns whether it was published.

    DIR is the folder of the new head. Until the publish gate has decided, only the folder `DIR.partial` is written. It has the
    features, the trainer's state and the candidate, so that a repeated command continues from them. If a call creates
    `DIR.partial` but fails before it has stored features, it removes the folder again. `view` and `check` are as in
    `RefreshJob`. Raises ValueError for bad input and OSError for a full disk.
    """
    state = RefreshState(Path(options.out), options.replace)
    try:
        state.recover()
        continues = state.open(options.recorded, _named_files(options))
        if state.verdict() is None:
            if continues:
                view.say(f"going on with {state.folder}")
            try:
                _make_head(_start(options, state, view, check))
            except (ValueError, OSError):
                if not continues and not any(state.features.glob("shard-*")):
                    state.discard()
                raise
        return _close(state, view)
    finally:
        state.release()


def _start(options: RefreshOptions, state: RefreshState, view: Any, check: Callable[[], None]) -> RefreshJob:
    """Returns the job that the options describe, with its device and with the Hugging Face folder of its policy."""
    # transformers shows a bar for every load, and reports the unused LM head as unexpected.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; leave it out")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if options.device == "auto" else options.device)
    policy = hf_folder(Path(options.policy))
    return RefreshJob(options, state, view, check, policy, read_policy_facts(policy), device)


def _make_head(job: RefreshJob) -> None:
    """Trains and judges a new head.

    Moves the head to the folder DIR of `--out` if it is published, and to DIR.refused otherwise.
    """
    options = job.options
    state = job.state
    settings = TrainingSettings(
        loss=options.loss,
        learning_rate=options.lr or default_learning_rate(job.facts.hidden_size),
        batch_tokens=options.batch_tokens or BATCH_TOKENS[job.device.type],
        ttt_steps=options.ttt_steps,
        tv_after=options.tv_after,
        seed=options.seed,
    )
    head, store = _captured(job)
    data = _data_of(store)
    refresh = _refreshed(job, HeadTrainer(head, settings), data)
    with _disk_errors(state.folder):
        policy = {"folder": str(Path(options.policy)), "version": options.policy_version}
        write_card(state.candidate, job.policy, refresh, settings, policy, _data_facts(job, data, store.held_out_share))
    state.put(refresh.published, refresh.reason)


def _refreshed(job: RefreshJob, trainer: HeadTrainer, data: RefreshData) -> Refresh:
    """Trains the head of `trainer`, saves it as the candidate, judges it, and returns the result.

    If an earlier command has left the state of an unfinished training, the training continues from there.
    """
    options = job.options
    state = job.state
    if state.trainer.is_file():
        trainer.load(state.trainer)
    budget = Budget(steps=options.steps) if options.steps else Budget(seconds=60 * (options.minutes or DEFAULT_MINUTES))
    progress = trainer.progress
    failure = None
    try:
        with job.view.bar("training") as move:
            trainer.train(data.training, budget, _on_step(job, trainer, data, move))
    except FloatingPointError as error:
        failure = f"refused: training failed, {error}"
    _save_candidate(job, trainer.head)
    if failure is not None:
        return Refresh(trainer.head, None, progress, failure, progress.seconds)
    job.view.say(f"trained {progress.steps} steps, {progress.tokens} tokens, in {progress.seconds:.0f} s")
    judgement = _judged(job, trainer.head, data)
    return Refresh(trainer.head, judgement, progress, judgement.decision.reason, progress.seconds)


def _on_step(job: RefreshJob, trainer: HeadTrainer, data: RefreshData, move: Callable[..., None]) -> OnStep:
    """Returns a function to call after each training step.

    It saves the trainer and measures acceptance every few seconds, and moves the progress bar.
    """
    sample = first_tokens(data.held_out, LIVE_TOKENS)
    acceptance = ""
    saved = time.monotonic()
    measure_at = saved + MEASURE_EVERY_S

    def on_step(step: int, total: int, loss: float) -> None:
        nonlocal saved, measure_at, acceptance
        # The last step is saved too, so that a command that is killed while it judges need not train again.
        if step >= total or time.monotonic() - saved > SAVE_EVERY_S:
            with _disk_errors(job.state.folder):
                trainer.save(job.state.trainer)
            saved = time.monotonic()
        job.check()
        figures = f"{trainer.progress.tokens} tokens, loss {loss:.3f}"
        if (started := time.monotonic()) >= measure_at:
            measured = measure_acceptance(trainer.head, sample, job.options.num_drafts, job.options.temperature)
            acceptance = f", held-out acceptance length {measured.expected_length:.2f}"
            measure_at = time.monotonic() + max(MEASURE_EVERY_S, 10 * (time.monotonic() - started))
            job.view.say(f"step {step} of {total}: {figures}{acceptance}")
        move(step, total=total, description=f"{figures}{acceptance}")

    return on_step


@torch.no_grad()
def _save_candidate(job: RefreshJob, head: DraftHead) -> None:
    """Rounds the weights of `head` itself to the dtype of the file, and saves the head.

    The publish gate judges `head` afterwards, so it judges exactly the weights that are saved.
    """
    dtype = getattr(torch, job.options.dtype)
    for parameter in head.learned().values():
        parameter.copy_(parameter.to(dtype))
    head.model.config.speculators_config.verifier.name_or_path = str(job.policy)
    with _disk_errors(job.state.folder):
        save_head(head, job.state.candidate, dtype)


def _judged(job: RefreshJob, candidate: DraftHead, data: RefreshData) -> Judgement:
    options = job.options
    draft = job.options.draft_folder
    with job.view.phase("measuring held-out acceptance"):
        current = None if draft is None else load_eagle3_head(draft, job.policy, job.device)
        judge = Judge(PublishGate(options.confidence, options.tolerance), options.num_drafts, options.temperature)
        judgement = judge.compare(candidate, current, data.held_out)
    job.view.judged(judgement)
    return judgement


def _close(state: RefreshState, view: Any) -> bool:
    """Removes the folder with the refresh's progress, reports how it ended, and returns whether the head was published."""
    verdict = state.verdict()
    assert verdict is not None
    published, reason = verdict
    state.discard()
    view.say(reason)
    view.say(f"the head is in {state.out}" if published else f"not published; the new head is kept in {state.refused}")
    return published


def _named_files(options: RefreshOptions) -> list[Path]:
    """Returns the input files and folders that the options name. They must not change until the refresh has ended.

    Raises ValueError if one is missing.
    """
    policy = Path(options.policy)
    draft = options.draft_folder
    if not policy.is_dir():
        raise ValueError(f"--policy {policy} is not a folder; name a Hugging Face folder or a checkpoint")
    if draft is not None and not draft.is_dir():
        raise ValueError(f"--draft {draft} is not a folder; name a head's, or leave it out to begin from scratch")
    return [policy, *([] if draft is None else [draft]), *rollout_files(list(map(Path, options.rollouts)))]


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Context manager that turns an error of writing to `folder` into an OSError whose text says what to do.

    This is needed because torch.save and safetensors raise errors of other types if the disk is full.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        signs = ("PytorchStreamWriter", "unexpected pos", "No space", "os error", "iostream")
        if not isinstance(error, OSError) and not any(sign in str(error) for sign in signs):
            raise
        number = getattr(error, "errno", None) or errno.ENOSPC
        raise OSError(number, f"{os.strerror(number)}; free some and repeat the command", str(folder)) from error


def _captured(job: RefreshJob) -> tuple[DraftHead, FeatureStore]:
    """Returns the head from which training starts, and a store with the features of as many rollouts as `--store-gb` allows.

    Raises ValueError for rollouts that cannot be used, and OSError for a full disk.
    """
    options = job.options
    folder = job.state.folder
    facts = job.facts
    max_length = min(options.max_length or facts.max_position_embeddings, facts.max_position_embeddings)
    texts, sentences = read_rollouts(list(map(Path, options.rollouts)), job.policy, facts.vocab_size, max_length)
    for sentence in sentences:
        job.view.say(sentence)
    share = held_out_share((t.first_prompt for t in texts), options.held_out_share)
    # Later turns of a held-out conversation are left out. Their prompts are longer than the first one, so the gate would
    # count them as samples of other prompts, although they depend on the first turn.
    texts = [t for t in texts if t.is_first_turn or not is_held_out(t.first_prompt, share)]
    head = _starting_head(job, texts)
    per_token = 4 + (len(head.layer_ids) + 1) * facts.hidden_size * job.feature_dtype.itemsize
    overhead = SEQUENCE_OVERHEAD_BYTES + SHARD_OVERHEAD_BYTES
    num_bytes = [len(t.token_ids) * per_token + overhead for t in texts]
    num_left_out = sum(total > options.store_gb * 1e9 for total in accumulate(reversed(num_bytes)))
    if num_left_out:
        texts = texts[num_left_out:]
        num_bytes = num_bytes[num_left_out:]
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
        with _disk_errors(folder):
            store.close()
    return head, store


def _capture(job: RefreshJob, texts: Sequence[RolloutText], store: FeatureStore, lm_head_VH: torch.Tensor) -> None:
    """Computes the features of all texts that are not in the store yet, and stores them.

    Raises ValueError if the policy cannot have sampled the texts.
    """
    num_done = store.num_sequences()
    if num_done >= len(texts):
        return
    policy = load_policy(job.policy, job.device, job.feature_dtype)
    flushed = time.monotonic()
    with job.view.bar("features", len(texts)) as move:
        for start in range(num_done - num_done % CHUNK_TEXTS, len(texts), CHUNK_TEXTS):
            chunk = texts[start : start + CHUNK_TEXTS]
            found = hf_features(policy, [t.text for t in chunk], store.source.layer_ids)
            if start == 0:
                warning = check_surprise(lm_head_VH, found[:CHECKED_SEQUENCES], job.options.temperature)
                if warning is not None:
                    job.view.warn(warning)
            with _disk_errors(job.state.folder):
                for features, text in list(zip(found, chunk, strict=True))[max(0, num_done - start) :]:
                    store.append(features, text.first_prompt)
                if time.monotonic() - flushed > FLUSH_EVERY_S:
                    store.flush()
                    flushed = time.monotonic()
            job.check()
            move(start + len(chunk))


def _data_of(store: FeatureStore) -> RefreshData:
    """Returns the training and the held-out sequences of a store.

    Raises ValueError if they are too few to train or to judge a head.
    """
    held_out = first_tokens(_shuffled(store, held_out=True), HELD_OUT_TOKENS)
    data = RefreshData(_shuffled(store, held_out=False), held_out)
    if (lacking := data.lacking) is not None:
        raise ValueError(f"{store.folder}: {lacking}; give more rollouts")
    return data


def _data_facts(job: RefreshJob, data: RefreshData, share: float) -> dict[str, Any]:
    """Returns the entries of the head card that describe the training data and the held-out data."""
    return {
        "hash": data_hash([*data.training, *data.held_out]),
        "rollouts": list(job.options.rollouts),
        "sequences": len(data.training),
        "tokens": sum(f.num_tokens for f in data.training),
        "held_out_share": share,
        "held_out_prompts": num_prompts(data.held_out),
        "temperature": job.options.temperature,
    }


def _shuffled(store: FeatureStore, held_out: bool) -> list[SequenceFeatures]:
    """Returns the training or the held-out sequences in an order that is random but depends only on their tokens."""

    def key(features: SequenceFeatures) -> tuple[bytes, int]:
        ids = features.token_ids_T.numpy().tobytes()
        return hashlib.blake2b(ids, digest_size=16).digest(), features.prompt_length

    return sorted(store.sequences(held_out), key=key)


def _starting_head(job: RefreshJob, texts: Sequence[RolloutText]) -> DraftHead:
    """Returns the head from which training starts. It is the head given by `--draft`, or a new head without this option.

    With `--draft-vocab N`, a new head can draft only the N tokens that were generated most often in `texts`.
    """
    options = job.options
    vocab_size = job.facts.vocab_size
    if options.draft_folder is not None:
        return load_eagle3_head(options.draft_folder, job.policy, job.device)
    drafted = None
    if options.draft_vocab is not None:
        if options.draft_vocab > vocab_size:
            raise ValueError(f"--draft-vocab {options.draft_vocab}: the policy has {vocab_size} tokens; lower it")
        counts = Counter(token for t in texts for token in t.token_ids[t.prompt_length :])
        drafted = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[: options.draft_vocab]
    return create_head(job.policy, options.layer_ids or None, drafted, job.device, options.seed)
