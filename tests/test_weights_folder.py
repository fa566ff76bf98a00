# SPDX-License-Identifier: Apache-2.0
"""The folder from which remote drafters take new weights: what is newest in it, and what is refused and not tried again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nemo_specrollout.remote.drafter.drafter_engine import read_like
from nemo_specrollout.remote.drafter.weights_watch import WeightsWatch
from nemo_specrollout.storage.weights_folder import NUM_KEPT, publications, publish

pytestmark = pytest.mark.unit

SHAPES = {"a": (2, 3), "b": (4,)}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A checkpoint of the draft model."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"not published")
    return folder


class Drafter:
    """What looks at a folder as a drafter does, and counts the checkpoints that it reads."""

    def __init__(self, folder: Path) -> None:
        self.read: list[str] = []
        self.watch = WeightsWatch(folder, self._read)

    def _read(self, folder: Path) -> list[tuple[str, Any]]:
        self.read.append(folder.name)
        return read_like(folder, SHAPES)

    def new(self) -> int | None:
        """Returns the number of the weights that a look has found; None if there are no new ones."""
        self.watch.look()
        found = self.watch.take()
        return None if found is None else found.publication.number


def test_numbers_at_the_end_of_names_say_what_is_newest(tmp_path: Path) -> None:
    assert publications(tmp_path / "nothing") == []
    for name in ("version_9", "step-10", "8", "3_final", ".version_11.77", "old"):
        (tmp_path / name).mkdir()
    (tmp_path / "version_12").touch()
    assert [p.path.name for p in publications(tmp_path)] == ["step-10", "version_9", "8"]


def test_a_publication_is_a_copy_and_the_oldest_ones_go(weights: Path, tmp_path: Path) -> None:
    into = tmp_path / "published"
    (into / "step_1").mkdir(parents=True)
    for number in range(2, 4 + NUM_KEPT):
        path = publish(weights, into, number)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    kept = [f"version_{number}" for number in range(4 + NUM_KEPT - NUM_KEPT, 4 + NUM_KEPT)]
    assert sorted(os.listdir(into)) == ["step_1", *kept], "what others have published stays"
    with pytest.raises(ValueError, match=r"6 is not larger than 6, .* give a larger number"):
        publish(weights, into, 6)
    (weights / "model.safetensors").unlink()
    (weights / "model.safetensors").mkdir()
    with pytest.raises(OSError):
        publish(weights, into, 7)
    assert sorted(os.listdir(into)) == ["step_1", *kept], "nothing half-written is left"


def test_a_drafter_takes_the_newest_weights_once(weights: Path, tmp_path: Path) -> None:
    drafter = Drafter(into := tmp_path / "published")
    assert drafter.new() is None
    publish(weights, into, 1)
    publish(weights, into, 2)
    assert drafter.new() == 2 and drafter.new() is None
    publish(weights, into, 3)
    assert drafter.new() == 3 and drafter.watch.problem == ""
    shutil.rmtree(into / "version_3")
    assert drafter.new() == 2, "who removes the newest weights goes back to those before"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def without_numbers(path: Path) -> None:
    save_file({"a": torch.full((2, 3), float("nan")), "b": torch.ones(4)}, path)


def of_another_shape(path: Path) -> None:
    save_file({"a": torch.ones(2, 4), "b": torch.ones(4)}, path)


def pickled(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.bin"))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (cut, "not a whole safetensors file"),
        (garble, "not a whole safetensors file"),
        (without_numbers, "a has values that are no finite numbers"),
        (of_another_shape, r"a has shape \(2, 4\), and the draft model's has \(2, 3\)"),
        (pickled, r"it has no \*\.safetensors file"),
    ],
)
def test_unsound_weights_are_refused_once_and_the_newest_sound_ones_used(
    weights: Path, tmp_path: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    import re

    into = tmp_path / "published"
    publish(weights, into, 1)
    bad = publish(weights, into, 2)
    spoil(bad / "model.safetensors")
    drafter = Drafter(into)
    assert drafter.new() == 1
    assert re.search(sentence, drafter.watch.problem) and "\n" not in drafter.watch.problem
    for _ in range(3):
        assert drafter.new() is None
    assert drafter.read == ["version_2", "version_1"], "the unsound ones are not read again"
    publish(weights, into, 3)
    assert drafter.new() == 3 and drafter.watch.problem == ""
    assert drafter.read[2:] == ["version_3"]


def test_weights_that_were_half_written_are_tried_again_when_they_are_whole(weights: Path, tmp_path: Path) -> None:
    whole = (weights / "model.safetensors").read_bytes()
    target = tmp_path / "published" / "step_7"
    target.mkdir(parents=True)
    drafter = Drafter(target.parent)
    (target / "model.safetensors").write_bytes(whole[:40])
    assert drafter.new() is None and "not a whole safetensors file" in drafter.watch.problem
    (target / "model.safetensors").write_bytes(whole)
    assert drafter.new() == 7 and drafter.watch.problem == ""


def test_weights_that_change_while_they_are_read_are_not_used(weights: Path, tmp_path: Path) -> None:
    into = tmp_path / "published"
    path = publish(weights, into, 1)

    def read(folder: Path) -> list[tuple[str, Any]]:
        found = read_like(folder, SHAPES)
        (path / "more.json").write_text("{}")
        return found

    watch = WeightsWatch(into, read)
    watch.look()
    assert watch.take() is None and "changed while it was read" in watch.problem


def test_weights_that_an_engine_cannot_use_are_not_tried_again(weights: Path, tmp_path: Path) -> None:
    drafter = Drafter(into := tmp_path / "published")
    publish(weights, into, 1)
    publish(weights, into, 2)
    drafter.watch.look()
    taken = drafter.watch.take()
    assert taken is not None
    drafter.watch.refuse(taken, "out of memory")
    assert drafter.watch.problem == "out of memory"
    assert drafter.new() == 1 and drafter.new() is None
