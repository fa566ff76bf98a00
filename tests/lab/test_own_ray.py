# SPDX-License-Identifier: Apache-2.0
"""A run's own Ray when Ray does not start in time. Ray's wait is cut short, but the processes of each try are real."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lab.local.own_ray import OwnRay, ray
from nemo_specrollout.cli.command_line import is_shown_as_sentence

pytestmark = pytest.mark.integration

LATE = "The current node timed out during startup."


def processes_of_ray() -> list[str]:
    """Returns the names of this process's children that are Ray's servers."""
    names = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            names.append(child.name())
    return sorted(name for name in names if name in ("gcs_server", "raylet"))


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Path]]]:
    """Returns a function that lists the folders of Ray, which are in a folder of this test. Its path must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        yield lambda: list(Path(base).glob("ray-*"))


def starts_late(monkeypatch: pytest.MonkeyPatch, times: int) -> list[list[str]]:
    """Lets the first starts of Ray fail, as the waiting for its raylet does. Returns the processes found at each of them."""
    found: list[list[str]] = []
    get_node = ray._private.services.get_node

    def gets_node(*arguments: object) -> object:
        if len(found) < times:
            found.append(processes_of_ray())
            raise Exception(LATE)
        return get_node(*arguments)

    monkeypatch.setattr(ray._private.services, "get_node", gets_node)
    return found


def test_a_late_ray_is_started_again_and_leaves_nothing_of_the_first_try(
    monkeypatch: pytest.MonkeyPatch, folders: Callable[[], list[Path]]
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    found = starts_late(monkeypatch, 1)
    own = OwnRay()
    try:
        assert found == [["gcs_server", "raylet"]] and processes_of_ray() == ["gcs_server", "raylet"]
        assert len(folders()) == 1 and signal.getsignal(signal.SIGTERM) is handler
        assert ray.get(ray.remote(lambda: 1 + 1).options(num_cpus=0).remote()) == 2
    finally:
        own.stop()
    assert not processes_of_ray() and not folders()


def test_a_ray_that_never_starts_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, folders: Callable[[], list[Path]]
) -> None:
    found = starts_late(monkeypatch, 3)
    with pytest.raises(TimeoutError, match=f"Ray has not started in 3 tries.*too busy .{LATE}") as error:
        OwnRay()
    assert is_shown_as_sentence(error.value), "the command line shows only the sentence"
    assert found == [["gcs_server", "raylet"]] * 3
    assert not processes_of_ray() and not folders()


def test_an_interrupted_start_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, folders: Callable[[], list[Path]]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray._private.services, "get_node", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OwnRay()
    assert not processes_of_ray() and not folders()
