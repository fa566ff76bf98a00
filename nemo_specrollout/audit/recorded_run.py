# SPDX-License-Identifier: Apache-2.0
"""Reads which rows (samples) a run has recorded in each step, and which policy versions sampled them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nemo_specrollout.audit.rows import FOLDER, EngineFacts, RecordedRow, RowFile
from nemo_specrollout.audit.verdict import Skipped
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports.records import AUDITS, Run, read_lines, read_object_or_nothing
from nemo_specrollout.reports.records import FOLDER as RECORDS
from nemo_specrollout.reports.starts import RunOfStarts
from nemo_specrollout.storage.files import write_atomically
from nemo_specrollout.telemetry.sample_stats import SampleStats

SAMPLES = "samples.jsonl"
_FILES_IN_MEMORY = 4
_KEPT_AUDITS = 100
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Place:
    """The place in which a row of a step is recorded, and the policy versions that sampled it.

    `seed`, `policy_spans` and `read_again` are those of `RecordedRow`.
    """

    step: int
    number: int
    """Number of the row among the rows of its step, from 0."""
    seed: int
    policy_spans: Spans
    read_again: tuple[int, ...]
    file: Path | None
    """File that has the row, or None if no engine has recorded it."""
    row: int = 0
    """Index of the row in `file`, from 0."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that sampled the row, in order and without duplicates."""
        return tuple(dict.fromkeys(version for version, _ in self.policy_spans))


class RecordedRun:
    """The rows that a run has recorded, whether it has one start or several. `read` reads one row at a time."""

    def __init__(self, run: Run) -> None:
        """Finds out which rows `run` has and where they are recorded. Raises ConfigError if it has recorded no rows."""
        self._damaged = list[str]()
        self._open = lru_cache(_FILES_IN_MEMORY)(RowFile)
        self.steps = dict[int, list[Place]]()
        """The places of the rows of each step, in the order of the rows."""
        for folder, bound in _folders(run):
            samples = {step: of_step for step, of_step in _samples(folder).items() if step < bound}
            self.steps.update(_rows_by_step(samples, self._places(folder)))
        facts = run.about.get("audit")
        if facts is False:
            raise ConfigError("RUN_DIR: this run has recorded no rows, because its block has audit: false")
        if not isinstance(facts, Mapping) or not self.steps:
            why = (
                "no step of it has ended" if isinstance(facts, Mapping) else "its version of this package records none"
            )
            raise ConfigError(f"RUN_DIR: {run.folder} has no rows to audit: {why}; name another run")
        self.model = str(facts.get("model", ""))
        """Folder or Hugging Face name of the model that the run began to train."""
        self.checkpoints = Path(facts["checkpoints"]) if facts.get("checkpoints") else None
        """Folder with the checkpoints of the run, or None if it keeps none."""
        self.checkpoint_offset = int(facts.get("checkpoint_offset", 0))
        """What to add to a policy version to get the number of the checkpoint that has its weights."""

    @property
    def damaged(self) -> Sequence[str]:
        """A sentence for each file of rows that cannot be read."""
        return self._damaged

    def engine_facts(self, place: Place) -> EngineFacts:
        """Returns the facts about the engine that recorded the row at `place`. `place.file` must not be None."""
        assert place.file is not None
        return self._open(place.file).facts

    def read(self, place: Place) -> RecordedRow | Skipped:
        """Returns the row at `place`, or the reason why it cannot be audited."""
        if place.file is None:
            return Skipped(place.step, place.number, "no engine has recorded it")
        try:
            row = self._open(place.file).finished(place.row)
        except ValueError as error:
            return Skipped(place.step, place.number, str(error))
        if row.params.unknown:
            return Skipped(place.step, place.number, f"{', '.join(row.params.unknown)} cannot be computed again")
        begin = len(row.prompt_token_ids)
        length = begin + len(row.token_ids)
        if place.policy_spans[0][1] > begin:
            reason = (
                "the records do not say which policy sampled its beginning, because another engine had it and was lost"
            )
            return Skipped(place.step, place.number, reason)
        spans = tuple(span for span in place.policy_spans if span[1] < length) or place.policy_spans[:1]
        return RecordedRow(
            place.step,
            place.number,
            row.seed,
            row.prompt_token_ids,  # type: ignore[arg-type]
            row.token_ids,  # type: ignore[arg-type]
            row.logprobs,  # type: ignore[arg-type]
            spans,
            row.params,
            place.read_again,
        )

    def _places(self, folder: Path) -> dict[int, tuple[Path, int]]:
        """Returns the file and the index in it of each row in `folder`, by the row's seed.

        If a row was generated again after a restart, the file that was written last counts.
        """
        found = {}
        for file in sorted((folder / FOLDER).glob("*.npz")):
            try:
                seeds = RowFile(file).seeds
            except ValueError as error:
                self._damaged.append(str(error))
                continue
            found.update({seed: (file, place) for place, seed in enumerate(seeds)})
        return found


def _folders(run: Run) -> list[tuple[Path, float]]:
    """Returns the folders with a run's records, one for each start.

    Each folder comes with the number of the first step that a later start made, or inf if there is no later start. Records of
    this step and the following ones do not count.
    """
    if not isinstance(run, RunOfStarts):
        return [(run.folder, math.inf)]
    return [(start.folder / RECORDS, bound) for start, bound in zip(run.starts, run.bounds, strict=True)]


def _samples(folder: Path) -> dict[int, list[Mapping[str, Any]]]:
    lines = read_lines(folder / SAMPLES)
    return {line["step"]: [s for s in line.get("samples") or [] if isinstance(s, Mapping)] for line in lines}


def _rows_by_step(
    samples: Mapping[int, Sequence[Mapping[str, Any]]], places: Mapping[int, tuple[Path, int]]
) -> dict[int, list[Place]]:
    """Returns for each step where its rows are recorded, in the order of the rows. Steps without rows are left out.

    A row may have entries in several steps, for example if it moved to another engine. It then belongs to the last of them.

    Args:
        samples: for each step, the lines about its samples from `samples.jsonl`.
        places: file and index of each row that an engine has recorded, by the row's seed.
    """
    found: dict[int, tuple[int, int, SampleStats]] = {}
    for step, of_step in samples.items():
        for number, sample in enumerate(of_step):
            seed = sample.get("seed")
            if not isinstance(seed, int) or not sample.get("policy_spans"):
                continue
            stats = SampleStats.of_spans(sample["policy_spans"], sample.get("read_again") or ())
            earlier = found.pop(seed, None)
            found[seed] = (step, number, stats if earlier is None else earlier[2].merged(stats))
    rows: dict[int, list[Place]] = {step: [] for step in samples}
    for seed, (step, number, stats) in found.items():
        file, row = places.get(seed, (None, 0))
        rows[step].append(Place(step, number, seed, stats.policy_spans, stats.read_again, file, row))
    return {step: sorted(of_step, key=lambda place: place.number) for step, of_step in rows.items() if of_step}


def keep_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Adds the result of an audit to the file `audit.json` in `folder`, from which the run's report takes it."""
    earlier = read_object_or_nothing(folder / AUDITS).get("audits")
    audits = [*(earlier if isinstance(earlier, list) else []), result][-_KEPT_AUDITS:]
    write_atomically(folder / AUDITS, json.dumps({"audits": audits}, indent=1) + "\n")
