# SPDX-License-Identifier: Apache-2.0
"""Finds accesses to the same memory that nothing orders, whatever values the programs of a launch happened to see.

Two programs are ordered only by two atomics at one address: the first program's releases, then the second program's acquires.
Lanes of a program are ordered only by a barrier. A release needs one too, because a single lane does the atomic. Two accesses
by equal blocks of pointers need none if the block is as large as a warp, because each lane keeps its place. Elements of a
smaller block are loaded by several lanes and stored by one.

This is the happens-before relation (Lamport, CACM 1978), by vector clocks.

Shapes: P programs, A accesses, N addresses of all accesses, U of them different, G accesses to one address.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

READ, WRITE, ATOMIC = 0, 1, 2
LANES = 32
"""Lanes of a warp."""
_ACQUIRE, _RELEASE = ("ACQUIRE", "ACQUIRE_RELEASE"), ("RELEASE", "ACQUIRE_RELEASE")


class AccessLog:
    """Accesses of a launch's programs, in the order in which they ran.

    Invariant: entry q of a program's clock counts the barriers of program q that come before what the program does now. The
    program's own entry counts all its barriers. Clocks are replaced, never changed.
    """

    def __init__(self, num_programs: int) -> None:
        self._clocks = [np.zeros(num_programs, np.int32) for _ in range(num_programs)]
        self._released: dict[int, np.ndarray] = {}
        self._blocks: dict[tuple[int, Any], int] = {}
        self._accesses: list[tuple[int, int, int, int, np.ndarray]] = []
        self._addresses: list[np.ndarray] = []

    def barrier(self, program: int) -> None:
        """Notes that all lanes of a program have done what comes before."""
        self._clocks[program] = self._clocks[program].copy()
        self._clocks[program][program] += 1

    def block_of(self, program: int, pointers: np.ndarray) -> int:
        """Returns a number for the accesses of a program that need no barrier between them."""
        key = (program, pointers.tobytes() if pointers.size >= LANES else len(self._accesses))
        return self._blocks.setdefault(key, len(self._blocks))

    def access(self, program: int, kind: int, block: int, addresses: np.ndarray, semantics: str = "RELAXED") -> None:
        """Notes an access of lanes that belong to a block. `semantics` are an atomic's, by Triton's names."""
        addresses = addresses.astype(np.int64)
        for address in addresses.tolist() if semantics in _ACQUIRE else ():
            self._clocks[program] = np.maximum(self._clocks[program], self._released.get(address, 0))
        num_barriers = self._clocks[program][program] - (semantics in _RELEASE)  # a release releases itself
        self._accesses.append((program, kind, block, num_barriers, self._clocks[program]))
        self._addresses.append(addresses)
        for address in addresses.tolist() if semantics in _RELEASE else ():
            self._released[address] = np.maximum(self._clocks[program], self._released.get(address, 0))

    def races(self) -> Iterator[tuple[int, int, int]]:
        """Yields each address for which lanes or programs race, and two of the programs."""
        program_A, kind_A, block_A, barriers_A, clock_AP = map(np.array, zip(*self._accesses, strict=True))
        address_N = np.concatenate(self._addresses)
        access_N = np.repeat(np.arange(len(self._accesses)), list(map(len, self._addresses)))
        order_N = np.argsort(address_N, kind="stable")
        address_N, access_N = address_N[order_N], access_N[order_N]
        starts_U = np.flatnonzero(np.diff(address_N, prepend=-1))
        ends_U, block_N = np.append(starts_U[1:], len(address_N)), block_A[access_N]
        is_shared_U = np.minimum.reduceat(block_N, starts_U) < np.maximum.reduceat(block_N, starts_U)
        is_written_U = np.maximum.reduceat(kind_A[access_N], starts_U) > READ
        for u in np.flatnonzero(is_shared_U & is_written_U):
            access_G = access_N[starts_U[u] : ends_U[u]]
            program_G, kind_G, block_G = program_A[access_G], kind_A[access_G], block_A[access_G]
            is_before_GG = clock_AP[access_G][:, program_G] > barriers_A[access_G]
            kinds_GG = kind_G[:, None] + kind_G
            is_conflict_GG = (block_G[:, None] != block_G) & (kinds_GG > READ + READ) & (kinds_GG < ATOMIC + ATOMIC)
            races_GG = is_conflict_GG & ~is_before_GG & ~is_before_GG.T
            if races_GG.any():
                one, other = program_G[np.argwhere(races_GG)[0]].tolist()
                yield int(address_N[starts_U[u]]), one, other
