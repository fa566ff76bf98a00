# SPDX-License-Identifier: Apache-2.0
"""Every kernel of ours computes the same bits in whatever order its programs run, and none of its programs race.

Shapes: B requests, S request slots, R rows, K draft positions, V vocabulary, L longest text.
"""

import ast
import functools
from pathlib import Path

import interpreter  # noqa: F401 - must be imported before triton
import pytest
import torch
from own_kernels import BoardWorld
from schedules import Schedule, compared
from triton import jit
from triton import language as tl

import nemo_specrollout
from nemo_specrollout.drafters import ahead_triton
from nemo_specrollout.drafters.ahead import PathTables
from nemo_specrollout.drafters.base import LEVEL_PRIORS, Proposals, Texts
from nemo_specrollout.generation.drafting import draft_sampling_triton
from nemo_specrollout.generation.step import row_sampling_triton
from nemo_specrollout.generation.step.sampled_rows import Drafts, Logits, RowKeys
from nemo_specrollout.remote.verifier import draft_stream_triton
from nemo_specrollout.remote.verifier.draft_stream import DraftStream
from nemo_specrollout.sampling.equality_triton import accept_rows

SCHEDULES = [Schedule(0, 1), Schedule(1, 2), Schedule(2, 64)]
S, B, K, V, L = 9, 7, 3, 4500, 60


def launched_kernels() -> set[str]:
    """Returns each kernel that a module of this package launches, as `module.name`."""
    package, found = Path(nemo_specrollout.__file__).parent, set()
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        nodes = list(ast.walk(ast.parse(path.read_text())))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        kernels = {f.name for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}
        for node in nodes:
            match node:
                case ast.Call(ast.Subscript(ast.Name(name))) if name in kernels:
                    found.add(f"{module}.{name}")
    return found


def ints(*shape: int, low: int = 0, high: int = 2, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


def slots() -> torch.Tensor:
    """Returns the slots of a batch in random order, with one row that has no request."""
    slots_B = torch.randperm(S)[:B]
    slots_B[2] = -1
    return slots_B


def observe_and_choose() -> None:
    """All requests share evidence, and contexts whose buckets are few."""
    world = BoardWorld(5, 3, 4, 2)
    world.use_triton()
    for number in range(2):
        world.step(number)
    lookup, texts = world.lookups[0], Texts(slots(), world.total_len_S, world.token_ids_SL)
    lookup.learned_S.zero_()
    lookup.index.learn(texts, lookup.salts_S, lookup.learned_S, 4)
    rates_G = torch.from_numpy(LEVEL_PRIORS).float()
    lookup.index.walk(texts, lookup.salts_S, rates_G, 0.1, world.board.proposals_of(0))


def accept() -> None:
    starts_B1 = torch.cat([torch.zeros(1), ints(B, low=1, high=K + 2).cumsum(0)]).int()
    num_rows = int(starts_B1[-1])
    emitted_BK, counts_B = torch.empty(B, K + 1, dtype=torch.int64), torch.empty(B, dtype=torch.int32)
    accept_rows(ints(num_rows, dtype=torch.int64), ints(num_rows), starts_B1, emitted_BK, counts_B)


def sample_drafts() -> None:
    rows = (torch.randn(B, V), slots(), torch.rand(S), ints(S, high=99, dtype=torch.int64), torch.arange(B))
    tokens_B, levels_BK = torch.empty(B, dtype=torch.int64), torch.zeros(B, K, dtype=torch.int8)
    draft_sampling_triton.sample_rows(*rows, tokens_B, levels_BK, torch.tensor(1), tokens_B[:0])


def draw_rows() -> None:
    """Requests have one to K + 1 rows."""
    num_B = ints(B, low=1, high=K + 2)
    starts_B1, slots_R = torch.cat([ints(1, high=1), num_B.cumsum(0)]).int(), slots().repeat_interleave(num_B)
    num_rows = len(slots_R)
    keys = RowKeys(slots_R, torch.rand(S), ints(S, high=99, dtype=torch.int64), torch.arange(num_rows))
    logits = Logits(torch.randn(num_rows, V), True)
    row_sampling_triton.draw_rows(logits, keys, logits, Drafts(ints(num_rows), starts_B1, K))


def align() -> None:
    table_SX = ints(S, DraftStream.columns(K), low=1)
    found_B, counts_3 = torch.empty(B, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    out = (torch.empty(B, K, dtype=torch.int32), torch.empty(B, K, dtype=torch.int8), found_B, counts_3)
    draft_stream_triton.align(slots(), ints(S, low=1, high=3), ints(S, L), table_SX, *out)


def follow_paths() -> None:
    """Each request has two paths of few tokens, so that some agree with its text and some at other places."""
    places = (torch.full((S, 2), 0), torch.full((S, 2), L), ints(S, 2, low=-1, dtype=torch.int64))
    tables = PathTables(ints(S, 2, L), *places, torch.full((S,), 2, dtype=torch.int32), ints(S))
    found = (
        torch.empty(B, K, dtype=torch.int32),
        torch.empty(B, K, dtype=torch.int8),
        torch.empty(B, dtype=torch.int32),
    )
    ahead_triton.propose(tables, Texts(slots(), ints(S, low=1, high=L), ints(S, L)), Proposals(*found))


@functools.cache
def differences() -> dict[str, list[str]]:
    """Returns what differed, and what raced, by kernel."""
    torch.manual_seed(0)
    with compared(SCHEDULES) as found:
        for launch in (observe_and_choose, accept, sample_drafts, draw_rows, align, follow_paths):
            launch()
    return found


@pytest.mark.parametrize("kernel", sorted(launched_kernels()))
def test_no_order_of_programs_changes_a_result(kernel: str) -> None:
    assert kernel in differences(), "launch the kernel in one of the functions above"
    said = differences()[kernel]
    assert not said, "\n".join(said[:9])


@jit
def _add(values_ptr, total_ptr):  # type: ignore[no-untyped-def]
    tl.store(total_ptr, tl.load(total_ptr) + tl.load(values_ptr + tl.program_id(0)))


@jit
def _shift(values_ptr, WAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 8)
    values = tl.load(values_ptr + i)
    if WAITS:
        tl.debug_barrier()
    tl.store(values_ptr + i + 1, values)


@jit
def _let_the_last_add(values_ptr, copies_ptr, finished_ptr, total_ptr, WAITS: tl.constexpr, LAST: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0)
    tl.store(copies_ptr + i, tl.load(values_ptr + i))
    if WAITS:
        tl.debug_barrier()
    if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == LAST:
        tl.store(total_ptr, tl.sum(tl.load(copies_ptr + tl.arange(0, 8)), axis=0))
        tl.store(finished_ptr, 0)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64)


def test_a_lost_update_is_found() -> None:
    with compared(SCHEDULES) as found:
        _add[(8,)](torch.arange(8), zeros(1))
    (said,) = found.values()
    assert any("race" in text for text in said)
    assert any("differs" in text for text in said)


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_barrier_between_lanes_is_found(waits: bool) -> None:
    with compared(SCHEDULES) as found:
        _shift[(1,)](torch.arange(9), waits)
    assert any(found.values()) != waits


@pytest.mark.parametrize(("waits", "last"), [(True, 7), (False, 7), (True, 6)])
def test_a_sum_by_the_last_program_needs_a_barrier(waits: bool, last: int) -> None:
    with compared(SCHEDULES) as found:
        _let_the_last_add[(8,)](torch.arange(8), zeros(8), zeros(1), zeros(1), waits, last)
    assert any(found.values()) != (waits and last == 7)
