# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of a launch in Triton's interpreter as a GPU may: in any order, and several at a time.

The interpreter runs one program after the other, so it cannot show a race between them. Here each program is a thread, and one
of them runs at a time. Before a memory operation, and halfway through one, a random other program may go on. The same seed
gives the same order.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Thread, current_thread
from typing import Any

import numpy as np
import torch
from races import ATOMIC, READ, WRITE, AccessLog
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, interpreter_builder

BURSTS = (1, 1, 2, 8, 64)
"""Memory operations that a program may do before another one goes on. A long burst overtakes a program that waits."""


@dataclass(frozen=True)
class Schedule:
    """A random order of a launch's programs."""

    seed: int
    num_at_a_time: int
    """Programs that are under way at a time. A single one is not interrupted."""


class _Program(Thread):
    """A program that runs only while `go_on` waits for it."""

    def __init__(
        self, body: Callable[[], None], place: tuple[int, int, int], rng: np.random.Generator, log: AccessLog
    ) -> None:
        super().__init__(daemon=True)
        self.rng, self.log = rng, log
        self.number = int(np.ravel_multi_index(place, interpreter_builder.grid_dim))
        self._body, self._place = body, place
        self._num_operations = 0
        self._may_run, self._has_paused = Lock(), Lock()
        self._may_run.acquire()
        self._has_paused.acquire()
        self.is_done, self._error = False, None
        self.start()

    def run(self) -> None:
        self._may_run.acquire()
        try:
            self._body()
        except BaseException as error:
            self._error = error
        self.is_done = True
        self._has_paused.release()

    def go_on(self, num_operations: int) -> None:
        """Runs the program up to its end, or for some memory operations; -1 means all. Raises the program's error."""
        self._num_operations = num_operations
        interpreter_builder.grid_idx = self._place
        self._may_run.release()
        self._has_paused.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Lets the scheduler run another program, unless this one has operations left. Only this program may call it."""
        if self._num_operations == 0:
            self._has_paused.release()
            self._may_run.acquire()
        self._num_operations -= 1


class _Programs:
    """Stands in for a kernel's body: collects the programs of a launch, and runs all of them when the last one is there."""

    def __init__(self, body: Any, schedule: Schedule) -> None:
        self.__signature__, self.__globals__, self.__name__ = inspect.signature(body), body.__globals__, body.__name__
        self._body, self._schedule = body, schedule
        self._rng = np.random.default_rng(schedule.seed)
        self._places: list[tuple[int, int, int]] = []
        self.log = AccessLog(math.prod(interpreter_builder.grid_dim))

    def __call__(self, **arguments: Any) -> None:
        self._places.append(interpreter_builder.grid_idx)
        if len(self._places) < math.prod(interpreter_builder.grid_dim):
            return
        rng, running = self._rng, []
        rng.shuffle(self._places)
        while running or self._places:
            while self._places and len(running) < self._schedule.num_at_a_time:
                running.append(_Program(lambda: self._body(**arguments), tuple(self._places.pop()), rng, self.log))
            program = running[rng.integers(len(running))]
            program.go_on(int(rng.choice(BURSTS)) if self._schedule.num_at_a_time > 1 else -1)
            if program.is_done:
                running.remove(program)


def _interruptible(method: Callable[..., Any], kind: int) -> Callable[..., Any]:
    """Makes a memory operation pause before it begins, and between two random halves of its lanes."""
    pointers_at, mask_at = {READ: (0, 1), WRITE: (0, 2), ATOMIC: (1, 3)}[kind]

    def run(self: Any, *args: Any) -> Any:
        program = current_thread()
        if not isinstance(program, _Program):  # the launch runs in the order of its grid
            return method(self, *args)
        pointers, handle = args[pointers_at].data, args[mask_at]
        block = program.log.block_of(program.number, pointers)
        semantics = args[4].name if kind == ATOMIC else "RELAXED"
        mask = handle.data.astype(bool)
        is_first = program.rng.random(mask.shape) < 0.5 if mask.sum() > 1 else np.ones_like(mask)

        def part(lanes: np.ndarray) -> Any:
            program.pause()
            program.log.access(program.number, kind, block, pointers[lanes], semantics)
            return method(self, *args[:mask_at], TensorHandle(lanes, handle.dtype), *args[mask_at + 1 :])

        first = part(mask & is_first)
        if is_first.all():
            return first
        second = part(mask & ~is_first)
        return None if first is None else TensorHandle(np.where(is_first, first.data, second.data), first.dtype)

    return run


def _barrier(_: Any) -> None:
    program = current_thread()
    if isinstance(program, _Program):
        program.pause()
        program.log.barrier(program.number)


for name, kind in (("create_masked_load", READ), ("create_masked_store", WRITE), ("create_atomic_rmw", ATOMIC)):
    setattr(InterpreterBuilder, name, _interruptible(getattr(InterpreterBuilder, name), kind))
InterpreterBuilder.create_barrier = _barrier


@contextmanager
def compared(schedules: Iterable[Schedule]) -> Iterator[dict[str, list[str]]]:
    """Runs each launch in the order of its grid, and by all schedules from equal memory.

    Yields a dictionary that gets an entry for each launched kernel, `module.name`: what differed, and by which schedule.
    """
    differences: dict[str, list[str]] = defaultdict(list)
    run = GridExecutor.__call__

    def run_all(executor: Any, *args: Any, **options: Any) -> None:
        body, tensors = executor.fn, dict(_tensors(zip(executor.arg_names, args, strict=False)))
        tensors |= _tensors(options.items())
        memory = {name: _bytes(tensor) for name, tensor in tensors.items()}
        before = {name: content.clone() for name, content in memory.items()}
        run(executor, *args, **options)
        after = {name: content.clone() for name, content in memory.items()}
        found = differences[f"{body.__module__}.{body.__name__}"]
        for schedule in schedules:
            _restore(memory, before)
            executor.fn = _Programs(body, schedule)
            run(executor, *args, **options)
            other = [name for name, content in memory.items() if not torch.equal(content, after[name])]
            found += [f"{name} differs by {schedule}" for name in other]
            races = executor.fn.log.races()
            found += [f"{_name_of(address, tensors)}: programs {p} and {q} race" for address, p, q in races]
        _restore(memory, after)

    GridExecutor.__call__ = run_all
    try:
        yield differences
    finally:
        GridExecutor.__call__ = run


def _tensors(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a launch, also from its tuples, by a name."""
    for name, value in arguments:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", map(str, range(len(value))))
            yield from _tensors((f"{name}.{field}", part) for field, part in zip(fields, value, strict=True))


def _name_of(address: int, tensors: dict[str, Tensor]) -> str:
    """Returns a tensor's element by its address."""
    for name, tensor in tensors.items():
        place = (address - tensor.data_ptr()) // tensor.element_size()
        if 0 <= place < tensor.untyped_storage().nbytes() // tensor.element_size():
            return f"{name}[{place}]"
    return hex(address)


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _restore(memory: dict[str, Tensor], contents: dict[str, Tensor]) -> None:
    for name, content in memory.items():
        content.copy_(contents[name])
