# SPDX-License-Identifier: Apache-2.0
"""A drafter's engine: a mirror that was corrected, put to sleep or woken drafts what one would that was opened anew."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from nemo_specrollout.decoupled.drafter_side import MirrorClosing, MirrorOpening
from nemo_specrollout.decoupled.mirrors import Correction
from nemo_specrollout.generation.drafter_engine import DrafterEngine

pytestmark = pytest.mark.integration

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[DrafterEngine]:
    drafter = DrafterEngine(tiny_model, 8, 512, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 27)
    yield drafter
    drafter.close()


def opening(mirror: int, seed: int, text: Sequence[int], temperature: float = 1.0) -> MirrorOpening:
    return MirrorOpening(mirror, seed, temperature, 0, 1.0, np.array(text, np.int32))


def run_ahead(engine: DrafterEngine, mirrors: Sequence[int], count: int) -> dict[int, list[int]]:
    """The next `count` draft tokens of each mirror."""
    texts: dict[int, list[int]] = {m: [] for m in mirrors}
    while wanting := [m for m in mirrors if len(texts[m]) < count]:
        drafted = engine.draft(np.array(wanting))
        for mirror, token in zip(drafted.mirrors_M.tolist(), drafted.tokens_M.tolist(), strict=True):
            texts[mirror].append(token)
    return texts


def fresh(engine: DrafterEngine, seed: int, text: Sequence[int], count: int, temperature: float = 1.0) -> list[int]:
    """What a mirror drafts that is opened with just this text."""
    engine.apply([opening(7, seed, text, temperature)])
    drafts = run_ahead(engine, [7], count)[7]
    engine.apply([MirrorClosing(7)])
    return drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_wrong", [1, 3, 6])
def test_a_corrected_mirror_drafts_as_a_fresh_one(engine: DrafterEngine, num_wrong: int, temperature: float) -> None:
    engine.apply([opening(m, 100 + m, PROMPT, temperature) for m in (0, 1)])
    drafts = run_ahead(engine, [0, 1], 6)[0]
    right = drafts[: 6 - num_wrong]
    engine.apply([Correction(0, len(PROMPT) + len(right), [77])])
    text = [*PROMPT, *right, 77]
    assert run_ahead(engine, [0, 1], 5)[0] == fresh(engine, 100, text, 5, temperature)
    engine.apply([MirrorClosing(0), MirrorClosing(1)])


def test_a_mirror_that_fell_behind_reads_what_it_missed(engine: DrafterEngine) -> None:
    engine.apply([opening(0, 9, PROMPT)])
    drafts = run_ahead(engine, [0], 2)[0]
    missed = list(range(30, 45))
    engine.apply([Correction(0, len(PROMPT) + 2, missed)])
    assert run_ahead(engine, [0], 4)[0] == fresh(engine, 9, [*PROMPT, *drafts, *missed], 4)
    engine.apply([MirrorClosing(0)])


def test_corrections_add_up(engine: DrafterEngine) -> None:
    engine.apply([opening(0, 3, PROMPT)])
    drafts = run_ahead(engine, [0], 8)[0]
    start = len(PROMPT)
    engine.apply([Correction(0, start + 5, [60]), Correction(0, start + 6, [61, 62]), Correction(0, start + 3, [63])])
    assert run_ahead(engine, [0], 4)[0] == fresh(engine, 3, [*PROMPT, *drafts[:3], 63], 4)
    engine.apply([MirrorClosing(0)])


def test_a_mirror_that_is_corrected_before_it_was_read(engine: DrafterEngine) -> None:
    engine.apply([opening(0, 4, PROMPT), Correction(0, len(PROMPT), [60, 61])])
    assert run_ahead(engine, [0], 4)[0] == fresh(engine, 4, [*PROMPT, 60, 61], 4)
    engine.apply([MirrorClosing(0)])


def test_a_mirror_sleeps_and_is_corrected_meanwhile(engine: DrafterEngine) -> None:
    engine.apply([opening(m, m, PROMPT) for m in (0, 1, 2)])
    drafts = run_ahead(engine, [0, 1, 2], 3)
    run_ahead(engine, [1, 2], 4)
    engine.apply([Correction(0, len(PROMPT) + 1, [50]), MirrorClosing(2)])
    run_ahead(engine, [1], 2)
    assert run_ahead(engine, [0, 1], 4)[0] == fresh(engine, 0, [*PROMPT, drafts[0][0], 50], 4)
    engine.apply([MirrorClosing(0), MirrorClosing(1)])


def test_random_corrections(engine: DrafterEngine) -> None:
    rng = np.random.default_rng(0)
    texts = {m: list(PROMPT) for m in range(4)}
    engine.apply([opening(m, m, text) for m, text in texts.items()])
    for _ in range(25):
        awake = [m for m in texts if rng.random() < 0.7] or [0]
        for mirror, drafts in run_ahead(engine, awake, int(rng.integers(1, 5))).items():
            texts[mirror] += drafts
        for mirror, text in texts.items():
            if rng.random() < 0.5:
                keep = int(rng.integers(len(PROMPT), len(text) + 1))
                new = rng.integers(1, 90, int(rng.integers(1, 4))).tolist()
                text[keep:] = new
                engine.apply([Correction(mirror, keep, new)])
    for mirror, text in texts.items():
        expected = fresh(engine, mirror, text, 3)
        assert run_ahead(engine, [mirror], 3)[mirror] == expected
    engine.apply([MirrorClosing(m) for m in texts])
