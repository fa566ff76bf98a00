# SPDX-License-Identifier: Apache-2.0
"""Items of the GPU check that measure the gain of drafts which are right with a given probability p, for large models.

The models have random weights, so no real drafter could be right. vLLM's own synthetic acceptance cannot be used, because it
replaces our acceptance rule, whose time belongs to the measurement. Instead, a drafter looks up the right tokens in a plain
run, and spoils each of them with probability 1 - p. The logits of random weights are nearly flat, so the noise of seed and
position decides each token. Therefore the texts of the plain run stay right.

Shapes: B requests of the batch, N known texts, L longest text, K draft positions, S request slots.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.gpu.geometries import VOCAB_SIZE, model_folder
from lab.gpu.gpu_speed import PROMPT_LENGTH, plain_step_ms, random_requests, start_random
from lab.gpu.gpu_stage import GIB, QUICK_GRAPHS, SEED, STOCK, Findings, block
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.drafters.base import NUM_LEVELS, Proposals, Texts
from nemo_specrollout.drafters.participant import Drafter, Put
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.speculation.policy import FixedPolicy, SpeculationPolicy, build_policy

MAX_DRAFTS = 7
AUTO = BudgetConfig("auto")
CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512]
"""Sizes of CUDA graphs that engines capture. vLLM's default captures 51 sizes up to the same bound."""
CELLS, AGAINST_FIXED = "budgets", "the automatic budget against the best fixed number of drafts"
"""Titles of two tables."""
STANDARD_ERRORS = 4.0
"""The measured acceptance rate may differ from the forced one by this many standard errors."""


@dataclass(frozen=True)
class Extent:
    """What an item measures. Each tuple begins with what is most important."""

    rates: tuple[float, ...] = (0.8, 0.6, 0.9)
    batches: tuple[int, ...] = (32, 128, 8, 256, 1)
    fixed: tuple[int, ...] = (4, 2, 7, 1)
    """Fixed numbers of drafts with which the automatic budget is compared."""
    length: int = 128
    stock_s: float = 45.0
    """Seconds that are reserved for the engine of stock vLLM."""
    is_compiled: bool = False
    """Whether engines run with torch.compile and vLLM's own sizes of CUDA graphs, which is vLLM's default."""


COMPILED = Extent((0.8, 0.6), (128, 256, 32), (2, 1, 4), stock_s=100.0, is_compiled=True)
RIGHT_LESS = Extent((0.6,), (32, 128, 8), (4, 2, 1), stock_s=60.0, is_compiled=True)
TINY = Extent((0.8,), (4, 1), (4, 1), 24, 0.0)


class OracleDrafter(Drafter):
    """A drafter that proposes the next tokens of known texts, each of them right with a forced probability.

    Owns the texts and a copy with spoilt tokens. A request whose seed is not known gets no drafts. Which tokens are spoilt
    depends only on text and position, so two runs get the same drafts.
    """

    name = "suffix"

    def __init__(
        self,
        num_slots: int,
        longest: int,
        device: torch.device,
        most_drafts: int = MAX_DRAFTS,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        """Creates a drafter that knows no text yet. `longest` is the number of tokens of the longest text."""
        self._device = device
        self._most_drafts = most_drafts
        self._vocab_size = vocab_size
        self._longest = longest
        self._text_of_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._columns_K = torch.arange(most_drafts, device=device)
        self._number_of: dict[int, int] = {}
        self.know([], [])

    def know(self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> None:
        """Replaces the known texts by the responses that a plain run has given to these requests."""
        texts = [[*r.prompt_token_ids, *out.token_ids] for r, out in zip(requests, rollouts, strict=True)]
        self._number_of = {_seed(request): i for i, request in enumerate(requests, 1)}
        texts_NL = np.zeros((len(texts) + 1, self._longest + self._most_drafts), np.int32)  # text 0 is empty
        for row, text in zip(texts_NL[1:], texts, strict=True):
            row[: len(text)] = text
        self._texts_NL = torch.from_numpy(texts_NL)
        self._lengths_N = torch.tensor([0, *map(len, texts)], device=self._device)
        self.force(1.0)

    def force(self, rate: float) -> None:
        """Sets the probability that a draft token is right."""
        uniform_NL = np.random.default_rng(SEED).random(self._texts_NL.shape)
        is_right_NL = torch.from_numpy(uniform_NL < rate)
        spoilt_NL = (self._texts_NL + 1) % self._vocab_size
        self._drafts_NL = torch.where(is_right_NL, self._texts_NL, spoilt_NL).int().to(self._device)

    def open(self, slots: torch.Tensor, requests: Sequence[Any], put: Put) -> None:
        self._text_of_S[slots] = put([self._number_of.get(r.identity.seed, 0) for r in requests], np.int64)

    def propose(self, texts: Texts, out: Proposals) -> None:
        slots_B = texts.slots_B.long()
        num_requests = len(slots_B)
        text_of_B = self._text_of_S[slots_B]
        start_B = texts.total_len_S[slots_B].long().clamp_(max=self._longest)
        out.tokens_BK[:num_requests] = self._drafts_NL[text_of_B[:, None], start_B[:, None] + self._columns_K]
        out.levels_BK[:num_requests] = NUM_LEVELS - 1
        out.found_B[:num_requests] = (self._lengths_N[text_of_B] - start_B).clamp_(0, self._most_drafts)


def _seed(request: RolloutRequest) -> int:
    return request.noise_seed(SEED)


class _NeverDraft(FixedPolicy):
    """A speculation policy that lets all drafters rest, so that an engine with drafters decodes plainly."""

    def ends_step(self, num_requests: int, num_followed: int) -> bool:
        return True


def never_draft(num_positions: int) -> SpeculationPolicy:
    """Returns a speculation policy under which an engine with drafters decodes plainly."""
    return _NeverDraft(0, num_positions)


class ForcedEngine:
    """An engine whose only drafter is an oracle, and whose budget can be replaced. Owns the engine and the oracle."""

    def __init__(self, folder: Path, options: Mapping[str, Any], most_drafts: int = MAX_DRAFTS) -> None:
        """Starts the engine with the options of `start_engine`. A request has at most `most_drafts` drafts."""
        self._most_drafts = most_drafts
        self.engine = start_random(folder, replace(block("suffix"), num_speculative_tokens=most_drafts), **options)
        self._drafting = self.engine.run_in_worker(lambda worker: worker.specrollout_router)
        device = self._drafting.board.tables.limit_S.device
        vocab_size = self.engine.run_in_worker(lambda worker: worker.model_runner.vocab_size)
        self.oracle = OracleDrafter(options["max_num_seqs"], options["length"], device, most_drafts, vocab_size)
        self.rollouts: list[Rollout] = []
        """Responses of the latest measurement."""
        self._drafting.use_drafters([self.oracle])
        self._drafting.record_graphs()

    def use_budget(self, config: BudgetConfig | None) -> None:
        """Lets this budget decide the number of drafts from now on. With None the engine never drafts."""
        most = self._most_drafts
        self.use_policy(never_draft(most) if config is None else build_policy(config, most))

    def use_policy(self, policy: SpeculationPolicy) -> None:
        """Lets this speculation policy decide the number of drafts from now on, with the step times learned so far."""
        policy.costs = self._drafting.policy.costs
        self._drafting.policy = policy

    def measure(self, requests: Sequence[RolloutRequest]) -> dict[str, float]:
        """Rolls out the requests, and returns figures of the decode steps in which all of them ran."""
        engine = self.engine
        batch = len(requests)
        before = engine.counters()
        self.rollouts = engine.generate(requests)
        assert before is not None
        stats = engine.stats(before.num_steps)
        assert stats is not None
        column = stats.trace.column
        is_full_S = (column("is_decode") > 0) & (column("num_requests") == batch)
        seconds = column("seconds")[is_full_S].sum()
        num_steps = max(int(is_full_S.sum()), 1)
        rows = column("num_rows")[is_full_S].sum()
        accepted = column("accepted_suffix")[is_full_S].sum()
        tried = stats.proposed[0][0] - before.proposed[0][0]
        right = stats.accepted[0][0] - before.accepted[0][0]
        return {
            "ms a step": 1e3 * seconds / num_steps,
            "rows": rows / num_steps,
            "drafts": rows / num_steps / batch - 1,
            "tokens a second": (batch * num_steps + accepted) / seconds,
            "first drafts": tried,
            "right": right / max(tried, 1),
        }


def speed(findings: Findings) -> None:
    """Measures the gain of right drafts for a dense model of 8 billion weights."""
    _measure(findings, findings.size("Qwen3-8B", "tiny"), findings.size(12 * GIB, GIB // 4))


def speed_compiled(findings: Findings) -> None:
    """Measures the gain of right drafts for a dense model of 8 billion weights, in engines that vLLM compiles."""
    _measure(findings, findings.size("Qwen3-8B", "tiny"), findings.size(12 * GIB, GIB // 4), COMPILED)


def speed_right_less(findings: Findings) -> None:
    """Measures the gain of drafts that are right less often, for a dense model of 8 billion weights in compiled engines.

    The item `speed_compiled` has no time for these lower probabilities.
    """
    _measure(findings, findings.size("Qwen3-8B", "tiny"), findings.size(12 * GIB, GIB // 4), RIGHT_LESS)


def speed_experts(findings: Findings) -> None:
    """Measures the gain of right drafts for a mixture of experts with 30 billion weights, of which 3 billion are active."""
    _measure(findings, findings.size("Qwen3-30B-A3B", "tiny experts"), findings.size(7 * GIB, GIB // 4))


def _measure(findings: Findings, geometry: str, kv_cache_bytes: int, extent: Extent = Extent()) -> None:
    """Notes figures of plain decoding, of each rate and number of requests, and of stock vLLM, as far as the time allows.

    A rate is the probability that a draft token is right.
    """
    extent = findings.size(extent, TINY)
    options: dict[str, Any] = {
        "max_num_seqs": max(extent.batches),
        "length": PROMPT_LENGTH + extent.length,
        "kv_cache_memory_bytes": kv_cache_bytes,
    }
    if torch.cuda.is_available():
        quick = {**QUICK_GRAPHS, "cudagraph_capture_sizes": CAPTURE_SIZES}
        options["compilation_config"] = {} if extent.is_compiled else quick
    requests = random_requests(max(extent.batches), extent.length)
    with model_folder(geometry) as folder:
        _measure_ours(findings, extent, ForcedEngine(folder, options), requests)
        gc.collect()  # the weights must be gone before they are loaded again
        torch.cuda.empty_cache()
        if findings.seconds_left > extent.stock_s / 2:
            engine = start_random(folder, STOCK, **options)
            engine.generate(requests)
            for batch in extent.batches:
                _note_stock(findings, batch, plain_step_ms(engine, requests[:batch]))
            engine.close()


def _measure_ours(findings: Findings, extent: Extent, forced: ForcedEngine, requests: Sequence[RolloutRequest]) -> None:
    plain = _plain(findings, forced, requests, extent)
    for rate in extent.rates:
        forced.oracle.force(rate)
        for batch in extent.batches:
            if findings.seconds_left > extent.stock_s:
                _cell(findings, forced, extent.fixed, rate, requests[:batch], plain[batch])
    forced.engine.close()


def _plain(
    findings: Findings, forced: ForcedEngine, requests: Sequence[RolloutRequest], extent: Extent
) -> dict[int, float]:
    """Notes the time of plain engine steps by number of requests, and gives the texts to the oracle.

    Returns the tokens per second of plain decoding by number of requests.
    """
    forced.use_budget(None)
    rollouts = forced.engine.generate(requests)
    forced.oracle.know(requests, rollouts)
    speeds = {}
    for batch in sorted(extent.batches):
        figures = forced.measure(requests[:batch])
        by_caller = plain_step_ms(forced.engine, requests[:batch])
        speeds[batch] = figures["tokens a second"]
        row = {"ms a step": figures["ms a step"], "ms a step, by the caller": by_caller}
        findings.note(f"{batch} requests", row, "plain decoding")
    return speeds


def _cell(
    findings: Findings,
    forced: ForcedEngine,
    fixed: Sequence[int],
    rate: float,
    requests: Sequence[RolloutRequest],
    plain_tokens_per_s: float,
) -> None:
    """Notes the speeds of the automatic budget and of fixed numbers of drafts, for one rate and number of requests."""
    name = f"{len(requests)} requests, p {rate:g}"
    forced.use_budget(AUTO)
    forced.measure(requests)  # learns acceptance and step times
    auto = _noted(findings, f"{name}, auto", forced.measure(requests), plain_tokens_per_s)
    gains = {}
    for k in fixed:
        forced.use_budget(BudgetConfig("fixed", k=k))
        figures = _noted(findings, f"{name}, {k} drafts", forced.measure(requests), plain_tokens_per_s)
        gains[k] = figures["over plain"]
        error = (rate * (1 - rate) / max(figures["first drafts"], 1)) ** 0.5
        text = f"{name}, {k} drafts: {figures['right']:.3f} of the first drafts were right"
        findings.check(abs(figures["right"] - rate) <= STANDARD_ERRORS * error, text)
    best = max(gains, key=lambda k: gains[k])
    row = {
        "over plain": auto["over plain"],
        "drafts": auto["drafts"],
        "best fixed": best,
        "its over plain": gains[best],
    }
    findings.note(name, row, AGAINST_FIXED)


def _noted(findings: Findings, name: str, figures: dict[str, float], plain_tokens_per_s: float) -> dict[str, float]:
    figures = {**figures, "over plain": figures["tokens a second"] / plain_tokens_per_s}
    findings.note(name, figures, CELLS)
    return figures


def _note_stock(findings: Findings, batch: int, stock_ms: float) -> None:
    """Notes the milliseconds of an engine step of stock vLLM, and compares the automatic budget with stock vLLM."""
    name = f"{batch} requests"
    row = findings.tables["plain decoding"][name]
    findings.note(name, {**row, "stock, ms a step": stock_ms}, "plain decoding")
    for cell, row in findings.tables.get(AGAINST_FIXED, {}).items():
        if cell.startswith(f"{name},"):
            tokens_per_s = findings.tables[CELLS][f"{cell}, auto"]["tokens a second"]
            findings.note(cell, {**row, "over stock": tokens_per_s * stock_ms / (1e3 * batch)}, AGAINST_FIXED)
