# SPDX-License-Identifier: Apache-2.0
"""Reads the traces of a local run. A trace is a line of `trace.jsonl` with the engine steps of one rollout."""

import numpy as np

from nemo_specrollout.reports.records import Record

_DRAFTS = ("drafted_", "accepted_")
SHORTEST_IDLE_S = 0.002
"""An engine counts as idle between two engine steps if the gap is longer than this, in seconds. Shorter gaps come from reading
the clock."""


def whole_trace(trace: Record) -> Record:
    """Merges the traces of several engines into one. The trace of a single engine is returned unchanged.

    The merged trace has a row for each moment at which a step of any engine begins or ends. The row has sums over the engine
    steps that are under way at that moment.
    """
    workers = [w for w in trace.get("workers", ()) if can_drain(w)]
    if not workers:
        return trace
    names = dict.fromkeys(n for w in workers for n in w["columns"] if n == "num_requests" or n.startswith(_DRAFTS))
    spans = [_step_spans(w) for w in workers]
    edges = np.unique(np.concatenate([edge for span in spans for edge in span]))
    at_s = edges[np.isfinite(edges)]
    sums = [sum(_under_way(w, *span, name, at_s) for w, span in zip(workers, spans, strict=True)) for name in names]
    rows = np.stack([at_s, *sums], 1).tolist()
    several = {"num_workers": len(workers)} if len(workers) > 1 else {}
    return {"step": trace.get("step"), "columns": ["time_s", *names], "rows": rows, **several}


def _step_spans(trace: Record) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds at which each engine step begins and ends in a chart, as two arrays.

    A step ends when it samples. It begins when the previous step sampled, or at its real beginning if the engine was idle
    before. The beginning of the first step is not known, so it is -inf.
    """
    sampled = column(trace, "time_s")
    ends = sampled + sum(column(trace, n) for n in ("host_s", "draft_s") if n in trace["columns"])
    begins = ends[1:] - column(trace, "seconds")[1:]
    was_idle = begins - ends[:-1] > SHORTEST_IDLE_S
    return np.append(-np.inf, np.where(was_idle, begins, sampled[:-1])), sampled


def _under_way(trace: Record, starts: np.ndarray, ends: np.ndarray, name: str, at_s: np.ndarray) -> np.ndarray:
    """Returns a column's value in the engine step that runs at each moment of `at_s`, float64.

    It is 0 between engine steps.
    """
    if name not in trace["columns"]:
        return np.zeros(len(at_s))
    step = np.minimum(np.searchsorted(ends, at_s), len(ends) - 1)
    return np.where((starts[step] < at_s) & (at_s <= ends[step]), column(trace, name)[step], 0.0)


def can_drain(trace: Record) -> bool:
    """Returns whether a trace has the columns and rows that a chart of running requests needs."""
    return len(trace.get("rows", ())) > 1 and {"time_s", "num_requests"} <= set(trace.get("columns", ()))


def seconds_since_start(trace: Record) -> np.ndarray:
    """Returns the time of each row in seconds since the first row, float64."""
    time_s = column(trace, "time_s")
    return time_s - time_s[0]


def drafts_by_name(trace: Record) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns two arrays for each drafter, by its name. They count its draft tokens and accepted tokens in each row.

    Drafters without drafts are left out.
    """
    names = [c.removeprefix("drafted_") for c in trace["columns"] if c.startswith("drafted_")]
    found = {n: (column(trace, f"drafted_{n}"), column(trace, f"accepted_{n}")) for n in names}
    return {n: pair for n, pair in found.items() if pair[0].any()}


def column(trace: Record, name: str) -> np.ndarray:
    """Returns the column `name` of a trace, float64."""
    i = trace["columns"].index(name)
    return np.array([row[i] for row in trace["rows"]], float)
