# SPDX-License-Identifier: Apache-2.0
"""What `refresh-draft` trains on: rollouts, read or generated, and their features; and the head that it begins with."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.cli.refresh_draft_options import RefreshOptions
from nemo_specrollout.cli.refresh_draft_rollouts import CONFIG_SUFFIXES, generate_rollouts, task_prompts
from nemo_specrollout.cli.refresh_draft_view import RefreshView

if TYPE_CHECKING:
    import torch

    from nemo_specrollout.training.features.feature_index import FeatureIndex
    from nemo_specrollout.training.features.feature_reader import FeatureReader
    from nemo_specrollout.training.features.features import SequenceFeatures
    from nemo_specrollout.training.features.rollout_files import RolloutText
    from nemo_specrollout.training.head.head import DraftHead
    from nemo_specrollout.training.head.head_facts import PolicyFacts
    from nemo_specrollout.training.refresh.refresh_state import RefreshState

HELD_OUT_TOKENS = 60_000
"""Of held-out sequences, by which the heads are judged, at most."""
COMPARED_SEQUENCES = 8


@dataclass(frozen=True)
class Data:
    """What a head learns from and is judged by, and what its card says of it."""

    training: list["SequenceFeatures"]
    held_out: list["SequenceFeatures"]
    facts: dict[str, Any]


class DataSource:
    """Reads, generates and computes, and keeps in `state` what took time. `check` is called now and then and raises
    KeyboardInterrupt when the user asked for it. `policy`: a Hugging Face folder."""

    def __init__(
        self,
        options: RefreshOptions,
        state: "RefreshState",
        view: RefreshView,
        check: Callable[[], None],
        policy: Path,
        facts: "PolicyFacts",
        device: "torch.device",
    ) -> None:
        self._options, self._state, self._view, self._check = options, state, view, check
        self._policy, self._facts, self._device = policy, facts, device

    def data_and_head(self) -> tuple[Data, "DraftHead"]:
        """From a feature store as it is, or by features of rollouts."""
        from nemo_specrollout.training.features.rollout_files import is_feature_store

        stores = [Path(p) for p in self._options.rollouts if is_feature_store(Path(p))]
        if stores and len(self._options.rollouts) > 1:
            raise ValueError(
                f"--rollouts {stores[0]} is a feature store; give it alone, or files and folders of rollouts"
            )
        return self._stored(stores[0]) if stores else self._captured(self._texts())

    @property
    def _max_length(self) -> int:
        return min(self._options.max_length or self._facts.max_position_embeddings, self._facts.max_position_embeddings)

    def _texts(self) -> list["RolloutText"]:
        from nemo_specrollout.training.features.rollout_files import read_rollouts

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
        from nemo_specrollout.training.features.rollout_files import held_out_share, read_prompts

        if file.suffix in CONFIG_SUFFIXES:
            found = task_prompts(file, self._options.num_prompts, self._options.seed)
        else:
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
        from nemo_specrollout.training.features.feature_store import FeatureStore
        from nemo_specrollout.training.features.rollout_files import held_out_share, tokenizer_hash
        from nemo_specrollout.training.refresh import offline_refresh as work

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
                    self._policy, kept, store, lm_head_VH, self._device, self._checked(move), options.temperature
                )
        finally:
            store.close()
        if warning:
            self._view.warn(warning)
        return self._data(store, store.index()), head

    def _stored(self, folder: Path) -> tuple[Data, "DraftHead"]:
        """The features of a store, checked against the policy."""
        from nemo_specrollout.training.features.feature_reader import FeatureReader
        from nemo_specrollout.training.features.rollout_checks import check_surprise, measure_surprise
        from nemo_specrollout.training.features.rollout_files import tokenizer_hash
        from nemo_specrollout.training.refresh import offline_refresh as work

        reader = FeatureReader(folder)
        index = reader.index()
        data = self._data(reader, index)
        tokens = [(f.token_ids_T.tolist(), f.prompt_length - f.first_position) for f in data.training]
        head = self._head([(ids, max(0, given)) for ids, given in tokens], index.source.layer_ids)
        source = work.source_of(head, self._policy, tokenizer_hash(self._policy))
        if differences := source.differences(index.source):
            raise ValueError(
                f"--rollouts {folder} does not fit the policy or head: {'; '.join(differences)}; give another"
            )
        surprise = measure_surprise(head.teacher_VH, data.held_out[: work.CHECKED_SEQUENCES], self._options.temperature)
        for warning in (check_surprise(surprise, self._facts.vocab_size), self._compare(data, source.layer_ids)):
            if warning:
                self._view.warn(warning)
        return data, head

    def _compare(self, data: Data, layer_ids: Sequence[int]) -> str | None:
        """Whether stored features are those of the policy as it is now."""
        from nemo_specrollout.training.features.hf_features import hf_features, load_policy
        from nemo_specrollout.training.features.rollout_checks import check_stored
        from nemo_specrollout.training.refresh.offline_refresh import feature_dtype

        whole = [f for f in data.held_out if f.first_position == 0 and 0 < f.prompt_length < f.num_tokens]
        texts = [(f.token_ids_T.tolist(), f.prompt_length) for f in whole[:COMPARED_SEQUENCES]]
        if not texts:
            return None
        policy = load_policy(self._policy, self._device, feature_dtype(self._device))
        return check_stored(whole[:COMPARED_SEQUENCES], hf_features(policy, texts, layer_ids))

    def _data(self, reader: "FeatureReader", index: "FeatureIndex") -> Data:
        from nemo_specrollout.training.features.rollout_files import MIN_HELD_OUT_PROMPTS
        from nemo_specrollout.training.refresh.offline_refresh import stored_sequences

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
        from nemo_specrollout.training.head.head_facts import read_head_facts

        if self._options.draft is not None:
            return len(read_head_facts(Path(self._options.draft)).layer_ids)
        return len(self._options.layer_ids) or 3

    def _head(self, texts: Sequence[tuple[Sequence[int], int]], layer_ids: tuple[int, ...] = ()) -> "DraftHead":
        """The head that training begins with: --draft, or a new one for these texts."""
        from nemo_specrollout.training.head.head import create_head, load_eagle3_head
        from nemo_specrollout.training.refresh.offline_refresh import most_frequent_tokens

        options = self._options
        if options.draft is not None:
            return load_eagle3_head(Path(options.draft), self._policy, self._device)
        chosen = None
        if options.draft_vocab is not None:
            if options.draft_vocab > self._facts.vocab_size:
                raise ValueError(
                    f"--draft-vocab {options.draft_vocab}: the policy has {self._facts.vocab_size} tokens; lower it"
                )
            chosen = most_frequent_tokens(texts, options.draft_vocab, self._facts.vocab_size)
        ids = options.layer_ids or layer_ids or None
        return create_head(self._policy, ids, chosen, self._device, options.seed)

    def _checked(self, move: Callable[[int], None]) -> Callable[[int], None]:
        def moved(done: int) -> None:
            self._check()
            move(done)

        return moved


def _check_room(folder: Path, needed: int) -> None:
    """Raises ValueError if there is no room for `needed` bytes of features, those that are there included."""
    free = shutil.disk_usage(folder).free + sum(f.stat().st_size for f in folder.glob("features/shard-*"))
    if needed > free:
        needed_mb, free_mb = needed / 1e6, free / 1e6
        raise ValueError(
            f"{folder}: the features take up to {needed_mb:,.0f} MB, and there is room for {free_mb:,.0f} MB; free some "
            "space, or lower --store-gb"
        )
