# SPDX-License-Identifier: Apache-2.0
"""What `nemo-specrollout explain` says of the tail of a rollout: what must hold for moves and races, and when that is so."""

from collections.abc import Iterator

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.scheduling.racing.draft_ladder import methods_of
from nemo_specrollout.scheduling.racing.straggler_policy import LEAST_CHANCE, RACE_PREMIUM
from nemo_specrollout.simulation.compare import Comparison
from nemo_specrollout.simulation.configured import TAIL, onset


def tail_lines(block: SpecrolloutConfig, expected: Comparison | None) -> Iterator[str]:
    """Sentences; `expected` is None where nothing can be predicted."""
    tail = block.fastest_of_n
    if tail is None or not tail.enabled:
        yield "off: no request moves or races; the block fastest_of_n turns it on"
        return
    yield from _conditions(tail, block)
    yield from _predicted(expected)


def _conditions(tail: FastestOfNConfig, block: SpecrolloutConfig) -> Iterator[str]:
    """What must hold."""
    methods = methods_of(block)
    if tail.moving:
        yield (
            "a request moves if another worker has room and the later end of the two workers comes forward by more than "
            f"{tail.min_gain:.0%} of it (min_gain), and by more than a turn takes"
        )
    if tail.max_racers > 1 and len(methods) > 1:
        yield (
            f"it is raced, by {tail.max_racers} workers at most (max_racers), if the same holds where the first racer to end "
            f"counts, it is the last of its worker, the other drafts in another way ({', '.join(methods)}), and that promises "
            f"{RACE_PREMIUM:.0%} more than a move; a racer with less than {LEAST_CHANCE:.0%} of a chance gives up"
        )
    elif tail.max_racers > 1:
        yield "no worker races: all draft alike; fastest_of_n.methods gives each its own"
    yield (
        "counted are the text so far, which the other worker computes again while its own requests wait, and that these are "
        "slower beside one more; so it begins when a worker has little or nothing left"
    )
    yield f"paces start from {tail.ladder}" if tail.ladder else "paces are learned while running (no ladder is named)"


def _predicted(expected: Comparison | None) -> Iterator[str]:
    """When it begins, how often it happens, and what it brings."""
    if expected is None:
        yield "when it begins: unknown without a prediction, see above"
        return
    with_tail = expected.steps[-1]
    if with_tail.variant != TAIL:
        yield "when it begins: never, there is one worker"
        return
    first = onset(with_tail)
    if first is None:
        yield "when it begins: never in the rollout that was simulated; no change is worth it"
        return
    without, counts = expected.steps[-2], with_tail.rollout
    steps = expected.scenario.training.num_steps if expected.scenario.training.mode == "async" else 1
    over = f" of {steps} steps" if steps > 1 else ""
    yield (
        f"when it begins: {first.at_s:.1f} s into a simulated rollout{over}, with {first.finished_share:.0%} of its requests "
        f"finished; {counts.num_moves} moves and {counts.num_races} races in all"
    )
    seconds, before = with_tail.rollout_s, without.rollout_s
    yield f"what it brings: a rollout of {seconds:.1f} s instead of {before:.1f}, {before / seconds:.2f}x (a prediction)"
