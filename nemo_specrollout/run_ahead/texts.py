# SPDX-License-Identifier: Apache-2.0
"""The texts made ahead that an engine has for its requests, and counts of how much of them agreed with the responses."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from nemo_specrollout.generation.engine.ahead_branches import TOKEN_BYTES, AheadBranch, begun_again
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, num_kept
from nemo_specrollout.run_ahead.decisions.flips import Array, counts_of_gaps

NO_GAPS = counts_of_gaps(np.zeros(0))


@dataclass(frozen=True)
class TextAhead:
    """The text that older weights have sampled for a request of a coming step, with the noise of this request."""

    tokens: bytes
    """Token ids of the response, as int32 numbers."""
    gaps: bytes = b""
    """For each token, the difference between its score and the runner-up's, in nats, as float16 numbers.

    For the last tokens the difference may not be known. Then there are fewer numbers than tokens."""
    runners_up: bytes = b""
    """For each token, the token with the second-best score, as int32 numbers. It is known for as many tokens as `gaps`."""
    branches: tuple[AheadBranch, ...] = ()
    """Branches of this text and of each other. Each one continues with the runner-up at a near-tie."""
    is_complete: bool = False
    """Whether the response has ended."""
    num_older: int = 0
    """Number of tokens at the end of the text that come from older weights than the tokens before them. So do their gaps."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text, without its branches."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the text and its branches take, without the Python objects around them."""
        return len(self.tokens) + len(self.gaps) + len(self.runners_up) + sum(len(b.text) for b in self.branches)

    def with_made(self, made: Sequence[int]) -> "TextAhead":
        """Returns the newest text of a request that had this text and has then sampled the tokens `made` under newer weights.

        The new text begins with `made`. Its rest comes from this text or one of its branches, whichever agrees with `made` for
        the most tokens.
        """
        tokens, branches = begun_again(made, self.tokens, self.branches)
        num_common = num_kept(self.tokens, np.frombuffer(tokens, np.int32))
        gaps, runners_up = self.gaps[: 2 * num_common], self.runners_up[: TOKEN_BYTES * num_common]
        num_older = max(len(tokens) // TOKEN_BYTES - len(made), 0)
        return TextAhead(tokens, gaps, runners_up, branches, num_older=num_older)

    def upto(self, num_tokens: int) -> "TextAhead":
        """Returns the text with only its first `num_tokens` tokens."""
        return replace(self, tokens=self.tokens[: TOKEN_BYTES * num_tokens], is_complete=False)


class KeptCounts(NamedTuple):
    """Counts of how much of the texts made ahead agreed with the responses that newer weights have sampled."""

    num_made: int = 0
    """Number of tokens in the texts of requests that have ended, without branches."""
    num_kept: int = 0
    """Number of tokens at the beginning of the texts that are the same in the responses. A text counts up to its first
    difference from its response."""
    num_right: int = 0
    """Like `num_kept`, plus the tokens of branches that go on like the response where the text itself differs from it."""
    num_tokens: int = 0
    """Number of tokens in the responses of requests that have ended and had a text made ahead."""
    num_texts: int = 0
    """Number of texts that were compared with responses."""
    num_flips: int = 0
    """Number of texts that differ from their response at a token whose score gap is known from the latest weights. Only the
    first such difference of a text counts."""
    num_runners_up: int = 0
    """Number of the texts counted in `num_flips` whose response has the runner-up at the first difference."""
    num_followed: int = 0
    """Number of branches that were of use. Each has the response's token where the text, or the branch before it, differs from
    the response."""
    num_brought: int = 0
    """Number of requests that had a text made ahead, including requests that have not ended."""
    gaps_G: Array = NO_GAPS
    """Histogram of the score gaps of the compared tokens up to the first difference, as `counts_of_gaps` returns it."""

    def plus(self, other: "KeptCounts") -> "KeptCounts":
        """Returns the sums of both objects' numbers."""
        pairs: Any = zip(self, other, strict=True)
        return KeptCounts(*(a + b for a, b in pairs))


def compare(text: TextAhead, response: Sequence[int] | np.ndarray) -> KeptCounts:
    """Returns how much of a text made ahead agrees with the response that newer weights have sampled.

    `response` has the token ids of this response. `num_flips`, `num_runners_up` and `gaps_G` leave out those tokens of the
    text that are more than one weight update old. So they show the effect of exactly one update.
    """
    response = np.asarray(response, np.int32)
    kept = num_kept(text.tokens, response)
    gap_P = np.frombuffer(text.gaps, np.float16)[: text.num_tokens - text.num_older]
    parts = kept < min(text.num_tokens, len(response))
    has_gap = parts and kept < len(gap_P)
    is_runner_up = has_gap and np.frombuffer(text.runners_up, np.int32)[kept] == response[kept]
    right, followed = _followed(text, response)
    return KeptCounts(
        num_made=text.num_tokens,
        num_kept=kept,
        num_right=right,
        num_tokens=len(response),
        num_texts=1,
        num_flips=int(has_gap),
        num_runners_up=int(is_runner_up),
        num_followed=followed,
        gaps_G=counts_of_gaps(gap_P[: kept + int(has_gap)]),
    )


def _followed(text: TextAhead, response: np.ndarray) -> tuple[int, int]:
    """Returns how many tokens of the text and its branches agree with the response, and how many branches were of use.

    A branch is of use if it has the response's token where the text, or the branch before it, differs from the response.
    """
    path = first = followed = 0
    own = text.tokens
    while True:
        right = first + num_kept(own, response[first:])
        at_change = [
            (i + 1, branch.text)
            for i, branch in enumerate(text.branches)
            if (branch.parent, branch.position) == (path, right) and num_kept(branch.text, response[right:])
        ]
        if not at_change:
            return right, followed
        path, own = max(at_change, key=lambda found: num_kept(found[1], response[right:]))
        first = right
        followed += 1


class TextsAhead:
    """Owns an engine's texts made ahead, by the seeds of their requests. Counts how much of them agreed with responses.

    A request and its text have the same seed, so they have the same noise. They differ only from the token on where the new
    weights have sampled another one. Requests may come and end in several threads, because NeMo-RL's HTTP server has a thread
    of its own.
    """

    def __init__(self) -> None:
        self._texts: Mapping[int, TextAhead] = {}
        self._kept = KeptCounts()
        self._lock = Lock()

    def replace(self, texts: Mapping[int, TextAhead]) -> None:
        """Replaces all texts by `texts`, which are those of the requests that come next, by their seeds."""
        self._texts = texts

    def of(self, seed: int) -> TextAhead | None:
        """Returns the text that was made ahead with this seed, or None if there is none."""
        return self._texts.get(seed)

    def bring(self, seed: int) -> TextAhead | None:
        """Returns the text for a request with this seed, or None if there is none. Counts it in `num_brought`."""
        text = self.of(seed)
        if text is not None and text.tokens:
            self._count(KeptCounts(num_brought=1))
        return text

    def followed(self, outputs: AsyncGenerator[Any, None], params: Any) -> AsyncGenerator[Any, None]:
        """Passes on the outputs of a vLLM request with the sampling parameters `params`.

        When the request ends, it counts how much of the text that the request had from the beginning agrees with the response.
        """
        identity = (params.extra_args or {}).get(EXTRA_ARGS_KEY) or {}
        text = self.of(identity["seed"]) if "ahead" in identity else None
        return outputs if text is None else self._compared_at_end(outputs, params, text)

    async def _compared_at_end(
        self, outputs: AsyncGenerator[Any, None], params: Any, text: TextAhead
    ) -> AsyncGenerator[Any, None]:
        comes_in_parts = params.output_kind.name == "DELTA"
        response: list[int] = []
        async with aclosing(outputs):
            async for output in outputs:
                (sample,) = output.outputs
                if not comes_in_parts:
                    response.clear()
                response.extend(sample.token_ids)
                if output.finished:
                    self._count(compare(text, response))
                yield output

    def longest_first(self, seeds: Sequence[int]) -> list[int]:
        """Returns the order in which requests should start, as indices in `seeds`.

        Requests with the longest expected response come first.

        A complete text is probably as long as the response. A text that is not complete counts twice its length, because long
        texts have more to come. A request without a text counts as the mean of the others.
        """
        texts = [self.of(seed) for seed in seeds]
        expected = [None if t is None else t.num_tokens * (1 if t.is_complete else 2) for t in texts]
        known = [length for length in expected if length is not None]
        mean = sum(known) / max(len(known), 1)
        return sorted(range(len(seeds)), key=lambda i: -(mean if (length := expected[i]) is None else length))

    def compare(self, seed: int, response: Sequence[int] | np.ndarray) -> None:
        """Counts how much of the text with this seed agrees with the response. A seed without a text is ignored.

        `response` has the token ids that the request has sampled.
        """
        text = self.of(seed)
        if text is not None and text.tokens:
            self._count(compare(text, response))

    def _count(self, counts: KeptCounts) -> None:
        with self._lock:
            self._kept = self._kept.plus(counts)

    def take_kept(self) -> KeptCounts:
        """Returns how much of the texts agreed with the responses, counted since the last call."""
        with self._lock:
            counts = self._kept
            self._kept = KeptCounts()
        return counts
