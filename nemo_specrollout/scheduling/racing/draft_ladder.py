# SPDX-License-Identifier: Apache-2.0
"""The draft ladder: how fast each draft method makes one request's tokens, by task and by how many requests its engine has.

`nemo-specrollout ladder` measures one; a run starts from it and keeps it up to date. Source of the name and of its use:
SpecActor (arXiv 2511.16193), Algorithm 3. There a rung is ranked by acceptance, here by tokens a second as measured, in which
acceptance and what drafting costs are both contained.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.files import read_regular
from nemo_specrollout.config.strict import ConfigError, bounded, build, check_rising

FORMAT = 1
ANY_TASK = "any"
# The method that drafts nothing.
PLAIN = "plain"
# Seconds of an engine's decoding that a figure remembers: what is older counts less and less.
MEMORY_S = 20.0
# Batch sizes that have figures of their own; those between count for the nearest.
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024])
# Where a batch size was never measured, a request's pace is believed to go with 1 / batch to this power.
GUESSED_SLOPE = 0.5


def method_called(drafter_types: Sequence[str]) -> str:
    """The name of a draft method."""
    return "+".join(drafter_types) or PLAIN


def methods_of(block: SpecrolloutConfig) -> list[str]:
    """The names of the draft methods of a block's engines, each once."""
    kinds = ([d.type for d in drafters] for drafters in block.drafters_of_workers)
    return list(dict.fromkeys(map(method_called, kinds)))


class Paces(Protocol):
    """What a policy must know of engines, measured or simulated."""

    def tokens_per_s(self, method: int, batch: int) -> float:
        """Of each of `batch` requests in an engine that drafts by `method`."""

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds in which an engine computes a text of `num_tokens` tokens; its other requests wait."""


@dataclass(frozen=True)
class Rung:
    """What is known of one draft method on one task; lists over batch sizes."""

    task: str
    """The task's name, or `any`."""

    method: str
    """The types of its drafters, joined by +; `plain` drafts nothing."""

    batches: tuple[int, ...] = bounded(low=1)
    """Requests in the engine, rising."""

    tokens_per_s: tuple[float, ...] = bounded(above=0.0)
    """Of each request."""

    weights_s: tuple[float, ...] = bounded(above=0.0)
    """Seconds of requests' decoding behind each figure."""

    acceptance: float = bounded(0.0, low=0.0, high=1.0)
    """Share of verified draft tokens that were accepted; for the reader, nothing is decided by it."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless the lists go together."""
        sizes = len(self.batches), len(self.tokens_per_s), len(self.weights_s)
        if len(set(sizes)) > 1 or not sizes[0]:
            raise ConfigError(
                f"{path}: {sizes[0]} batches, {sizes[1]} tokens_per_s, {sizes[2]} weights_s; give as many of each, and at "
                "least one"
            )
        check_rising(f"{path}.batches", self.batches)


@dataclass(frozen=True)
class LadderFile:
    """What `nemo-specrollout ladder` writes."""

    device: str
    """What was measured on, in words."""

    policy: str
    """The policy's folder or name."""

    prefill_s_per_token: float = bounded(above=0.0)
    """Seconds in which an engine computes one token of a text."""

    rungs: tuple[Rung, ...] = ()
    """By task, the method that is fastest with one request first."""

    format: int = bounded(FORMAT, low=FORMAT, high=FORMAT)
    """The version of this file's format."""

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path, field: str) -> "LadderFile":
        """From the file that the user named as `field`. Raises ConfigError with the field, the value and the fix."""
        try:
            return build(cls, json.loads(read_regular(path).decode("utf-8")), "")
        except (OSError, ValueError) as error:
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{field}: {path} is no ladder ({reason}); `nemo-specrollout ladder` writes one"
            ) from error


class Ladder:
    """Paces by method and batch size, decayed over what is observed; owns all figures. Methods are numbers here.

    A figure that contradicts its neighbours, a pace that rises with the batch, is evened out with them, each by its weight.
    Between measured batch sizes it goes straight on in logarithms. A method that was never seen is taken for the mean of the
    others, and where nothing was seen at all only the ratios of the guess mean anything.

    Example: `observe("any", 0, 1, 300, 2.0)`, then `tokens_per_s(0, 1)` is 150 and `tokens_per_s(0, 4)` a guess, 75.
    """

    def __init__(self, methods: Sequence[str], file: LadderFile | None = None) -> None:
        self.methods = tuple(methods)
        self._prefill = _Mean()
        self._of: dict[tuple[str, int], _Figures] = defaultdict(_Figures)
        self._curves: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._known: dict[tuple[int, int], float] = {}
        if file is not None:
            self._start_from(file)

    def observe(self, task: str, method: int, batch: int, num_tokens: int, seconds: float) -> None:
        """Requests of `task`, in an engine of `batch` requests, made `num_tokens` in `seconds`, both summed over them."""
        size = int(SIZES[np.argmin(np.abs(np.log(SIZES / batch)))])
        for name in {task, ANY_TASK}:
            self._of[name, method][size].add(num_tokens, seconds)
        self._curves.clear()
        self._known.clear()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """An engine computed texts of `num_tokens` tokens in `seconds`."""
        self._prefill.add(num_tokens, seconds)

    def tokens_per_s(self, method: int, batch: int) -> float:
        """Of each of `batch` typical requests; never rising with the batch."""
        if (method, batch) not in self._known:
            self._known[method, batch] = self._predict(method, batch)
        return self._known[method, batch]

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds; 0 while no prefill was seen."""
        return num_tokens / self._prefill.ratio if self._prefill.seconds else 0.0

    def ease(self, task: str, method: int) -> float:
        """How much faster than typical the task's requests are by `method`, where both were seen; else 1."""
        own, typical = self._of.get((task, method), _Figures()), self._of.get((ANY_TASK, method), _Figures())
        shared = [(own[b].ratio, typical[b].ratio, own[b].seconds) for b in own if b in typical]
        weight = sum(s for _, _, s in shared)
        return float(np.exp(sum(s * np.log(a / b) for a, b, s in shared) / weight)) if weight else 1.0

    def rungs(self, task: str = ANY_TASK) -> list[Rung]:
        """What was seen of each method, the fastest with one request first."""
        seen = [m for m in range(len(self.methods)) if self._of.get((task, m))]
        return [self._rung(task, m) for m in sorted(seen, key=lambda m: -self.tokens_per_s(m, 1))]

    def file(self, device: str, policy: str, acceptance: Sequence[float]) -> LadderFile | None:
        """All that is known now, with each method's acceptance; None where nothing was seen."""
        if not self._prefill.seconds or not self._of:
            return None
        tasks = sorted({task for (task, _), means in self._of.items() if means}, key=lambda task: task == ANY_TASK)
        of_method = dict(zip(self.methods, acceptance, strict=True))
        rungs = (replace(r, acceptance=of_method[r.method]) for task in tasks for r in self.rungs(task))
        return LadderFile(device, policy, 1.0 / self._prefill.ratio, tuple(rungs))

    def _rung(self, task: str, method: int) -> Rung:
        means = sorted(self._of[task, method].items())
        batches, ratios, seconds = zip(*((b, m.ratio, m.seconds) for b, m in means), strict=True)
        return Rung(task, self.methods[method], batches, ratios, seconds)

    def _start_from(self, file: LadderFile) -> None:
        self._prefill.add(MEMORY_S / file.prefill_s_per_token, MEMORY_S)
        for rung in file.rungs:
            if rung.method in self.methods:
                means = self._of[rung.task, self.methods.index(rung.method)]
                for batch, rate, weight_s in zip(rung.batches, rung.tokens_per_s, rung.weights_s, strict=True):
                    means[batch].add(rate * weight_s, weight_s)

    def _predict(self, method: int, batch: int) -> float:
        if not self._of.get((ANY_TASK, method)):
            others = [m for m in range(len(self.methods)) if self._of.get((ANY_TASK, m))]
            return float(np.mean([self._predict(m, batch) for m in others])) if others else batch**-GUESSED_SLOPE
        if method not in self._curves:
            self._curves[method] = self._of[ANY_TASK, method].curve()
        sizes, log_rates = self._curves[method]
        nearest = np.clip(batch, sizes[0], sizes[-1])
        rate = np.exp(np.interp(np.log(nearest), np.log(sizes), log_rates))
        return float(rate * (nearest / batch) ** GUESSED_SLOPE)


@dataclass
class _Mean:
    """Tokens over seconds, of about the last `memory_s` seconds."""

    memory_s: float = MEMORY_S
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_tokens: float, seconds: float) -> None:
        keep = min(1.0, max(self.memory_s - seconds, 0.0) / self.seconds) if self.seconds else 0.0
        self.tokens, self.seconds = keep * self.tokens + num_tokens, keep * self.seconds + seconds

    @property
    def ratio(self) -> float:
        return max(self.tokens, 1e-9) / self.seconds


class _Figures(dict[int, _Mean]):
    """Of a method: tokens of requests over their seconds, by batch size. One slow step counts once, however many wait in it:
    what a figure remembers are seconds of the engine."""

    def __missing__(self, batch: int) -> _Mean:
        self[batch] = _Mean(MEMORY_S * batch)
        return self[batch]

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Batch sizes and logarithms of tokens a second, which do not rise; float64 both."""
        from scipy.optimize import isotonic_regression

        sizes = np.array(sorted(self), float)
        rates = np.array([self[int(b)].ratio for b in sizes])
        weights = np.array([self[int(b)].seconds / b for b in sizes])
        return sizes, np.log(isotonic_regression(rates, weights=weights, increasing=False).x)
