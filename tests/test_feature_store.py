# SPDX-License-Identifier: Apache-2.0
"""The feature store: its contents, the held-out split, its bound, and its recovery from a crash at any moment."""

import dataclasses
import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_specrollout.heads.features.feature_store import (
    FeatureReader,
    FeatureSource,
    FeatureStore,
    data_hash,
    newest_sequences,
)
from nemo_specrollout.heads.features.features import SequenceFeatures, is_held_out
from nemo_specrollout.storage.files import write_atomically

pytestmark = pytest.mark.unit

SOURCE = FeatureSource("tiny", "abc", vocab_size=1000, hidden_size=4, layer_ids=(1, 2, 3))
NUM_TOKENS, PROMPT_LENGTH = 20, 5
MAX_BYTES = 20_000
"""Enough for nine shards of one sequence each."""


def features(
    version: int, i: int, dtype: torch.dtype = torch.float32, num_tokens: int = NUM_TOKENS
) -> SequenceFeatures:
    """Returns features that depend on version and number alone. Four consecutive numbers share a prompt."""
    prompt = torch.full((PROMPT_LENGTH,), (i // 4) % 1000, dtype=torch.int32)
    rest = torch.arange(num_tokens - PROMPT_LENGTH, dtype=torch.int32) + i % 4
    aux = torch.full((num_tokens, 12), float(version), dtype=dtype) + torch.arange(num_tokens, dtype=dtype)[:, None]
    return SequenceFeatures(torch.cat([prompt, rest]), aux, aux[:, :4] * 2, PROMPT_LENGTH, version)


def same(one: SequenceFeatures, other: SequenceFeatures) -> bool:
    names = [f.name for f in dataclasses.fields(one)]
    pairs = [(getattr(one, n), getattr(other, n)) for n in names]
    return all(a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def num_sequences(reader: FeatureReader, held_out: bool) -> int:
    return len(list(reader.sequences(held_out)))


def stored(reader: FeatureReader) -> list[SequenceFeatures]:
    return [f for held_out in (False, True) for f in reader.sequences(held_out)]


def assert_whole(folder: Path) -> list[SequenceFeatures]:
    """Asserts that every shard has the written contents, and returns them; [] if there is no index yet."""
    try:
        found = stored(FeatureReader(folder))
    except FileNotFoundError:
        return []
    for f in found:
        number = 4 * int(f.token_ids_T[0]) + int(f.token_ids_T[PROMPT_LENGTH])
        assert same(f, features(f.policy_version, number, num_tokens=f.num_tokens))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flushed_sequences_are_read_newest_first(tmp_path: Path, dtype: torch.dtype) -> None:
    store = FeatureStore(tmp_path, 8 << 20, SOURCE, held_out_share=0.3)
    written = {(v, i): features(v, i, dtype) for v in (0, 2, 1) for i in range(40)}
    for sequence in written.values():
        store.append(sequence)
    assert stored(store) == []
    store.flush()
    for held_out in (False, True):
        found = list(FeatureReader(tmp_path).sequences(held_out))
        expected = [f for f in written.values() if is_held_out(f.token_ids_T[:PROMPT_LENGTH], 0.3) == held_out]
        assert len(found) == len(expected) == num_sequences(store, held_out) > 0
        assert [f.policy_version for f in found] == sorted((f.policy_version for f in found), reverse=True)
        assert all(any(same(f, e) for e in expected) for f in found)
    assert sum(f.num_tokens for f in newest_sequences([store], False, max_tokens=50)) == 60


def test_the_store_keeps_copies(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, SOURCE, held_out_share=0.0)
    batch = features(0, 0, num_tokens=40)
    view = dataclasses.replace(
        batch, token_ids_T=batch.token_ids_T[:20], aux_TF=batch.aux_TF[:20], final_TH=batch.final_TH[:20]
    )
    store.append(view)
    batch.aux_TF.zero_()
    store.close()
    (found,) = stored(store)
    assert same(found, features(0, 0))


@given(st.lists(st.integers(0, 999), min_size=1, max_size=30), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_larger_share_holds_out_more_prompts(prompt: list[int], one: float, two: float) -> None:
    tensor = torch.tensor(prompt, dtype=torch.int32)
    assert is_held_out(prompt, one) == is_held_out(tensor, one) == is_held_out(tensor.long(), one)
    low, high = sorted((one, two))
    assert is_held_out(prompt, high) or not is_held_out(prompt, low)
    assert not is_held_out(prompt, 0.0) and is_held_out(prompt, 1.0)


def test_the_held_out_share_is_as_requested() -> None:
    share = sum(is_held_out([i, i + 1], 0.1) for i in range(10_000)) / 10_000
    assert share == pytest.approx(0.1, abs=0.01)


def test_part_of_a_sequence_is_held_out_by_its_whole_prompt(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, SOURCE)
    whole = features(0, 0)
    for part in (dataclasses.replace(whole, first_position=3), dataclasses.replace(whole, prompt_length=21)):
        with pytest.raises(ValueError, match="prompt_ids"):
            store.append(part)
        store.append(part, prompt_ids=[7, 8, 9])
        store.append(dataclasses.replace(part, prompt_ids_P=torch.tensor([7, 8, 9], dtype=torch.int32)))
    store.flush()
    assert num_sequences(store, is_held_out([7, 8, 9], 0.1)) == 4


def test_only_sequences_from_the_prompt_to_a_response_are_kept(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, SOURCE)
    whole = features(0, 0)
    prompt_length, prompt_P = 4, torch.arange(4, dtype=torch.int32)
    at = [
        dataclasses.replace(whole, prompt_length=prompt_length, first_position=n, prompt_ids_P=prompt_P)
        for n in (0, 3, 4)
    ]
    given = dataclasses.replace(whole, prompt_length=whole.num_tokens)
    store.keep([*at, given])
    held_out = is_held_out(prompt_P, 0.1)
    kept = list(store.sequences(held_out))
    assert [f.first_position for f in kept] == [0, 3] and num_sequences(store, not held_out) == 0
    assert all(f.whole_prompt_P.tolist() == prompt_P.tolist() for f in kept)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.booleans()), min_size=1, max_size=40))
def test_the_oldest_versions_go_first_and_the_bound_holds(appended: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FeatureStore(Path(folder), MAX_BYTES, SOURCE)
        for version, i, flush in appended:
            store.append(features(version, i))
            if flush:
                store.flush()
            assert sum(p.stat().st_size for p in Path(folder).glob("shard-*")) <= MAX_BYTES
        store.close()
        kept = [f.policy_version for f in assert_whole(Path(folder))]
        versions = sorted((v for v, _, _ in appended), reverse=True)
        # The store drops whole shards, so the oldest version that remains may be incomplete.
        assert sorted(kept, reverse=True) == versions[: len(kept)]
        assert len(kept) == len(versions) or len(kept) >= 8
        assert {p.name for p in Path(folder).glob("shard-*")} == {s.name for s in store.shards()}


def test_the_hash_depends_on_the_contents_alone(tmp_path: Path) -> None:
    def hash_of(name: str, versions: list[int]) -> str:
        store = FeatureStore(tmp_path / name, 1 << 20, SOURCE)
        for version in versions:
            store.append(features(version, 0))
            store.flush()
        store.close()
        return data_hash(stored(store))

    assert hash_of("a", [1, 2]) == hash_of("b", [2, 1]) != hash_of("c", [1, 3])


@pytest.mark.parametrize(
    "change", [{"layer_ids": (1, 2, 4)}, {"hidden_size": 8}, {"vocab_size": 999}, {"tokenizer_hash": "x"}]
)
def test_features_of_another_source_are_refused(tmp_path: Path, change: dict) -> None:
    FeatureStore(tmp_path, 1 << 20, SOURCE).close()
    with pytest.raises(ValueError, match=next(iter(change))):
        FeatureStore(tmp_path, 1 << 20, dataclasses.replace(SOURCE, **change))
    FeatureStore(tmp_path, 1 << 20, dataclasses.replace(SOURCE, policy_name="the same, from elsewhere")).close()
    with pytest.raises(ValueError, match="held_out_share"):
        FeatureStore(tmp_path, 1 << 20, SOURCE, held_out_share=0.2)
    kept = json.loads((tmp_path / "index.json").read_text())["source"]
    assert kept == {**dataclasses.asdict(SOURCE), "layer_ids": [1, 2, 3]}


def test_unfit_sequences_are_refused(tmp_path: Path) -> None:
    store, good = FeatureStore(tmp_path, MAX_BYTES, SOURCE), features(0, 0)
    unfit = {
        "shapes": dataclasses.replace(good, aux_TF=good.aux_TF[:, :8]),
        "float32 or bfloat16": dataclasses.replace(good, final_TH=good.final_TH.double()),
        "store_bytes": features(0, 0, num_tokens=300),
    }
    for message, sequence in unfit.items():
        with pytest.raises(ValueError, match=message):
            store.append(sequence)
    store.flush()
    assert stored(store) == []


def test_only_one_process_writes(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, SOURCE)
    with pytest.raises(BlockingIOError, match="another process"):
        FeatureStore(tmp_path, 1 << 20, SOURCE)
    store.close()
    FeatureStore(tmp_path, 1 << 20, SOURCE).close()


def test_a_folder_without_a_valid_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json: not a JSON object"):
        FeatureStore(tmp_path, 1 << 20, SOURCE)
    (tmp_path / "index.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"format 2, not 0; held_out_share .*remove it"):
        FeatureStore(tmp_path, 1 << 20, SOURCE)


def test_readers_skip_dropped_shards(tmp_path: Path) -> None:
    store, reader = FeatureStore(tmp_path, MAX_BYTES, SOURCE, held_out_share=0.0), FeatureReader(tmp_path)
    for version in range(5):
        store.append(features(version, 0))
        store.flush()
    reading = reader.sequences(False)
    assert next(reading).policy_version == 4
    for version in range(5, 12):
        store.append(features(version, 0))
        store.flush()
    assert 0 < len(list(reading)) < 4


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, 1 << 20, SOURCE)
    for version in (3, 5, 4):
        store.append(features(version, 0))
    store.flush()
    store.forget_after(4)
    assert [f.policy_version for f in stored(store)] == [4, 3] and store.num_sequences() == 2


def test_a_full_disk_is_reported_and_leaves_the_store_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A flush writes one file. A failed sync of its folder is harmless.
    fatal = {("replace", 0), ("fsync", 0)}
    for function, step in itertools.product(("fsync", "replace"), range(3)):
        folder = tmp_path / f"{function}{step}"
        store = FeatureStore(folder, MAX_BYTES, SOURCE)
        for version in range(12):
            store.append(features(version, 0))
            store.flush()
        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing_after(step, getattr(os, function)))
            store.append(features(12, 0))
            if (function, step) in fatal:
                with pytest.raises(OSError, match="store_bytes") as error:
                    store.flush()
                assert error.value.errno == errno.ENOSPC
            else:
                store.flush()
        found = [f.policy_version for f in assert_whole(folder)]
        assert len(found) >= 7 and {p.name for p in folder.glob("*shard-*")} == {s.name for s in store.shards()}
        store.append(features(13, 0))
        store.close()
        assert assert_whole(folder)[0].policy_version == 13


def failing_after(num_calls: int, function: Callable) -> Callable:
    calls = itertools.count()

    def failing(*arguments: object) -> object:
        if next(calls) == num_calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*arguments)

    return failing


def test_files_are_replaced_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "one")
    assert path.read_bytes() == b"one"
    write_atomically(path, b"\xff")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing_after(0, os.fsync))
        with pytest.raises(OSError):
            write_atomically(path, "three")
    assert path.read_bytes() == b"\xff" and [p.name for p in tmp_path.iterdir()] == ["file"]


def in_a_new_process(function: str, folder: Path) -> None:
    """Runs a function of this file in a process without threads, where forking is safe."""
    code = f"import sys, pathlib, test_feature_store as t; t.{function}(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=environment, timeout=300)


def test_a_crash_at_any_file_operation_leaves_the_store_intact(tmp_path: Path) -> None:
    in_a_new_process("crash_everywhere", tmp_path)


def test_kills_at_random_moments_leave_the_store_intact(tmp_path: Path) -> None:
    in_a_new_process("kill_often", tmp_path)


def write_some(folder: Path, progress: Path) -> None:
    """Opens a store of two shards twice and writes four. `progress` grows by a byte after each flush."""
    for first in (0, 2):
        store = FeatureStore(folder, MAX_BYTES // 4, SOURCE)
        for version in range(first, first + 2):
            store.append(features(version, version))
            store.flush()
            with progress.open("ab") as file:
                file.write(b".")
        store.close()


def crash_everywhere(tmp_path: Path) -> None:
    os.fsync = lambda _: None  # a kill loses no written data, so the slow call proves nothing here
    events = {"open", "os.rename", "os.remove", "os.mkdir", "os.listdir", "os.scandir"}
    for crash_at in itertools.count():
        folder, progress = tmp_path / f"store{crash_at}", tmp_path / f"progress{crash_at}"
        child = os.fork()
        if child == 0:
            calls = itertools.count()

            def hook(event: str, arguments: tuple) -> None:
                if event in events and str(folder) in str(arguments) and next(calls) == crash_at:  # noqa: B023
                    os._exit(9)

            sys.addaudithook(hook)
            write_some(folder, progress)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = [f.policy_version for f in assert_whole(folder)]
        num_flushed = progress.stat().st_size if progress.exists() else 0
        # The store has what a finished flush wrote, unless newer data replaced it.
        assert num_flushed == 0 or max(found) >= num_flushed - 1
        assert len(found) >= min(num_flushed, 1)
        assert sum(p.stat().st_size for p in folder.glob("*shard-*")) <= MAX_BYTES // 4
        store = FeatureStore(folder, MAX_BYTES // 4, SOURCE)
        assert {p.name for p in folder.iterdir()} == {"index.json", ".lock", *(s.name for s in store.shards())}
        store.append(features(50, 3))
        store.close()
        assert 50 in {f.policy_version for f in assert_whole(folder)}
        if status == 0:
            print(f"{crash_at} crashes")
            assert crash_at > 20
            return
        assert status == 9


def kill_often(tmp_path: Path) -> None:
    """Kills the writer of one store many times, while the store is read, until enough was written."""
    rng, seen, round_ = random.Random(0), 0, 0
    while round_ < 12 or seen <= 10:
        child = os.fork()
        if child == 0:
            store = FeatureStore(tmp_path, 40 * MAX_BYTES, SOURCE)
            for i in itertools.count():
                store.append(features(round_, i, num_tokens=PROMPT_LENGTH + 4 + rng.randrange(900)))
                store.flush()
        time.sleep(rng.uniform(0.0, 0.06))
        assert_whole(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen = max(seen, len(assert_whole(tmp_path)))
        round_ += 1
    FeatureStore(tmp_path, 40 * MAX_BYTES, SOURCE).close()
