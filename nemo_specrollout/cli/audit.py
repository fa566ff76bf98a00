# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout audit`: computes some of a run's rows (samples) again, and says whether the policy sampled them.

It uses transformers models instead of engines.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_specrollout.cli.command_line import EXIT_BAD_INPUT, EXIT_FAILED, check_out
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports.records import in_ranges
from nemo_specrollout.reports.run_folders import find_folders, read_run

_EVERY_S = 5.0
"""Seconds between two lines of progress."""
_SHOWN = 10


def audit(parsed: argparse.Namespace) -> int:
    """Audits some rows of a run, prints the verdict, and saves it in the run's records, so that the run's report can show it.

    Returns the exit code. It is 0 if the policy sampled every audited row, 1 if at least one row is not the policy's own
    sample, and 2 if no row could be audited. Raises ConfigError if a flag is wrong, or if the run lacks the records that an
    audit needs.
    """
    steps = _numbers(parsed.steps)
    if parsed.rows < 1:
        raise ConfigError(f"--rows: {parsed.rows}; it must be a whole number, at least 1")
    if parsed.json is not None:
        check_out(parsed.json, "--json")
    recorded = read_run(find_folders(parsed.run_dir))
    from nemo_specrollout.audit.audit import audit_rows, auditable_steps, choose
    from nemo_specrollout.audit.recorded_run import RecordedRun, keep_result
    from nemo_specrollout.audit.weights import Weights

    run = RecordedRun(recorded)
    device = parsed.device or _device()
    weights = Weights(run, _given(parsed.weights, run, steps), device)
    places = choose(run, weights, steps, parsed.rows)
    for sentence in run.damaged:
        print(f"warning: {sentence}", file=sys.stderr)
    chosen = sorted({place.step for place in places})
    print(f"auditing {len(places):,} rows of step {in_ranges(chosen)} on {device}", file=sys.stderr, flush=True)
    progress = _Progress()
    found = audit_rows(run, weights, places, progress.row_done)
    result = {**found.as_json(), "steps": chosen, "seconds": round(progress.seconds, 1), "device": device}
    keep_result(recorded.folder, {**result, "date": time.strftime("%Y-%m-%d %H:%M")})
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _show(result, in_ranges(auditable_steps(run, weights)))
    if not found.rows:
        return EXIT_BAD_INPUT
    return EXIT_FAILED if found.foreign else 0


def _show(result: Mapping[str, Any], auditable: str) -> None:
    """Prints the verdict of an audit and the figures on which it is based.

    `result` is `Audit.as_json` with further keys, and `auditable` names the steps whose weights are available.
    """
    console = Console(highlight=False, soft_wrap=True)
    color = "red" if result["rows_not_the_policys"] or not result["rows"] else "green"
    console.print(f"{result['verdict']}", style=f"bold {color}")
    print(f"  {result['rows']:,} rows, {result['tokens']:,} tokens, {result['seconds']:.1f} s")
    if gaps := result["logprob_difference"]:
        print(
            f"  log-probs differ by at most {gaps['largest']:.2g} nats, 99 % of them by at most {gaps['p99']:.2g}, "
            f"half of them by at most {gaps['median']:.2g}"
        )
        rounding = result["rounding_explains"]
        print(
            f"  rounding of {result['dtype']} explains {rounding['logprob']:.2g} nats of a log-prob here, and "
            f"{rounding['score']:.2g} between two scores"
        )
    shown = [(row, d) for row in result["by_row"] for d in row.get("differences", ())]
    for row, d in shown[:_SHOWN]:
        gap = "it is excluded" if d["gap"] is None else f"its score is {d['gap']:.2g} below"
        print(
            f"  step {row['step']}, row {row['number']}, token {d['number']}: {d['recorded']}, not {d['sampled']}: {gap}"
        )
    if len(shown) > _SHOWN:
        print(f"  and {len(shown) - _SHOWN:,} more tokens; --json FILE has all")
    reasons: dict[str, int] = {}
    for row in result["skipped"]:
        reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    for reason, count in reasons.items():
        print(f"  {count:,} {'row was' if count == 1 else 'rows were'} not audited: {reason}")
    print(f"  steps whose weights are at hand: {auditable or 'none'}")


class _Progress:
    """Prints a line about the audit's progress every few seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = self._began
        self._loaded = self._began

    @property
    def seconds(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._began

    def row_done(self, done: int, total: int) -> None:
        """Notes that `done` of `total` rows are audited. Prints a line if the last line is `_EVERY_S` seconds old."""
        now = time.monotonic()
        if done == 1:  # the first row has loaded the policy
            self._loaded = now
        if now - self._told < _EVERY_S and done < total:
            return
        self._told = now
        left = f", {(now - self._loaded) / (done - 1) * (total - done):.0f} s left" if done > 1 else ""
        print(f"  {done:,} of {total:,} rows{left}", file=sys.stderr, flush=True)


def _numbers(text: str | None) -> list[int]:
    """Returns the numbers of steps in a text such as "10,20", in rising order. Raises ConfigError if a part is no number."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    wrong = next((part for part in parts if not part.isdecimal()), None)
    if wrong is not None:
        raise ConfigError(f"--steps: {wrong!r} is not the number of a step; write some such as 10,20")
    return sorted({int(part) for part in parts})


def _given(texts: list[str], run: Any, steps: list[int]) -> dict[int, Path]:
    """Returns the folders that the flags `--weights` name, by policy version.

    `texts` are the values of the flags, and `steps` the steps to audit. Raises ConfigError if a folder is missing, or if it is
    not clear which policy version a folder has.
    """
    found = {}
    for text in texts:
        version, has_version, folder = text.partition("=")
        if has_version and version.isdecimal():
            found[int(version)] = Path(folder)
            continue
        versions = {v for step in steps for row in run.steps.get(step, ()) for v in row.versions}
        if len(versions) != 1:
            which = f"the rows are of policies {sorted(versions)}" if versions else "name the step by --steps, too"
            raise ConfigError(
                f"--weights: {text} is of one policy, and {which}; write VERSION=FOLDER, once for each policy"
            )
        found[versions.pop()] = Path(text)
    for folder_ in found.values():
        if not folder_.is_dir():
            raise ConfigError(
                f"--weights: {folder_} is not a folder; name a Hugging Face folder or a step_N of NeMo-RL"
            )
    return found


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
