# SPDX-License-Identifier: Apache-2.0
"""Makes each sample of an asynchronous engine come from one policy version, although weights change while requests run.

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
"""Key of the token ids in vLLM's prompts. If a prompt has other keys too, the request has images or a cache of its own. Then
no branches of it are started."""
_EARLIER = 0.5
"""Factor by which each change of the weights reduces the weight of earlier requests in `InterruptedShare`."""


@dataclass(frozen=True)
class OwnRow:
    """What is needed of one of the engine's own requests to start branches of it. Its `EarlyRow` has this as `row`."""

    seed: int
    params: Any
    """vLLM's sampling parameters of the request."""


def branch_request(start: EarlyStart) -> tuple[Any, Any]:
    """Returns vLLM's prompt and sampling parameters for a branch of one of the engine's own requests (`OwnRow`).

    The parameters are None if nothing is left to decode.
    """
    row = start.row.row
    assert isinstance(row, OwnRow)
    return {_PROMPT: [*start.row.prompt, *start.prefix]}, early_params(row.params, start)


class InterruptedShare:
    """Estimates the probability that the weights change while a request runs. Owns counts of the requests that have ended."""

    def __init__(self) -> None:
        self._num_interrupted = self._num_ended = 1.0

    @property
    def probability(self) -> float:
        """Share of the latest requests that were interrupted by a change of the weights, or 1 before anything is known."""
        return self._num_interrupted / self._num_ended

    def ended(self, *, is_interrupted: bool) -> None:
        """Counts a request that has ended, or that was interrupted by a change of the weights."""
        self._num_ended += 1.0
        self._num_interrupted += is_interrupted

    def change_begins(self) -> None:
        """Reduces the weight of all requests that were counted so far."""
        self._num_ended *= _EARLIER
        self._num_interrupted *= _EARLIER


class OnePolicyStream:
    """Makes requests start over when the weights have changed. The text so far is reused as drafts, most of which are right.

    With `rolling`, branches of the requests are decoded in free slots. A branch leaves the text at a near-tie where new
    weights will probably sample another token. A request that starts over brings its branches along. If the new weights leave
    the text, its drafts come from the branch that agrees with the new tokens.

    Owns the count of weight changes, and knows whether one is going on. A change begins before the first new tensor arrives
    and ends after the last one. A plan of `rolling` lasts from the first request after a change to the next change. The object
    belongs to one event loop.

    Invariant: a request whose output is yielded was decoded entirely between two changes. A request that arrives during a
    change waits until the change has ended. A request that is running when a change begins starts over after the change, even
    if vLLM has just finished it. vLLM has no branch during a change.
    """

    def __init__(
        self, generate: Callable[..., AsyncGenerator[Any, None]], rolling: RollingStream | None = None
    ) -> None:
        """`generate` is vLLM's own method, except that no request reuses a prefix that was cached under older weights.

        `rolling` decodes branches, for which `branch_request` makes the requests. It is None if there are no branches.
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
        """Known texts of the requests that were running when the latest change of the weights began, by their names."""
        self._figures = EarlyFigures()
        self._kept = KeptCounts()

    async def change_begins(self) -> None:
        """Notes that new weights are coming. Every running request will start over, and all branches are stopped."""
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
        """Sets how far the next weight update is expected to move the difference between the scores of two tokens, in nats."""
        self._scale = scale

    def take_figures(self) -> EarlyFigures:
        """Returns what was done for branches since the last call."""
        figures = self._figures
        self._figures = EarlyFigures()
        return figures if self._rolling is None else figures.plus(self._rolling.take_figures())

    def take_kept(self) -> KeptCounts:
        """Returns how much of the texts of requests that started over agreed with the new responses, since the last call."""
        counts = self._kept
        self._kept = KeptCounts()
        return counts

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Replaces `AsyncLLM.generate` for a request whose parameters have an entry of this package (`EXTRA_ARGS_KEY`).

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
        """Returns the sampling parameters with which a request starts, and the name of the request in `rolling`.

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
        """Returns the known text of an interrupted request.

        It is made from the text `before` that was known at the start, from branches, and from the tokens `made` until the
        interruption.
        """
        texts = {} if self._texts is None else await asyncio.shield(self._texts)
        text = texts.get(name, before) if name is not None else before
        return (TextAhead(b"") if text is None else text).with_made(made)

    def _count(self, known: TextAhead | None, made: Sequence[int], *, is_interrupted: bool) -> None:
        """Counts a request that has ended or was interrupted, and compares its tokens with the text that it brought along."""
        self._interrupted.ended(is_interrupted=is_interrupted)
        if known is not None and known.tokens and len(made):
            self._kept = self._kept.plus(compare(known.upto(len(made)) if is_interrupted else known, made))


def _may_branch(prompt: Any, identity: Mapping[str, Any]) -> bool:
    """Returns whether branches of a request can serve as drafts for it."""
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
    """Returns sampling parameters with the known text as drafts, and with the entries of `more` for this package."""
    params = params.clone()
    identity = {**params.extra_args[EXTRA_ARGS_KEY], **more}
    if known is not None:
        identity |= {"ahead": known.tokens, "branches": pack(known.branches)}
    params.extra_args = {**params.extra_args, EXTRA_ARGS_KEY: identity}
    return params
