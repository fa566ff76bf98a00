# SPDX-License-Identifier: Apache-2.0
"""Moves the memory of this process into huge pages, so that all engines of a bench read their weights at the same speed.

A process that starts gets the small pages that earlier ones have left, which lie scattered over the machine's memory. On a
virtual machine, the engine that started first needed up to 1.12 times as long for each step as the same engine started last.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

# From the kernel's include/uapi/asm-generic/mman-common.h. Linux 6.1 and later know it. Python's mmap module does not name it.
MADV_COLLAPSE = 25
# Smaller mappings hardly matter, because an engine's weights have hundreds of megabytes.
MIN_BYTES = 4 << 20


def use_huge_pages() -> int:
    """Moves the large mappings of this process into huge pages. Their contents stay the same.

    It does what it can. An older kernel refuses, and a mapping stays as it is where the kernel finds no free huge page.
    Mappings that appear later are not moved, so call it when all engines have started.

    Returns:
        The bytes of the mappings that are now in huge pages as a whole.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError):  # without Linux there is no such file
        lines = Path("/proc/self/maps").read_text().splitlines()
        return move(large_mappings(lines), lambda at, size: int(libc.madvise(at, size, MADV_COLLAPSE)))
    return 0


def move(mappings: Iterable[tuple[int, int]], madvise: Callable[[ctypes.c_void_p, ctypes.c_size_t], int]) -> int:
    """Asks the kernel to move each of `mappings`, and returns the bytes of those for which `madvise` returns 0."""
    done = 0
    for start, size in mappings:
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size)) == 0:
            done += size
    return done


def large_mappings(lines: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the address and the bytes of each large private mapping that has no file and can be written.

    `lines` are those of the kernel's file `/proc/self/maps`.
    """
    found = []
    for line in lines:
        addresses, access, _, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        is_memory = access == "rw-p" and inode == "0" and (not path or path[0].startswith(("[heap]", "[anon")))
        if is_memory and end - start >= MIN_BYTES:
            found.append((start, end - start))
    return found
