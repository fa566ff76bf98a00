# SPDX-License-Identifier: Apache-2.0
"""Reads the records of a run of the lab or of NeMo-RL, and computes figures of the whole run.

The folder of a run has `run.json`, which says how the run was made, and `metrics.jsonl`, which has a line for each step. A
number that is missing, null or not finite is read as NaN, so that an unfinished run can be shown.
"""

import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.storage.files import read_regular
from nemo_specrollout.storage.model_folder import read_object
from nemo_specrollout.storage.text_files import parse_json, whole_number

Record = Mapping[str, Any]
FORMAT = 1
"""Version of the format of the records, which `run.json` has under the key `records`."""
RUN, METRICS, SUMMARY = "run.json", "metrics.jsonl", "summary.json"
HISTORY = "history"
"""Key in a step's record with counts of the earlier responses that engines draft from (`learned.history`), since the start."""
BEGAN = "began"
"""Key in a step's record with sentences that say which learned state the engines had when they started
(`learned.warm_start`)."""
AUDITS = "audit.json"
"""File with the results of `nemo-specrollout audit`."""
PREFIX = "specrollout/"
"""Prefix of the names of this package's metrics in NeMo-RL's logger."""
FOLDER = "specrollout"
"""Name of the folder for this package's records. It is in NeMo-RL's log folder."""
PHASES = ("generation", "logprob", "train", "refit", "verify", "validation", "checkpoint")
"""Phases of a step in the order in which they run. The seconds of a phase are recorded as `<phase>_s`."""
_KINDS: tuple[tuple[str, type, str], ...] = (
    ("alarms", list, "a list of sentences"),
    (BEGAN, list, "a list of sentences"),
    *((key, dict, "a block") for key in ("acceptance", "draft_refresh", "draft_supply", "tail", HISTORY)),
)
"""Those keys of a step's record whose values are lists or objects. Each has the type of its values, and words for this type
that stand in error messages."""
_MOST_STEPS = 1 << 53
"""Largest number of a step or a count. Above it, a float cannot represent every whole number, and a record with a larger
number is damaged."""
_LARGEST = 1e300
"""Largest number that is drawn or added up. A larger number in a record counts as missing."""
_COUNTS = ("tokens_checked", "tokens_equal", "deaths", "seeds_derived")
_TAIL_COUNTS = ("moves", "races", "won_by_racer", "deaths", "diverged")


@dataclass(frozen=True)
class Run:
    """The records of a run. `steps` may be empty, because a run may be killed at any time."""

    folder: Path
    about: Record
    """Content of `run.json`."""
    steps: Sequence[Record]
    summary: Record

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Returns the records in `folder`, which one start of a run has written. Raises ConfigError for a damaged line."""
        steps = [step | _shares(step) for step in read_steps(folder)]
        return cls(folder, read_object_or_nothing(folder / RUN), steps, read_object_or_nothing(folder / SUMMARY))

    @property
    def alarm_bound(self) -> float:
        """Log-prob gap above which an alarm is raised, in nats per token (`logprob_gap_alarm`), or NaN if it is not known."""
        return number(self.about, "block.logprob_gap_alarm")

    @property
    def alarms(self) -> list[tuple[Any, str]]:
        """All alarms, as pairs of a step's number and a sentence."""
        return [(step["step"], str(sentence)) for step in self.steps for sentence in step.get("alarms") or ()]

    @property
    def began(self) -> list[tuple[Any, str]]:
        """All sentences about what engines had learned when they started, as pairs of a step's number and a sentence."""
        return [(step["step"], str(sentence)) for step in self.steps for sentence in step.get(BEGAN) or ()]

    def has(self, key: str) -> bool:
        """Returns whether at least one step has a finite number at `key`."""
        return bool(np.isfinite(series(self.steps, key)).any())

    def mean(self, key: str) -> float:
        """Returns the mean of the numbers at `key` over the steps that have one, or NaN if none has."""
        return reduced(np.mean, series(self.steps, key))


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Returns the last record of each step in a run's folder, in the order of the steps.

    Incomplete lines, and keys whose value is null, are left out. Raises ConfigError with file, line and key if a value has
    another type than the report expects.
    """
    steps = list[dict[str, Any]]()
    for where, line in _lines_by_step(folder / METRICS).values():
        step = {key: value for key, value in line.items() if value is not None}
        _check_step(step, where)
        steps.append(step)
    return steps


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the last record of each step in a JSON-lines file. Incomplete lines are skipped.

    If there is no file, the list is empty.
    """
    return [record for _, record in _lines_by_step(path).values()]


def _lines_by_step(path: Path) -> dict[int, tuple[str, dict[str, Any]]]:
    """Returns the place ("FILE, line N") and the content of the last line of each step, in the order of the steps."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for line_number, line in enumerate(decoded(path).split("\n") if path.is_file() else [], 1):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        step = whole_number(record.get("step")) if isinstance(record, dict) else None
        if step is not None and abs(step) <= _MOST_STEPS:
            found[step] = (f"{path}, line {line_number}", {**record, "step": step})
    return {step: found[step] for step in sorted(found)}


def decoded(path: Path) -> str:
    """Returns the text of a file without a byte-order mark. Bytes that are not UTF-8 become replacement characters."""
    return read_regular(path).decode("utf-8-sig", errors="replace")


def _check_step(step: Record, where: str) -> None:
    """Raises ConfigError if a value of a step has another type than the report expects. It names `where` and the key."""
    for key, kind, name in _KINDS:
        if not isinstance(step.get(key, kind()), kind):
            raise _damage(where, key, step[key], name)
    for drafter, counts in step.get("acceptance", {}).items():
        if not _has_counts(counts):
            name = "the counts `proposed` and `accepted`, two lists of equal length"
            raise _damage(where, f"acceptance.{drafter}", counts, name)


def _has_counts(counts: object) -> bool:
    columns = [counts.get(name, ()) for name in ("proposed", "accepted")] if isinstance(counts, Mapping) else [()]
    return all(map(_are_counts, columns)) and len(columns[0]) == len(columns[-1])


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MOST_STEPS for value in values)


def _damage(where: str, key: str, value: object, kind: str) -> ConfigError:
    fix = "remove the line, or bring the file back from a copy"
    return ConfigError(f"{where}: {key} is {reprlib.repr(value)}, where a record of a step has {kind}; {fix}")


def read_object_or_nothing(path: Path) -> Record:
    """Returns the object in a JSON file, or an empty one if the file is missing or damaged."""
    try:
        return read_object(path)
    except ValueError:
        return {}


@contextmanager
def naming_damage(place: Path) -> Iterator[None]:
    """Context that turns errors of damaged records into a ConfigError. `place` is the folder or file that the error names."""
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{place}: a line of its records is damaged, and there is no report of it ({type(error).__name__}: {error}); "
            "remove the line, or bring the file back from a copy"
        ) from error


def _shares(step: Record) -> dict[str, float]:
    """Returns the seconds of a step that belong to no phase, and the share of the step's time that generation took.

    They have the keys `other_s` and `generation_share`. The result is {} if the step's time is not known.
    """
    step_s = number(step, "step_s")
    if not step_s > 0:
        return {}
    known_s = np.nansum([number(step, f"{phase}_s") for phase in PHASES])
    return {"other_s": max(step_s - float(known_s), 0.0), "generation_share": number(step, "generation_s") / step_s}


def number(record: Record, key: str) -> float:
    """Returns the number at `key` of a record, or NaN if there is none.

    A dot in `key` leads into a nested object, as in `tail.moves`.
    """
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if not isinstance(value, int | float) or abs(value) > _LARGEST or math.isnan(value):
        return math.nan
    return float(value)


def series(records: Sequence[Record], key: str) -> np.ndarray:
    """Returns the number at `key` of each record, or NaN where there is none, float64."""
    return np.array([number(r, key) for r in records], float)


def reduced(how: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    """Applies `how`, such as a sum, a mean or a maximum, to the finite values. Returns NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(how(known)) if len(known) else math.nan


def ratio_of_sums(steps: Sequence[Record], above: str, below: str) -> float:
    """Returns the sum of the key `above` divided by the sum of the key `below`, over the steps that have both keys.

    The result is NaN if the sum of `below` is not above 0.
    """
    values_above = series(steps, above)
    values_below = series(steps, below)
    has_both = np.isfinite(values_above) & np.isfinite(values_below)
    total = values_below[has_both].sum()
    return float(values_above[has_both].sum() / total) if total > 0 else math.nan


def in_ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as a text of ranges, such as "1-4, 8"."""
    ranges = list[list[int]]()
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def reward_window(num_steps: int) -> int:
    """Returns the number of steps over which the report averages rewards, which is a fifth of the run's steps.

    A single step is no measure of progress, because steps have different problems.
    """
    return max(1, num_steps // 5)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns for each value the mean of this value and the `window - 1` values before it.

    The mean is NaN if one of these values is NaN, or if there are fewer values.
    """
    means = np.full(len(values), math.nan)
    if len(values) >= window:
        means[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return means


def acceptance_totals(steps: Sequence[Record]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns for each drafter two int64 arrays, the counts of proposed and of accepted draft tokens by position.

    The counts are sums over `steps`. Drafters and positions without proposed draft tokens are left out.
    """
    proposed: dict[str, np.ndarray] = {}
    accepted: dict[str, np.ndarray] = {}
    none_K = np.zeros(0, np.int64)
    for step in steps:
        for name, counts in (step.get("acceptance") or {}).items():
            proposed[name] = _sum_by_position(proposed.get(name, none_K), counts["proposed"])
            accepted[name] = _sum_by_position(accepted.get(name, none_K), counts["accepted"])
    totals = {}
    for name, proposed_K in proposed.items():
        was_proposed_K = proposed_K > 0
        if was_proposed_K.any():
            totals[name] = (proposed_K[was_proposed_K], accepted[name][was_proposed_K])
    return totals


def _sum_by_position(total_K: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Returns the sum of two sequences of counts by position, int64. They may have different lengths."""
    counts_K = np.array(counts, np.int64)
    width = max(len(total_K), len(counts_K))
    return np.pad(total_K, (0, width - len(total_K))) + np.pad(counts_K, (0, width - len(counts_K)))


def accepted_shares(steps: Sequence[Record], drafters: Collection[str]) -> np.ndarray:
    """Returns the acceptance rate of some drafters together, for each step, float64.

    It is the share of accepted tokens among all verified draft tokens of `drafters`, or NaN in a step without any.
    """
    shares = []
    for step in steps:
        counts = [c for name, c in (step.get("acceptance") or {}).items() if name in drafters]
        proposed, accepted = (sum(sum(c[k]) for c in counts) for k in ("proposed", "accepted"))
        shares.append(accepted / proposed if proposed else math.nan)
    return np.array(shares)


def refreshes(steps: Sequence[Record]) -> list[tuple[Any, Record]]:
    """Returns pairs of the step's number and its entry `draft_refresh`, for each step after which a draft head was trained."""
    return [(s["step"], s["draft_refresh"]) for s in steps if number(s, "draft_refresh.refresh_s") >= 0]


def policy_lag(samples: Sequence[Record | None], policy_version: int) -> dict[str, float]:
    """Returns metrics about the age of the weights with which `samples` were begun.

    `policy_version` is the version that is trained on them. The metrics are the mean and the maximum number of steps by which
    the weights are older than this version, and the number of samples during which the weights changed. `samples` belong to
    one line of `samples.jsonl`. The result is empty if no sample has its policy versions.
    """
    spans = [sample["policy_spans"] for sample in samples if sample and sample.get("policy_spans")]
    lags = [policy_version - min(version for version, _ in sample_spans) for sample_spans in spans]
    if not lags:
        return {}
    return {
        "policy_lag_mean": sum(lags) / len(lags),
        "policy_lag_max": float(max(lags)),
        "samples_updated_amid": float(sum(len(sample_spans) > 1 for sample_spans in spans)),
    }


LEAST_KEPT = 0.1
"""Share of right tokens, among the tokens that were made ahead, below which an alarm says that `run_ahead` saves little
time."""


def ahead_figures(num_made: int, num_kept: int, num_tokens: int, seconds: float) -> dict[str, float]:
    """Returns the metrics of a step for which engines made `num_made` tokens ahead in `seconds`.

    `num_tokens` is the number of tokens of the responses for which there were texts made ahead. Of these tokens, `num_kept`
    lie before the first difference between the response and its text.
    """
    kept = {"ahead_kept": num_kept / max(num_tokens, 1)} if num_made else {}
    return {"ahead_tokens": float(num_made), "ahead_s": seconds, **kept}


def ahead_alarms(num_made: int, num_kept: int) -> list[str]:
    """Returns a list with one sentence if updates change the policy so much that texts made ahead are rarely right, or []."""
    if num_kept >= LEAST_KEPT * num_made:
        return []
    share = f"{num_kept / num_made:.0%} of {num_made:,} tokens that were made ahead were right"
    return [f"{share}: updates are so large that run_ahead saves little time"]


def summary_of(steps: Sequence[Record]) -> dict[str, Any]:
    """Returns the figures of `summary.json`, by name, from a run's steps. docs/reference/metrics.md explains the names.

    A ratio is None if nothing was counted for it.
    """
    if not steps:
        return {"steps": 0}
    rewards = series(steps, "reward")
    window = reward_window(len(steps))
    return {
        "steps": len(steps),
        "speedup_estimate": _known(ratio_of_sums(steps, "plain_estimate_s", "rollout_s")),
        "acceptance_length": _known(ratio_of_sums(steps, "num_tokens", "request_steps")),
        "reward_first": _known(reduced(np.mean, rewards[:window])),
        "reward_last": _known(reduced(np.mean, rewards[-window:])),
        "reward_averaged_over_steps": window,
        "largest_logprob_gap": _known(reduced(np.max, series(steps, "logprob_gap"))),
        "alarms": sum(len(step.get("alarms") or ()) for step in steps),
        **{key: int(total) for key in _COUNTS if math.isfinite(total := reduced(np.sum, series(steps, key)))},
        **_head_summary(steps),
        **_tail_summary(steps),
        **_ahead_summary(steps),
    }


def _head_summary(steps: Sequence[Record]) -> dict[str, Any]:
    """Returns the figures of `summary.json` about refreshes of the draft head, by name.

    They say how many refreshes a run had, how many heads it published, and how much time the refreshes took. The result is {}
    for a run without a trained draft head.
    """
    if not any("draft_refresh" in step for step in steps):
        return {}
    trained = refreshes(steps)
    refresh_s = sum(number(record, "refresh_s") for _, record in trained)
    run_s = np.nansum([series(steps, f"{phase}_s") for phase in PHASES])
    return {
        "refreshes": len(trained),
        "heads_published": sum(bool(record.get("published")) for _, record in trained),
        "refresh_s": refresh_s,
        "refresh_share": _known(refresh_s / (run_s + refresh_s) if run_s + refresh_s else math.nan),
    }


def _tail_summary(steps: Sequence[Record]) -> dict[str, Any]:
    """Returns the figures of `summary.json` about requests that moved or were raced, by name, or {} for a run with one engine.

    `tail_saved_s` is None if no step has an estimate of it.
    """
    tails = [step for step in steps if "tail" in step]
    if not tails:
        return {}
    counts = {key: reduced(np.sum, series(tails, f"tail.{key}")) for key in _TAIL_COUNTS}
    seconds = series(tails, "rollout_s")
    idle_share = reduced(np.sum, series(tails, "tail.idle_share") * seconds) / reduced(np.sum, seconds)
    return {
        **{f"tail_{key}": int(count) for key, count in counts.items() if math.isfinite(count)},
        **({"tail_idle_share": idle_share} if math.isfinite(idle_share) else {}),
        "tail_saved_s": _known(reduced(np.sum, series(tails, "tail.saved_s"))),
    }


def _ahead_summary(steps: Sequence[Record]) -> dict[str, Any]:
    """Returns the figures of `summary.json` about texts that a run made ahead, by name, or {} if there were no such texts.

    Shares are means over the steps that had texts made ahead.
    """
    made = [step for step in steps if number(step, "ahead_tokens") > 0]
    if not made:
        return {}
    return {
        "ahead_tokens": int(reduced(np.sum, series(made, "ahead_tokens"))),
        "ahead_kept": _known(reduced(np.mean, series(made, "ahead_kept"))),
        "ahead_right": _known(reduced(np.mean, series(made, "ahead_right"))),
        "ahead_saved_s": _known(reduced(np.sum, series(made, "ahead_saved_s"))),
        "ahead_delay_s": _known(reduced(np.sum, series(steps, "ahead_delay_s"))),
    }


def _known(value: float) -> float | None:
    """Returns `value`, or None if it is NaN or infinite, because JSON has no such numbers."""
    return float(value) if math.isfinite(value) else None
