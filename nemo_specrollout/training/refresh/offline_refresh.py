# SPDX-License-Identifier: Apache-2.0
"""Offline refresh: a draft head from stored rollouts or from prompts, in one command that can be killed and repeated."""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.scheduling.heads.publish_gate import PublishGate
from nemo_specrollout.training.checkpoints.policy_source import find_policy, policy_folder
from nemo_specrollout.training.features.rollout_files import is_feature_store, rollout_files
from nemo_specrollout.training.head.acceptance import measure_acceptance
from nemo_specrollout.training.head.head import DraftHead, load_eagle3_head, save_head
from nemo_specrollout.training.head.head_checks import check_head
from nemo_specrollout.training.head.head_facts import read_policy_facts
from nemo_specrollout.training.head.trainer import (
    BATCH_TOKENS,
    Budget,
    HeadTrainer,
    OnStep,
    TrainingResult,
    TrainingSettings,
    default_learning_rate,
)
from nemo_specrollout.training.refresh.candidate import Judge, Refresh, write_card
from nemo_specrollout.training.refresh.offline_data import AnswerPrompts, OfflineData, first_tokens, load_data
from nemo_specrollout.training.refresh.refresh_job import RefreshJob, RefreshView
from nemo_specrollout.training.refresh.refresh_options import DEFAULT_MINUTES, RefreshOptions
from nemo_specrollout.training.refresh.refresh_state import RefreshState

SAVE_EVERY_S = 15.0
"""Seconds between two writes of the trainer's state."""
MEASURE_EVERY_S = 20.0
"""Fewest seconds between two measurements of acceptance while training."""
LIVE_TOKENS = 1_000
"""Most tokens of held-out sequences by which acceptance is measured while training."""


class OfflineRefresh:
    """One offline refresh. All that took time is in `state`, and nothing else is written before the gate has decided."""

    def __init__(
        self,
        options: RefreshOptions,
        state: RefreshState,
        view: RefreshView,
        answer_prompts: AnswerPrompts,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares a refresh.

        Args:
            options: Options of the user.
            state: Folder of what is done so far.
            view: Output for the user.
            answer_prompts: Generates rollouts from prompts; called only for `--prompts`.
            check: Raises KeyboardInterrupt if the user asked to stop. Called between steps.
        """
        self._options, self._state, self._view = options, state, view
        self._answer_prompts, self._check = answer_prompts, check

    def run(self) -> bool:
        """Makes the head; returns whether it was published.

        Raises ValueError for bad input and OSError for a full disk. A folder that this run started is removed again if
        it holds nothing to continue from.
        """
        try:
            self._state.recover()
            return self._start_or_continue()
        finally:
            self._state.release()

    def _start_or_continue(self) -> bool:
        options, state = self._options, self._state
        continues = state.open(options.recorded, _named_files(options), options.restart)
        if (verdict := state.verdict()) is not None:
            self._close(*verdict, state.out if verdict[0] else state.refused)
            return verdict[0]
        if continues:
            self._view.say(f"going on with {state.folder}")
        try:
            return self._run()
        except (ValueError, OSError):
            if not continues and not state.rollouts.exists() and not any(state.features.glob("shard-*")):
                state.discard()
            raise

    def _run(self) -> bool:
        # transformers reports every load with a bar, and the unused LM head as unexpected.
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        job = self._job()
        if job.options.draft_folder is not None:
            check_head(job.options.draft_folder, job.policy)
        settings = _training_settings(job)
        data, head = load_data(job, self._answer_prompts)
        refresh = _judged(job, self._trained(job, head, data, settings), data)
        with disk_errors(self._state.folder):
            policy = {"folder": str(Path(self._options.policy)), "version": self._options.policy_version}
            write_card(self._state.candidate, job.policy, refresh, settings, policy, data.facts)
        place = self._state.put(refresh.published, refresh.reason)
        self._close(refresh.published, refresh.reason, place)
        return refresh.published

    def _job(self) -> RefreshJob:
        """Finds device and policy. A policy that is no Hugging Face folder is converted, once."""
        options, state = self._options, self._state
        device = _device(options.device)
        checkpoint, policy = Path(options.policy), state.policy
        if not policy.is_dir():
            is_converted = find_policy(checkpoint).kind != "hugging_face"
            with self._view.phase(f"{'converting' if is_converted else 'reading'} {checkpoint}"):
                policy = policy_folder(checkpoint, state.policy, options.hf_config)
        return RefreshJob(options, state, self._view, self._check, policy, read_policy_facts(policy), device)

    def _trained(self, job: RefreshJob, head: DraftHead, data: OfflineData, settings: TrainingSettings) -> Refresh:
        """Trains `head` and saves the candidate, unless an earlier process has done that; returns it without a judgement."""
        state = self._state
        if state.trained.is_file() and state.candidate.is_dir():
            result = TrainingResult(**json.loads(state.trained.read_text()))
            return Refresh(load_eagle3_head(state.candidate, job.policy, job.device), None, result, "", result.seconds)
        trainer, started = HeadTrainer(head, settings), time.perf_counter()
        if state.trainer.is_file():
            trainer.load(state.trainer)
        try:
            with self._view.bar("training") as move:
                result = trainer.train(data.training, _budget(job.options), self._on_step(job, trainer, data, move))
        except FloatingPointError as error:
            _save_candidate(job, trainer.head)
            reason = f"refused: training failed, {error}"
            return Refresh(trainer.head, None, None, reason, time.perf_counter() - started)
        _save_candidate(job, trainer.head)
        write_atomically(state.trained, json.dumps(asdict(result)) + "\n")
        self._view.say(f"trained {result.steps} steps, {result.tokens} tokens, in {result.seconds:.0f} s")
        return Refresh(trainer.head, None, result, "", result.seconds)

    def _on_step(self, job: RefreshJob, trainer: HeadTrainer, data: OfflineData, move: Callable[..., None]) -> OnStep:
        """Returns the function that saves the trainer, measures acceptance and moves the bar, each when it is due."""
        sample, acceptance = first_tokens(data.held_out, LIVE_TOKENS), ""
        saved = time.monotonic()
        measure_at = saved + MEASURE_EVERY_S

        def on_step(step: int, total: int, loss: float) -> None:
            nonlocal saved, measure_at, acceptance
            if time.monotonic() - saved > SAVE_EVERY_S:
                with disk_errors(job.state.folder):
                    trainer.save(job.state.trainer)
                saved = time.monotonic()
            job.check()
            figures = f"{trainer.tokens_so_far} tokens, loss {loss:.3f}"
            if (started := time.monotonic()) >= measure_at:
                measured = measure_acceptance(trainer.head, sample, job.options.num_drafts, job.options.temperature)
                acceptance = f", held-out acceptance length {measured.expected_length:.2f}"
                measure_at = time.monotonic() + max(MEASURE_EVERY_S, 10 * (time.monotonic() - started))
                job.view.say(f"step {step} of {total}: {figures}{acceptance}")
            move(step, total=total, description=f"{figures}{acceptance}")

        return on_step

    def _close(self, published: bool, reason: str, place: Path) -> None:
        """Removes what is no longer needed, and tells the user how the refresh ended."""
        state, say = self._state, self._view.say
        keeps_features = (self._options.keep_features or not published) and state.features.is_dir()
        state.close(keeps_features)
        say(reason)
        say(f"{'the head is in' if published else 'not published; the new head is kept in'} {place}")
        if keeps_features:
            say(f"features {state.kept_features}; use them again by --rollouts {state.kept_features}")


def _judged(job: RefreshJob, refresh: Refresh, data: OfflineData) -> Refresh:
    """Returns the refresh with the gate's judgement; unchanged if training failed."""
    if refresh.training is None:
        return refresh
    options, draft = job.options, job.options.draft_folder
    with job.view.phase("measuring held-out acceptance"):
        current = None if draft is None else load_eagle3_head(draft, job.policy, job.device)
        judge = Judge(PublishGate(options.confidence, options.tolerance), options.num_drafts, options.temperature)
        judgement = judge.compare(refresh.candidate, current, data.held_out)
    job.view.judged(judgement)
    return replace(refresh, judgement=judgement, reason=judgement.decision.reason)


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


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raises OSError where torch.save and safetensors have errors of their own for a full disk."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        text = " ".join(str(error).split())
        signs = ("PytorchStreamWriter", "unexpected pos", "No space", "os error", "iostream")
        if not any(sign in text for sign in signs):
            raise
        reason = f"{os.strerror(errno.ENOSPC)}; free some and repeat the command"
        raise OSError(errno.ENOSPC, reason, str(folder)) from error


def _training_settings(job: RefreshJob) -> TrainingSettings:
    """Returns the trainer's settings. Raises ValueError for an unknown loss."""
    options = job.options
    return TrainingSettings(
        loss=options.loss,
        learning_rate=options.lr or default_learning_rate(job.facts.hidden_size),
        batch_tokens=options.batch_tokens or BATCH_TOKENS[job.device.type],
        ttt_steps=options.ttt_steps,
        tv_after=options.tv_after,
        seed=options.seed,
    )


def _budget(options: RefreshOptions) -> Budget:
    if options.steps is not None:
        return Budget(steps=options.steps)
    return Budget(seconds=60.0 * (options.minutes or DEFAULT_MINUTES))


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; leave it out")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _named_files(options: RefreshOptions) -> list[Path]:
    """Returns the files and folders that must not change while a refresh is unfinished. Raises ValueError for missing ones."""
    policy, draft, prompts = Path(options.policy), options.draft_folder, options.prompts
    if not policy.is_dir():
        raise ValueError(f"--policy {policy} is not a folder; name a Hugging Face folder or a checkpoint")
    if draft is not None and not draft.is_dir():
        raise ValueError(f"--draft {draft} is not a folder; name a head's, or leave it out to begin from scratch")
    if prompts is not None and not Path(prompts).is_file():
        raise ValueError(f"--prompts {prompts}: no such file; give one prompt a line, or JSONL")
    named = [policy, *(Path(path) for path in (draft, prompts) if path is not None)]
    for path in options.rollout_paths:
        named += [path] if is_feature_store(path) else rollout_files([path])
    return named
