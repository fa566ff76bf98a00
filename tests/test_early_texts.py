# SPDX-License-Identifier: Apache-2.0
"""Texts in flight: what is begun first, what is known in the end, how much of it was right, and how many requests pay."""

from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_specrollout.generation.engine.ahead_branches import AheadBranch, unpack
from nemo_specrollout.generation.engine.requests import as_bytes
from nemo_specrollout.run_ahead.decisions.early_share import EarlyPrices, PlainRollout, Worth, num_early
from nemo_specrollout.run_ahead.decisions.flips import FlipModel, counts_of_gaps
from nemo_specrollout.run_ahead.early_requests import EarlyRequests, EngineSize, OwnLoad
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyTexts
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead, TextsAhead, compare

pytestmark = pytest.mark.unit
PROMPT = (1, 2, 3)


@dataclass(frozen=True)
class Row:
    seed: int


def early_texts(*rows: EarlyRow, most_branches: int = 2, kept: float = 0.9) -> EarlyTexts:
    return EarlyTexts(rows, FlipModel(0.01), most_branches, kept, count(7))


def row(seed: int, steps_ahead: int = 1, known: TextAhead | None = None) -> EarlyRow:
    return EarlyRow(PROMPT, Row(seed), steps_ahead, known)


def float16(*gaps: float) -> bytes:
    return np.array(gaps, np.float16).tobytes()


def test_the_next_step_comes_before_later_ones_and_a_near_tie_before_steps_that_are_unlikely_to_last() -> None:
    texts = early_texts(row(5, 2), row(6), row(7, 30))
    first, second = texts.next(2)
    assert (first.row.row.seed, second.row.row.seed) == (6, 5)
    texts.grew(first.name, [10, 11, 12])
    texts.ties(first.name, len(PROMPT), float16(3.0, 0.0, 2.0), as_bytes([90, 91, 92]))
    branch, last = texts.next(2)
    assert branch.row.row.seed == 6
    assert branch.prefix == (10, 91)
    assert last.row.row.seed == 7
    assert texts.next(1) == []
    texts.grew(branch.name, [50])
    texts.ended(first.name)
    assert sorted(texts.running) == sorted([second.name, branch.name, last.name])
    assert texts.least(1) == [last.name]
    made = texts.texts()
    assert set(made) == {6}
    assert made[6].is_complete
    assert made[6].tokens == as_bytes([10, 11, 12])
    assert made[6].branches == (AheadBranch(0, 1, as_bytes([91, 50])),)
    assert made[6].runners_up == as_bytes([90, 91, 92])


def test_the_worth_of_a_request_follows_what_is_known_of_it() -> None:
    """A near-tie halves that of a running text. A text that was stopped is worth what its beginning is worth."""
    texts = early_texts(row(6), row(5), most_branches=0)
    first, second = texts.next(2)
    assert [worth.probability for worth in texts.worths(2)] == [1.0, 1.0]
    texts.grew(second.name, [10, 11])
    texts.ties(second.name, len(PROMPT), float16(9.0, 0.0), as_bytes([90, 91]))
    assert [worth.probability for worth in texts.worths(2)] == pytest.approx([1.0, 0.5])
    assert texts.least(1) == [second.name]
    texts.stopped(first.name)
    assert [worth.probability for worth in texts.worths(2)] == pytest.approx([0.9, 0.5])
    texts.ended(second.name)
    assert [worth.probability for worth in texts.worths(2)] == pytest.approx([0.9])


def test_a_branch_of_a_branch_has_the_tokens_of_both_before_it() -> None:
    texts = early_texts(row(6))
    (text,) = texts.next(1)
    texts.grew(text.name, [10, 11])
    texts.ties(text.name, len(PROMPT), float16(9.0, 0.0), as_bytes([90, 91]))
    (branch,) = texts.next(1)
    texts.grew(branch.name, [20, 21])
    texts.ties(branch.name, len(PROMPT) + 2, float16(8.0, 0.001), as_bytes([70, 71]))
    (second,) = texts.next(1)
    assert second.prefix == (10, 91, 20, 71)
    assert texts.texts()[6].branches[1] == AheadBranch(1, 3, as_bytes([71]))


def test_what_is_verified_again_keeps_the_known_tail_and_its_branches_until_it_parts() -> None:
    known = TextAhead(
        as_bytes([10, 11, 12, 13]),
        float16(1.0, 2.0, 3.0, 4.0),
        as_bytes([90, 91, 92, 93]),
        (AheadBranch(0, 0, as_bytes([90])), AheadBranch(0, 3, as_bytes([93, 1])), AheadBranch(2, 4, as_bytes([7]))),
    )
    texts = early_texts(row(6, known=known))
    (text,) = texts.next(1)
    assert text.drafts == known.tokens
    assert unpack(text.branches) == known.branches
    texts.grew(text.name, [10, 11])
    texts.ties(text.name, len(PROMPT), float16(5.0, 6.0), as_bytes([80, 81]))
    made = texts.texts()[6]
    assert made.tokens == known.tokens
    assert made.gaps == float16(5.0, 6.0, 3.0, 4.0)
    assert made.branches == (AheadBranch(0, 3, as_bytes([93, 1])), AheadBranch(0, 3, as_bytes([93, 7])))
    texts.grew(text.name, [55])
    assert texts.texts()[6].branches == ()


def test_what_follows_a_known_branch_goes_on_as_the_branch_does() -> None:
    known = TextAhead(
        as_bytes([10, 11, 12]),
        float16(1.0, 2.0, 3.0),
        as_bytes([90, 91, 92]),
        (AheadBranch(0, 1, as_bytes([91, 50, 51])),),
    )
    texts = early_texts(row(6, known=known))
    (text,) = texts.next(1)
    texts.grew(text.name, [10, 91])
    texts.ties(text.name, len(PROMPT), float16(5.0, 6.0), as_bytes([80, 81]))
    made = texts.texts()[6]
    assert made.tokens == as_bytes([10, 91, 50, 51])
    assert made.gaps == float16(5.0, 6.0) and not made.branches, "nothing is known of the gaps beyond"


def test_branches_of_a_request_that_the_engine_decodes_as_its_own() -> None:
    """It is not begun or stopped here, and it is no text of a coming step. Its branches end with it."""
    texts = early_texts(row(5, 30))
    name = texts.follow(EarlyRow(PROMPT, Row(6), probability=0.5))
    other = texts.follow(EarlyRow(PROMPT, Row(7)))
    assert not texts.running
    texts.grew(name, [10, 11])
    texts.ties(name, len(PROMPT), float16(9.0, 0.0), as_bytes([90, 91]))
    assert texts.worths(2)[0] == Worth(0.25, 0.25), "half of such requests end before weights change"
    branch, text = texts.next(2)
    assert (branch.prefix, text.row.row.seed) == ((10, 91), 5)
    texts.grew(branch.name, [50])
    assert texts.branches_of(name) == [branch.name] and texts.branches_of(other) == []
    made = texts.followed()
    assert made[name].branches == (AheadBranch(0, 1, as_bytes([91, 50])),) and made[name].gaps == float16(9.0, 0.0)
    assert set(made) == {name, other} and not texts.texts()
    texts.stopped(branch.name)
    texts.forget(name)
    assert set(texts.followed()) == {other} and texts.running == [text.name]
    texts.ties(name, len(PROMPT) + 2, float16(0.0), as_bytes([7]))
    assert not texts.next(1)


def test_a_text_that_gave_way_begins_again_with_what_it_has_made() -> None:
    """Its near-ties may arrive after it was stopped. One with a branch does not begin again, because the branch goes on."""
    texts = early_texts(row(6), row(7))
    (text,) = texts.next(1)
    texts.grew(text.name, [10, 11])
    texts.stopped(text.name)
    texts.ties(text.name, len(PROMPT), float16(5.0, 0.0), as_bytes([80, 81]))
    (again,) = texts.next(1)
    assert (again.row.row.seed, again.drafts) == (6, as_bytes([10, 11]))
    assert texts.texts()[6].gaps == float16(5.0, 0.0)
    texts.grew(again.name, [10])
    texts.ties(again.name, len(PROMPT), float16(0.0), as_bytes([90]))
    other, branch = texts.next(2)
    assert (branch.prefix, other.row.row.seed) == ((90,), 7), "near-ties of the stopped request are forgotten"
    texts.stopped(again.name)
    texts.stopped(again.name)
    assert not texts.next(1)


def test_a_row_that_is_not_begun_keeps_what_is_known_of_it() -> None:
    known = TextAhead(as_bytes([10]), is_complete=True)
    texts = early_texts(row(6, known=known), row(7))
    assert texts.texts() == {6: replace(known, num_older=1)}, "weights before the present ones have made it"
    assert texts.next(1)[0].row.row.seed == 7, "a complete text has tokens to make only if it parts"


def test_rows_that_were_known_before_tell_what_the_last_update_has_changed() -> None:
    """Each of them once, as far as the weights before have made it."""
    gaps = float16(1.0, 2.0, 3.0, 4.0)
    known = TextAhead(as_bytes([10, 11, 12, 13]), gaps, as_bytes([90, 91, 92, 93]), num_older=1)
    texts = early_texts(row(6, known=known), row(7, known=known), row(8, known=known), row(9))
    same, parted, late, new = texts.next(4)
    texts.grew(same.name, [10, 11, 12, 13, 14])
    texts.grew(parted.name, [10, 91])
    texts.grew(late.name, [10, 11, 12, 93])  # a change of the last token may be of either update
    texts.grew(new.name, [10])
    expected = counts_of_gaps(np.array([1.0, 2.0, 3.0, 1.0, 2.0, 1.0, 2.0, 3.0]))
    for _ in range(2):
        seen = texts.flips()
        assert (seen.num_texts, seen.num_flips) == (3, 1)
        assert np.array_equal(seen.gaps_G, expected)
    texts.stopped(parted.name)
    (again,) = texts.next(1)
    texts.grew(again.name, [10])
    assert texts.flips().num_flips == 1 and np.array_equal(texts.flips().gaps_G, expected)
    assert [texts.texts()[seed].num_older for seed in (6, 7, 8, 9)] == [0, 2, 0, 0]


def test_what_was_right_counts_the_branches_that_the_response_followed() -> None:
    text = TextAhead(
        as_bytes([10, 11, 12]), float16(1, 0.5, 2), as_bytes([90, 91, 92]), (AheadBranch(0, 1, as_bytes([91, 50, 51])),)
    )
    counts = compare(text, [10, 91, 50, 99])
    assert counts[:8] == (3, 1, 3, 4, 1, 1, 1, 1)
    assert np.array_equal(counts.gaps_G, counts_of_gaps(np.array([1.0, 0.5])))
    assert compare(text, [10, 11, 12, 13])[:8] == (3, 3, 3, 4, 1, 0, 0, 0)
    assert compare(text, [10, 77])[5:8] == (1, 0, 0)
    owner = TextsAhead()
    owner.replace({4: text})
    owner.compare(4, [10, 91])
    owner.compare(5, [10, 91])
    assert owner.take_kept().num_texts == 1
    assert owner.take_kept()[:8] == KeptCounts()[:8]


def test_the_mean_time_of_a_token_counts_the_steps_of_a_draining_batch() -> None:
    seconds_R = np.array([0.0, 1.0, 1.5, 2.0])
    assert PlainRollout(seconds_R, [1, 3]).token_s == pytest.approx((1.5 + 2 * 1.0) / 4)
    assert PlainRollout(seconds_R, [2, 2, 2, 2, 2, 2]).token_s == pytest.approx(2 * 2 * 2.0 / 12)
    assert PlainRollout(seconds_R, []).token_s == 0.0


def test_a_phase_spares_the_time_of_the_positions_to_which_it_lets_a_text_get() -> None:
    """Of four responses three end after 2 tokens and one after 8. A step takes a second, and 0.1 more for each request."""
    plain = PlainRollout(1.0 + 0.1 * np.arange(9), [2, 2, 2, 8])
    assert plain.spared_s(8.0, np.zeros(1), np.ones(1)) == pytest.approx(plain.token_s)

    def spared_s(known: float, steps_ahead: int) -> float:
        return float(plain.spared_s(2.0, np.array([known]), np.array([steps_ahead]))[0])

    assert spared_s(0, 1) == pytest.approx(2 * 1.4 / 8)  # the first two tokens of all responses
    assert spared_s(2, 1) == pytest.approx(1.1)  # only the longest response has these
    assert spared_s(0, 3) == pytest.approx(2 * 1.1 / 8)  # it gets from 4 to 6 because all begin now
    assert spared_s(6, 2) == 0.0  # it will have ended one phase earlier
    assert [spared_s(8, 1), spared_s(20, 1)] == pytest.approx([1.1, 1.1])  # longer than any response so far


def test_early_requests_begin_where_rows_are_nearly_free_and_not_where_they_cost_what_they_spare() -> None:
    texts = [Worth(0.95, 1.0)] * 30
    free = EarlyPrices(7.0 + 0.01 * np.arange(65), 0.02, plain_of(0.3))
    assert num_early(free, 8, texts) == 30
    dear = EarlyPrices(0.5 * np.arange(65), 0.5, plain_of(0.55))
    assert num_early(dear, 8, texts) == 0
    eight_at_once = EarlyPrices(np.maximum(np.arange(65.0), 8.0), 1.0, plain_of(1.6))
    assert num_early(eight_at_once, 2, texts) == 6
    assert num_early(eight_at_once, 0, texts) == 30
    unlikely = [Worth(0.02, 4.0)] * 30
    assert num_early(free, 8, unlikely) == 0
    assert num_early(free, 8, []) == 0
    assert free.delay_s(8, 30) == pytest.approx(0.3) and free.delay_s(60, 30) == pytest.approx(0.04)


def test_the_delay_of_own_requests_is_counted_by_prices() -> None:
    """Samples of one prompt find it cached, and a known text is verified beside the engine's own requests."""
    texts = early_texts(row(5), row(6, known=TextAhead(as_bytes([10] * 20))))
    nothing = SimpleNamespace(external_req_ids={}, request_states={})
    early = EarlyRequests(nothing, EngineSize(8, 1000, 16, 5), texts)
    early.set_prices(([0.0, *(1.0 + 0.1 * np.arange(8))], 0.01), [100, 100])
    assert len(early.begin(OwnLoad(2, blocks_left=1000))) == 2
    assert early.figures.delay_s == pytest.approx((len(PROMPT) + 20) * 0.01)
    early.note_step(2)
    assert early.figures.delay_s == pytest.approx(0.23 + 0.2)
    early.note_time(2, 50.0)
    known_s = early.figures.delay_s
    early.note_time(2, 51.3)  # one step, which is 0.2 longer
    assert early.figures.delay_s - known_s == pytest.approx(0.2)
    early.note_time(0, 60.0)
    early.stopped(early.running)
    early.note_step(2)
    assert early.figures.delay_s - known_s == pytest.approx(0.2) and early.figures.num_steps_beside == 1
    assert early.figures.metrics(2, 4)["ahead_delay_s"] == pytest.approx(early.figures.delay_s / 4)


def plain_of(token_s: float) -> PlainRollout:
    """A rollout in which every token takes as long."""
    return PlainRollout(np.array([0.0, token_s]), [100])


def test_a_branch_may_begin_with_the_first_token() -> None:
    texts = early_texts(row(5))
    (start,) = texts.next(1)
    texts.grew(start.name, [10, 11])
    texts.ties(start.name, len(PROMPT), float16(0.0, 9.0), as_bytes([90, 91]))
    (branch,) = texts.next(1)
    assert branch.prefix == (90,)


def test_a_text_that_gave_way_does_not_begin_again_once_a_branch_of_it_has_begun() -> None:
    texts = early_texts(row(5), kept=0.3)
    (text,) = texts.next(1)
    texts.grew(text.name, [10, 11])
    texts.stopped(text.name)
    texts.ties(text.name, len(PROMPT), float16(9.0, 0.0), as_bytes([90, 91]))
    (branch,) = texts.next(2)
    assert branch.prefix == (10, 91)
    assert len(texts.worths(1)) == 1
    assert texts.texts()[5].branches == (AheadBranch(0, 1, as_bytes([91])),)


def test_the_requests_that_will_probably_be_longest_begin_first() -> None:
    """A text that has not ended will be longer, and nothing is known of a request without a text."""
    texts = TextsAhead()
    assert texts.longest_first([1, 2, 3]) == [0, 1, 2]
    ended = TextAhead(as_bytes(range(30)), is_complete=True)
    texts.replace({1: ended, 2: TextAhead(as_bytes(range(20))), 3: TextAhead(as_bytes(range(5)))})
    assert texts.longest_first([3, 9, 1, 2]) == [3, 2, 1, 0]
