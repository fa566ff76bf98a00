# SPDX-License-Identifier: Apache-2.0
"""The history of finished responses: files that grow while they are read, damage, bounds, and what an index is fed with."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_specrollout.history import segments
from nemo_specrollout.history.feeding import PIECE, Feeding, tokens_of_index
from nemo_specrollout.history.segments import ROWS, TEXTS, OtherSegment, Place, SegmentReader, SegmentWriter, Text
from nemo_specrollout.history.service import HistoryService, Piece
from nemo_specrollout.history.store import RETRY_S, HistoryStore

pytestmark = pytest.mark.unit

MINE, OTHER = b"a" * 16, b"b" * 16
MIB = 1 << 20


def text(group: int, *tokens: int, num_context: int = 0) -> Text:
    return Text(group, num_context, np.array(tokens, np.int32))


def store_at(folder: Path, most_bytes: int = MIB, fingerprint: bytes = MINE) -> HistoryStore:
    store = HistoryStore(folder, most_bytes, fingerprint)
    store.open()
    return store


def tokens_of(store: HistoryStore, group: int) -> list[list[int] | None]:
    """Returns the texts of a group, the newest first; None for one that cannot be read."""
    found = [store.read(place) for place, _ in store.find(group)]
    return [None if one is None else one.tokens.tolist() for one in found]


def wait_for(reached: Callable[[], bool]) -> None:
    """Waits until a thread has reached a state, as long as the test's own limit allows."""
    while not reached():
        time.sleep(0.01)


def test_a_reader_finds_texts_while_the_segment_grows(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, MINE, 5)
    reader = SegmentReader(tmp_path, writer.name, MINE)
    assert reader.refresh() == 0
    writer.append([text(7, 1, 2, 3, num_context=1), text(8, 4)])
    assert reader.refresh() == 2 and reader.groups_R.tolist() == [7, 8]
    writer.append([text(7, 5, 6)])
    assert reader.refresh() == 1 and reader.find(7).tolist() == [0, 2] and reader.find(9).tolist() == []
    found = reader.read(0)
    assert found is not None and (found.group, found.num_context, found.tokens.tolist()) == (7, 1, [1, 2, 3])
    assert [reader.num_tokens(row) for row in range(3)] == [3, 1, 2]


def test_groups_of_63_bits_and_empty_texts_survive(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, MINE, 5)
    writer.append([text((1 << 63) - 1), text(0, 2**31 - 1, -1)])
    reader = SegmentReader(tmp_path, writer.name, MINE)
    reader.refresh()
    found = [reader.read(row) for row in range(2)]
    assert [None if one is None else (one.group, one.tokens.tolist()) for one in found] == [
        ((1 << 63) - 1, []),
        (0, [2**31 - 1, -1]),
    ]


@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        (TEXTS, lambda content: content[:-2]),
        (TEXTS, lambda content: content[:64] + b"\xff" * (len(content) - 64)),
        (TEXTS, lambda content: b""),
        (ROWS, lambda content: content[:-32] + b"\xff" * 32),
        (ROWS, lambda content: content[:64] + bytes(len(content) - 64)),
    ],
    ids=["cut off", "overwritten", "emptied", "a row of ones", "rows of zeros"],
)
def test_damaged_texts_are_left_out(tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]) -> None:
    writer = SegmentWriter(tmp_path, MINE, 5)
    writer.append([text(7, 1, 2, 3)])
    writer.close()
    path = tmp_path / f"{writer.name}{ending}"
    path.write_bytes(damage(path.read_bytes()))
    store = store_at(tmp_path)
    everything = [found for group in (7, 0, -1) for found in tokens_of(store, group)]
    assert [found for found in everything if found] == []
    store.append([text(7, 9)])
    store.refresh()
    assert tokens_of(store, 7)[0] == [9]


def test_a_row_that_is_not_complete_waits(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, MINE, 5)
    writer.append([text(7, 1), text(7, 2)])
    path = tmp_path / f"{writer.name}{ROWS}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    reader = SegmentReader(tmp_path, writer.name, MINE)
    assert reader.refresh() == 1
    path.write_bytes(whole)
    assert reader.refresh() == 1 and reader.find(7).tolist() == [0, 1]


def test_other_tokenizers_formats_and_garbage_are_named_once(tmp_path: Path) -> None:
    for fingerprint in (MINE, OTHER):
        store_at(tmp_path, fingerprint=fingerprint).append([text(7, 1)])
    (tmp_path / f"00000000000000000001-garbage{ROWS}").write_bytes(os.urandom(200))
    (tmp_path / f"00000000000000000002-empty{ROWS}").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("not ours")
    store = store_at(tmp_path)
    (said,) = store.take_problems()
    reason = "2 of its segments are of another tokenizer or format, or damaged, so their responses are not used"
    assert said == f"history: {tmp_path} {reason}"
    assert tokens_of(store, 7) == [[1]] and store.num_read == 1
    store.refresh()
    assert store.take_problems() == []
    with pytest.raises(OtherSegment):
        SegmentReader(tmp_path, "00000000000000000001-garbage", MINE)


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    one, other = store_at(tmp_path), store_at(tmp_path)
    (place,) = one.append([text(7, 1)])
    other.append([text(7, 2)])
    ((name, first, groups_R),) = other.refresh()
    assert (Place(name, first), groups_R.tolist()) == (place, [7])
    assert sorted(tokens_of(other, 7)) == [[1], [2]]
    assert one.is_own(place) and not other.is_own(place)
    assert other.refresh() == []


def test_equal_texts_of_a_prompt_are_written_once(tmp_path: Path) -> None:
    one, other = store_at(tmp_path), store_at(tmp_path)
    one.append([text(7, 1, 2)])
    other.refresh()
    other.append([text(7, 1, 2), text(7, 1, 3), text(8, 1, 2)])
    other.refresh()
    assert sorted(found or [] for found in tokens_of(other, 7)) == [[1, 2], [1, 3]] and tokens_of(other, 8) == [[1, 2]]


def test_the_oldest_texts_make_room(tmp_path: Path) -> None:
    most = 64 << 10
    store = store_at(tmp_path, most)
    for i in range(40):
        store.append([text(i, *[i] * 1000)])
        store.refresh()
    held = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert held <= most
    kept = [i for i in range(40) if tokens_of(store, i)]
    assert kept == list(range(kept[0], 40)) and 10 <= len(kept) < 17
    assert store.take_problems() == []


def test_a_folder_beyond_its_bound_is_named(tmp_path: Path) -> None:
    big = store_at(tmp_path, 64 * MIB)
    for _ in range(3):
        big.append([text(1, *range(200_000))])
        big._drop_writer()
    store = store_at(tmp_path, MIB)
    (said,) = store.take_problems()
    assert said == (f"history: {tmp_path} held 2.3 MiB, more than history_mib 1, so the oldest responses were removed")
    assert store.num_read == 1


def test_a_segment_that_others_removed_is_written_no_more(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.append([text(1, 1)])
    for path in tmp_path.iterdir():
        path.unlink()
    store.append([text(1, 2)])
    store.refresh()
    assert tokens_of(store, 1) == [[2]]


def test_a_full_disk_costs_one_sentence_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    store = HistoryStore(tmp_path, MIB, MINE, clock=lambda: now)
    store.open()
    store.append([text(1, 1)])

    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(segments.os, "write", full)
        assert store.append([text(1, 2)]) == [] and store.append([text(1, 3)]) == []
    (said,) = store.take_problems()
    assert said == f"history: {tmp_path} cannot be written (No space left on device), so new responses are not kept"
    assert store.append([text(1, 4)]) == []
    now = RETRY_S + 1.0
    assert len(store.append([text(1, 5)])) == 1
    store.refresh()
    assert tokens_of(store, 1) == [[5], [1]] and store.take_problems() == []


def test_a_folder_that_cannot_be_made_costs_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = store_at(tmp_path / "file" / "history")
    store.append([text(1, 1)])
    store.refresh()
    assert store.take_problems()[0].endswith("cannot be made (Not a directory), so responses are not kept")
    assert store.find(1) == []


def test_an_index_is_fed_with_the_newest_texts_that_fit() -> None:
    feeding = Feeding(most_tokens=400)
    places = [Place("s", row) for row in range(5)]
    texts = [(place, 60) for place in places]
    assert feeding.chosen(texts, num_groups=1) == (places[:3], False)
    assert feeding.chosen(texts, num_groups=2) == (places[:1], False)
    for place in places[:3]:
        feeding.fed(place, 60)
    assert feeding.chosen(texts, num_groups=1) == ([], True)
    feeding.fed(Place("t", 0), 100)
    assert feeding.chosen(texts, num_groups=1) == (places[:1], True), "the first one was pushed out"


def test_tokens_of_an_index() -> None:
    assert tokens_of_index(1 << 12, (1, 2, 4, 6)) == 1 << 10


def pieces_of(service: HistoryService, num: int) -> list[Piece]:
    found = list[Piece]()

    def has_all() -> bool:
        found.extend(service.take(1 << 20, 100))
        return len(found) >= num

    wait_for(has_all)
    return found


def service_at(folder: Path, num_context: int = 2) -> HistoryService:
    return HistoryService(HistoryStore(folder, MIB, MINE), Feeding(1 << 20), num_context, vocab_size=5000)


def test_texts_of_prompts_at_work_become_ready(tmp_path: Path) -> None:
    store_at(tmp_path).append([text(1, 10, 11, 12, 13, num_context=2), text(2, 20)])
    service = service_at(tmp_path)
    service.opened([1, 1])
    (piece,) = pieces_of(service, 1)
    assert (piece.group, piece.num_context, piece.tokens.tolist()) == (1, 2, [10, 11, 12, 13])
    service.closed([1, 1])
    service.opened([1])
    (known,) = pieces_of(service, 1)
    assert known.group == 1 and len(known.tokens) == 0, "the index knows the text"
    assert service.facts().num_fed == service.facts().num_from_others == 1 and service.facts().num_read == 2
    service.close()


def test_a_long_text_is_fed_in_pieces_that_go_on_from_each_other(tmp_path: Path) -> None:
    tokens = list(range(2 * PIECE + 5))
    store_at(tmp_path).append([text(1, *tokens, num_context=1)])
    service = service_at(tmp_path, num_context=3)
    service.opened([1])
    pieces = pieces_of(service, 3)
    assert [piece.num_context for piece in pieces] == [1, 3, 3]
    assert [token for piece in pieces for token in piece.tokens[piece.num_context :].tolist()] == tokens[1:]
    assert all(piece.tokens[0] == piece.tokens[piece.num_context] - piece.num_context for piece in pieces)
    service.close()


def test_a_sibling_that_ends_elsewhere_becomes_ready_within_the_step(tmp_path: Path) -> None:
    here, there = service_at(tmp_path), service_at(tmp_path)
    here.opened([1])
    assert here.settle(60.0)
    there.ended(lambda: [text(1, 5, 6), text(2, 7)])
    (piece,) = pieces_of(here, 1)
    assert piece.group == 1 and piece.tokens.tolist() == [5, 6]
    for service in (here, there):
        service.close()


def test_a_text_ends_before_a_token_that_no_policy_can_read(tmp_path: Path) -> None:
    texts = [text(1, 5, 6, 5000, 7), text(1, 8, -1), text(1, 2**31 - 1, 9, 10, num_context=1), text(1, 4999)]
    store_at(tmp_path).append(texts)
    service = service_at(tmp_path)
    service.opened([1])
    assert [piece.tokens.tolist() for piece in pieces_of(service, 3)] == [[4999], [8], [5, 6]]
    service.close()


def test_groups_take_turns(tmp_path: Path) -> None:
    store_at(tmp_path).append([text(group, group, i) for i in range(3) for group in (1, 2)])
    service = service_at(tmp_path)
    service.opened([1, 2])
    pieces = pieces_of(service, 6)
    assert [piece.group for piece in pieces] == [1, 2] * 3
    assert [int(piece.tokens[1]) for piece in pieces] == [2, 2, 1, 1, 0, 0]
    service.close()


def test_a_failure_does_not_end_the_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = service_at(tmp_path)
    service.ended(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    service.ended(lambda: [text(1, 1)])
    assert service.settle(60.0) and service.facts().num_written == 1
    assert "the history of responses failed" in caplog.text
    service.close()
