# SPDX-License-Identifier: Apache-2.0
"""The driver's part of remote drafters: where they listen, as far as engines must know. Never waits for a drafter.

Nothing that goes wrong here may end the run: without drafters the engines decode plainly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_specrollout.nemo_rl.step_log import StepNotes

CallAll = Callable[[str, Sequence[Any]], list[Any]]
"""Calls a method of all engines' workers, with the same arguments. What each returned."""


@dataclass(frozen=True)
class DrafterNews:
    """How a drafter is: where it listens (empty: nowhere), which actor keeps it up, how often that one started it again, and
    what the process, or the actor, that ended last said."""

    address: str = ""
    actor: int = 0
    num_restarts: int = 0
    last_words: str = ""


class Link(Protocol):
    """To what keeps one drafter up, elsewhere (`drafter_actors.DrafterLink`)."""

    def news(self) -> DrafterNews | None: ...

    def close(self) -> None: ...


@dataclass
class _Known:
    """The newest of one drafter, and how often it was started again by actors before the one that keeps it up now."""

    news: DrafterNews = field(default_factory=DrafterNews)
    num_before: int = 0

    def hear(self, news: DrafterNews) -> None:
        if news.actor and self.news.actor and news.actor != self.news.actor:
            self.num_before += self.news.num_restarts + 1
        kept = self.news if not news.actor else news  # counts survive while the actor is down
        self.news = DrafterNews(news.address, kept.actor, kept.num_restarts, news.last_words)

    @property
    def num_restarts(self) -> int:
        return self.num_before + self.news.num_restarts


class RemoteDrafters:
    """Owns the links to the drafters that Ray placed, and what the engines were told of them.

    States: to be started, if the drafters need GPUs: those are what is left when all of NeMo-RL's workers have theirs;
    started; closed.
    """

    def __init__(
        self, start: Callable[[], Sequence[Link]], secret: str, notes: StepNotes, *, starts_later: bool
    ) -> None:
        self._start, self._secret, self._notes = start, secret, notes
        self._links: list[Link] | None = None if starts_later else list(start())
        self._known: list[_Known] = []
        self._told: list[str] = []

    def look(self, call_all: CallAll) -> None:
        """Between rollouts, or amid one: engines are told of drafters that listen elsewhere than before."""
        if self._links is None:
            self._links = list(self._start())
        self._known = self._known or [_Known() for _ in self._links]
        for drafter, (link, known) in enumerate(zip(self._links, self._known, strict=True)):
            news = link.news()
            if news is not None:
                self._hear(drafter, known, news)
        addresses = [known.news.address for known in self._known]
        if addresses != (self._told or [""] * len(addresses)):
            self._told = addresses
            self._tell(call_all, addresses)

    def figures(self) -> dict[str, float]:
        """Since the run's start."""
        return {"drafter_restarts": float(sum(known.num_restarts for known in self._known))}

    def close(self) -> None:
        """The run is over: no drafter stays."""
        links, self._links, self._known = self._links or [], [], []
        for link in links:
            link.close()

    def _hear(self, drafter: int, known: _Known, news: DrafterNews) -> None:
        if news.last_words and news.last_words != known.news.last_words:
            where = "" if not known.news.address else f" at {known.news.address}"
            again = "it is started again" if news.actor else "Ray starts it again if it can"
            self._say(f"drafter {drafter}{where} ended ({news.last_words}); the rollout goes on, and {again}")
        known.hear(news)

    def _tell(self, call_all: CallAll, addresses: list[str]) -> None:
        try:
            call_all("specrollout_drafters_at", [addresses, self._secret])
        except Exception as error:
            last_line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            self._say(f"an engine was not told where drafters listen: {last_line}")

    def _say(self, sentence: str) -> None:
        self._notes.alarms.append(sentence)
