# SPDX-License-Identifier: Apache-2.0
"""Item of the GPU check that times engine steps by their number of rows, with and without CUDA graphs.

With texts made ahead, 32 requests can fill an engine step of 32 x 32 rows. vLLM captures graphs of up to 512 rows by default.
In a larger step, the host launches each kernel. The item measures what larger graphs cost and gain. One engine with larger
graphs serves all ways, because an engine step can be kept out of its graph:

- vLLM's graphs: Steps of up to 512 rows are in a graph, and larger ones are not.
- larger graphs: Steps are in a graph up to the number of rows that a block with texts made ahead can fill.
- piecewise graphs: A step runs as if it read prompts, so only what lies between the attention of two layers is in graphs.
- no graph: The host launches every kernel.

All drafts are right (`forced_acceptance`), so an engine step makes as many tokens as it has rows.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from lab.gpu.forced_acceptance import AUTO, ForcedEngine
from lab.gpu.geometries import model_folder
from lab.gpu.gpu_speed import PROMPT_LENGTH, profile, random_requests
from lab.gpu.gpu_stage import GIB, Findings
from nemo_specrollout.speculation.policy import FixedPolicy
from nemo_specrollout.speculation.step_model import StepModel

DEFAULT, LARGER, PIECEWISE, NONE = "vLLM's graphs", "larger graphs", "piecewise graphs", "no graph"
WAYS = (DEFAULT, LARGER, NONE, PIECEWISE)
STEPS, CAPTURE, AUTO_TABLE = "", "capture", "the automatic budget"
"""Titles of tables."""


@dataclass(frozen=True)
class Extent:
    """What the item measures."""

    rows: tuple[int, ...] = (256, 512, 768, 1024, 1536, 1760)
    """Numbers of rows of an engine step. vLLM samples at most 1,766 rows of this vocabulary at once, so 2,048 cannot be
    verified."""
    num_requests: int = 32
    most_drafts: int = 63
    length: int = 640
    edge: int = 512
    """Number of rows of the largest graph that vLLM captures by default."""
    profiled: int = 1024
    rates: tuple[float, ...] = (1.0, 0.95)


TINY = Extent((8, 16, 24), 4, 7, 24, 16, 24, (1.0,))


class _ExactRows(FixedPolicy):
    """A speculation policy that verifies as many drafts as fill an engine step of `num_rows` rows."""

    def __init__(self, num_rows: int, num_positions: int) -> None:
        super().__init__(num_positions, num_positions)
        self._num_rows = num_rows

    def num_drafts(self, num_requests: int, most: int) -> int:
        return min(super().num_drafts(num_requests, most), max(self._num_rows - num_requests, 0))


def rows(findings: Findings) -> None:
    """Measures engine steps with the shape of Qwen3-8B in each way, by their number of rows.

    Then measures the automatic budget with vLLM's graphs and with larger ones.
    """
    extent = findings.size(Extent(), TINY)
    options: dict[str, Any] = {
        "max_num_seqs": extent.num_requests,
        "length": PROMPT_LENGTH + extent.length,
        "kv_cache_memory_bytes": findings.size(8 * GIB, GIB // 4),
    }
    if torch.cuda.is_available():
        options["compilation_config"] = {}  # vLLM's default compilation
    captured = _Captured()
    with model_folder(findings.size("Qwen3-8B", "tiny")) as folder:
        started = time.perf_counter()
        with mock.patch.object(cudagraph_utils, "tqdm", captured.watch):
            forced = ForcedEngine(folder, options, extent.most_drafts)
        captured.note(findings, extent.edge, time.perf_counter() - started)
    requests = random_requests(extent.num_requests, extent.length)
    forced.use_budget(None)
    forced.oracle.know(requests, forced.engine.generate(requests))
    for way in WAYS:
        _use(forced, way, extent)
        for num_rows in extent.rows:
            _cell(findings, forced, way, num_rows, requests, extent)
    for way in (DEFAULT, LARGER):
        _use(forced, way, extent)
        _automatic(findings, forced, way, requests, extent)
        forced.oracle.force(1.0)
        forced.use_policy(_ExactRows(extent.profiled, extent.most_drafts))
        profile(findings, f"{way}, {extent.profiled} rows", forced.engine, requests)
    forced.engine.close()


def _use(forced: ForcedEngine, way: str, extent: Extent) -> None:
    """Makes engine steps run in this way from now on. The step model starts over with the sizes of the way's graphs."""
    forced.oracle.force(1.0)
    forced.engine.run_in_worker(partial(_use_in_worker, way=way, extent=extent))


def _use_in_worker(worker: Any, way: str, extent: Extent) -> None:
    runner = worker.model_runner
    graphs = runner.cudagraph_manager
    most_rows = extent.num_requests * (1 + extent.most_drafts)
    sizes = [size for size in runner.compilation_config.cudagraph_capture_sizes or () if size <= most_rows]
    if graphs is not None:
        graphs.dispatch = partial(dispatch_by, type(graphs).dispatch, graphs, way, extent.edge)
    if way == NONE:
        sizes = []
    elif way == DEFAULT:
        sizes = [size for size in sizes if size <= extent.edge]
    worker.specrollout_accounts.step_model = StepModel(most_rows, sizes)
    worker.specrollout_router.policy.costs = None


def dispatch_by(
    native: Any, graphs: Any, way: str, edge: int, num_reqs: int, num_tokens: int, *args: Any, **options: Any
) -> Any:
    """Does the work of the graph manager's method `dispatch`, which chooses the graph of an engine step.

    Chooses only among the graphs that `way` allows. `native` is vLLM's own method. `edge` is the number of rows of the largest
    graph that vLLM captures by default.
    """
    if way == NONE or (way == DEFAULT and num_tokens > edge):
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)
    found = native(graphs, num_reqs, num_tokens, *args, **options)
    if way != PIECEWISE or found.cg_mode != CUDAGraphMode.FULL:
        return found
    return native(graphs, num_reqs, num_tokens, None, 0)  # as for a step with prompts


def _cell(findings: Findings, forced: ForcedEngine, way: str, num_rows: int, requests: Any, extent: Extent) -> None:
    """Notes the measured milliseconds of engine steps with `num_rows` rows, and the step model's prediction of them.

    The prediction is made before the steps.
    """
    forced.use_policy(_ExactRows(num_rows, extent.most_drafts))
    costs = forced.engine.run_in_worker(lambda worker: worker.specrollout_accounts.step_model.costs())
    drafts = np.array([num_rows - extent.num_requests])
    expected_s = None if costs is None else float(costs.seconds(extent.num_requests, drafts)[0])
    before = forced.engine.counters()
    assert before is not None
    forced.engine.generate(requests)
    stats = forced.engine.stats(before.num_steps)
    assert stats is not None
    column = stats.trace.column
    is_full_S = (column("is_decode") > 0) & (column("num_rows") == num_rows)
    seconds_S = column("seconds")[is_full_S]
    name = f"{way}, {num_rows} rows"
    findings.check(len(seconds_S) > 0, f"{name}: no step has as many")
    if len(seconds_S):
        times = {"median ms": np.median(seconds_S), "mean ms": np.mean(seconds_S), "slowest ms": np.max(seconds_S)}
        row: dict[str, Any] = {"steps": len(seconds_S), **{title: 1e3 * float(value) for title, value in times.items()}}
        row["rows a ms"] = num_rows / row["median ms"]
        row["predicted ms"] = "" if expected_s is None else 1e3 * expected_s
        findings.note(name, row, STEPS)


def _automatic(findings: Findings, forced: ForcedEngine, way: str, requests: Any, extent: Extent) -> None:
    """Notes the speed of the automatic budget for each probability that a draft token is right."""
    for rate in extent.rates:
        forced.oracle.force(rate)
        forced.use_budget(AUTO)
        for _ in range(2):  # learns acceptance and step times
            forced.measure(requests)
        found = forced.measure(requests)
        row = {title: found[title] for title in ("ms a step", "rows", "tokens a second")}
        findings.note(f"{way}, p {rate:g}", row, AUTO_TABLE)


class _Captured:
    """Watches vLLM's graph manager capture graphs. Owns the seconds and bytes of each graph, by kind and number of rows."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[float, int]] = {}

    def watch(self, graphs: Iterable[Any], **_: Any) -> Iterator[Any]:
        """Yields vLLM's graphs one by one, in place of vLLM's progress bar, and measures the capture of each.

        A graph that is captured again counts once.
        """
        for graph in graphs:
            started, free = time.perf_counter(), torch.accelerator.get_memory_info()[0]
            yield graph
            torch.accelerator.synchronize()
            taken = free - torch.accelerator.get_memory_info()[0]
            self._found[graph.cg_mode.name, graph.num_tokens] = (time.perf_counter() - started, taken)

    def note(self, findings: Findings, edge: int, start_s: float) -> None:
        """Notes seconds and memory of all graphs up to `edge` rows, and of all larger ones.

        `start_s` is the seconds in which the engine started, which are noted too.
        """
        findings.note("start of the engine", {"s": start_s}, CAPTURE)
        for kind in sorted({kind for kind, _ in self._found}):
            for is_larger in (False, True):
                costs = [cost for (k, n), cost in self._found.items() if k == kind and (n > edge) == is_larger]
                sums = {"s": sum(s for s, _ in costs), "MiB": sum(taken for _, taken in costs) / 2**20}
                name = f"{kind}, {'more' if is_larger else 'up to'} {'than ' * is_larger}{edge} rows"
                findings.note(name, {"graphs": len(costs), **sums}, CAPTURE)
