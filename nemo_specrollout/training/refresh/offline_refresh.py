# SPDX-License-Identifier: Apache-2.0
"""Offline refresh: a draft head from stored rollouts, in one command that can be killed and repeated."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from nemo_specrollout.scheduling.heads.publish_gate import PublishGate
from nemo_specrollout.training.features.feature_store import first_tokens, is_feature_store
from nemo_specrollout.training.features.rollout_files import rollout_files
from nemo_specrollout.training.head.acceptance import measure_acceptance
from nemo_specrollout.training.head.head import DraftHead, load_eagle3_head, save_head
from nemo_specrollout.training.head.head_facts import read_policy_facts
from nemo_specrollout.training.head.trainer import (
    BATCH_TOKENS,
    Budget,
    HeadTrainer,
    OnStep,
    TrainingSettings,
    default_learning_rate,
)
from nemo_specrollout.training.refresh.candidate import Judge, Judgement, Refresh, RefreshData, write_card
from nemo_specrollout.training.refresh.offline_data import RefreshJob, disk_errors, load_data
from nemo_specrollout.training.refresh.policy_checkpoint import convert, hf_folder
from nemo_specrollout.training.refresh.refresh_options import DEFAULT_MINUTES, RefreshOptions
from nemo_specrollout.training.refresh.refresh_state import RefreshState

SAVE_EVERY_S = 15.0
"""Seconds between two writes of the trainer's state."""
MEASURE_EVERY_S = 20.0
"""Minimum seconds between two measurements of acceptance while training."""
LIVE_TOKENS = 1_000
"""Maximum number of held-out tokens that measure acceptance while training."""


def refresh_offline(options: RefreshOptions, view: Any, check: Callable[[], None] = lambda: None) -> bool:
    """Makes the head; returns whether it was published.

    All that took time is kept in `DIR.partial`, and nothing else is written before the gate has decided. A folder that this
    call started is removed again if it holds nothing to continue from. `view` and `check` are as in `RefreshJob`.
    Raises ValueError for bad input and OSError for a full disk.
    """
    state = RefreshState(Path(options.out), options.replace)
    try:
        state.recover()
        continues = state.open(options.recorded, _named_files(options), options.restart)
        if state.verdict() is None:
            if continues:
                view.say(f"going on with {state.folder}")
            try:
                _make_head(_start(options, state, view, check))
            except (ValueError, OSError):
                if not continues and not any(state.features.glob("shard-*")):
                    state.discard()
                raise
        return _close(options, state, view)
    finally:
        state.release()


def _start(options: RefreshOptions, state: RefreshState, view: Any, check: Callable[[], None]) -> RefreshJob:
    """Finds device and policy. A checkpoint of NeMo-RL is converted, once."""
    # transformers reports every load with a bar, and the unused LM head as unexpected.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; leave it out")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if options.device == "auto" else options.device)
    policy = state.policy if state.policy.is_dir() else hf_folder(Path(options.policy))
    if policy is None:
        policy = state.policy
        with view.phase(f"NeMo-RL converts {options.policy}"):
            convert(Path(options.policy), policy)
    return RefreshJob(options, state, view, check, policy, read_policy_facts(policy), device)


def _make_head(job: RefreshJob) -> None:
    """Trains and judges a candidate, and moves it into its place."""
    options, state = job.options, job.state
    settings = TrainingSettings(
        loss=options.loss,
        learning_rate=options.lr or default_learning_rate(job.facts.hidden_size),
        batch_tokens=options.batch_tokens or BATCH_TOKENS[job.device.type],
        ttt_steps=options.ttt_steps,
        tv_after=options.tv_after,
        seed=options.seed,
    )
    data, data_facts, head = load_data(job)
    refresh = _refreshed(job, HeadTrainer(head, settings), data)
    with disk_errors(state.folder):
        policy = {"folder": str(Path(options.policy)), "version": options.policy_version}
        write_card(state.candidate, job.policy, refresh, settings, policy, data_facts)
    state.put(refresh.published, refresh.reason)


def _refreshed(job: RefreshJob, trainer: HeadTrainer, data: RefreshData) -> Refresh:
    """Trains a head, or goes on with that, saves the candidate and judges it."""
    options, state = job.options, job.state
    if state.trainer.is_file():
        trainer.load(state.trainer)
    budget = Budget(steps=options.steps) if options.steps else Budget(seconds=60 * (options.minutes or DEFAULT_MINUTES))
    progress, failure = trainer.progress, None
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
    """Returns the function that saves the trainer, measures acceptance and moves the bar, each when it is due."""
    sample, acceptance = first_tokens(data.held_out, LIVE_TOKENS), ""
    saved = time.monotonic()
    measure_at = saved + MEASURE_EVERY_S

    def on_step(step: int, total: int, loss: float) -> None:
        nonlocal saved, measure_at, acceptance
        # The last step is saved too: a command that is killed while it judges need not train again.
        if step >= total or time.monotonic() - saved > SAVE_EVERY_S:
            with disk_errors(job.state.folder):
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
    """Saves the head, after rounding it to the saved type, so that the judged head is the saved one."""
    dtype = getattr(torch, job.options.dtype)
    for parameter in head.learned().values():
        parameter.copy_(parameter.to(dtype))
    is_temporary = job.policy == job.state.policy
    head.model.config.speculators_config.verifier.name_or_path = None if is_temporary else str(job.policy)
    with disk_errors(job.state.folder):
        save_head(head, job.state.candidate, dtype)


def _judged(job: RefreshJob, candidate: DraftHead, data: RefreshData) -> Judgement:
    options, draft = job.options, job.options.draft_folder
    with job.view.phase("measuring held-out acceptance"):
        current = None if draft is None else load_eagle3_head(draft, job.policy, job.device)
        judge = Judge(PublishGate(options.confidence, options.tolerance), options.num_drafts, options.temperature)
        judgement = judge.compare(candidate, current, data.held_out)
    job.view.judged(judgement)
    return judgement


def _close(options: RefreshOptions, state: RefreshState, view: Any) -> bool:
    """Removes what is no longer needed, and tells the user how the refresh ended; returns whether the head was published."""
    verdict = state.verdict()
    assert verdict is not None
    published, reason = verdict
    keeps_features = (options.keep_features or not published) and state.features.is_dir()
    state.close(keeps_features)
    view.say(reason)
    view.say(f"the head is in {state.out}" if published else f"not published; the new head is kept in {state.refused}")
    if keeps_features:
        view.say(f"features {state.kept_features}; use them again by --rollouts {state.kept_features}")
    return published


def _named_files(options: RefreshOptions) -> list[Path]:
    """Returns the files and folders that must not change while a refresh is unfinished. Raises ValueError for missing ones."""
    policy, draft = Path(options.policy), options.draft_folder
    if not policy.is_dir():
        raise ValueError(f"--policy {policy} is not a folder; name a Hugging Face folder or a checkpoint")
    if draft is not None and not draft.is_dir():
        raise ValueError(f"--draft {draft} is not a folder; name a head's, or leave it out to begin from scratch")
    named = [policy, *([] if draft is None else [draft])]
    for path in map(Path, options.rollouts):
        named += [path] if is_feature_store(path) else rollout_files([path])
    return named
