# SPDX-License-Identifier: Apache-2.0
import ctypes
from typing import NamedTuple

import numpy as np

from lab.bench.huge_pages import MIN_BYTES, large_mappings, move, use_huge_pages


class Mapping(NamedTuple):
    """What is read of a mapping, with psutil's names."""

    addr: str
    perms: str
    path: str


# 8 MB of a file, of memory that only can be read, of a shared mapping, of the stack, of the heap, of memory without a name, of
# memory with a name, and a page.
MAPS = [
    Mapping("7f0000000000-7f0000800000", "rw-p", "/usr/lib/library with a space.so"),
    Mapping("7f0000800000-7f0001000000", "r--p", "[anon]"),
    Mapping("7f0001000000-7f0001800000", "rw-s", "/dev/shm/block (deleted)"),
    Mapping("7f0001800000-7f0002000000", "rw-p", "[stack]"),
    Mapping("7f0002000000-7f0002800000", "rw-p", "[heap]"),
    Mapping("7f0002800000-7f0003000000", "rw-p", "[anon]"),
    Mapping("7f0003000000-7f0003800000", "rw-p", "[anon: glibc: malloc]"),
    Mapping("7f0003800000-7f0003801000", "rw-p", "[anon]"),
]
EIGHT_MB = 8 << 20


def test_only_large_memory_of_this_process_is_moved() -> None:
    addresses = [0x7F0002000000, 0x7F0002800000, 0x7F0003000000]
    assert large_mappings(MAPS) == [(address, EIGHT_MB) for address in addresses]


def test_a_mapping_that_the_kernel_refuses_does_not_count() -> None:
    asked = []

    def madvise(start: ctypes.c_void_p, size: ctypes.c_size_t) -> int:
        asked.append((start.value, size.value))
        return -1 if start.value == 0x7F0002800000 else 0

    assert move(large_mappings(MAPS), madvise) == 2 * EIGHT_MB
    assert asked == large_mappings(MAPS)


def test_the_contents_of_memory_stay_the_same() -> None:
    """Here the real kernel is asked. How much it moves depends on its version and on the free memory."""
    numbers = np.arange(16 * MIN_BYTES // 8)
    assert use_huge_pages() >= 0
    assert np.array_equal(numbers, np.arange(len(numbers)))
