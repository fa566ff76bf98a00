# SPDX-License-Identifier: Apache-2.0
"""Replays a record of proposals, to find what different sets of drafters are worth in each phase of a run.

    python -m lab.simulation.replay [RECORD] [--machine two_cores|deep|gpu] [--at-a-time N]

The draft board, the step model and the speculation policy are the engine's. Proposals and tokens are recorded
(`lab.bench.record_speculation`), and seconds come from a machine's cost model with random noise. The command takes some
seconds.

Shapes: B running requests, D drafters, K draft positions.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import torch

from lab.simulation.replay_record import Record
from lab.vllm_on_cpu.own_kernels import step as cpu_kernels
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.drafters.base import NUM_LEVELS, RowPrice, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.speculation.decision import likeliest, survival_of
from nemo_specrollout.speculation.foresight import Foresight, Kind
from nemo_specrollout.speculation.policy import SpeculationPolicy, build_policy
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.speculation.step_model import StepModel, is_due

STORED = Path(__file__).with_name("smollm2_record.npz")
NOISE = 0.05
"""Standard deviation of the random noise on the logarithm of an engine step's seconds."""
MAX_ROWS = 8192
COSTS_EVERY = 16
"""Number of engine steps between two updates of the speculation policy's costs, as in the engine."""


@dataclass(frozen=True)
class Machine:
    """Cost model of engine steps on a machine."""

    rows: tuple[float, ...]
    """Numbers of rows for which the seconds of an engine step are known."""
    seconds: tuple[float, ...]
    """Seconds of an engine step, one value for each number of rows in `rows`."""
    request_s: float
    """Seconds of each request, in addition to those of its rows."""
    text_s: float
    """Seconds that drafters without weights take to propose drafts in an engine step."""
    pass_s: float
    """Seconds of a forward pass of the drafter with weights (the model)."""
    pass_row_s: float
    """Seconds of each row in a forward pass of the drafter with weights."""
    sample_s: float
    """Seconds to sample one draft token of one request."""
    graph_sizes: tuple[int, ...] = ()
    """Numbers of rows for which there is a CUDA graph. An engine step with more rows than the largest takes twice as long."""

    def step_s(self, num_requests: int, num_rows: int, has_drafters: bool) -> float:
        """Returns the seconds of an engine step, without the time in which a drafter with weights drafts."""
        slower = 1.0
        rows = num_rows
        if self.graph_sizes:
            rows = next((size for size in self.graph_sizes if size >= num_rows), num_rows)
            slower = 2.0 if num_rows > self.graph_sizes[-1] else 1.0
        seconds = slower * float(np.interp(rows, self.rows, self.seconds)) + num_requests * self.request_s
        return seconds + has_drafters * self.text_s

    def draft_s(self, num_rows: int, num_requests: int, depth: int) -> float:
        """Returns the seconds in which a drafter with weights reads `num_rows` tokens and drafts `depth` for each request."""
        passes_s = (
            self.pass_s
            + num_rows * self.pass_row_s
            + max(depth - 1, 0) * (self.pass_s + num_requests * self.pass_row_s)
        )
        return passes_s + depth * num_requests * self.sample_s


_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
MACHINES = {
    "two_cores": Machine(
        (1, 8, 16, 32, 64, 128, 256),
        (0.0155, 0.0175, 0.021, 0.029, 0.046, 0.079, 0.146),
        1e-4,
        2e-4,
        0.0018,
        2.5e-5,
        3e-5,
    ),
    "deep": Machine(
        (1, 8, 16, 32, 64, 128, 256), (0.046, 0.05, 0.06, 0.082, 0.13, 0.226, 0.42), 1e-4, 2e-4, 0.0018, 2.5e-5, 3e-5
    ),
    "gpu": Machine(
        (1, 64, 160, 256, 512, 1024),
        (0.0052, 0.0056, 0.0069, 0.0086, 0.0148, 0.027),
        0.0,
        4e-4,
        7e-4,
        0.0,
        1e-6,
        _SIZES,
    ),
}
"""Machines by name. They are two cores with SmolLM2-135M, the same with a deeper policy, and an H200 with Qwen3-8B
(docs/benchmarks/gpu.md)."""


@dataclass
class Phase:
    """Sums over the engine steps of one batch of the record."""

    batch: int
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    depths: int = 0
    """Sum over engine steps of how many tokens ahead the model drafted."""
    drafts: int = 0
    """Number of verified draft tokens."""
    dormant: int = 0
    """Number of engine steps in which the model was dormant."""
    by_step: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and tokens of each engine step."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def rate_from(self, start_s: float) -> float:
        """Returns the tokens per second in the engine steps that end after `start_s` seconds of the phase.

        If less than about a quarter of the phase's engine steps are left then, all of its engine steps count.
        """
        seconds_2 = np.array(self.by_step)
        late = np.cumsum(seconds_2[:, 0]) > start_s
        kept = seconds_2[late] if late.sum() > len(late) // 4 else seconds_2
        return float(kept[:, 1].sum() / kept[:, 0].sum())


class Choice(Enum):
    """Who chooses the drafts of an engine step, and from which evidence."""

    NOW = "now"
    """Drafts are chosen from what the drafters have just proposed, as in an engine on a CPU."""
    DEVICE = "device"
    """The host chooses the number of drafts from proposals that are one engine step old. Then the device chooses the drafts
    from current proposals."""
    HOST = "host"
    """The host chooses both the number and the drafts, from proposals that are one engine step old (`HostBudget`)."""
    UNFORESEEN = "host without foresight"
    """The host chooses both the number and the drafts, from proposals that are one engine step old. Unlike with `HOST`, it
    takes the old acceptance rates for current ones, and predicts no newer ones."""


class Replay:
    """A simulated engine whose proposals and tokens come from a record. Owns the draft board and the speculation policy."""

    choice = Choice.NOW
    """Who chooses the drafts. It must be set before the first batch."""

    def __init__(
        self,
        record: Record,
        drafters: Sequence[int],
        machine: Machine,
        policy: SpeculationPolicy | None = None,
        max_requests: int = 64,
        seed: int = 0,
    ) -> None:
        """Makes an engine that has decoded nothing.

        `drafters` are numbers of the record's drafters, or empty for plain decoding.
        """
        self._record = record
        self._machine = machine
        self._drafters = list(drafters)
        self._rng = np.random.default_rng(seed)
        num_positions = record.drafts_PDK.shape[2]
        self.policy = policy or build_policy(BudgetConfig("auto"), num_positions)
        self._model = self._drafters.index(record.model) if record.model in drafters else None
        self._step_model = StepModel(MAX_ROWS, machine.graph_sizes)
        self._drafts_SK = np.zeros((max_requests, num_positions), np.int64)
        self._rates_2SK = np.zeros((2, max_requests, num_positions), np.float32)
        """Acceptance rates of the drafts in the latest two engine steps, the older step first."""
        self._spread: Spread | None = None
        """Number of proposed drafts by survival in the previous engine step, or None before the first."""
        self._foresight = Foresight(max_requests, num_positions, 0.0)
        self._num_steps = 0
        self._rests = False
        self._is_idle = not drafters
        if drafters:
            names = [record.names[d] for d in drafters]
            priors_DE = record.priors_DE[list(drafters)][:, :NUM_LEVELS]
            shape = BoardShape(max_requests, num_positions)
            self.board = DraftBoard(names, priors_DE, shape, torch.device("cpu"), self._model)
            self.board.use_kernels(cpu_kernels)
        longest = int(np.diff(record.start_R).max()) + num_positions
        self._texts = Texts(
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(max_requests, dtype=torch.int32),
            torch.zeros(max_requests, longest, dtype=torch.int32),
        )
        self._lengths_S = self._texts.total_len_S.numpy()
        self._ends_S = np.zeros(max_requests, np.int64)
        self._response_S = np.zeros(max_requests, np.int64)
        self._follows_S = np.zeros(max_requests, np.bool_)

    def play(self, batch: int, at_a_time: int | None = None) -> Phase:
        """Rolls out a batch of the record with at most `at_a_time` requests at once, and returns its tokens and seconds."""
        waiting = np.flatnonzero(self._record.batch_R == batch).tolist()
        free = list(range(len(self._lengths_S)))
        running = list[int]()
        phase = Phase(batch)
        while waiting or running:
            new: list[int] = []
            while waiting and len(running) + len(new) < (at_a_time or len(self._lengths_S)):
                new.append(free.pop(0))
                self._open(new[-1], waiting.pop(0))
            if new:
                self._admit(new)
            running += new
            self._step(np.array(running), phase)
            ended = [slot for slot in running if self._lengths_S[slot] >= self._ends_S[slot]]
            running = [slot for slot in running if slot not in ended]
            free += ended
        return phase

    def _open(self, slot: int, response: int) -> None:
        start, end = self._record.start_R[response : response + 2]
        self._texts.token_ids_SL[slot, : end - start] = torch.from_numpy(self._record.tokens_P[start:end])
        self._lengths_S[slot] = 1
        self._ends_S[slot] = end - start
        self._response_S[slot] = response

    def _admit(self, slots: list[int]) -> None:
        was_dormant = self.policy.is_dormant
        self.policy.requests_arrived(len(slots))
        self._follows_S[slots] = self._model is not None and not self.policy.is_dormant
        if not self._drafters:
            return
        if self._model is not None and was_dormant and not self.policy.is_dormant:
            self.board.forget_drafter(self._model)
        limits = torch.from_numpy(self._ends_S[slots] + self.board.num_positions).int()
        self.board.open(torch.tensor(slots), limits)
        self._foresight.opened(slots, [Kind.NEW] * len(slots))

    def _choose(self, slots_B: np.ndarray) -> tuple[np.ndarray, int]:
        """Returns how many drafts of each request are verified, int64 [B], and how many rows they take in all."""
        caps_B = np.full(len(slots_B), self._drafts_SK.shape[1])
        num_drafts = self.policy.num_drafts(len(slots_B), int(caps_B.sum()))
        if self.choice is Choice.HOST:
            survival_BK = self._foresight.survival(self._rates_2SK[0], slots_B)
        elif self.choice is Choice.UNFORESEEN:
            survival_BK = survival_of(self._rates_2SK[0][slots_B])
        else:
            survival_BK = survival_of(self.board.tables.rates_SK.numpy()[slots_B])
        counts_B = likeliest(survival_BK, caps_B, num_drafts)
        # The device computes as many rows as the host has set, even if there are fewer drafts now.
        return counts_B, num_drafts if self.choice is Choice.DEVICE else int(counts_B.sum())

    def _observe_spread(self) -> None:
        """Tells the speculation policy how many drafts were proposed, by their survival."""
        spread = Spread.of_table(self.board.tables.spread_FQ.numpy().copy())
        known = spread if self.choice is Choice.NOW else self._spread
        self._spread = spread
        if known is not None:
            self.policy.observe(known)

    def _step(self, slots_B: np.ndarray, phase: Phase) -> None:
        """Simulates an engine step, which verifies drafts, samples, and proposes drafts for the next step.

        Adds it to `phase`.
        """
        num_requests = len(slots_B)
        policy = self.policy
        counts_B = np.zeros(len(slots_B), np.int64)
        num_verified = 0
        if self._drafters and not self._rests:
            counts_B, num_verified = self._choose(slots_B)
        num_followed = int(self._follows_S[slots_B].sum())
        depth = policy.plan(num_requests, num_followed)
        if policy.is_dormant and self._follows_S.any():
            self._follows_S[:], num_followed, depth = False, 0, 0
        rests = self._rests
        self._rests = policy.ends_step(num_requests, num_followed)
        right_B = self._num_right(slots_B, counts_B)
        left_B = self._ends_S[slots_B] - self._lengths_S[slots_B]
        emitted_B = np.minimum(right_B + 1, left_B)
        self._lengths_S[slots_B] += emitted_B
        num_rows = num_requests + num_verified
        was_idle = self._is_idle
        self._is_idle = not self._drafters or (rests and not num_followed)
        seconds = self._machine.step_s(num_requests, num_rows, not self._is_idle) * self._noise()
        self._step_model.observe(num_requests, num_rows, seconds, not self._is_idle)
        if self._drafters and not (self._is_idle and was_idle):
            self._observe(slots_B, right_B, counts_B)
        if self._is_idle and self._drafters:
            self.board.tables.rates_SK.zero_()
        if not self._is_idle:
            depth = self._depth(slots_B, num_rows, depth)
            if num_followed:
                draft_s = self._machine.draft_s(num_rows, num_requests, depth) * self._noise()
                self._step_model.observe_drafting(num_rows, num_requests, depth, draft_s)
                seconds += draft_s
            self._propose(slots_B, depth)
            self._observe_spread()
        if self._drafters:
            self._rates_2SK = np.stack([self._rates_2SK[1], self.board.tables.rates_SK.numpy()])
        self._num_steps += 1
        if policy.costs is None or is_due(self._num_steps, COSTS_EVERY):
            policy.costs = self._step_model.costs()
        phase.tokens += int(emitted_B.sum())
        phase.seconds += seconds
        phase.steps += 1
        phase.depths += depth if num_followed else 0
        phase.drafts += num_verified
        phase.dormant += policy.is_dormant
        phase.by_step.append((seconds, int(emitted_B.sum())))

    def _depth(self, slots_B: np.ndarray, num_rows: int, planned: int) -> int:
        """Returns how many tokens ahead the model drafts after an engine step. Subclasses may change the plan."""
        return planned

    def _num_right(self, slots_B: np.ndarray, counts_B: np.ndarray) -> np.ndarray:
        """Returns how many verified drafts of each request are right, which means equal to the recorded tokens, int64 [B]."""
        if not counts_B.any():
            return counts_B
        drafts_SK = self._drafts_SK[slots_B]
        num_positions = self._drafts_SK.shape[1]
        columns_BK = self._lengths_S[slots_B, None] + np.arange(num_positions)
        text_BK = self._texts.token_ids_SL.numpy()[
            slots_B[:, None], np.minimum(columns_BK, self._texts.token_ids_SL.shape[1] - 1)
        ]
        is_right_BK = (drafts_SK == text_BK) & (np.arange(num_positions) < counts_B[:, None])
        return np.cumprod(is_right_BK, axis=1).sum(axis=1)

    def _observe(self, slots_B: np.ndarray, right_B: np.ndarray, counts_B: np.ndarray) -> None:
        texts = self._texts._replace(slots_B=torch.from_numpy(slots_B))
        sampled_B, rejected_B = (torch.from_numpy(n).int() for n in (right_B + 1, counts_B - right_B))
        self.board.observe(texts, sampled_B, rejected_B, self._num_steps)

    def _propose(self, slots_B: np.ndarray, depth: int) -> None:
        """Writes the recorded proposals to the draft board, and lets the board choose one draft for each position."""
        tables = self.board.tables
        num_requests = len(slots_B)
        record = self._record
        last_B = np.diff(record.start_R)[self._response_S[slots_B]] - 1
        position_B = record.start_R[self._response_S[slots_B]] + np.minimum(self._lengths_S[slots_B], last_B)
        for d, of_record in enumerate(self._drafters):
            tables.tokens_DBK[d, :num_requests] = torch.from_numpy(record.drafts_PDK[position_B, of_record])
            tables.levels_DBK[d, :num_requests] = torch.from_numpy(record.levels_PDK[position_B, of_record])
            found_B = record.found_PD[position_B, of_record].astype(np.int32)
            if d == self._model:
                found_B = np.where(self._follows_S[slots_B], np.minimum(found_B, depth), -1)
            tables.found_DB[d, :num_requests] = torch.from_numpy(found_B)
        texts = self._texts._replace(slots_B=torch.from_numpy(slots_B))
        self.board.choose(
            texts,
            RowPrice(self.policy.row_price, self.policy.context_price, self.policy.mean_price),
            most=self.policy.most_drafts,
        )
        self._drafts_SK[slots_B] = tables.drafts_BK[:num_requests].numpy()

    def _noise(self) -> float:
        return float(np.exp(NOISE * self._rng.standard_normal()))


def ways_of(record: Record) -> dict[str, list[int]]:
    """Returns the sets of drafters to compare, by name. A set is a list of drafter numbers.

    The sets are no drafter, the drafters without weights, the drafter with weights alone, and all drafters.
    """
    text = [d for d in range(len(record.names)) if d != record.model]
    return {"plain": [], "text": text, "model": [record.model], "all": list(range(len(record.names)))}


def phases(
    record: Record, machine: Machine, order: Sequence[int], at_a_time: int | None = None
) -> dict[str, list[Phase]]:
    """Replays batches of the record in this order with each set of drafters, and returns the phases of each set."""
    found = {}
    for way, drafters in ways_of(record).items():
        replay = Replay(record, drafters, machine)
        found[way] = [replay.play(batch, at_a_time) for batch in order]
    return found


def union_over_best(found: dict[str, list[Phase]], start_s: float = 0.0) -> list[float]:
    """Returns the speed of all drafters divided by that of the best subset, in each phase from second `start_s` on."""
    return [
        found["all"][i].rate_from(start_s) / max(found[way][i].rate_from(start_s) for way in ("plain", "text", "model"))
        for i in range(len(found["all"]))
    ]


def options_of(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a command line, which are a record, a machine's name, and how many requests run at once."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, default=STORED)
    parser.add_argument("--machine", choices=MACHINES, default="two_cores")
    parser.add_argument("--at-a-time", type=int, default=None, help="requests that run at once; default: a batch")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table for a record of proposals."""
    options = options_of(__doc__, arguments)
    record = Record.load(options.record)
    machine = MACHINES[options.machine]
    order = sorted(set(record.batch_R.tolist()))
    found = phases(record, machine, order, options.at_a_time)
    print(f"{options.machine}: speed over plain of each batch, and all drafters over the best part")
    print("batch  " + "".join(f"{way:>8}" for way in found) + "    over")
    for i, (batch, over) in enumerate(zip(order, union_over_best(found), strict=True)):
        gains = "".join(f"{found[way][i].rate / found['plain'][i].rate:8.2f}" for way in found)
        print(f"{batch:<7}{gains}{over:8.3f}")


if __name__ == "__main__":
    main()
