# SPDX-License-Identifier: Apache-2.0
"""Decides when an engine starts and stops early requests, which are requests of coming steps or branches of texts.

The engine's own requests are those of the current step. `rolling_engine.py` decodes early requests in a synchronous engine and
`rolling_stream.py` in an asynchronous one, and both ask `EarlyRequests`. It reads sampled tokens in vLLM's output processor.
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
"""Number of engine steps between two checks of which early requests to start or stop, if no request comes or goes."""
STARTS_AT_ONCE = 8
"""Largest number of early requests that start in one engine step. Each start is a call of vLLM, so more of them would make
the step long."""
GROWTH_STEPS = 64
"""An early request starts only if the KV cache has room for every request to grow by this number of tokens."""
MOST_LEFTOVERS = 64
"""If the vLLM worker keeps near-ties of more ended requests than this number, it is asked for them."""
PATIENCE_STEPS = 8
"""If one of the engine's own requests has no token in this number of checks in a row, all early requests are stopped."""
_PREFIX = "ahead-"
"""Prefix of the ids of early requests in vLLM."""


@dataclass
class EarlyFigures:
    """What one engine, or several engines together, have done for requests of coming steps."""

    num_texts: int = 0
    """Number of texts for coming steps that were started."""
    num_branches: int = 0
    """Number of branches of texts that were started."""
    num_stopped: int = 0
    """Number of texts and branches that were stopped. The engine's own requests needed their room, or decoding them further
    would not have saved time."""
    num_tokens: int = 0
    """Number of tokens that the engine has decoded for texts of coming steps and for their branches."""
    num_steps_beside: int = 0
    """Number of engine steps with both early requests and the engine's own ones."""
    num_steps_alone: int = 0
    """Number of engine steps with early requests only."""
    alone_s: float = 0.0
    """Seconds of the engine steps with early requests only."""
    delay_s: float = 0.0
    """Seconds by which early requests made engine steps with own requests of the engine longer, estimated from
    `EarlyPrices`."""

    def plus(self, other: "EarlyFigures") -> "EarlyFigures":
        """Returns the sums of both objects' numbers."""
        return EarlyFigures(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self, num_steps: int, num_engines: int = 1) -> dict[str, float]:
        """Returns a step's metrics from sums over `num_engines` engines. `num_steps` is the number of coming steps planned."""
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
    """What an engine returns when a plan of early requests ends, which is mainly the texts that it has made."""

    texts: dict[int, TextAhead]
    """All known texts of the plan's requests, by their seeds."""
    figures: EarlyFigures
    flips: KeptCounts = field(default_factory=KeptCounts)
    """How much of the texts that older weights had made agreed with what the engine's weights sample."""
    followed: dict[int, TextAhead] = field(default_factory=dict)
    """All known texts of the engine's own requests of which branches could start, by the names of these requests."""


class EngineSize(NamedTuple):
    """How many requests and tokens an engine has room for."""

    slots: int
    """Largest number of requests at a time."""
    num_blocks: int
    """Number of blocks of the KV cache."""
    block_size: int
    """Number of tokens in a block."""
    step_tokens: int
    """Largest number of tokens by which a request may grow in an engine step."""

    @classmethod
    def of(cls, vllm_config: Any) -> "EngineSize":
        """Returns the size of a started engine with this vLLM config."""
        cache = vllm_config.cache_config
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else int(speculative.num_speculative_tokens)
        slots = int(vllm_config.scheduler_config.max_num_seqs)
        return cls(slots, int(cache.num_gpu_blocks or 0), int(cache.block_size), drafts + 1)

    def blocks(self, num_tokens: int) -> int:
        """Returns the number of blocks that a request with `num_tokens` tokens takes."""
        return -(-num_tokens // self.block_size)

    def blocks_soon(self, num_tokens: int, num_requests: int = 1) -> int:
        """Returns the most KV cache blocks that requests with `num_tokens` tokens in total can take until the next check."""
        growth = self.step_tokens * (LOOK_STEPS + 2)  # with asynchronous scheduling, outputs are a step late
        return self.blocks(num_tokens + num_requests * growth) + max(num_requests - 1, 0)  # blocks that are not full


class OwnLoad(NamedTuple):
    """State of an engine's own requests, and the free blocks of the KV cache."""

    num_requests: int = 0
    blocks_left: int = 0
    """Least number of KV cache blocks that will be free at the next check. More will be free if requests share prefixes."""
    is_waiting: bool = False
    """Whether any of the engine's own requests has no token yet."""
    lengths: tuple[int, ...] = ()
    """Number of tokens that each of the engine's own requests has sampled."""


@dataclass
class _Running:
    """An early request that the engine decodes, or one of the engine's own requests whose tokens are read."""

    request_id: str
    """Id of the request in vLLM."""
    num_given: int
    """Number of tokens of the prompt and the prefix of the request."""
    num_told: int = 0
    """Number of the request's sampled tokens that were passed to `EarlyTexts`."""


@dataclass
class EarlyRequests:
    """Owns the early requests of one plan in an engine, with their texts, and knows which of them vLLM has.

    The engine's own requests come first. An early request starts only if all own requests have started, if a slot and KV cache
    are free, and if the request saves more time than it costs. It is stopped when one of these conditions no longer holds.
    """

    processor: Any
    """vLLM's output processor, which knows every request of the engine."""
    size: EngineSize
    early: EarlyTexts
    longest: int = 0
    """Largest number of tokens that a request of the plan has in its prompt and its known text together."""
    prices: EarlyPrices | None = None
    """Measured times of the engine. Until they are known, early requests run only while the engine has no others."""
    figures: EarlyFigures = field(default_factory=EarlyFigures)
    _running: dict[int, _Running] = field(default_factory=dict)
    _followed: dict[int, _Running] = field(default_factory=dict)
    """The engine's own requests whose tokens are read, so that branches of them can be started."""
    _untold: set[int] = field(default_factory=set)
    """Names of requests of which the vLLM worker may have near-ties that this object has not got yet."""
    _num_waits: int = 0
    """Number of checks in a row at which one of the engine's own requests had no token yet."""
    _noted_s: float = 0.0
    """Time of the latest call of `note_time`."""
    _prompts: set[tuple[int, ...]] = field(default_factory=set)
    """Prompts of requests that were started. Later samples of these prompts find them in the prefix cache."""

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
        """Names of requests of which the vLLM worker may have near-ties that this object has not got yet."""
        return sorted(self._untold)

    @property
    def has_leftovers(self) -> bool:
        """Whether the vLLM worker keeps near-ties of so many ended requests that it should be asked for them."""
        return len(self._untold) - len(self._running) - len(self._followed) > MOST_LEFTOVERS

    @property
    def is_empty(self) -> bool:
        """Whether no early request runs and none could start, not even at near-ties that the vLLM worker still has."""
        may_branch = self.early.most_branches > 0 and bool(self._untold)
        return not self._running and not may_branch and not self.early.worths(1)

    # What the engine has

    def own_load(self) -> OwnLoad:
        """Returns the state of the engine's own requests, and how many KV cache blocks all of its requests leave free."""
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
        """Sets `prices` from a reply of `specrollout_step_seconds`. `lengths` are the lengths of a rollout's responses."""
        if reply is not None:
            seconds_R = np.array(reply[0], np.float64)
            plain = PlainRollout(seconds_R, lengths or [1])
            self.prices = EarlyPrices(seconds_R, float(reply[1]), plain, self.early.most_steps_ahead)

    def worth(self) -> EarlyWorth:
        """Returns how much time early requests can save later, or `EarlyWorth()` while the engine's times are not known."""
        return EarlyWorth() if self.prices is None else early_worth(self.prices, self.early.worths(self.size.slots))

    def note_step(self, num_own: int) -> None:
        """Notes that the engine makes an engine step with `num_own` requests of its own."""
        if self._running:
            self.figures.num_steps_beside += 1
            if self.prices is not None:
                self.figures.delay_s += self.prices.delay_s(num_own, self.num_running)

    def note_time(self, num_own: int, now: float) -> None:
        """Adds to `delay_s` by how much the engine's own requests were delayed since the last call of this method.

        For engines whose engine steps cannot be counted. `now` is the current time in seconds.
        """
        if self._running and num_own and self.prices is not None:
            delay_s = self.prices.delay_s(num_own, self.num_running)
            self.figures.delay_s += (now - self._noted_s) * delay_s / max(self.prices.step_s(num_own) + delay_s, 1e-9)
        self._noted_s = now

    def give_way(self, load: OwnLoad) -> list[int]:
        """Returns the names of early requests to stop. They save no more time, or own requests need their slot or KV cache."""
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
        """Returns whether there is a free slot for an early request, and all of the engine's own requests have a token."""
        return load.num_requests + self.num_running < self.size.slots and not load.is_waiting

    def begin(self, load: OwnLoad) -> list[EarlyStart]:
        """Returns the early requests to start now, and counts them as running."""
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
        """Adds to `delay_s` the time in which the engine computes the prompt and the known text of a new early request."""
        prompt = tuple(start.row.prompt)
        num_rows = len(start.drafts) // TOKEN_BYTES + (0 if prompt in self._prompts else len(prompt))
        self._prompts.add(prompt)
        if num_own and self.prices is not None:
            self.figures.delay_s += num_rows * self.prices.verify_row_s

    # Requests of the engine's own

    def follow(self, row: EarlyRow) -> int:
        """Registers one of the engine's own requests, so that branches of it may start.

        Returns the request's name, a number by which other methods and `specrollout_take_ties` know it.
        """
        name = self.early.follow(row)
        self._followed[name] = _Running("", len(row.prompt))
        self._untold.add(name)
        return name

    def called(self, name: int, request_id: str) -> None:
        """Notes the id in vLLM of a request that was registered by `follow`. Ignores other requests."""
        if name in self._followed:
            self._followed[name].request_id = request_id

    def branches_of(self, name: int) -> list[int]:
        """Returns the names of the running branches of a request. It has none if it was not registered by `follow`."""
        return self.early.branches_of(name) if name in self._followed else []

    def forget(self, name: int) -> None:
        """Forgets a request that was registered by `follow` and has ended. Its branches must have been stopped."""
        if self._followed.pop(name, None) is not None:
            self.early.forget(name)

    # What they have made

    def read(self, names: Iterable[int]) -> None:
        """Reads the tokens that early requests, or requests that were registered by `follow`, have sampled so far."""
        for name in names:
            for tokens in self._sampled(self._live(name)):
                self._grew(name, tokens)

    def read_all(self) -> None:
        """Reads the tokens of all running early requests, and of all requests that were registered by `follow`."""
        self.read([*self._running, *self._followed])

    def stopped(self, names: Iterable[int]) -> None:
        """Notes that early requests were stopped. Their tokens must have been read before."""
        for name in names:
            if self._running.pop(name, None) is not None:
                self.early.stopped(name)

    def finished(self, request_id: str, tokens: Sequence[int], reason: str | None) -> None:
        """Notes that vLLM has ended an early request, which has sampled `tokens` in total."""
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
        """Reads the tokens of all requests. Then stores the near-ties that `specrollout_take_ties` has returned as `reply`."""
        self.read_all()
        for name, (first, gaps, runners_up) in (reply or {}).items():
            self.early.ties(int(name), int(first), gaps, runners_up)
        self._untold &= {*self._running, *self._followed}

    def settle(self) -> None:
        """Notes which early requests vLLM no longer has. Call it after an error in which their outputs may have been lost."""
        self.stopped([name for name in self._running if not self.processor.external_req_ids.get(engine_id(name))])

    def made(self) -> EarlyMade:
        """Returns everything that is known about the plan's requests, and about requests that were registered by `follow`."""
        return EarlyMade(self.early.texts(), self.figures, self.early.flips(), self.early.followed())

    def take_figures(self) -> EarlyFigures:
        """Returns what the engine has done for early requests since the last call."""
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
        """Returns how many early requests save more time than they cost, at most `most`."""
        worths = self.early.worths(most)
        if self.prices is None:
            return 0 if load.num_requests else len(worths)
        return num_early(self.prices, load.num_requests, worths)

    def _blocks(self, name: int) -> int:
        """Returns the most KV cache blocks that an early request can take until the next check."""
        running = self._running[name]
        sampled = max(map(len, self._sampled(running)), default=running.num_told)
        return self.size.blocks_soon(running.num_given + sampled)

    def _sampled(self, running: _Running) -> Iterator[Sequence[int]]:
        for internal_id in self.processor.external_req_ids.get(running.request_id, ()):
            yield self.processor.request_states[internal_id].detokenizer.output_token_ids

    def _has_room(self, load: OwnLoad, starts: Sequence[EarlyStart]) -> bool:
        """Returns whether the KV cache has room for one more early request, and for all requests to grow for a while.

        `starts` are early requests that the load does not count yet.
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
    """Returns sampling parameters to start an early request, or None if its prefix already ends the response.

    `params` are the parameters that the request will have in its own step. The vLLM worker keeps near-ties of the request
    under the request's name. Nobody reads the decoded text or the log-probs of the request.
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
    """Returns whether the sampling parameters tell that a token ends the response."""
    eos = None if params.ignore_eos else params.eos_token_id
    return token_id in (params.stop_token_ids or ()) or token_id == eos


def longest_of(rows: Iterable[Any]) -> int:
    """Returns the largest number of tokens that an `EarlyRow` has in its prompt and its known text together, or 0."""
    return max((len(r.prompt) + (0 if r.known is None else r.known.num_tokens) for r in rows), default=0)
