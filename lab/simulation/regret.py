# SPDX-License-Identifier: Apache-2.0
"""Measures how far the engine's speculation policy stays behind perfect decisions on a record of proposals.

    python -m lab.simulation.regret [RECORD] [--machine two_cores|deep|gpu] [--at-a-time N]

Three ways to decide are compared, with the same proposals and the same machine:
  ours       is the engine's speculation policy, which learns the seconds of engine steps and predicts survival.
  rates      knows the true seconds. It sees the drafts of all depths before it chooses a depth, and weighs them by the
             draft board's acceptance rates for these very drafts.
  hindsight  knows the tokens, so it makes and verifies only drafts that are right.

The last two decide each engine step for the most tokens per second. In both, the model follows all requests or none, whichever
is faster in a batch.

Shapes: B running requests, D drafters, K draft positions, F = K + 1 depths of drafting, P positions of all responses.
"""

from collections.abc import Sequence

import numpy as np

from lab.simulation.replay import MACHINES, MAX_ROWS, Machine, Phase, Replay, options_of, ways_of
from lab.simulation.replay_record import Record
from nemo_specrollout.speculation.decision import Steps, best_steps
from nemo_specrollout.speculation.policy import FixedPolicy
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.speculation.step_model import StepCosts


class _PaidPolicy(FixedPolicy):
    """Speculation policy that knows the true seconds, and verifies the drafts that give the most tokens per second."""

    def __init__(self, num_positions: int, machine: Machine) -> None:
        super().__init__(num_positions, num_positions)
        self._machine = machine
        self._submitted_Q = np.zeros(1)
        self._depth = 0
        self._true_costs = true_costs(machine)

    def observe(self, spread: Spread) -> None:
        self._submitted_Q = spread.submitted_Q.astype(np.float64)

    def num_drafts(self, num_requests: int, most: int) -> int:
        steps = self.steps(self._submitted_Q[None], num_requests, num_requests, self._depth)
        seconds_2 = self._true_costs.seconds(num_requests, np.array([0, num_requests]))
        self.row_price = float(steps.rate_F[0] * (seconds_2[1] - seconds_2[0])) / num_requests
        return min(most, int(steps.num_drafts_F[0]))

    def best_depth(self, spread: Spread, num_requests: int, num_rows: int) -> int:
        """Returns the depth of drafting at which the latest drafts give the most tokens per second, and remembers it."""
        counts_FQ = spread.tokens_FQ.astype(np.float64)
        self._depth = int(self.steps(counts_FQ, num_requests, num_rows).rate_F.argmax())
        return self._depth

    def steps(self, counts_FQ: np.ndarray, num_requests: int, num_rows: int, depth: int | None = None) -> Steps:
        """Returns the best engine step for each depth of drafting, or only for `depth` if it is given."""
        depths = range(len(counts_FQ)) if depth is None else (depth,)
        draft_s_F = np.array([self._machine.draft_s(num_rows, num_requests, depth) for depth in depths])
        return best_steps(counts_FQ, num_requests, self._true_costs, 0.0, draft_s_F, self._machine.pass_row_s)


def true_costs(machine: Machine) -> StepCosts:
    """Returns the seconds of engine steps on a machine, without the time in which a model drafts."""
    rows = np.arange(MAX_ROWS + 1)
    seconds_R = np.array([machine.step_s(0, int(n), False) for n in rows]) + machine.request_s * rows
    return StepCosts(seconds_R, np.array(machine.graph_sizes, np.float64), -machine.request_s, text_s=machine.text_s)


class RatesReplay(Replay):
    """A replay that chooses the depth of drafting after the drafts were made, by the board's acceptance rates for them.

    Only the seconds of the chosen depth count.
    """

    def __init__(self, record: Record, drafters: Sequence[int], machine: Machine) -> None:
        self._paid = _PaidPolicy(record.drafts_PDK.shape[2], machine)
        super().__init__(record, drafters, machine, self._paid)

    def _depth(self, slots_B: np.ndarray, num_rows: int, planned: int) -> int:
        if self._model is None:
            return 0
        self._propose(slots_B, planned)
        return self._paid.best_depth(Spread.of_table(self.board.tables.spread_FQ.numpy()), len(slots_B), num_rows)


class Hindsight:
    """A simulated engine that knows which recorded drafts are right."""

    def __init__(self, record: Record, machine: Machine, has_model: bool) -> None:
        self._record = record
        self._machine = machine
        right_PDK = record.drafts_PDK == record.right_PK()[:, None, :]
        right_PDK &= np.arange(right_PDK.shape[2]) < record.found_PD[:, :, None]
        right_PD = right_PDK.cumprod(axis=2).sum(axis=2)
        self._text_P = right_PD[:, ways_of(record)["text"]].max(axis=1)
        self._model_P = right_PD[:, record.model] if has_model else None
        self._num_positions = right_PDK.shape[2]

    def play(self, batch: int, at_a_time: int | None = None) -> Phase:
        """Rolls out a batch of the record with at most `at_a_time` requests at once, and returns its tokens and seconds."""
        responses = np.flatnonzero(self._record.batch_R == batch)
        next_R = self._record.start_R[responses] + 1
        end_R = self._record.start_R[responses + 1]
        phase = Phase(batch)
        while len(running := np.flatnonzero(next_R < end_R)[:at_a_time]):
            drafts_B, depth, seconds = self._best_step(next_R[running], end_R[running])
            next_R[running] += drafts_B + 1
            tokens = int(drafts_B.sum()) + len(running)
            phase.tokens += tokens
            phase.seconds += seconds
            phase.steps += 1
            phase.drafts += tokens - len(running)
            phase.depths += depth
            phase.by_step.append((seconds, tokens))
        return phase

    def _best_step(self, position_B: np.ndarray, end_B: np.ndarray) -> tuple[np.ndarray, int, float]:
        """Returns the engine step with the most tokens per second, as drafts per request, depth of drafting, and seconds."""
        most_B = end_B - position_B - 1
        num_requests = len(position_B)
        steps = []
        for depth in range(self._num_positions + 1 if self._model_P is not None else 1):
            right_B = self._text_P[position_B]
            if self._model_P is not None:
                right_B = np.maximum(right_B, np.minimum(self._model_P[position_B], depth))
            right_B = np.minimum(right_B, most_B)
            for drafts_B in (np.minimum(right_B, k) for k in range(int(right_B.max()) + 1)):
                rows = num_requests + int(drafts_B.sum())
                seconds = self._machine.step_s(num_requests, rows, True)
                if self._model_P is not None:
                    seconds += self._machine.draft_s(rows, num_requests, depth)
                steps.append((rows / seconds, depth, drafts_B, seconds))
        _, depth, drafts_B, seconds = max(steps, key=lambda step: step[0])
        return drafts_B, depth, seconds


def shares(
    record: Record, machine: Machine, order: Sequence[int], at_a_time: int | None = None
) -> list[tuple[float, float]]:
    """Returns the engine's speed in each batch, divided by that of `RatesReplay`, and divided by that of `Hindsight`."""
    ways = ways_of(record)
    ours = Replay(record, ways["all"], machine)
    by_rates = [RatesReplay(record, ways[way], machine) for way in ("all", "text")]
    known = [Hindsight(record, machine, has_model) for has_model in (True, False)]
    found = []
    for batch in order:
        rate = ours.play(batch, at_a_time).rate
        allowed, possible = (max(one.play(batch, at_a_time).rate for one in both) for both in (by_rates, known))
        found.append((rate / allowed, rate / possible))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table for a record of proposals."""
    options = options_of(__doc__, arguments)
    record = Record.load(options.record)
    machine = MACHINES[options.machine]
    order = sorted(set(record.batch_R.tolist()))
    print(f"{options.machine}: our speed over what the board's rates allow, and over hindsight")
    print("batch  over rates  over hindsight")
    for batch, (of_rates, of_hindsight) in zip(order, shares(record, machine, order, options.at_a_time), strict=True):
        print(f"{batch:<7}{of_rates:10.3f}{of_hindsight:16.3f}")


if __name__ == "__main__":
    main()
