# SPDX-License-Identifier: Apache-2.0
"""The texts that an engine makes for requests of coming steps. Decides which text or branch gets the next free slot.

This module uses no engine and no clock, so that a simulated engine can use it too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter
from typing import Protocol

import numpy as np

from nemo_specrollout.generation.engine.ahead_branches import TOKEN_BYTES, AheadBranch, begun_again, pack, paths_of
from nemo_specrollout.generation.engine.requests import as_bytes
from nemo_specrollout.run_ahead.decisions.branches import Branch, BranchChoice
from nemo_specrollout.run_ahead.decisions.early_share import Worth
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead, compare

TEXT = 0
"""Number of the text itself among the paths of a request. The other paths are branches of the text, numbered from 1 on."""


class Row(Protocol):
    """A request of a coming step as the engine's own code describes it. Only its seed is used here."""

    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class EarlyRow:
    """A request of a coming step that an engine may decode early."""

    prompt: Sequence[int]
    """Token ids of the prompt."""
    row: Row
    steps_ahead: int = 1
    """Number of weight updates until the step of the request, which is 1 for the next step."""
    known: TextAhead | None = None
    """The text that older weights than the engine's current ones have sampled for the request, or None."""
    probability: float = 1.0
    """Probability that newer weights will decode the request. It is below 1 for one of the engine's own requests, because that
    may end before the weights change."""


@dataclass(frozen=True)
class EarlyStart:
    """An early request that the engine should start. It decodes a text of a coming step or a branch of one."""

    name: int
    """Number that identifies the early request. No two requests of an engine have the same."""
    row: EarlyRow
    prefix: tuple[int, ...] = ()
    """Given beginning of the response. For a branch, this is the text up to the near-tie, followed by the runner-up."""
    drafts: bytes = b""
    """Token ids, as int32 numbers, of the known text after the prompt and the prefix. They are used as drafts."""
    branches: bytes = b""
    """Known branches of `drafts`, as `ahead_branches.pack` returns them."""


@dataclass
class _Path:
    """A text or a branch of one. The first tokens of a branch are those of its parent, and its own tokens follow them."""

    parent: int
    """Number of the path from which a branch starts."""
    position: int
    """Index in the response of the first own token."""
    name: int
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    runners_up: list[int] = field(default_factory=list)
    num_grown: int = 0
    """Number of own tokens whose near-ties were passed to `BranchChoice`."""
    is_complete: bool = False


@dataclass
class _Flight:
    """A request of a coming step, or one of the engine's own requests, with the paths that were started for it."""

    row: EarlyRow
    worth: Worth
    """What decides how much time can be saved by starting the text of the request."""
    paths: list[_Path] = field(default_factory=list)
    is_known_now: bool = False
    """Whether the engine's current weights have made the known text of the row. If so, the text was started before and
    stopped."""
    is_followed: bool = False
    """Whether the engine decodes the text as one of its own requests, so that only branches of it start early."""


class EarlyTexts:
    """Owns the texts of an engine's early requests. Each text and each branch has a number as its name, which `next` gives it.

    `follow` also adds requests of the engine's own, because these may have to start over with newer weights. The engine
    decodes their texts anyway, so `next` starts only branches of them.
    """

    def __init__(
        self, rows: Sequence[EarlyRow], flips: FlipModel, most_branches: int, kept: float, names: Iterator[int]
    ) -> None:
        """Starts with what is known about each row.

        Args:
            rows: Requests of coming steps. If several save the same time, the first of them starts first.
            flips: Model of how far the next weight update will move scores.
            most_branches: Largest number of branches of a request, or 0 for none.
            kept: Share of the tokens made ahead that a weight update leaves unchanged, as earlier updates have shown.
            names: Iterator of new numbers, which become the names of requests.
        """
        self.most_branches = most_branches
        self._choice = BranchChoice(flips, most_branches + 1)
        self._kept = kept
        self._names = names
        self._flights = {i: _Flight(row, self._text_worth(row)) for i, row in enumerate(rows)}
        self._indices = count(len(rows))
        self.most_steps_ahead = max((row.steps_ahead for row in rows), default=1)
        """Largest number of weight updates until the step of a row."""
        self._seen = KeptCounts()
        """Counts of how much of older texts agreed with the newer ones, for rows whose text was started, stopped and started
        again."""
        self._by_name: dict[int, tuple[int, int]] = {}
        """Index of the row and number of the path that belong to each name."""
        self._running: dict[int, Worth] = {}
        """For each running request, by its name, how much time it can save. It is cached because it is needed more often than
        it changes."""
        self._waiting = sorted(self._flights, key=lambda i: -self._flights[i].worth.probability)
        """Indices of the rows whose texts have not started, best first. Rows that are equally good stay in their order."""

    @property
    def running(self) -> list[int]:
        """Names of the requests that the engine has started and that have neither ended nor been stopped."""
        return list(self._running)

    def worths(self, most: int) -> list[Worth]:
        """Returns what decides how much time a token can save (`Worth`), for up to `most` requests that run or could start.

        The best come first. Of the branches that could start, only the most likely one is known in advance. The others count
        as much as this one.
        """
        found = [*self._running.values(), *(self._flights[i].worth for i in self._waiting[:most])]
        best = self._choice.best()
        if best > 0.0:
            found += [Worth(best, best)] * max(most - len(found), 0)
        return sorted(found, key=_probability, reverse=True)[:most]

    def next(self, number: int) -> list[EarlyStart]:
        """Returns the best requests to start, at most `number`, and counts them as running."""
        starts: list[EarlyStart] = []
        while len(starts) < number:
            text_worth = self._flights[self._waiting[0]].worth.probability if self._waiting else 0.0
            if self._waiting and text_worth >= self._choice.best():
                starts.append(self._begin_text(self._waiting.pop(0)))
                continue
            branches = self._choice.next(1)
            if not branches:
                break
            starts.append(self._begin_branch(branches[0]))
        return starts

    def follow(self, row: EarlyRow) -> int:
        """Registers one of the engine's own requests, from its beginning, so that branches of it may start.

        Returns the name of its text.
        """
        index = next(self._indices)
        name = next(self._names)
        self._flights[index] = _Flight(row, self._text_worth(row), [_Path(TEXT, 0, name)], is_followed=True)
        self._by_name[name] = (index, TEXT)
        self._choice.open(index, row.probability)
        return name

    def branches_of(self, name: int) -> list[int]:
        """Returns the names of the running branches of a request that was registered by `follow`."""
        index, _ = self._by_name[name]
        return [path.name for path in self._flights[index].paths[1:] if path.name in self._running]

    def forget(self, name: int) -> None:
        """Forgets a request that was registered by `follow` and has ended. Its branches must have been stopped."""
        index, _ = self._by_name[name]
        for path in self._flights.pop(index).paths:
            del self._by_name[path.name]
        self._choice.close(index)

    def grew(self, name: int, tokens: Iterable[int]) -> None:
        """Adds tokens that a request has sampled since the last call."""
        index, number = self._by_name[name]
        self._flights[index].paths[number].tokens.extend(tokens)
        self._tell_ties(index, number)

    def ties(self, name: int, first: int, gaps: bytes, runners_up: bytes) -> None:
        """Adds near-ties of a request's tokens, as `specrollout_take_ties` returns them. Ignores a name that is not known.

        `first` is the index of the first of these tokens in the sequence that begins with the prompt. `gaps` has float16
        numbers in nats, and `runners_up` has int32 token ids.
        """
        if name not in self._by_name:
            return
        index, number = self._by_name[name]
        flight = self._flights[index]
        path = flight.paths[number]
        own = first - len(flight.row.prompt) - path.position
        missing = own - len(path.gaps)
        if missing > 0:  # the first token of a branch was not sampled
            path.gaps.extend([np.inf] * missing)
            path.runners_up.extend([-1] * missing)
        del path.gaps[own:]
        del path.runners_up[own:]
        path.gaps.extend(np.frombuffer(gaps, np.float16).tolist())
        path.runners_up.extend(np.frombuffer(runners_up, np.int32).tolist())
        self._tell_ties(index, number)

    def ended(self, name: int) -> None:
        """Notes that a response has ended by itself. All tokens of the request must have been added with `grew`."""
        del self._running[name]
        index, number = self._by_name[name]
        self._flights[index].paths[number].is_complete = True

    def stopped(self, name: int) -> None:
        """Notes that a request was stopped. Its tokens so far stay known.

        A text without branches may start again, with these tokens as drafts. A branch does not start again.
        """
        if self._running.pop(name, None) is None:
            return
        index, number = self._by_name[name]
        if number == TEXT and len(self._flights[index].paths) == 1:
            self._waiting.insert(0, index)

    def least(self, number: int) -> list[int]:
        """Returns the names of the running requests that can save the least time, at most `number` of them."""
        return sorted(self._running, key=lambda name: self._running[name].probability)[:number]

    def texts(self) -> dict[int, TextAhead]:
        """Returns all known texts of coming steps, by the seeds of their requests. Requests without a known text are left out.

        Requests that were registered by `follow` are left out as well, because they belong to no coming step (see `followed`).
        """
        known = {flight.row.row.seed: self._text(flight) for flight in self._flights.values() if not flight.is_followed}
        return {seed: text for seed, text in known.items() if text is not None and text.tokens}

    def flips(self) -> KeptCounts:
        """Returns how much of the texts of older weights agreed with the engine's weights, for rows that were started."""
        seen = self._seen
        for flight in self._flights.values():
            if not (flight.is_known_now or flight.is_followed):
                seen = seen.plus(_changed(flight))
        return seen

    def followed(self) -> dict[int, TextAhead]:
        """Returns all known texts of requests that were registered by `follow`, by their names."""
        known = {f.paths[TEXT].name: self._text(f) for f in self._flights.values() if f.is_followed}
        return {name: TextAhead(b"") if text is None else text for name, text in known.items()}

    def _begin_text(self, index: int) -> EarlyStart:
        flight = self._flights[index]
        if flight.paths:  # it was stopped
            if not flight.is_known_now:
                self._seen = self._seen.plus(_changed(flight))
            flight.row = replace(flight.row, known=self._text(flight))
            flight.worth = self._text_worth(flight.row)
            flight.is_known_now = True
            del self._by_name[flight.paths.pop().name]
            self._choice.close(index)
        known = flight.row.known
        self._choice.open(index)
        start = EarlyStart(
            next(self._names),
            flight.row,
            drafts=known.tokens if known is not None else b"",
            branches=pack(known.branches) if known is not None else b"",
        )
        self._run(index, _Path(TEXT, 0, start.name))
        return start

    def _begin_branch(self, branch: Branch) -> EarlyStart:
        index = branch.request
        assert isinstance(index, int)
        if index in self._waiting:  # its text was stopped, and does not start again once it has a branch
            self._waiting.remove(index)
        flight = self._flights[index]
        prefix = (*self._tokens_before(flight, branch.parent, branch.position), branch.token_id)
        start = EarlyStart(next(self._names), flight.row, prefix, _known_after(flight.row.known, prefix))
        self._run(index, _Path(branch.parent, branch.position, start.name, [branch.token_id]))
        return start

    def _run(self, index: int, path: _Path) -> None:
        paths = self._flights[index].paths
        self._by_name[path.name] = (index, len(paths))
        paths.append(path)
        self._running[path.name] = self._worth(path.name)

    def _tokens_before(self, flight: _Flight, number: int, position: int) -> list[int]:
        """Returns the first `position` tokens of the response along the path with this number."""
        path = flight.paths[number]
        if number > TEXT and position <= path.position:
            return self._tokens_before(flight, path.parent, position)
        before = self._tokens_before(flight, path.parent, path.position) if number else []
        return before + path.tokens[: position - path.position]

    def _tell_ties(self, index: int, number: int) -> None:
        """Passes the score gaps and runners-up of a path's further tokens to `BranchChoice`, as far as all are known."""
        path = self._flights[index].paths[number]
        known = min(len(path.gaps), len(path.tokens))
        first = max(path.num_grown, int(number > TEXT))  # the first token of a branch cannot flip back
        if known > first:
            gap_P = np.array(path.gaps[first:known])
            self._choice.grow(index, number, gap_P, path.runners_up[first:known])
            path.num_grown = known
        if path.name in self._running:
            self._running[path.name] = self._worth(path.name)

    def _text_worth(self, row: EarlyRow) -> Worth:
        """Returns what decides how much time can be saved by starting the text of a row now.

        A text that is complete already needs new tokens only if the next weights change it. So less time can be saved.
        """
        k = row.steps_ahead
        probability = self._kept**k
        if row.known is not None and row.known.is_complete:
            probability *= 1.0 - self._kept
        num_known = 0 if row.known is None else row.known.num_tokens
        return Worth(probability, float(k), k, num_known)

    def _worth(self, name: int) -> Worth:
        index, number = self._by_name[name]
        k = self._flights[index].row.steps_ahead
        survival = self._choice.survival(index, number)
        probability = survival * self._kept ** (k - 1)
        path = self._flights[index].paths[number]
        num_known = path.position + len(path.tokens)
        return Worth(probability, float(k) if number == TEXT else survival * k, k, num_known)

    def _text(self, flight: _Flight) -> TextAhead | None:
        """Returns the known text of a row, or None if there is none.

        The text begins with the tokens that the current weights have made. Its rest comes from the text that was known before
        or one of its branches, whichever agrees with these tokens the longest.
        """
        known = flight.row.known
        path = flight.paths[TEXT] if flight.paths else None
        if path is None or not (path.tokens or path.is_complete):
            return None if known is None else replace(known, num_older=_num_older(flight, known.num_tokens))
        made = as_bytes(path.tokens)
        branches = tuple(AheadBranch(p.parent, p.position, as_bytes(p.tokens)) for p in flight.paths[1:])
        gaps, runners_up = _ties(path, len(path.tokens))
        if path.is_complete or known is None:
            return TextAhead(made, gaps, runners_up, branches, path.is_complete)
        tokens, others = begun_again(path.tokens, known.tokens, known.branches)
        has_ties = len(path.gaps) >= len(path.tokens)
        if has_ties and tokens[len(made) :] == known.tokens[len(made) :]:
            gaps, runners_up = _with_tail(gaps, known.gaps), _with_tail(runners_up, known.runners_up)
        branches += tuple(branch for branch in others if branch.position >= len(path.tokens))
        num_older = _num_older(flight, len(tokens) // TOKEN_BYTES - len(path.tokens))
        return TextAhead(tokens, gaps, runners_up, branches, num_older=num_older)


def _num_older(flight: _Flight, num_left: int) -> int:
    """Returns how many of the last `num_left` known tokens were made by older weights than the current ones."""
    known = flight.row.known
    return min(num_left, known.num_older) if known is not None and flight.is_known_now else num_left


def _changed(flight: _Flight) -> KeptCounts:
    """Returns how much of the known text of a row agrees with the text that the current weights have made."""
    known = flight.row.known
    tokens = flight.paths[TEXT].tokens if flight.paths else []
    return compare(known, tokens) if known is not None and tokens else KeptCounts()


_probability = attrgetter("probability")


def _ties(path: _Path, length: int) -> tuple[bytes, bytes]:
    """Returns the known gaps and runners-up of the first `length` tokens of a path, or of fewer if fewer are known."""
    gaps = np.array(path.gaps[:length], np.float16)
    return gaps.tobytes(), as_bytes(path.runners_up[:length])


def _with_tail(made: bytes, known: bytes) -> bytes:
    """Returns `made` and after it the rest of `known`. Both are gaps, or both are runners-up, of texts that begin alike."""
    return made + known[len(made) :]


def _known_after(known: TextAhead | None, prefix: Sequence[int]) -> bytes:
    """Returns the rest of a known text or branch that begins with `prefix`, as int32 numbers, or b"" if none does."""
    if known is None:
        return b""
    for path in paths_of(known.tokens, known.branches):
        if len(path) > len(prefix) and np.array_equal(path[: len(prefix)], prefix):
            return path[len(prefix) :].tobytes()
    return b""
