# SPDX-License-Identifier: Apache-2.0
"""The driver's part of the online refresh: what engines and trainer are told, and when. Never waits for a training.

Nothing that goes wrong here may end the run: the engines keep the head that they have.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.nemo_rl.step_log import StepNotes
from nemo_specrollout.scheduling.heads.refresh_schedule import StepFacts
from nemo_specrollout.training.head.head_folder import HeadFolder, PublishedHead, RefreshRecord

MOST_RESTARTS = 1
CallEngines = Callable[[str, Sequence[Sequence[Any] | None]], list[Any]]
"""Calls a method of engines' workers: of as many engines as there are lists of arguments, None is left out. What each
returned."""


class TrainerFailed(Exception):
    """The trainer is gone, or its last call raised."""


class Trainer(Protocol):
    """What trains, elsewhere (`head_trainer.TrainerLink`). Its first answer is the source of its features."""

    @property
    def is_idle(self) -> bool: ...

    def ask(self, version: int, facts: Sequence[StepFacts]) -> None: ...

    def answer(self) -> RefreshRecord | dict[str, Any] | None: ...

    def close(self) -> None: ...


class HeadRefresh:
    """Owns the trainer, the facts that it was not told yet, and which head the engines have.

    States: at work; given up, after the trainer failed twice or an engine could not do its part. Steps that are done while a
    published head is on its way to the engines tell nothing of it: only their time counts.
    """

    def __init__(
        self,
        block: SpecrolloutConfig,
        folder: HeadFolder,
        start: Callable[[], Trainer],
        call_engines: CallEngines,
        has_head: Sequence[bool],
        notes: StepNotes,
    ) -> None:
        """`has_head`: of each engine, whether one drafts in it."""
        assert block.draft_refresh is not None
        self._config, self._num_drafts = block.draft_refresh, block.num_speculative_tokens
        self._folder, self._start, self._call_engines, self._notes = folder, start, call_engines, notes
        self._has_head = has_head
        self._num_failures = 0
        self._unsent: list[StepFacts] = []
        self._owed_s = 0.0
        self._source: dict[str, Any] | None = None
        self._in_service: PublishedHead | None = None
        self._to_load = folder.published()
        self._record: RefreshRecord | None = None
        # A GPU for the trainer is what is left when all of NeMo-RL's workers have theirs.
        self._starts_later = bool(self._config.trainer_gpus)
        self._trainer: Trainer | None = None if self._starts_later else start()

    def policy_updated(self, version: int) -> None:
        """After a refit, before its requests: the policy of `version` becomes the teacher of what its rollouts will be, and
        the engines get the head that was published last."""
        if self._starts_later:
            self._starts_later, self._trainer = False, self._start()
        self._listen()
        if self._trainer is not None and self._config.trigger != "never":
            self._folder.forget_old(version)
            self._tell("specrollout_save_teacher", [[str(self._folder.teacher(version))]])
        head, self._to_load = self._to_load, None
        if head is not None:
            self._in_service = head
            arguments = [str(head.folder), head.policy_version, head.expected_length, self._num_drafts]
            self._tell("specrollout_load_head", [arguments if has_head else None for has_head in self._has_head])

    def after_step(self, version: int, facts: StepFacts | None) -> dict[str, float]:
        """The rollouts of a step are done, with the policy of `version`; `facts` is None if there were none. Figures of the
        heads made since last asked."""
        self._listen()
        if self._source is not None:
            self._tell("specrollout_store_features", [[place] for place in self._places(self._source)])
        if facts is not None:
            self._note(facts)
        if self._trainer is not None and self._source is not None and self._trainer.is_idle and self._unsent:
            self._trainer.ask(version, self._unsent)
            self._unsent = []
        return self._figures()

    def close(self) -> None:
        """The run is over, or heads are refreshed no more."""
        trainer, self._trainer, self._source = self._trainer, None, None
        if trainer is not None:
            trainer.close()

    def _listen(self) -> None:
        if self._trainer is None:
            return
        try:
            answer = self._trainer.answer()
        except TrainerFailed as error:
            self._trainer_failed(str(error))
            return
        if isinstance(answer, dict):
            self._source = answer
        elif answer is not None:
            self._record = answer
            self._find_published()

    def _find_published(self) -> None:
        """What `published.json` names is what the trainer compares its next head with, from whatever run it is."""
        published = self._folder.published()
        if published != self._in_service:
            self._to_load = published
            self._owed_s += sum(facts.seconds for facts in self._unsent)
            self._unsent = []

    def _note(self, facts: StepFacts) -> None:
        if self._to_load is not None:
            self._owed_s += facts.seconds
            return
        self._unsent.append(replace(facts, seconds=facts.seconds + self._owed_s))
        self._owed_s = 0.0

    def _trainer_failed(self, why: str) -> None:
        self.close()
        self._num_failures += 1
        if self._num_failures > MOST_RESTARTS:
            self._say(f"the draft head's trainer failed again ({why}); the head stays as it is for the rest of the run")
            return
        self._say(f"the draft head's trainer failed ({why}); it is started again, once")
        self._find_published()
        self._trainer = self._start()

    def _places(self, source: dict[str, Any]) -> list[dict[str, Any]]:
        """Where each engine keeps its features."""
        share = {"max_bytes": self._config.store_bytes // len(self._has_head), "source": source}
        share["held_out_share"] = self._config.held_out_share
        return [{"folder": str(self._folder.features(i)), **share} for i in range(len(self._has_head))]

    def _tell(self, method: str, arguments: Sequence[Sequence[Any] | None]) -> None:
        """A worker that could not do it says why, or raises."""
        try:
            errors = {error for error in self._call_engines(method, arguments) if error}
        except Exception as error:
            errors = {_last_line(error)}
        if errors:
            self._give_up(f"an engine failed at {method}: {'; '.join(sorted(errors))}")

    def _give_up(self, why: str) -> None:
        if self._trainer is not None:
            self._num_failures += 1
            self._say(f"draft heads are refreshed no more: {why}")
        self.close()

    def _say(self, sentence: str) -> None:
        self._notes.alarms.append(sentence)

    def _figures(self) -> dict[str, float]:
        """Of the last record, once; its words are noted."""
        figures = {"refresh_failures": float(self._num_failures)}
        record, self._record = self._record, None
        if record is None:
            return figures
        self._notes.words["draft_refresh"] = record.known()
        is_judged = record.gate is not None
        figures["heads_published"] = float(is_judged and bool(record.published))
        figures["heads_refused"] = float(is_judged and not record.published)
        return {**figures, "refresh_s": record.refresh_s or 0.0}


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
