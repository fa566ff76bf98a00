# SPDX-License-Identifier: Apache-2.0
"""Moves the memory of this process into huge pages, so that all engines of a bench read their weights at the same speed.

A process that starts gets the small pages that earlier ones have left, which lie scattered over the machine's memory. On a
virtual machine, a second plain engine ran at 1.07x of the first one's speed (docs/benchmarks/smollm2.md).
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import psutil

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
    libc = ctypes.CDLL(None)
    mappings = large_mappings(psutil.Process().memory_maps(grouped=False))
    return move(mappings, lambda at, size: int(libc.madvise(at, size, MADV_COLLAPSE)))


def move(mappings: Iterable[tuple[int, int]], madvise: Callable[[ctypes.c_void_p, ctypes.c_size_t], int]) -> int:
    """Asks the kernel to move each of `mappings`, and returns the bytes of those for which `madvise` returns 0."""
    done = 0
    for start, size in mappings:
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size)) == 0:
            done += size
    return done


def large_mappings(mappings: Iterable[Any]) -> list[tuple[int, int]]:
    """Returns the address and the bytes of each large private mapping that has no file and can be written.

    `mappings` are those of a process, as psutil lists them.
    """
    found = []
    for mapping in mappings:
        start, end = (int(address, 16) for address in mapping.addr.split("-"))
        is_memory = mapping.perms == "rw-p" and mapping.path.startswith(("[heap]", "[anon"))
        if is_memory and end - start >= MIN_BYTES:
            found.append((start, end - start))
    return found
