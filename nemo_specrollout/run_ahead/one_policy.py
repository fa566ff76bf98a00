# SPDX-License-Identifier: Apache-2.0
"""Makes each sample of an asynchronous engine come from one policy version although weights change while requests run.

This is what `run_ahead` does in an asynchronous run.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.generation.engine.ahead_branches import pack, unpack
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.early_requests import EarlyFigures, early_params
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart
from nemo_specrollout.run_ahead.rolling_stream import RollingStream
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead, compare

_PROMPT = "prompt_token_ids"
"""Key of the token ids in vLLM's prompts. A request whose prompt has other keys gets no branches, because it has images or a
cache of its own."""
_EARLIER = 0.5
"""Factor by which each change of the weights reduces the influence of earlier requests on the share of interrupted ones."""


@dataclass(frozen=True)
class OwnRow:
    """An own request of the engine as `EarlyRow.row`, so that branches of it can be started."""

    seed: int
    params: Any
    """vLLM's sampling parameters."""


def branch_request(start: EarlyStart) -> tuple[Any, Any]:
    """Returns vLLM's prompt and sampling parameters of a branch of an `OwnRow`.

    The parameters are None if nothing is left to decode.
    """
    row = start.row.row
    assert isinstance(row, OwnRow)
    return {_PROMPT: [*start.row.prompt, *start.prefix]}, early_params(row.params, start)


class InterruptedShare:
    """Estimates the probability that weights change while a request runs. Owns the counts of requests that have ended."""

    def __init__(self) -> None:
        self._num_interrupted = self._num_ended = 1.0

    @property
    def probability(self) -> float:
        """Share of the latest requests that were interrupted, or 1 before anything is known."""
        return self._num_interrupted / self._num_ended

    def ended(self, *, is_interrupted: bool) -> None:
        """Counts a request that has ended, or that was interrupted by a change of the weights."""
        self._num_ended += 1.0
        self._num_interrupted += is_interrupted

    def change_begins(self) -> None:
        """Reduces the weight of what was counted before the change."""
        self._num_ended *= _EARLIER
        self._num_interrupted *= _EARLIER


class OnePolicyStream:
    """Makes requests start over when weights have changed. The text so far is reused as drafts, most of which are right.

    With `rolling`, branches of the requests are decoded in free slots. They leave a text at near-ties that new weights are
    likely to flip. A request that starts over brings its branches along, and its drafts follow the one that agrees with what
    the new weights sample.

    Owns the count of changes, and knows whether one is going on. A change begins before the first new tensor arrives and ends
    after the last one. Belongs to one event loop. A plan of `rolling` lasts from the first request after a change to the next
    change.

    Invariant: a request whose output is yielded was decoded entirely between two changes. A request that arrives during a
    change waits until it has ended. A request that is running when a change begins starts over after it, even if vLLM has just
    finished it. No branch is in vLLM during a change.
    """

    def __init__(
        self, generate: Callable[..., AsyncGenerator[Any, None]], rolling: RollingStream | None = None
    ) -> None:
        """`generate` is vLLM's own method, except that its requests reuse no prefix that was cached before the latest change.

        `rolling` decodes branches, whose requests `branch_request` makes. It is None if there are no branches.
        """
        self._generate = generate
        self._rolling = rolling
        self._num_changes = 0
        self._settled = asyncio.Event()
        """Set while no change of the weights is going on."""
        self._settled.set()
        self._scale = FlipModel().scale
        self._interrupted = InterruptedShare()
        self._texts: asyncio.Future[dict[int, TextAhead]] | None = None
        """Known texts of the requests that were running when the latest change began, by their names."""
        self._figures = EarlyFigures()
        self._kept = KeptCounts()

    async def change_begins(self) -> None:
        """Notes that new weights are coming. Every running request has to start over, and all branches are stopped."""
        self._num_changes += 1
        self._settled.clear()
        self._interrupted.change_begins()
        texts = self._texts = asyncio.get_running_loop().create_future()
        followed: dict[int, TextAhead] = {}
        try:
            if self._rolling is not None and self._rolling.has_plan:
                made = await self._rolling.end(keeps_cache=True)  # later requests do not find what is cached now
                followed = made.followed
                self._figures = self._figures.plus(made.figures)
        finally:
            texts.set_result(followed)

    def change_ends(self) -> None:
        """Notes that all new weights have arrived or that the change has failed, and lets waiting requests continue."""
        self._settled.set()

    def expect(self, scale: float) -> None:
        """Sets how far the next update is expected to move the difference of two scores, in nats (`FlipModel`)."""
        self._scale = scale

    def take_figures(self) -> EarlyFigures:
        """Returns what was done for branches since the last call."""
        figures = self._figures
        self._figures = EarlyFigures()
        return figures if self._rolling is None else figures.plus(self._rolling.take_figures())

    def take_kept(self) -> KeptCounts:
        """Returns how much was right of the texts of requests that started over, counted since the last call."""
        counts = self._kept
        self._kept = KeptCounts()
        return counts

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Replaces `AsyncLLM.generate` for a request with an identity of ours (`EXTRA_ARGS_KEY`).

        Yields only the last output.
        """
        attempt = 0
        known = _brought(params)
        while True:
            while not self._settled.is_set():  # another change may begin before this task runs
                await self._settled.wait()
            begun_at = self._num_changes
            attempt_id = f"{request_id}-{attempt}"
            sent, name = await self._followed(prompt, params, attempt_id, known)
            latest = None
            try:
                async with aclosing(self._generate(prompt, sent, request_id=attempt_id)) as outputs:
                    async for output in outputs:
                        latest = output
                        if self._num_changes != begun_at:
                            break
            finally:
                if name is not None and self._rolling is not None:
                    self._rolling.forget(name)  # does nothing if the weights have changed and its plan has ended
            is_interrupted = self._num_changes != begun_at
            made = [] if latest is None else latest.outputs[0].token_ids
            self._count(known if attempt else None, made, is_interrupted=is_interrupted)
            if not is_interrupted:
                if latest is not None:
                    yield latest
                return
            attempt += 1
            known = await self._known_now(name, known, made)

    async def _followed(
        self, prompt: Any, params: Any, request_id: str, known: TextAhead | None
    ) -> tuple[Any, int | None]:
        """Returns the sampling parameters with which a request starts, and its name in `rolling`.

        The name is None if no branches of the request may start.
        """
        rolling = self._rolling
        identity = params.extra_args[EXTRA_ARGS_KEY]
        if rolling is None or not _may_branch(prompt, identity):
            return _with_text(params, known, {}), None
        if not rolling.has_plan:
            await rolling.plan([], self._scale, kept=1.0)
        row = OwnRow(identity["seed"], params)
        name = rolling.follow(EarlyRow(prompt[_PROMPT], row, 1, known, self._interrupted.probability))
        rolling.called(name, request_id)
        return _with_text(params, known, {"ties": name}), name

    async def _known_now(self, name: int | None, before: TextAhead | None, made: Sequence[int]) -> TextAhead:
        """Returns the known text of an interrupted request, from the text `before`, its branches and its tokens `made`."""
        texts = {} if self._texts is None else await asyncio.shield(self._texts)
        text = texts.get(name, before) if name is not None else before
        return (TextAhead(b"") if text is None else text).with_made(made)

    def _count(self, known: TextAhead | None, made: Sequence[int], *, is_interrupted: bool) -> None:
        """Counts a request that has ended or was interrupted, and how much of the text that it brought along was right."""
        self._interrupted.ended(is_interrupted=is_interrupted)
        if known is not None and known.tokens and len(made):
            self._kept = self._kept.plus(compare(known.upto(len(made)) if is_interrupted else known, made))


def _may_branch(prompt: Any, identity: Mapping[str, Any]) -> bool:
    """Returns whether branches of a request may be drafts for it."""
    return (
        isinstance(prompt, Mapping)
        and set(prompt) == {_PROMPT}
        and "seed" in identity
        and identity.get("speculate", True)
    )


def _brought(params: Any) -> TextAhead | None:
    """Returns the text that a request brings along with its branches, or None if it brings none."""
    identity = params.extra_args[EXTRA_ARGS_KEY]
    if "ahead" not in identity:
        return None
    return TextAhead(identity["ahead"], branches=unpack(identity.get("branches", b"")))


def _with_text(params: Any, known: TextAhead | None, more: Mapping[str, Any]) -> Any:
    """Returns sampling parameters with the known text as drafts, and with `more` in their identity."""
    params = params.clone()
    identity = {**params.extra_args[EXTRA_ARGS_KEY], **more}
    if known is not None:
        identity |= {"ahead": known.tokens, "branches": pack(known.branches)}
    params.extra_args = {**params.extra_args, EXTRA_ARGS_KEY: identity}
    return params
