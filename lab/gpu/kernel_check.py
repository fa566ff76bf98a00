# SPDX-License-Identifier: Apache-2.0
"""Compares our Triton kernels with their numba bodies, or with vLLM's functions, on random inputs.

The GPU check also measures the time of their launches. A CPU can run the comparisons in Triton's interpreter. vLLM is imported
only for comparisons with its functions.

Shapes: B requests, S request slots, R rows, D drafters, E evidence levels, K draft positions, L longest text, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lab.vllm_on_cpu import own_kernels
from lab.vllm_on_cpu.own_kernels import step as step_bodies
from nemo_specrollout.drafters.base import LEVEL_PRIORS, NUM_LEVELS, RowPrice, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.drafters.device_index import ContextIndex, Lookup, context_orders
from nemo_specrollout.sampling.equality import accept_by_equality

own_kernels.register()
K, L = 7, 512
CPU = torch.device("cpu")
ROUNDING, RELATIVE_ROUNDING = 1e-4, 2e-5
"""Floating-point results may differ by the first number plus the second number times the result, because sums may be added in
another order. A lost addend of 1 is still noticed in sums up to 45,000."""
_DRAFTERS = ("suffix", "ngram", "eagle3")
_MODEL = 2
"""Index of the drafter with weights, whose drafts are random here."""
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Compared:
    """The result of a comparison."""

    different: dict[str, float] = field(default_factory=dict)
    """Largest gap between the expected and the actual values of each result that differs, by the result's name. A
    floating-point result differs only if rounding does not explain the gap."""
    launches: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Functions that launch our kernels once more on the same inputs, by name."""

    def note(self, expected: Tensors, got: Tensors) -> None:
        """Compares the results of the same name, and notes the gaps of those that differ."""
        for name, value in expected.items():
            wanted = value.cpu().double()
            gaps = (got[name].cpu().double() - wanted).abs().nan_to_num(nan=torch.inf)
            allowed = ROUNDING + RELATIVE_ROUNDING * wanted.abs() if value.is_floating_point() else torch.zeros(())
            if bool((gaps > allowed).any()):
                self.different[name] = max(float(gaps.max()), self.different.get(name, 0.0))


class DraftingStep:
    """A draft board with two context indexes on one device, and random inputs of its engine steps.

    Boards for equal numbers of requests get equal inputs. Example: `step.observe(); step.choose();
    step.results()["drafts_BK"]`.
    """

    def __init__(self, num_requests: int, device: torch.device, kernels: ModuleType, on_host: bool = False) -> None:
        """Creates the board and the texts. With `on_host`, texts lie in pinned memory of the host, where vLLM keeps them."""
        self._rng = np.random.default_rng(num_requests)
        self._device = device
        self._number = 0
        shape = BoardShape(num_requests, K)
        self.board = DraftBoard(_DRAFTERS, np.tile(LEVEL_PRIORS, (len(_DRAFTERS), 1)), shape, device, _MODEL)
        self.board.use_kernels(kernels)
        slots = torch.arange(num_requests, device=device)
        self.board.open(slots, self._ints(num_requests, low=L // 2, high=L))
        self.lookups = [self._lookup(i, 1 + i, slots // (4 if i == 0 else 1), kernels) for i in range(_MODEL)]
        text_SL = torch.from_numpy(self._rng.integers(0, 50, (num_requests, 32)).repeat(2, axis=0)[:num_requests])
        text_SL = text_SL.int().repeat(1, L // 32)
        self.texts = Texts(
            slots, self._ints(num_requests, low=33, high=64), text_SL.pin_memory() if on_host else text_SL.to(device)
        )
        self.draw_inputs()

    def _lookup(self, drafter: int, shortest: int, salts_S: torch.Tensor, kernels: ModuleType) -> Lookup:
        index = ContextIndex(1 << 16, context_orders(shortest, 6), self._device)
        index.use_kernels(kernels)
        return Lookup(index, salts_S * 7 + 1, torch.zeros_like(salts_S, dtype=torch.int32), drafter)

    def _ints(self, *shape: int, high: int, low: int = 0) -> torch.Tensor:
        return torch.from_numpy(self._rng.integers(low, high, shape)).int().to(self._device)

    def draw_inputs(self) -> None:
        """Draws the inputs of the next engine step.

        The inputs are the step's rows, the tokens that the step has sampled, and the drafts of the drafter with weights.
        """
        num_requests = len(self.texts.slots_B)
        tables = self.board.tables
        slots_B = self._rng.permutation(num_requests)
        slots_B[0] = -1 if num_requests > 1 else 0  # rows that pad a CUDA graph have no slot
        self.texts = self.texts._replace(slots_B=torch.from_numpy(slots_B).to(self._device))
        self._num_sampled_B = self._ints(num_requests, high=K + 2)
        self._num_rejected_B = self._ints(num_requests, high=K + 1)
        own = self.texts.slots_B[slots_B >= 0]
        self.texts.total_len_S[own] += self._num_sampled_B[slots_B >= 0]
        self.texts.total_len_S.clamp_(max=L)
        for buffer, high in zip(tables[:3], (50, NUM_LEVELS, K + 1), strict=True):
            buffer[_MODEL].copy_(self._ints(*buffer[_MODEL].shape, high=high))
        self._number += 1

    def observe(self) -> None:
        """Lets the board and the indexes learn the tokens of the engine step. In the first step they learn the whole texts."""
        max_new = L if self._number == 1 else K + 1
        self.board.observe(self.texts, self._num_sampled_B, self._num_rejected_B, self._number, self.lookups, max_new)

    def choose(self) -> None:
        """Lets the indexes propose drafts, and chooses the drafts of the next engine step."""
        self.board.choose(self.texts, RowPrice(0.02, 1e-4, 0.03), self.lookups)

    def results(self) -> dict[str, torch.Tensor]:
        """Returns all tables of the board and of the indexes by name."""
        indexes = {
            f"{_DRAFTERS[u.drafter]} {name}": table
            for u in self.lookups
            for name, table in (
                ("words", u.index.words),
                ("candidates", u.index.candidates),
                ("learned_S", u.learned_S),
            )
        }
        return {**self.board.tables._asdict(), **indexes}

    def copy_from(self, other: "DraftingStep") -> None:
        """Copies all tables of another board and its indexes into this one.

        Otherwise rounding differences could add up over the steps until the boards choose other drafts.
        """
        theirs = other.results()
        for name, table in self.results().items():
            table.copy_(theirs[name])


def compare_drafting(num_requests: int, device: torch.device, on_host: bool = False, num_steps: int = 8) -> Compared:
    """Compares the kernels that learn tokens, count contexts, look up drafts and choose among them, over some engine steps."""
    from nemo_specrollout.drafters import step_triton

    result = Compared()
    theirs = DraftingStep(num_requests, CPU, step_bodies)
    ours = DraftingStep(num_requests, device, step_triton, on_host)
    for i in range(num_steps):
        for part in (DraftingStep.observe, DraftingStep.choose):
            part(theirs)
            part(ours)
            result.note(theirs.results(), ours.results())
            ours.copy_from(theirs)
        if i + 1 < num_steps:
            theirs.draw_inputs()
            ours.draw_inputs()
    earlier_S = ours.texts.total_len_S - 4

    def observe_again() -> None:
        """Makes the indexes forget that they know the last tokens of each text, and learn these once more."""
        for lookup in ours.lookups:
            lookup.learned_S.copy_(earlier_S)
        ours.observe()

    result.launches = {"observe and learn": observe_again, "look up and choose": ours.choose}
    return result


def compare_acceptance(num_requests: int, device: torch.device) -> Compared:
    """Compares the kernel that accepts drafts by equality with its reference."""
    from nemo_specrollout.sampling.equality_triton import accept_rows

    sampled_R, inputs_R, starts_B1 = (t.to(device) for t in _verified_rows(num_requests))
    expected = accept_by_equality(sampled_R.cpu(), inputs_R.cpu(), starts_B1.cpu(), K)
    emitted_BK, counts_B = (torch.zeros_like(t, device=device) for t in expected)

    def launch() -> None:
        accept_rows(sampled_R, inputs_R, starts_B1, emitted_BK, counts_B)

    launch()
    result = Compared(launches={"accept": launch})
    names = ("emitted_BK", "counts_B")
    result.note(dict(zip(names, expected, strict=True)), dict(zip(names, (emitted_BK, counts_B), strict=True)))
    return result


def _verified_rows(num_requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tokens that an engine step sampled, the tokens that it read, and the first row of each request.

    Most of the tokens that it read are right drafts, which equal the token sampled in the row before.
    """
    rng = np.random.default_rng(num_requests)
    starts_B1 = np.concatenate([[0], np.cumsum(rng.integers(1, K + 2, num_requests))])
    sampled_R = torch.from_numpy(rng.integers(0, 5, starts_B1[-1]))
    is_right_R = torch.from_numpy(rng.random(starts_B1[-1]) < 0.7)
    return sampled_R, torch.where(is_right_R, sampled_R.roll(1), -1).int(), torch.from_numpy(starts_B1).int()


def compare_row_sampling(num_requests: int, device: torch.device, num_vocab: int) -> Compared:
    """Compares sampling, log-probs, ranks and acceptance of an engine step's rows with vLLM's functions on the same device.

    The runner-up of a row is compared with what vLLM samples if the row's own token is ruled out.
    """
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    from nemo_specrollout.generation.engine import compat
    from nemo_specrollout.generation.step import row_sampling
    from nemo_specrollout.generation.step.sampled_rows import Drafts, Drawn, Logits, RowKeys, TieTables

    _, _, starts_B1 = _verified_rows(num_requests)
    num_rows = int(starts_B1[-1])
    requests_R = torch.repeat_interleave(torch.arange(num_requests), starts_B1.diff())
    logits_RV = _logits(num_rows, num_vocab).to(device)
    temperature_S = torch.full((num_requests,), 0.8)
    seeds_S = torch.arange(num_requests) * 977
    keys = RowKeys(*(t.to(device) for t in (requests_R, temperature_S, seeds_S, torch.arange(num_rows) + 100)))
    scored = Logits(logits_RV, True)
    sampled_R = compat.draw(logits_RV, *keys, apply_temperature=True)
    is_right_R = torch.arange(num_rows, device=device) % 3 > 0
    drafts = Drafts(torch.where(is_right_R, sampled_R.roll(1), -1).int(), starts_B1.to(device), K)
    scaled_RV = logits_RV.float()
    gumbel.apply_temperature(scaled_RV, keys.slots_R, keys.temperature_S)
    graded = logprob.compute_topk_scores(scaled_RV, 0, sampled_R)
    expected = Drawn(sampled_R, graded, *accept_by_equality(sampled_R, *drafts))

    without_RV = logits_RV.scatter(1, sampled_R[:, None], -torch.inf)
    runners_up_R = compat.draw(without_RV, *keys, apply_temperature=True)
    places_SL = torch.zeros(num_requests, num_rows + 101, device=device)
    ties = TieTables(places_SL, places_SL.int(), torch.ones(num_requests, dtype=torch.bool, device=device))

    def launch(ties: TieTables | None = None) -> Drawn:
        return row_sampling.draw_rows(scored, keys, scored, drafts, ties)

    result = Compared(launches={"sample rows": launch, "sample rows, near-ties": partial(launch, ties)})
    result.note(_drawn(expected), _drawn(launch()))
    result.note(_drawn(expected), _drawn(launch(ties)))
    found_R = ties.runner_up_SL[keys.slots_R, keys.positions_R + 1].long()
    result.note({"runners_up_R": runners_up_R}, {"runners_up_R": found_R})
    return result


def _drawn(drawn: Any) -> dict[str, torch.Tensor]:
    return {
        "tokens_R": drawn.tokens_R,
        "logprobs": drawn.logprobs.logprobs,
        "ranks": drawn.logprobs.selected_token_ranks,
        "emitted_BK": drawn.emitted_BK,
        "counts_B": drawn.counts_B,
    }


def _logits(num_rows: int, num_vocab: int) -> torch.Tensor:
    """Returns random logits in bfloat16 [R, V]."""
    return torch.randn(num_rows, num_vocab, generator=torch.Generator().manual_seed(num_rows)).mul_(3).bfloat16()


def compare_draft_sampling(num_requests: int, device: torch.device, num_vocab: int) -> Compared:
    """Compares our sampled drafts to the tokens of vLLM's sampler, with the same noise and on the same device.

    A second comparison samples drafts from every eighth token of the vocabulary only. Evidence levels are not compared,
    because a CPU's logarithms differ slightly, so a score gap near an edge may get another level.
    """
    from nemo_specrollout.generation.drafting.draft_sampling import sample_with_score_gap
    from nemo_specrollout.generation.engine.compat import draw

    logits_BV = _logits(num_requests, num_vocab).to(device)
    slots_B = torch.arange(num_requests, device=device)
    keys = (slots_B, torch.ones(num_requests, device=device), slots_B * 977, slots_B + 100)
    levels_BK = torch.zeros(num_requests, K, dtype=torch.int8, device=device)
    column = torch.tensor(1, device=device)
    some_V = torch.arange(0, num_vocab, 8, device=device)
    masked_BV = torch.full_like(logits_BV, -torch.inf).index_copy_(1, some_V, logits_BV[:, some_V])

    def drafted(scored_BV: torch.Tensor, token_ids_V: torch.Tensor | None = None) -> torch.Tensor:
        return sample_with_score_gap(scored_BV, *keys, levels_BK, column, token_ids_V)

    result = Compared(launches={"sample drafts": lambda: drafted(logits_BV)})
    for name, scored_BV, got_B in (
        ("tokens_B", logits_BV, drafted(logits_BV)),
        ("tokens of a part_B", masked_BV, drafted(logits_BV[:, some_V], some_V)),
    ):
        result.note({name: draw(scored_BV, *keys, apply_temperature=True)}, {name: got_B})
    return result
