# SPDX-License-Identifier: Apache-2.0
"""The work behind `refresh-draft`, in order: rollouts, head, features, training, judgement. It loads torch when called."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.cli.refresh_draft_data import Data, DataSource
from nemo_specrollout.cli.refresh_draft_options import DEFAULT_MINUTES, RefreshOptions
from nemo_specrollout.cli.refresh_draft_view import RefreshView

if TYPE_CHECKING:
    import torch

    from nemo_specrollout.training.features.features import SequenceFeatures
    from nemo_specrollout.training.head.head import DraftHead
    from nemo_specrollout.training.head.trainer import Budget, HeadTrainer, TrainingResult, TrainingSettings
    from nemo_specrollout.training.refresh.refresh_state import RefreshState

MEASURE_EVERY_S = 20.0
LIVE_TOKENS = 1_000
"""Of held-out sequences, by which acceptance is measured while training."""


class DraftRefresh:
    """One run of the command. `check` is called between steps and raises KeyboardInterrupt when the user asked for it.

    Invariant: what took time is in `state` or can be made again from it, and nothing else is written before the gate spoke.
    """

    def __init__(
        self,
        options: RefreshOptions,
        state: "RefreshState",
        check: Callable[[], None] = lambda: None,
        view: RefreshView | None = None,
    ) -> None:
        self._options, self._state, self._check, self._view = options, state, check, view or RefreshView()

    def run(self) -> bool:
        """Whether the head was published. Raises ValueError for bad input, OSError for a full disk; a folder that this run
        began is removed again if there is nothing in it to go on from."""
        try:
            self._state.recover()
            return self._go_on()
        finally:
            self._state.release()

    def _go_on(self) -> bool:
        options, state = self._options, self._state
        goes_on = state.open(options.recorded, _named_files(options), options.restart)
        if (verdict := state.verdict()) is not None:
            self._close(*verdict, state.out if verdict[0] else state.refused)
            return verdict[0]
        if goes_on:
            self._view.say(f"going on with {state.folder}")
        try:
            return self._run()
        except (ValueError, OSError):
            if not goes_on and not state.rollouts.exists() and not any(state.features.glob("shard-*")):
                state.discard()
            raise

    def _run(self) -> bool:
        from nemo_specrollout.training.head.head_facts import read_policy_facts

        _silence_transformers()
        options = self._options
        self._device = _device(options.device)
        self._policy = self._policy_folder()
        self._facts = read_policy_facts(self._policy)
        self._check_draft()
        self._settings()
        data, head = DataSource(
            options, self._state, self._view, self._check, self._policy, self._facts, self._device
        ).data_and_head()
        return self._finish(*self._train(head, data), data)

    def _policy_folder(self) -> Path:
        """The policy as a Hugging Face folder; a checkpoint is converted once."""
        from nemo_specrollout.training.checkpoints.policy_source import find_policy, policy_folder

        checkpoint, hf_config = Path(self._options.policy), self._options.hf_config
        if self._state.policy.is_dir():
            return self._state.policy
        if find_policy(checkpoint).kind == "hugging_face":
            return policy_folder(checkpoint, self._state.policy, hf_config)
        with self._view.phase(f"converting {checkpoint}"):
            return policy_folder(checkpoint, self._state.policy, hf_config)

    def _check_draft(self) -> None:
        from nemo_specrollout.training.head.head_checks import check_head

        if self._options.draft is not None:
            check_head(Path(self._options.draft), self._policy)

    def _train(self, head: "DraftHead", data: Data) -> tuple["HeadTrainer", "TrainingResult | None", str, float]:
        """Trains `head`, unless an earlier process has; the trainer, what training took, why it failed, seconds."""
        from nemo_specrollout.training.head.trainer import HeadTrainer
        from nemo_specrollout.training.refresh import offline_refresh as work

        if (done := work.trained_already(self._state, self._policy, self._device)) is not None:
            return HeadTrainer(done[0], self._settings()), done[1], "", done[1].seconds
        trainer, started = HeadTrainer(head, self._settings()), time.perf_counter()
        verifier = None if self._policy == self._state.policy else str(self._policy)
        try:
            with self._view.training() as move:
                report = self._reporter(head, data, move)
                result = work.train(trainer, data.training, self._budget(), self._state, report, verifier, self._dtype)
        except FloatingPointError as error:
            work.save_candidate(trainer.head, self._state, verifier, self._dtype)
            return trainer, None, f"refused: training failed, {error}", time.perf_counter() - started
        self._view.say(f"trained {result.steps} steps, {result.tokens} tokens, in {result.seconds:.0f} s")
        return trainer, result, "", result.seconds

    def _reporter(
        self, head: "DraftHead", data: Data, move: Callable[[int, int, str], None]
    ) -> Callable[[int, int, float, int], None]:
        """Moves the bar, and now and then measures acceptance on some held-out sequences."""
        from nemo_specrollout.training.head.acceptance import measure_acceptance

        sample, acceptance = _first_tokens(data.held_out, LIVE_TOKENS), ""
        due = time.monotonic() + MEASURE_EVERY_S

        def report(step: int, total: int, loss: float, tokens: int) -> None:
            nonlocal acceptance, due
            self._check()
            if (started := time.monotonic()) >= due:
                length = measure_acceptance(
                    head, sample, self._options.num_drafts, self._options.temperature
                ).expected_length
                acceptance = f", held-out acceptance length {length:.2f}"
                due = time.monotonic() + max(MEASURE_EVERY_S, 10 * (time.monotonic() - started))
                self._view.say(f"step {step} of {total}: {tokens} tokens, loss {loss:.3f}{acceptance}")
            move(step, total, f"{tokens} tokens, loss {loss:.3f}{acceptance}")

        return report

    def _finish(
        self, trainer: "HeadTrainer", result: "TrainingResult | None", failure: str, seconds: float, data: Data
    ) -> bool:
        """Judges the candidate, and puts it where it belongs."""
        from nemo_specrollout.training.head.head import load_eagle3_head
        from nemo_specrollout.training.refresh.offline_refresh import conclude
        from nemo_specrollout.training.refresh.refresh_round import Refresh, judge

        options, state = self._options, self._state
        refresh = Refresh(trainer.head, None, None, failure, seconds)
        if result is not None:
            with self._view.phase("measuring held-out acceptance"):
                current = load_eagle3_head(Path(options.draft), self._policy, self._device) if options.draft else None
                judgement = judge(
                    trainer.head, current, data.held_out, self._gate(), options.num_drafts, options.temperature
                )
            refresh = Refresh(trainer.head, judgement, result, judgement.decision.reason, seconds)
            self._view.judged(judgement)
        place = conclude(
            refresh, state, self._policy, trainer, policy=Path(options.policy), policy_version=options.policy_version,
            data=data.facts,
        )  # fmt: skip
        self._close(refresh.published, refresh.reason, place)
        return refresh.published

    def _close(self, published: bool, reason: str, place: Path) -> None:
        """Removes what is not needed any more, and says how it ended."""
        state, say = self._state, self._view.say
        keeps = (self._options.keep_features or not published) and state.features.is_dir()
        state.close(keep_features=keeps)
        say(reason)
        say(f"{'the head is in' if published else 'not published; the new head is kept in'} {place}")
        if keeps:
            say(f"features {state.kept_features}; use them again by --rollouts {state.kept_features}")

    def _gate(self) -> Any:
        from nemo_specrollout.scheduling.heads.publish_gate import PublishGate

        return PublishGate(self._options.confidence, self._options.tolerance)

    def _settings(self) -> "TrainingSettings":
        from nemo_specrollout.training.head.trainer import BATCH_TOKENS, TrainingSettings, default_learning_rate

        options = self._options
        return TrainingSettings(
            loss=options.loss,
            learning_rate=options.lr or default_learning_rate(self._facts.hidden_size),
            batch_tokens=options.batch_tokens or BATCH_TOKENS[self._device.type],
            ttt_steps=options.ttt_steps,
            tv_after=options.tv_after,
            seed=options.seed,
        )

    @property
    def _dtype(self) -> "torch.dtype":
        import torch

        return torch.bfloat16 if self._options.dtype == "bfloat16" else torch.float32

    def _budget(self) -> "Budget":
        from nemo_specrollout.training.head.trainer import Budget

        options = self._options
        if options.steps is not None:
            return Budget(steps=options.steps)
        return Budget(seconds=60.0 * (options.minutes or DEFAULT_MINUTES))


def _silence_transformers() -> None:
    """It reports every load, with a bar, and the LM head that features do not need as unexpected."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _device(name: str) -> "torch.device":
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; leave it out")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _named_files(options: RefreshOptions) -> list[Path]:
    """What was named and must not change while a refresh is unfinished. Raises ValueError for what is not there."""
    from nemo_specrollout.training.features.rollout_files import is_feature_store, rollout_files

    policy = Path(options.policy)
    if not policy.is_dir():
        raise ValueError(f"--policy {policy} is not a folder; name a Hugging Face folder or a checkpoint")
    if options.draft is not None and not Path(options.draft).is_dir():
        raise ValueError(
            f"--draft {options.draft} is not a folder; name a head's, or leave it out to begin from scratch"
        )
    if options.prompts is not None and not Path(options.prompts).is_file():
        raise ValueError(f"--prompts {options.prompts}: no such file; give one prompt a line, or JSONL")
    named = [policy, *(Path(p) for p in (options.draft, options.prompts) if p is not None)]
    for path in map(Path, options.rollouts):
        named += [path] if is_feature_store(path) else rollout_files([path])
    return named


def _first_tokens(sequences: Sequence["SequenceFeatures"], max_tokens: int) -> list["SequenceFeatures"]:
    kept: list[SequenceFeatures] = []
    for features in sequences:
        if kept and sum(f.num_tokens for f in kept) + features.num_tokens > max_tokens:
            break
        kept.append(features)
    return kept
