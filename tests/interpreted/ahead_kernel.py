# SPDX-License-Identifier: Apache-2.0
"""The kernel of the drafter `ahead`, interpreted, does what its numba body does, for texts that agree with their paths or not.

Shapes: B requests, S request slots, P paths, L longest text, K draft positions.
"""

import interpreter
import numpy as np
import pytest
import torch

from lab.vllm_on_cpu.own_kernels import ahead as cpu
from nemo_specrollout.drafters import ahead_triton
from nemo_specrollout.drafters.ahead import FARTHEST, PathTables
from nemo_specrollout.drafters.base import Proposals, Texts

assert interpreter.torch is torch  # imported before vllm
NUM_SLOTS, LONGEST = 7, 90


def random_tables(rng: np.random.Generator, num_paths: int) -> PathTables:
    """Returns paths of few tokens, so that some agree with a text at other places; the ends of some lie in their middle."""
    tokens_SPL = torch.from_numpy(rng.integers(0, 3, (NUM_SLOTS, num_paths, LONGEST))).int()
    begin_SP = torch.from_numpy(rng.integers(0, 9, (NUM_SLOTS, num_paths)))
    end_SP = torch.from_numpy(rng.integers(9, LONGEST + 1, (NUM_SLOTS, num_paths)))
    shift_SP = torch.from_numpy(rng.integers(-2, 3, (NUM_SLOTS, num_paths)))
    num_paths_S = torch.from_numpy(rng.integers(0, num_paths + 1, NUM_SLOTS)).int()
    num_paths_S[:2] = num_paths
    path_S = torch.from_numpy(rng.integers(0, num_paths, NUM_SLOTS)).int().clamp(max=1)
    return PathTables(tokens_SPL, begin_SP, end_SP, shift_SP, num_paths_S, path_S.minimum((num_paths_S - 1).clamp(0)))


def texts_near(rng: np.random.Generator, tables: PathTables) -> Texts:
    """Returns texts that are a path of their slot, shifted, with a few other tokens."""
    num_paths = tables.tokens_SPL.shape[1]
    wide_SL = torch.from_numpy(rng.integers(0, 3, (NUM_SLOTS, LONGEST + 5))).int()
    for slot in range(NUM_SLOTS):
        shift = int(rng.integers(-FARTHEST, FARTHEST + 1)) * int(rng.integers(2))
        wide_SL[slot, :LONGEST] = tables.tokens_SPL[slot, rng.integers(num_paths)].roll(-shift)
    is_other = torch.from_numpy(rng.random(wide_SL.shape) < 0.04)
    wide_SL[is_other] = 5
    slots_B = torch.from_numpy(rng.permutation(NUM_SLOTS)[:6])
    slots_B[rng.integers(6)] = -1
    return Texts(slots_B, torch.from_numpy(rng.integers(1, LONGEST, NUM_SLOTS)).int(), wide_SL[:, :LONGEST])


@pytest.mark.parametrize(("num_paths", "most"), [(1, 1), (1, 8), (3, 130), (5, 16)])
def test_the_kernel_follows_the_same_paths(num_paths: int, most: int) -> None:
    rng = np.random.default_rng(num_paths)
    moved = switched = 0
    for _ in range(12):
        tables = random_tables(rng, num_paths)
        texts = texts_near(rng, tables)
        worlds = []
        for kernels in (ahead_triton, cpu):
            own = PathTables(*(table.clone() for table in tables))
            shape = (len(texts.slots_B), most)
            out = Proposals(
                torch.full(shape, -9, dtype=torch.int32),
                torch.full(shape, -9, dtype=torch.int8),
                torch.full(shape[:1], -9, dtype=torch.int32),
            )
            kernels.propose(own, texts, out)
            worlds.append((*own, out.found_B, out.tokens_BK, out.levels_BK))
        for got, expected in zip(*worlds, strict=True):
            assert torch.equal(got, expected)
        moved += int((worlds[0][3] != tables.shift_SP).sum())
        switched += int((worlds[0][5] != tables.path_S).sum())
        assert (worlds[0][6] >= 0).all()
    assert moved > 5
    assert switched > 5 or num_paths == 1
