# SPDX-License-Identifier: Apache-2.0
"""The known part of a response, and the attempts of engines to make it."""

from dataclasses import dataclass, field, replace

from nemo_specrollout.generation.requests import Rollout
from nemo_specrollout.racing.turns import Request


@dataclass
class Attempt:
    """One engine's work on one request."""

    name: int
    """The attempt's name in orders and results."""
    position: int
    """Number of the response's tokens that the engine has reported or was given."""


@dataclass
class Response:
    """A response as far as any engine has reported it, with the attempts under way.

    Invariant: the first engine to report a token decides it. An engine that reports another token at its place loses its
    attempt. So the response up to each point is the work of one engine, in whatever order engines report.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_spans: list[tuple[int, int]] = field(default_factory=list)
    """Version and first token of the response, for each policy that sampled part of it."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """Attempt by engine."""
    finish_reason: str | None = None
    """`stop` or `length`; None until the response is complete."""

    @property
    def num_text(self) -> int:
        """Number of tokens of the prompt and of the response so far."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def rollout(self) -> Rollout:
        """The complete response."""
        assert self.finish_reason is not None
        return Rollout(self.tokens, self.logprobs, self.finish_reason)

    def begin(self, engine: int) -> Request:
        """Returns the request that the engine gets: its attempt begins after the known part of the response."""
        self.attempts[engine].position = len(self.tokens)
        return replace(self.request, prefix_token_ids=tuple(self.tokens))

    def extend(
        self, engine: int, tokens: list[int], logprobs: list[float], finish_reason: str | None, policy_version: int
    ) -> bool:
        """Adds what an attempt made. Returns False, and adds nothing, if it contradicts the known part."""
        attempt = self.attempts[engine]
        start, num_known = attempt.position, len(self.tokens)
        overlap = min(len(tokens), num_known - start)
        is_short = finish_reason is not None and start + len(tokens) < num_known
        if is_short or self.tokens[start : start + overlap] != tokens[:overlap]:
            return False
        if len(tokens) > overlap and (not self.policy_spans or self.policy_spans[-1][0] != policy_version):
            self.policy_spans.append((policy_version, num_known))
        self.tokens += tokens[overlap:]
        self.logprobs += logprobs[overlap:]
        attempt.position += len(tokens)
        self.finish_reason = finish_reason
        return True
