# SPDX-License-Identifier: Apache-2.0
"""Keeps a file of the decode speeds that engines have measured, for the next start of the run or of a similar one."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.learned.kept_file import Found, KeptFile
from nemo_specrollout.learned.state import LARGEST, Unfit
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile, faded

KIND = "speeds"
"""Prefix of the names of the files that keep decode speeds."""


class KeptSpeeds:
    """Owns the file that keeps the decode speeds of a run's engines, and what was read from it.

    `begin` reads the file before the first rollout, unless the user has named another file of decode speeds. `keep` writes it
    after a training step.
    """

    def __init__(self, block: SpecrolloutConfig, model: str, num_engines: int, about: Mapping[str, Any]) -> None:
        """`model` is the folder or the name of the policy.

        `about` has everything else on which speeds depend, such as the device.
        """
        learned = block.learned
        racing = block.fastest_of_n
        self._is_named = racing is not None and racing.ladder is not None
        self._file: KeptFile | None = None
        if learned.warm_start and learned.folder is not None and racing is not None and racing.enabled:
            self._file = KeptFile(Path(learned.folder), KIND, _key(block, model, num_engines, about))
        self._found = Found(reason="nothing is kept", is_told=False)
        self._num_steps = 0
        self._was_told = False

    def begin(self) -> SpeedTableFile | None:
        """Returns the decode speeds that an earlier start has kept, with less weight than new measurements will have.

        Returns None if none were kept, if they are not valid, or if the user has named another file of decode speeds.
        """
        if self._file is None or self._is_named:
            return None
        self._found = self._file.read()
        if self._found.state is None:
            return None
        try:
            known = _checked(self._found.state)
        except ValueError as error:
            self._found = self._file.unfit(str(error))
            return None
        self._num_steps = self._found.num_steps
        return faded(known)

    @property
    def sentence(self) -> str | None:
        """Sentence for the user about the decode speeds with which the run began.

        It is None if this run keeps no speeds, or if no earlier start has kept any.
        """
        found = self._found
        if not found.is_told:
            return None
        if found.state is None:
            return f"began without earlier decode speeds, because {found.reason}"
        return f"began with the decode speeds of {found.saved} after {found.num_steps:,} steps"

    def take_sentence(self) -> str | None:
        """Returns `sentence` at the first call, and None at later calls, so that the user is told once."""
        was_told = self._was_told
        self._was_told = True
        return None if was_told else self.sentence

    def keep(self, table: SpeedTableFile | None) -> None:
        """Writes the decode speeds at the end of a training step, if it is time to write the file again.

        Does nothing if `table` is None. Does not wait for the disk.
        """
        self._num_steps += 1
        if self._file is not None and table is not None and self._file.is_due:
            self._file.keep(asdict(table), self._num_steps)

    def settle(self) -> None:
        """Waits until the decode speeds that were kept are on disk."""
        if self._file is not None:
            self._file.settle()

    def take_alarms(self) -> list[str]:
        """Returns the problems with the file since the last call, as sentences for the user."""
        problem = None if self._file is None else self._file.take_problem()
        return [] if problem is None else [problem]


def _checked(state: Any) -> SpeedTableFile:
    """Returns the content of a kept file as a decode-speed table.

    Raises ValueError if the content has another format, or if it has numbers that nobody can have measured.
    """
    known = build(SpeedTableFile, state, "")
    numbers = [n for rung in known.rungs for n in (*rung.batches, *rung.tokens_per_s, *rung.weights_s)]
    smallest, largest = min((1.0, *numbers)), max((1.0 / known.prefill_s_per_token, *numbers))
    if not 1.0 / LARGEST <= smallest <= largest <= LARGEST:
        raise Unfit("it has speeds that nobody can have measured")
    return known


def _key(block: SpecrolloutConfig, model: str, num_engines: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties that two runs must have in common so that one may begin with the decode speeds of the other.

    The number of engines is not among them, because engines are equally fast in a run that resumes on more nodes. The weights
    are not among them either. They change in every training step, and new measurements soon replace the kept ones.
    """
    methods = [[asdict(drafter) for drafter in block.of_engine(engine).drafters] for engine in range(num_engines)]
    key = {
        "model": model,
        "config": _digest(Path(model) / "config.json"),
        "methods": sorted({json.dumps(method, sort_keys=True, default=str) for method in methods}),
        "drafts": [block.num_speculative_tokens, asdict(block.budget)],
        **about,
    }
    plain: dict[str, Any] = json.loads(json.dumps(key, sort_keys=True, default=str))
    return plain


def _digest(file: Path) -> str:
    """Returns a digest of a model's configuration file, or "" if the file is not there, as for a model on the Hub."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def with_kept(named: SpeedTableFile | None, kept: KeptSpeeds) -> SpeedTableFile | None:
    """Returns the decode speeds with which a run begins, or None if there are none.

    They are `named`, which come from a file that the user has named. If `named` is None, they are those in `kept`.
    """
    return kept.begin() if named is None else named
