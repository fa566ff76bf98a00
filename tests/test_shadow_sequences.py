# SPDX-License-Identifier: Apache-2.0
"""A drafter's engine: a shadow that was corrected or slept drafts the same tokens as a fresh one."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine
from nemo_specrollout.remote.protocol.messages import Open

pytestmark = pytest.mark.integration

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[DrafterEngine]:
    drafter = DrafterEngine(tiny_model, 8, 512, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 27)
    yield drafter
    drafter.close()


def opened(
    engine: DrafterEngine,
    shadow: int,
    seed: int,
    text: Sequence[int],
    sampling: tuple[float, int, float] = (1.0, 0, 1.0),
) -> None:
    """Opens a shadow sequence."""
    engine.open(shadow, Open(shadow, seed, *sampling, 512, 8, np.array(text, np.int32).tobytes()))


def closed(engine: DrafterEngine, *shadows: int) -> None:
    for shadow in shadows:
        engine.close_shadow(shadow)


def run_ahead(engine: DrafterEngine, shadows: Sequence[int], count: int) -> dict[int, list[int]]:
    """Returns the next `count` draft tokens of each shadow."""
    texts: dict[int, list[int]] = {m: [] for m in shadows}
    while unfinished := [m for m in shadows if len(texts[m]) < count]:
        for row in engine.draft(np.array(unfinished)):
            texts[row["owner"]].append(int(row["token"]))
    return texts


def fresh(engine: DrafterEngine, seed: int, text: Sequence[int], count: int, temperature: float = 1.0) -> list[int]:
    """Returns the draft tokens of a shadow that is opened with this text."""
    opened(engine, 7, seed, text, (temperature, 0, 1.0))
    drafts = run_ahead(engine, [7], count)[7]
    closed(engine, 7)
    return drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_wrong", [1, 3, 6])
def test_a_corrected_shadow_drafts_as_a_fresh_one(engine: DrafterEngine, num_wrong: int, temperature: float) -> None:
    for m in (0, 1):
        opened(engine, m, 100 + m, PROMPT, (temperature, 0, 1.0))
    drafts = run_ahead(engine, [0, 1], 6)[0]
    right = drafts[: 6 - num_wrong]
    engine.correct(0, len(PROMPT) + len(right), [77])
    text = [*PROMPT, *right, 77]
    assert run_ahead(engine, [0, 1], 5)[0] == fresh(engine, 100, text, 5, temperature)
    closed(engine, 0, 1)


def test_a_shadow_that_fell_behind_reads_what_it_missed(engine: DrafterEngine) -> None:
    opened(engine, 0, 9, PROMPT)
    drafts = run_ahead(engine, [0], 2)[0]
    missed = list(range(30, 45))
    engine.correct(0, len(PROMPT) + 2, missed)
    assert run_ahead(engine, [0], 4)[0] == fresh(engine, 9, [*PROMPT, *drafts, *missed], 4)
    closed(engine, 0)


def test_corrections_accumulate(engine: DrafterEngine) -> None:
    opened(engine, 0, 3, PROMPT)
    drafts = run_ahead(engine, [0], 8)[0]
    start = len(PROMPT)
    engine.correct(0, start + 5, [60])
    engine.correct(0, start + 6, [61, 62])
    engine.correct(0, start + 3, [63])
    assert run_ahead(engine, [0], 4)[0] == fresh(engine, 3, [*PROMPT, *drafts[:3], 63], 4)
    closed(engine, 0)


def test_a_shadow_may_be_corrected_before_its_text_is_read(engine: DrafterEngine) -> None:
    opened(engine, 0, 4, PROMPT)
    engine.correct(0, len(PROMPT), [60, 61])
    assert run_ahead(engine, [0], 4)[0] == fresh(engine, 4, [*PROMPT, 60, 61], 4)
    closed(engine, 0)


def test_a_sleeping_shadow_may_be_corrected(engine: DrafterEngine) -> None:
    for m in (0, 1, 2):
        opened(engine, m, m, PROMPT)
    drafts = run_ahead(engine, [0, 1, 2], 3)
    run_ahead(engine, [1, 2], 4)
    engine.correct(0, len(PROMPT) + 1, [50])
    closed(engine, 2)
    run_ahead(engine, [1], 2)
    assert run_ahead(engine, [0, 1], 4)[0] == fresh(engine, 0, [*PROMPT, drafts[0][0], 50], 4)
    closed(engine, 0, 1)


def test_randomly_corrected_shadows_draft_as_fresh_ones(engine: DrafterEngine) -> None:
    rng = np.random.default_rng(0)
    texts = {m: list(PROMPT) for m in range(4)}
    for m, text in texts.items():
        opened(engine, m, m, text)
    for _ in range(25):
        awake = [m for m in texts if rng.random() < 0.7] or [0]
        for shadow, drafts in run_ahead(engine, awake, int(rng.integers(1, 5))).items():
            texts[shadow] += drafts
        for shadow, text in texts.items():
            if rng.random() < 0.5:
                keep = int(rng.integers(len(PROMPT), len(text) + 1))
                new = rng.integers(1, 90, int(rng.integers(1, 4))).tolist()
                text[keep:] = new
                engine.correct(shadow, keep, new)
    for shadow, text in texts.items():
        expected = fresh(engine, shadow, text, 3)
        assert run_ahead(engine, [shadow], 3)[shadow] == expected
    closed(engine, *texts)


def changed(model: Path, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Returns a copy of a model in `folder`, with its matrices changed."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    matrices = {name: change(tensor) if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    save_file(matrices, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_new_weights_are_used_at_once(engine: DrafterEngine, tiny_model: Path, tmp_path: Path) -> None:
    """The texts are read again: their KV of the old weights would make other drafts."""
    other = changed(tiny_model, tmp_path / "other", lambda tensor: tensor * 1.3)
    for m in (0, 1):
        opened(engine, m, m, PROMPT)
    drafts = run_ahead(engine, [0, 1], 4)[0]
    old = fresh(engine, 0, [*PROMPT, *drafts], 16)
    engine.load_weights(other)
    new = run_ahead(engine, [0, 1], 16)[0]
    assert new == fresh(engine, 0, [*PROMPT, *drafts], 16) != old
    engine.load_weights(tiny_model)
    assert fresh(engine, 0, [*PROMPT, *drafts], 16) == old
    closed(engine, 0, 1)


def test_a_folder_that_is_no_checkpoint_of_the_draft_model_changes_nothing(
    engine: DrafterEngine, tiny_model: Path, tmp_path: Path
) -> None:
    old = fresh(engine, 0, PROMPT, 16)
    (tmp_path / "empty").mkdir()
    narrow = changed(tiny_model, tmp_path / "narrow", lambda tensor: 2 * tensor[:, 1:].contiguous())
    cut = changed(tiny_model, tmp_path / "cut", lambda tensor: 2 * tensor)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    other_words = changed(tiny_model, tmp_path / "words", lambda tensor: 2 * tensor)
    (other_words / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    garbled = changed(tiny_model, tmp_path / "garbled", lambda tensor: 2 * tensor)
    (garbled / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [1]}')
    for folder, reason in (
        (tmp_path / "nowhere", "is not a folder on the drafter's machine"),
        (tmp_path / "empty", "is not a checkpoint of the draft model: it has no"),
        (narrow, "is not a checkpoint of the draft model: .* has shape"),
        (cut, "not a whole safetensors file"),
        (other_words, "has another tokenizer"),
        (garbled, "a value has a wrong type"),
    ):
        with pytest.raises(ValueError, match=reason):
            engine.load_weights(folder)
    assert fresh(engine, 0, PROMPT, 16) == old


@pytest.mark.parametrize("sampling", [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 20, 0.9)])
def test_drafts_equal_tokens_that_vllm_samples(engine: DrafterEngine, sampling: tuple[float, int, float]) -> None:
    """A policy with the drafter's weights samples the same tokens: only the evidence levels are ours."""
    opened(engine, 0, 11, PROMPT, sampling)
    drafts = run_ahead(engine, [0], 40)[0]
    core = engine._llm.llm_engine.engine_core.engine_core
    sampler = core.model_executor.driver_worker.worker.model_runner.sampler
    ours = vars(sampler).pop("sample")
    closed(engine, 0)
    opened(engine, 1, 11, PROMPT, sampling)
    assert run_ahead(engine, [1], 40)[1] == drafts
    sampler.sample = ours
    closed(engine, 1)


def test_evidence_has_many_levels(engine: DrafterEngine) -> None:
    for m in range(8):
        opened(engine, m, m, PROMPT)
    levels = np.concatenate([engine.draft(np.arange(8))["level"] for _ in range(50)])
    closed(engine, *range(8))
    assert len(np.unique(levels)) > 8
