# SPDX-License-Identifier: Apache-2.0
"""An engine's early requests, which are those of coming steps (`run_ahead`). Decides which ones to start and to stop.

The engine's own requests are those of the current step. `rolling_engine.py` decodes early requests in a synchronous engine and
`rolling_stream.py` in an asynchronous one. Both ask `EarlyRequests`. vLLM is not imported, but its output processor is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, TOKEN_BYTES
from nemo_specrollout.run_ahead.decisions.early_share import EarlyPrices, PlainRollout, early_worth, num_early
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart, EarlyTexts
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

LOOK_STEPS = 8
"""Number of engine steps after which the engine is checked again if no request has come or gone."""
STARTS_AT_ONCE = 8
"""Most early requests that start in one engine step. More would make that step long, because each one is a call of vLLM."""
GROWTH_STEPS = 64
"""Number of tokens by which the KV cache must have room for every request to grow before an early one starts."""
MOST_LEFTOVERS = 64
"""Most ended requests of which the vLLM worker may keep near-ties before it is asked for them."""
PATIENCE_STEPS = 8
"""Number of checks during which an own request may wait for its first token before all early ones give way."""
_PREFIX = "ahead-"
"""Prefix of the ids of early requests in vLLM."""


@dataclass
class EarlyFigures:
    """What an engine, or several engines together, did for coming steps."""

    num_texts: int = 0
    """Number of texts that were started."""
    num_branches: int = 0
    """Number of branches that were started."""
    num_stopped: int = 0
    """Number of texts and branches that gave way to own requests of the engine, or were no longer worth their price."""
    num_tokens: int = 0
    """Number of tokens that texts and branches have made."""
    num_steps_beside: int = 0
    """Number of engine steps with own and early requests."""
    num_steps_alone: int = 0
    """Number of engine steps with early requests only."""
    alone_s: float = 0.0
    """Seconds of the engine steps with early requests only."""
    delay_s: float = 0.0
    """Seconds by which early requests made engine steps with own requests longer, estimated from `EarlyPrices`."""

    def plus(self, other: "EarlyFigures") -> "EarlyFigures":
        """Returns the sums."""
        return EarlyFigures(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self, num_steps: int, num_engines: int = 1) -> dict[str, float]:
        """Returns the metrics of a step in which `num_engines` engines did this, with `num_steps` coming steps planned."""
        return {
            "ahead_begun": float(self.num_texts),
            "ahead_branches": float(self.num_branches),
            "ahead_made": float(self.num_tokens),
            "ahead_steps_beside": float(self.num_steps_beside),
            "ahead_delay_s": self.delay_s / num_engines,
            "ahead_steps": float(num_steps),
        }


@dataclass(frozen=True)
class EarlyMade:
    """What an engine has made for coming steps when it ends a plan."""

    texts: dict[int, TextAhead]
    """All known texts of the plan's requests, by their seeds."""
    figures: EarlyFigures
    flips: KeptCounts = field(default_factory=KeptCounts)
    """How much of the texts from older weights was right under the engine's weights."""
    followed: dict[int, TextAhead] = field(default_factory=dict)
    """All known texts of the engine's own requests that were followed, by their names."""


class EngineSize(NamedTuple):
    """The capacity of an engine."""

    slots: int
    """Most requests at a time."""
    num_blocks: int
    """Number of blocks of its KV cache."""
    block_size: int
    """Number of tokens in a block."""
    step_tokens: int
    """Most tokens by which a request may grow in an engine step."""

    @classmethod
    def of(cls, vllm_config: Any) -> "EngineSize":
        """Returns the size of a started engine with this vLLM config."""
        cache = vllm_config.cache_config
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else int(speculative.num_speculative_tokens)
        slots = int(vllm_config.scheduler_config.max_num_seqs)
        return cls(slots, int(cache.num_gpu_blocks or 0), int(cache.block_size), drafts + 1)

    def blocks(self, num_tokens: int) -> int:
        """Returns the number of blocks that `num_tokens` tokens of a request take."""
        return -(-num_tokens // self.block_size)

    def blocks_soon(self, num_tokens: int, num_requests: int = 1) -> int:
        """Returns the most blocks that requests with `num_tokens` tokens in total can take until the next check."""
        growth = self.step_tokens * (LOOK_STEPS + 2)  # with asynchronous scheduling, outputs are a step late
        return self.blocks(num_tokens + num_requests * growth) + max(num_requests - 1, 0)  # blocks that are not full


class OwnLoad(NamedTuple):
    """The state of an engine's own requests, and the room that all of its requests leave."""

    num_requests: int = 0
    blocks_left: int = 0
    """Least number of KV cache blocks that will be free at the next check. More will be free if requests share prefixes."""
    is_waiting: bool = False
    """Whether an own request has no token yet."""
    lengths: tuple[int, ...] = ()
    """Number of tokens that each own request has sampled."""


@dataclass
class _Running:
    """An early request in the engine, or a followed own request."""

    request_id: str
    """Its id in vLLM."""
    num_given: int
    """Number of tokens of its prompt and prefix."""
    num_told: int = 0
    """Number of its sampled tokens that were passed to `EarlyTexts`."""


@dataclass
class EarlyRequests:
    """Owns the early requests of one plan in an engine, with their texts, and knows which of them vLLM has.

    The engine's own requests come first. An early one starts only if all own ones have started, if a slot and KV cache are
    left, and if it is worth more than it costs. It is stopped as soon as one of these conditions no longer holds.
    """

    processor: Any
    """vLLM's output processor, which knows every request of the engine."""
    size: EngineSize
    early: EarlyTexts
    longest: int = 0
    """Number of tokens of the longest prompt with its known text."""
    prices: EarlyPrices | None = None
    """None until times were measured. Until then early requests run only while the engine has no own ones."""
    figures: EarlyFigures = field(default_factory=EarlyFigures)
    _running: dict[int, _Running] = field(default_factory=dict)
    _followed: dict[int, _Running] = field(default_factory=dict)
    """Own requests whose tokens are read, so that branches of them can be started."""
    _untold: set[int] = field(default_factory=set)
    """Names of requests whose near-ties were not all taken from the vLLM worker."""
    _num_waits: int = 0
    """Number of checks in a row at which an own request had no token yet."""
    _noted_s: float = 0.0
    """Time of the latest call of `note_time`."""
    _prompts: set[tuple[int, ...]] = field(default_factory=set)
    """Prompts that were started, so that further samples of them find them cached."""

    @property
    def num_running(self) -> int:
        """Number of early requests in the engine."""
        return len(self._running)

    @property
    def running(self) -> list[int]:
        """Names of the early requests in the engine."""
        return list(self._running)

    @property
    def untold(self) -> list[int]:
        """Names of requests whose near-ties the vLLM worker may still have."""
        return sorted(self._untold)

    @property
    def has_leftovers(self) -> bool:
        """Whether the vLLM worker keeps near-ties of so many ended requests that they should be taken from it."""
        return len(self._untold) - len(self._running) - len(self._followed) > MOST_LEFTOVERS

    @property
    def is_empty(self) -> bool:
        """Whether no early request runs and none could start, not even with near-ties that the vLLM worker still has."""
        may_branch = self.early.most_branches > 0 and bool(self._untold)
        return not self._running and not may_branch and not self.early.worths(1)

    # What the engine has

    def own_load(self) -> OwnLoad:
        """Returns how many requests of the current step the engine has, how far they are, and how much room is left."""
        states = list(self.processor.request_states.values())
        sampled_S = [0 if s.detokenizer is None else s.detokenizer.num_output_tokens() for s in states]
        num_tokens = sum(sampled_S) + sum(s.prompt_len for s in states)
        own = [i for i, s in enumerate(states) if not is_early(s.external_req_id)]
        num_coming = max(self.num_running - (len(states) - len(own)), 0)  # early ones that vLLM has not added yet
        num_tokens += num_coming * self.longest
        num_blocks = self.size.blocks_soon(num_tokens, len(states) + num_coming)
        is_waiting = any(states[i].is_prefilling for i in own)
        return OwnLoad(len(own), self.size.num_blocks - num_blocks, is_waiting, tuple(sampled_S[i] for i in own))

    def set_prices(self, reply: tuple[Sequence[float], float] | None, lengths: Sequence[int]) -> None:
        """Sets the prices from a reply of `specrollout_step_seconds`. `lengths` are those of a rollout's responses."""
        if reply is not None:
            seconds_R = np.array(reply[0], np.float64)
            plain = PlainRollout(seconds_R, lengths or [1])
            self.prices = EarlyPrices(seconds_R, float(reply[1]), plain, self.early.most_steps_ahead)

    def worth(self) -> EarlyWorth:
        """Returns the current worth of early requests, which is `EarlyWorth()` until times were measured."""
        return EarlyWorth() if self.prices is None else early_worth(self.prices, self.early.worths(self.size.slots))

    def note_step(self, num_own: int) -> None:
        """Notes that the engine makes an engine step with `num_own` own requests."""
        if self._running:
            self.figures.num_steps_beside += 1
            if self.prices is not None:
                self.figures.delay_s += self.prices.delay_s(num_own, self.num_running)

    def note_time(self, num_own: int, now: float) -> None:
        """Adds to `delay_s` the delay of own requests since the last call, in an engine whose steps cannot be counted.

        `now` is the current time in seconds.
        """
        if self._running and num_own and self.prices is not None:
            delay_s = self.prices.delay_s(num_own, self.num_running)
            self.figures.delay_s += (now - self._noted_s) * delay_s / max(self.prices.step_s(num_own) + delay_s, 1e-9)
        self._noted_s = now

    def give_way(self, load: OwnLoad) -> list[int]:
        """Returns the names of early requests to stop now, because own requests need their room or they no longer pay."""
        running = self.num_running
        if not running:
            self._num_waits = 0
            return []
        self._num_waits = self._num_waits + 1 if load.is_waiting else 0
        if self._num_waits > PATIENCE_STEPS:
            return self.running
        wanted = self._wanted(load, running) if load.num_requests else running  # without own ones, none is in the way
        surplus = running - min(self.size.slots - load.num_requests, wanted)
        blocks_left = load.blocks_left
        names: list[int] = []
        if surplus > 0 or blocks_left < 0:
            for name in self.early.least(running):
                if len(names) >= surplus and blocks_left >= 0:
                    break
                blocks_left += self._blocks(name)
                names.append(name)
        return names

    def has_slot(self, load: OwnLoad) -> bool:
        """Returns whether a slot is left for an early request, and no own request waits for its first token."""
        return load.num_requests + self.num_running < self.size.slots and not load.is_waiting

    def begin(self, load: OwnLoad) -> list[EarlyStart]:
        """Returns the early requests that start now, and counts them as running."""
        if not self.has_slot(load):
            return []
        running = self.num_running
        free = min(self.size.slots - load.num_requests - running, STARTS_AT_ONCE)
        free = min(free, self._wanted(load, running + free) - running)
        starts: list[EarlyStart] = []
        while len(starts) < free and self._has_room(load, starts):
            start = next(iter(self.early.next(1)), None)
            if start is None:
                break
            num_given = len(start.row.prompt) + len(start.prefix)
            self.longest = max(self.longest, num_given)
            self._running[start.name] = _Running(engine_id(start.name), num_given)
            self._note_start(start, load.num_requests)
            self.figures.num_branches += bool(start.prefix)
            self.figures.num_texts += not start.prefix
            starts.append(start)
        self._untold.update(start.name for start in starts)
        return starts

    def _note_start(self, start: EarlyStart, num_own: int) -> None:
        """Adds to `delay_s` how much longer own requests take because of a starting request's prompt and known text."""
        prompt = tuple(start.row.prompt)
        num_rows = len(start.drafts) // TOKEN_BYTES + (0 if prompt in self._prompts else len(prompt))
        self._prompts.add(prompt)
        if num_own and self.prices is not None:
            self.figures.delay_s += num_rows * self.prices.verify_row_s

    # Requests of the engine's own

    def follow(self, row: EarlyRow) -> int:
        """Follows an own request, so that branches of it may start. Returns its name, which is also that of its near-ties."""
        name = self.early.follow(row)
        self._followed[name] = _Running("", len(row.prompt))
        self._untold.add(name)
        return name

    def called(self, name: int, request_id: str) -> None:
        """Notes vLLM's id of a followed request. Ignores a request that is not followed."""
        if name in self._followed:
            self._followed[name].request_id = request_id

    def branches_of(self, name: int) -> list[int]:
        """Returns the names of the running branches of a request, which has none if it is not followed."""
        return self.early.branches_of(name) if name in self._followed else []

    def forget(self, name: int) -> None:
        """Forgets a followed request that has ended. Its branches must have been stopped. Ignores one that is not followed."""
        if self._followed.pop(name, None) is not None:
            self.early.forget(name)

    # What they have made

    def read(self, names: Iterable[int]) -> None:
        """Reads the tokens that these running or followed requests have sampled so far."""
        for name in names:
            for tokens in self._sampled(self._live(name)):
                self._grew(name, tokens)

    def read_all(self) -> None:
        """Reads the tokens of all running and followed requests."""
        self.read([*self._running, *self._followed])

    def stopped(self, names: Iterable[int]) -> None:
        """Notes that requests were stopped. Their tokens must have been read."""
        for name in names:
            if self._running.pop(name, None) is not None:
                self.early.stopped(name)

    def finished(self, request_id: str, tokens: Sequence[int], reason: str | None) -> None:
        """Notes that vLLM has ended a request, with all its tokens."""
        name = int(request_id.removeprefix(_PREFIX))
        if name not in self._running:
            return
        self._grew(name, tokens)
        del self._running[name]
        if reason in ("stop", "length"):
            self.early.ended(name)
        else:
            self.early.stopped(name)

    def take_ties(self, reply: Mapping[Any, Sequence[Any]] | None) -> None:
        """Reads all tokens, and then stores near-ties from `reply`, which `specrollout_take_ties` gave for `untold`."""
        self.read_all()
        for name, (first, gaps, runners_up) in (reply or {}).items():
            self.early.ties(int(name), int(first), gaps, runners_up)
        self._untold &= {*self._running, *self._followed}

    def settle(self) -> None:
        """Notes which requests vLLM no longer has, after an error that may have lost their outputs."""
        self.stopped([name for name in self._running if not self.processor.external_req_ids.get(engine_id(name))])

    def made(self) -> EarlyMade:
        """Returns everything that is known about the plan's rows and about followed requests."""
        return EarlyMade(self.early.texts(), self.figures, self.early.flips(), self.early.followed())

    def take_figures(self) -> EarlyFigures:
        """Returns what the engine has done since the last call."""
        figures = self.figures
        self.figures = EarlyFigures()
        return figures

    def _live(self, name: int) -> _Running:
        return self._running.get(name) or self._followed[name]

    def _grew(self, name: int, tokens: Sequence[int]) -> None:
        running = self._live(name)
        if len(tokens) > running.num_told:
            self.early.grew(name, tokens[running.num_told :])
            self.figures.num_tokens += (len(tokens) - running.num_told) * (name in self._running)
            running.num_told = len(tokens)
            self.longest = max(self.longest, running.num_given + running.num_told)

    def _wanted(self, load: OwnLoad, most: int) -> int:
        """Returns the number of early requests, at most `most`, that are worth more than they cost."""
        worths = self.early.worths(most)
        if self.prices is None:
            return 0 if load.num_requests else len(worths)
        return num_early(self.prices, load.num_requests, worths)

    def _blocks(self, name: int) -> int:
        """Returns the most blocks that a request can take until the next check."""
        running = self._running[name]
        sampled = max(map(len, self._sampled(running)), default=running.num_told)
        return self.size.blocks_soon(running.num_given + sampled)

    def _sampled(self, running: _Running) -> Iterator[Sequence[int]]:
        for internal_id in self.processor.external_req_ids.get(running.request_id, ()):
            yield self.processor.request_states[internal_id].detokenizer.output_token_ids

    def _has_room(self, load: OwnLoad, starts: Sequence[EarlyStart]) -> bool:
        """Returns whether the KV cache has room for one more request of any length, and for all requests to grow for a while.

        `starts` are requests that the load does not count yet.
        """
        num_blocks = sum(self._blocks(start.name) for start in starts) + self.size.blocks_soon(self.longest)
        num_requests = load.num_requests + self.num_running + 1
        return num_blocks + num_requests * self.size.blocks(GROWTH_STEPS) <= load.blocks_left


def engine_id(name: int) -> str:
    """Returns the id in vLLM of the early request with this name."""
    return f"{_PREFIX}{name}"


def is_early(request_id: str) -> bool:
    """Returns whether an id in vLLM is that of an early request."""
    return request_id.startswith(_PREFIX)


def early_params(params: Any, start: EarlyStart) -> Any | None:
    """Returns sampling parameters for starting an early request, or None if its given prefix already ends the response.

    `params` are the parameters that the request will have in its own step. The vLLM worker keeps the near-ties of an early
    request under its name. Nobody reads the decoded text or the log-probs of its tokens.
    """
    params = params.clone()
    num_prefix = len(start.prefix)
    if num_prefix and (num_prefix >= params.max_tokens or _ends(params, start.prefix[-1])):
        return None
    identity = {key: v for key, v in params.extra_args[EXTRA_ARGS_KEY].items() if key not in ("ahead", "branches")}
    identity.setdefault("prompt_length", len(start.row.prompt))
    identity |= {"ties": start.name, "early": True}
    if start.drafts:
        identity["ahead"] = start.drafts
    if start.branches:
        identity["branches"] = start.branches
    params.extra_args = {**params.extra_args, EXTRA_ARGS_KEY: identity}
    params.max_tokens -= num_prefix
    params.min_tokens = max(params.min_tokens - num_prefix, 0)
    return params


def _ends(params: Any, token_id: int) -> bool:
    """Returns whether a token ends a response, as far as the parameters tell."""
    eos = None if params.ignore_eos else params.eos_token_id
    return token_id in (params.stop_token_ids or ()) or token_id == eos


def longest_of(rows: Iterable[Any]) -> int:
    """Returns the number of tokens of the longest prompt with its known text among `EarlyRow`s."""
    return max((len(r.prompt) + (0 if r.known is None else r.known.num_tokens) for r in rows), default=0)
