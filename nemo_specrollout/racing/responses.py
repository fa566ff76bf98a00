# SPDX-License-Identifier: Apache-2.0
"""What is known of the response to a request that several workers may be making."""

from dataclasses import dataclass, field, replace

from nemo_specrollout.generation.engine import Rollout
from nemo_specrollout.racing.turns import Request


@dataclass
class Run:
    """A worker's work on a response: its name in orders and reports, and how many of the response's tokens the worker has."""

    name: int
    position: int


@dataclass
class Response:
    """Tokens and log-probs as far as any worker has told, and the run of each worker that has it.

    Invariant: every token was told once first, and a worker that tells one again tells the same, or its run is no run of this
    response any more. So the response is one worker's work up to each point, in whatever order workers report.
    """

    request: Request
    task: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, first token of the response) of each policy that sampled of it."""
    runs: dict[int, Run] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def num_text(self) -> int:
        """Tokens of prompt and response so far."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def rollout(self) -> Rollout:
        """When it has ended."""
        assert self.finish_reason is not None
        return Rollout(self.tokens, self.logprobs, self.finish_reason)

    def begin(self, worker: int) -> Request:
        """The run of `worker` begins at what is known; what the worker is asked."""
        self.runs[worker].position = len(self.tokens)
        return replace(self.request, prefix_token_ids=tuple(self.tokens))

    def take(
        self, worker: int, tokens: list[int], logprobs: list[float], finish_reason: str | None, policy_version: int
    ) -> bool:
        """Adds what a run has made; whether it is what is known of it. If not, nothing is added."""
        run = self.runs[worker]
        start, num_known = run.position, len(self.tokens)
        overlap = min(len(tokens), num_known - start)
        is_short = finish_reason is not None and start + len(tokens) < num_known
        if is_short or self.tokens[start : start + overlap] != tokens[:overlap]:
            return False
        if len(tokens) > overlap and (not self.policy_spans or self.policy_spans[-1][0] != policy_version):
            self.policy_spans.append((policy_version, num_known))
        self.tokens += tokens[overlap:]
        self.logprobs += logprobs[overlap:]
        run.position += len(tokens)
        self.finish_reason = finish_reason
        return True
