# SPDX-License-Identifier: Apache-2.0
"""The work behind `refresh-draft`, in order: rollouts, head, features, training, judgement. It loads torch when called."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.cli.refresh_draft_options import DEFAULT_MINUTES, RefreshOptions
from nemo_specrollout.cli.refresh_draft_rollouts import generate_rollouts
from nemo_specrollout.cli.refresh_draft_view import RefreshView

if TYPE_CHECKING:
    import torch

    from nemo_specrollout.training.feature_store import FeatureIndex, FeatureReader
    from nemo_specrollout.training.features import SequenceFeatures
    from nemo_specrollout.training.head import DraftHead
    from nemo_specrollout.training.refresh import Refresh
    from nemo_specrollout.training.refresh_state import RefreshState
    from nemo_specrollout.training.rollout_files import RolloutText
    from nemo_specrollout.training.trainer import Budget, HeadTrainer, TrainingResult, TrainingSettings

MEASURE_EVERY_S = 20.0
LIVE_TOKENS, HELD_OUT_TOKENS = 1_000, 60_000
"""Of held-out sequences, by which acceptance is measured while training, and by which the heads are judged."""
COMPARED_SEQUENCES = 8
BATCH_TOKENS = {"cpu": 256, "cuda": 4096}
SMALL_HIDDEN, SMALL_RATE, RATE_FALL = 256, 3e-3, 1.227


@dataclass(frozen=True)
class Data:
    """What a head learns from and is judged by, and what its card says of it."""

    training: list["SequenceFeatures"]
    held_out: list["SequenceFeatures"]
    facts: dict[str, Any]


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
        options, state = self._options, self._state
        inputs = _named_files(options)
        goes_on = state.open(options.recorded, inputs, options.restart)
        if goes_on:
            self._view.say(f"going on with {state.folder}")
        try:
            return self._run()
        except (ValueError, OSError):
            if not goes_on and not any(state.features.glob("shard-*")):
                state.discard()
            raise
        finally:
            state.release()

    def _run(self) -> bool:
        from nemo_specrollout.training.head_facts import read_policy_facts

        self._device = _device(self._options.device)
        self._policy = self._policy_folder()
        self._facts = read_policy_facts(self._policy)
        self._check_draft()
        self._settings()
        data, head = self._data_and_head()
        return self._finish(*self._train(head, data), data)

    def _policy_folder(self) -> Path:
        """The policy as a Hugging Face folder; a checkpoint is converted once."""
        from nemo_specrollout.training.policy_source import find_policy, policy_folder

        checkpoint, hf_config = Path(self._options.policy), self._options.hf_config
        if self._state.policy.is_dir():
            return self._state.policy
        if find_policy(checkpoint).kind == "hugging_face":
            return policy_folder(checkpoint, self._state.policy, hf_config)
        with self._view.phase(f"converting {checkpoint}"):
            return policy_folder(checkpoint, self._state.policy, hf_config)

    def _check_draft(self) -> None:
        from nemo_specrollout.training.head_facts import check_head

        if self._options.draft is not None:
            check_head(Path(self._options.draft), self._policy)

    @property
    def _max_length(self) -> int:
        return min(self._options.max_length or self._facts.max_position_embeddings, self._facts.max_position_embeddings)

    def _data_and_head(self) -> tuple[Data, "DraftHead"]:
        """From a feature store as it is, or by features of rollouts."""
        from nemo_specrollout.training.rollout_files import is_feature_store

        stores = [Path(p) for p in self._options.rollouts if is_feature_store(Path(p))]
        if stores and len(self._options.rollouts) > 1:
            raise ValueError(
                f"--rollouts {stores[0]} is a feature store; give it alone, or files and folders of rollouts"
            )
        return self._stored(stores[0]) if stores else self._captured(self._texts())

    def _texts(self) -> list["RolloutText"]:
        from nemo_specrollout.training.rollout_files import read_rollouts

        paths = [Path(p) for p in self._options.rollouts]
        if self._options.prompts is not None:
            self._generate(Path(self._options.prompts))
            paths = [self._state.rollouts]
        read = read_rollouts(paths, self._policy, self._facts.vocab_size, self._max_length)
        self._view.say(f"rollouts: {len(read.texts)} texts of {read.num_tokens} tokens in {read.num_files} files")
        for number, what in (
            (read.num_empty, "rollouts without a response were skipped"),
            (read.num_too_long, f"prompts fill the context of {self._max_length} tokens and were skipped"),
            (read.num_cut, f"texts were cut at {self._max_length} tokens"),
        ):
            if number:
                self._view.say(f"{number} {what}")
        return list(read.texts)

    def _generate(self, file: Path) -> None:
        from nemo_specrollout.training.rollout_files import held_out_share, read_prompts

        found = read_prompts(file, self._policy, self._facts.vocab_size)
        prompts = [p for p in found if len(p) < self._max_length]
        if len(prompts) < len(found):
            self._view.say(
                f"{len(found) - len(prompts)} prompts fill the context of {self._max_length} tokens: skipped"
            )
        held_out_share(prompts, self._options.held_out_share)
        with self._view.bar("rollouts", len(prompts) * self._options.samples_per_prompt) as move:
            generate_rollouts(
                self._options, self._policy, prompts, self._max_length, self._state.rollouts, self._checked(move)
            )

    def _captured(self, texts: list["RolloutText"]) -> tuple[Data, "DraftHead"]:
        """Features of `texts`, of as many as there is room for."""
        from nemo_specrollout.training import offline_refresh as work
        from nemo_specrollout.training.feature_store import FeatureStore
        from nemo_specrollout.training.rollout_files import held_out_share, tokenizer_hash

        options, dtype = self._options, work.feature_dtype(self._device)
        num_layers = self._num_aux_layers()

        def size_of(num_tokens: int, num_texts: int) -> int:
            return work.stored_bytes(num_tokens, num_texts, self._facts.hidden_size, num_layers, dtype)

        share = held_out_share((t.first_prompt for t in texts), options.held_out_share)
        texts = work.without_later_turns(texts, share)
        kept = work.newest_within(texts, int(options.store_gb * 1e9), size_of)
        if len(kept) < len(texts):
            self._view.say(
                f"{len(texts) - len(kept)} of the first texts are left out, to stay within --store-gb {options.store_gb}"
            )
            held_out_share((t.first_prompt for t in kept), share)
        head = self._head([t.text for t in kept])
        needed = size_of(sum(len(t.token_ids) for t in kept), len(kept))
        _check_room(self._state.folder, needed)
        source = work.source_of(head, self._policy, tokenizer_hash(self._policy))
        store = FeatureStore(self._state.features, max(2 * needed, 1 << 24), source, share)
        try:
            with self._view.bar("features", len(kept)) as move:
                lm_head_VH = head.teacher_VH
                warning = work.capture_features(
                    self._policy, kept, store, lm_head_VH, self._device, self._checked(move)
                )
        finally:
            store.close()
        if warning:
            self._view.warn(warning)
        return self._data(store, store.index()), head

    def _stored(self, folder: Path) -> tuple[Data, "DraftHead"]:
        """The features of a store, checked against the policy."""
        from nemo_specrollout.training import offline_refresh as work
        from nemo_specrollout.training.feature_store import FeatureReader
        from nemo_specrollout.training.rollout_checks import check_surprise, measure_surprise
        from nemo_specrollout.training.rollout_files import tokenizer_hash

        reader = FeatureReader(folder)
        index = reader.index()
        data = self._data(reader, index)
        tokens = [(f.token_ids_T.tolist(), f.prompt_length - f.first_position) for f in data.training]
        head = self._head([(ids, max(0, given)) for ids, given in tokens], index.source.layer_ids)
        source = work.source_of(head, self._policy, tokenizer_hash(self._policy))
        if differences := source.mixes_with(index.source):
            raise ValueError(
                f"--rollouts {folder} does not fit the policy or head: {'; '.join(differences)}; give another"
            )
        surprise = measure_surprise(head.teacher_VH, data.held_out[: work.CHECKED_SEQUENCES])
        for warning in (check_surprise(surprise, self._facts.vocab_size), self._compare(data, source.layer_ids)):
            if warning:
                self._view.warn(warning)
        return data, head

    def _compare(self, data: Data, layer_ids: Sequence[int]) -> str | None:
        """Whether stored features are those of the policy as it is now."""
        from nemo_specrollout.training.hf_features import hf_features, load_policy
        from nemo_specrollout.training.offline_refresh import feature_dtype
        from nemo_specrollout.training.rollout_checks import check_stored

        whole = [f for f in data.held_out if f.first_position == 0 and 0 < f.prompt_length < f.num_tokens]
        texts = [(f.token_ids_T.tolist(), f.prompt_length) for f in whole[:COMPARED_SEQUENCES]]
        if not texts:
            return None
        policy = load_policy(self._policy, self._device, feature_dtype(self._device))
        return check_stored(whole[:COMPARED_SEQUENCES], hf_features(policy, texts, layer_ids))

    def _data(self, reader: "FeatureReader", index: "FeatureIndex") -> Data:
        from nemo_specrollout.training.offline_refresh import stored_sequences
        from nemo_specrollout.training.rollout_files import MIN_HELD_OUT_PROMPTS

        training = stored_sequences(reader, held_out=False)
        held_out = stored_sequences(reader, held_out=True, max_tokens=HELD_OUT_TOKENS)
        prompts = {tuple(f.token_ids_T[: f.prompt_length].tolist()) for f in held_out}
        if len(prompts) < MIN_HELD_OUT_PROMPTS or not training:
            raise ValueError(
                f"{reader.folder}: {len(training)} sequences to train on and {len(prompts)} held-out prompts are too few; "
                f"{MIN_HELD_OUT_PROMPTS} prompts are needed to judge by, give more rollouts"
            )
        facts = {
            "hash": reader.data_hash(),
            "rollouts": list(self._options.rollouts) or [f"generated from {self._options.prompts}"],
            "sequences": len(training),
            "tokens": sum(f.num_tokens for f in training),
            "held_out_share": index.held_out_share,
            "held_out_prompts": len(prompts),
            "temperature": self._options.temperature,
        }
        return Data(training, held_out, facts)

    def _num_aux_layers(self) -> int:
        from nemo_specrollout.training.head_facts import read_head_facts

        if self._options.draft is not None:
            return len(read_head_facts(Path(self._options.draft)).layer_ids)
        return len(self._options.layer_ids) or 3

    def _head(self, texts: Sequence[tuple[Sequence[int], int]], layer_ids: tuple[int, ...] = ()) -> "DraftHead":
        """The head that training begins with: --draft, or a new one for these texts."""
        from nemo_specrollout.training.head import create_head, load_head
        from nemo_specrollout.training.offline_refresh import most_frequent_tokens

        options = self._options
        if options.draft is not None:
            return load_head(Path(options.draft), self._policy, self._device)
        chosen = None
        if options.draft_vocab is not None:
            if options.draft_vocab > self._facts.vocab_size:
                raise ValueError(
                    f"--draft-vocab {options.draft_vocab}: the policy has {self._facts.vocab_size} tokens; lower it"
                )
            chosen = most_frequent_tokens(texts, options.draft_vocab, self._facts.vocab_size)
        ids = options.layer_ids or layer_ids or None
        return create_head(self._policy, ids, chosen, self._device, options.seed)

    def _train(self, head: "DraftHead", data: Data) -> tuple["HeadTrainer", "TrainingResult | None", str, float]:
        """Trains `head`, unless an earlier process has; the trainer, what training took, why it failed, seconds."""
        from nemo_specrollout.training import offline_refresh as work
        from nemo_specrollout.training.trainer import HeadTrainer

        if (done := work.trained_already(self._state, self._policy, self._device)) is not None:
            return HeadTrainer(done[0], self._settings()), done[1], "", done[1].seconds
        trainer, started = HeadTrainer(head, self._settings()), time.perf_counter()
        verifier = None if self._policy == self._state.policy else str(self._policy.absolute())
        try:
            with self._view.training() as move:
                report = self._reporter(head, data, move)
                result = work.train(trainer, data.training, self._budget(), self._state, report, verifier)
        except FloatingPointError as error:
            work.save_candidate(trainer.head, self._state, verifier)
            return trainer, None, f"refused: training failed, {error}", time.perf_counter() - started
        self._view.say(f"trained {result.steps} steps, {result.tokens} tokens, in {result.seconds:.0f} s")
        return trainer, result, "", result.seconds

    def _reporter(
        self, head: "DraftHead", data: Data, move: Callable[[int, int, str], None]
    ) -> Callable[[int, int, float, int], None]:
        """Moves the bar, and now and then measures acceptance on some held-out sequences."""
        from nemo_specrollout.training.acceptance import measure_acceptance

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
        from nemo_specrollout.training.head import load_head
        from nemo_specrollout.training.offline_refresh import conclude
        from nemo_specrollout.training.refresh import Refresh, judge

        options, state = self._options, self._state
        refresh = Refresh(trainer.head, None, None, failure, seconds)
        if result is not None:
            with self._view.phase("measuring held-out acceptance"):
                current = load_head(Path(options.draft), self._policy, self._device) if options.draft else None
                judgement = judge(
                    trainer.head, current, data.held_out, self._gate(), options.num_drafts, options.temperature
                )
            refresh = Refresh(trainer.head, judgement, result, judgement.decision.reason, seconds)
            self._view.judged(judgement)
        place = conclude(
            refresh, state, self._policy, trainer, policy=Path(options.policy), policy_version=options.policy_version,
            data=data.facts,
        )  # fmt: skip
        keeps = options.keep_features or not refresh.published
        had_features = state.features.is_dir()
        state.close(keep_features=keeps)
        self._say_end(refresh, place, keeps and had_features)
        return refresh.published

    def _say_end(self, refresh: "Refresh", place: Path, has_features: bool) -> None:
        self._view.say(refresh.reason)
        self._view.say(f"{'the head is in' if refresh.published else 'not published; the new head is kept in'} {place}")
        if has_features:
            self._view.say(
                f"features {self._state.kept_features}; use them again by --rollouts {self._state.kept_features}"
            )

    def _gate(self) -> Any:
        from nemo_specrollout.scheduling.publish_gate import PublishGate

        return PublishGate(self._options.confidence, self._options.tolerance)

    def _settings(self) -> "TrainingSettings":
        from nemo_specrollout.training.trainer import TrainingSettings

        options = self._options
        return TrainingSettings(
            loss=options.loss,
            learning_rate=options.lr or default_learning_rate(self._facts.hidden_size),
            batch_tokens=options.batch_tokens or BATCH_TOKENS[self._device.type],
            ttt_steps=options.ttt_steps,
            seed=options.seed,
        )

    def _budget(self) -> "Budget":
        from nemo_specrollout.training.trainer import Budget

        options = self._options
        if options.steps is not None:
            return Budget(steps=options.steps)
        return Budget(seconds=60.0 * (options.minutes or DEFAULT_MINUTES))

    def _checked(self, move: Callable[[int], None]) -> Callable[[int], None]:
        def moved(done: int) -> None:
            self._check()
            move(done)

        return moved


def default_learning_rate(hidden_size: int) -> float:
    """3e-3 up to a hidden size of 256, then falling as a power of it, to 1e-4 at 4096."""
    return SMALL_RATE * min(1.0, (SMALL_HIDDEN / hidden_size) ** RATE_FALL)


def _device(name: str) -> "torch.device":
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; leave it out")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _named_files(options: RefreshOptions) -> list[Path]:
    """What was named and must not change while a refresh is unfinished. Raises ValueError for what is not there."""
    from nemo_specrollout.training.rollout_files import is_feature_store, rollout_files

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


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder}: the features take up to {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; free some, or "
            "lower --store-gb"
        )


def _first_tokens(sequences: Sequence["SequenceFeatures"], max_tokens: int) -> list["SequenceFeatures"]:
    kept: list[SequenceFeatures] = []
    for features in sequences:
        if kept and sum(f.num_tokens for f in kept) + features.num_tokens > max_tokens:
            break
        kept.append(features)
    return kept
