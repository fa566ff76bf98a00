# SPDX-License-Identifier: Apache-2.0
"""pin_table.py DIR: the rows of docs/benchmarks/nemo-rl-pins.md for the runs that `make test-nemo-rl VLLM=...` kept in DIR.

DIR is NEMO_RL_RUNS/pin-VERSION. `test_pins.py` has what must hold; this prints how much of it there was.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from nemo_rl_host import Run, count_equal
from test_pins import PLAIN_OF, STEPS


def row(folder: Path, name: str) -> str:
    """A row of the table: rows equal to plain's, losses, Generation KL error, draft tokens, seconds."""
    run = Run(folder / name)
    equal = "-"
    if name in PLAIN_OF:
        counts = [count_equal(Run(folder / PLAIN_OF[name]), run, step) for step in STEPS]
        equal = f"{sum(same for same, _ in counts)} of {sum(total for _, total in counts)}"
    steps = run.metrics
    losses = ", ".join(f"{step['loss']:.4f}" for step in steps)
    kl = max(abs(step["gen_kl_error"]) for step in steps)
    drafted, accepted = drafts_of(run)
    if name == "megatron_eagle3":  # vLLM's own drafter, of whose drafts no sample tells
        drafted = round(sum(step["draft_tokens_per_request_step"] * step["request_steps"] for step in steps))
        accepted = round(num_request_steps(Run(folder / PLAIN_OF[name])) - num_request_steps(run))
    seconds = run.result["seconds"]
    return f"| {name} | {equal} | {losses} | {kl:.0e} | {drafted}, {accepted} | {seconds:.0f} |"


def drafts_of(run: Run) -> tuple[int, int]:
    """Draft tokens that a step verified, and those that were right, in all samples of a run."""
    samples = [sample for line in run.lines("samples.jsonl") for sample in line["samples"]]
    return sum(s["num_drafted"] for s in samples), sum(s["num_accepted"] for s in samples)


def num_request_steps(run: Run) -> float:
    """Engine steps of all requests, each of which brings a token and the drafts that are right."""
    return sum(step["request_steps"] for step in run.metrics)


def main(folder: Path) -> None:
    for place in sorted(folder.iterdir(), key=lambda path: path.stat().st_ctime):
        if Run(place).is_over:
            print(row(folder, place.name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
