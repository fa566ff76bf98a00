# SPDX-License-Identifier: Apache-2.0
"""Records which drafts an engine verifies in each engine step under the automatic budget, so that two engines can be compared.

    python -m lab.bench.host_decisions OUT.json [--host] [--late] [--against OTHER.json]

The engine decodes greedily with text drafters and `run_ahead`. It decodes the same requests twice, first without texts made
ahead, and then with right ones for half of the requests. It does not measure the seconds of engine steps, but gets fixed ones,
so that engines of all versions of vLLM decide by the same figures. With `--host` the host chooses the drafts even where the
device could. With `--late` the host knows acceptance rates that are one engine step old, as on a GPU.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.local.engine import RolloutEngine
from lab.local.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.engine import arguments
from nemo_specrollout.generation.engine.requests import RolloutRequest, as_bytes
from nemo_specrollout.speculation.step_model import StepModel

POLICY = Path(__file__).parents[2] / "examples" / "models" / "step_adder"
BLOCK = SpecrolloutConfig(
    drafters=(SuffixDrafterConfig(), NgramDrafterConfig()), run_ahead=RunAheadConfig(most_drafts=32)
)
REQUESTS = [RolloutRequest([*range(40 + i, 44 + 2 * i)], i, 0) for i in range(4)]
MOST_ROWS = 512


class GivenSeconds(StepModel):
    """A step model with fixed step times like a GPU's. It learns nothing from the steps of the engine that uses it."""

    def __init__(self) -> None:
        super().__init__(MOST_ROWS)
        for rows in (4, 16, 64, 256, MOST_ROWS):
            super().observe(4, rows, 0.005 + 5e-5 * rows)

    def observe(self, *_: Any) -> None:
        """Ignores an engine step."""


def prepare(worker: Any, is_late: bool) -> None:
    """Gives a worker fixed step times, and makes it record the number of drafts that it verifies.

    The worker's attribute `verified` gets a list for each engine step, of pairs of a request slot and its number of drafts.
    With `is_late`, the host knows acceptance rates that are one engine step old.
    """
    from nemo_specrollout.generation.engine.transfers import HostCopy

    runner = worker.model_runner
    router = worker.specrollout_router
    worker.specrollout_accounts.step_model = GivenSeconds()
    router.policy.costs = worker.specrollout_accounts.step_model.costs()
    if is_late and worker.specrollout_host_budget is not None:
        worker.specrollout_host_budget.read(HostCopy(router.board.tables.rates_SK, is_late=True))
    sample_tokens = runner.sample_tokens
    worker.verified = []

    def noting(*args: Any) -> Any:
        state = runner.execute_model_state
        if state is not None and state.input_batch.num_draft_tokens:
            batch = state.input_batch
            drafts = (batch.cu_num_logits.diff() - 1).tolist()
            worker.verified.append(sorted(zip(batch.idx_mapping_np.tolist(), drafts, strict=False)))
        return sample_tokens(*args)

    runner.sample_tokens = noting


def decisions(is_late: bool, **options: Any) -> dict[str, Any]:
    """Returns the drafts verified in each engine step, all tokens, and whether the host has chosen the drafts.

    The drafts of a step are pairs of a request slot and its number of drafts. `options` are more arguments of the engine.
    """
    generation = GenerationConfig(VllmConfig(max_model_len=512), 40, specrollout=BLOCK)
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 1 << 26}
    engine = RolloutEngine(POLICY, generation, 0, **sizes, **options)
    engine.run_in_worker(lambda worker: prepare(worker, is_late))
    plain = engine.generate(REQUESTS, temperature=0.0)
    pairs = list(zip(REQUESTS, plain, strict=True))
    with_texts = [replace(q, ahead=as_bytes(r.token_ids) if i % 2 else b"") for i, (q, r) in enumerate(pairs)]
    again = engine.generate(with_texts, temperature=0.0)
    steps = engine.run_in_worker(lambda worker: worker.verified)
    tokens = [list(rollout.token_ids) for rollout in (*plain, *again)]
    return {"host": bool(engine.facts()["host_chooses_drafts"]), "steps": steps, "tokens": tokens}


def main() -> None:
    """Writes the decisions to a file. With `--against`, also prints how many of them equal another engine's decisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--host", action="store_true", help="the host chooses the drafts")
    parser.add_argument("--late", action="store_true", help="by rates that are a step old")
    parser.add_argument("--against", type=Path, help="decisions of another engine")
    options = parser.parse_args()
    if options.host:
        arguments.host_choice = lambda *_: "asked to"
    found = decisions(options.late)
    options.out.write_text(json.dumps(found) + "\n")
    steps = json.loads(json.dumps(found["steps"]))
    drafts = [number for step in steps for _, number in step]
    print(f"the {'host' if found['host'] else 'device'} chose in {len(steps)} steps; most drafts: {max(drafts)}")
    if options.against:
        other = json.loads(options.against.read_text())
        same = sum(a == b for a, b in zip(steps, other["steps"], strict=False))
        equal = "the same tokens" if found["tokens"] == other["tokens"] else "OTHER TOKENS"
        print(f"{same} of {max(len(steps), len(other['steps']))} steps verify the same drafts; {equal}")


if __name__ == "__main__":
    main()
