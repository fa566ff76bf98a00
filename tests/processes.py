# SPDX-License-Identifier: Apache-2.0
"""Waiting for processes of other owners, which may end between two questions about them."""

import contextlib
import time

import psutil


def lives(process: psutil.Process) -> bool:
    """Returns whether the process runs. A zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pid: int) -> None:
    """Waits until process `pid` runs no longer: it has ended, or its parent has yet to collect it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while lives(process):
            time.sleep(0.01)


def wait_for_child(parent: int, word: str) -> int:
    """Returns the process id of the first child of `parent` whose command holds `word`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(parent)
        while lives(process):
            for child in process.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if any(word in part for part in child.cmdline()):
                        return child.pid
            time.sleep(0.05)
    raise AssertionError(f"process {parent} started no {word}")
