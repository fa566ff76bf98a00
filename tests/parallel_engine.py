# SPDX-License-Identifier: Apache-2.0
"""Rolls out eight requests in a tensor-parallel engine, and prints their tokens as a line of JSON.

Usage: parallel_engine.py MODEL RANKS BLOCK [host|late], with the block as JSON. The budget `random` stands for the policies of
`lab.local.random_budgets`. With `host`, the host chooses the drafts of each step, as it must before vLLM 0.32; with `late`, by
rates that are a step old, as on a GPU. The line then has the drafts that each rank kept in each step, how many objects and
tensors the ranks told each other while they generated, and the number of steps. If the block names a folder for what engines
learn, the line also has what each rank began with, and the engine keeps what it has learned.
"""

import json
import sys
from dataclasses import replace
from typing import Any

from vllm import LLM, SamplingParams

from lab.local.random_budgets import randomise
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation.engine.arguments import NEWEST_VLLM, with_specrollout
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import RolloutRequest, rollout_extra_args
from nemo_specrollout.generation.engine.transfers import HostCopy


def note_kept_drafts(worker: Any) -> None:
    """Makes a worker note how many drafts of each request its host keeps in each step, and count the objects that are told."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    budget = worker.specrollout_host_budget
    broadcast = group.broadcast
    trimmed = budget.trimmed
    broadcast_object = group.broadcast_object
    worker.kept_drafts = []
    worker.num_told = 0
    worker.num_tensors = 0
    worker.first_step = worker.specrollout_accounts.trace.num_steps

    def noting(scheduled: Any) -> Any:
        result = trimmed(scheduled)
        asked, kept = (
            {name: len(tokens) for name, tokens in each.scheduled_spec_decode_tokens.items()}
            for each in (scheduled, result)
        )
        if asked:
            worker.kept_drafts.append([asked, kept])
        return result

    def telling(*args: Any, **options: Any) -> Any:
        worker.num_told += 1
        return broadcast_object(*args, **options)

    def telling_tensor(*args: Any, **options: Any) -> Any:
        worker.num_tensors += 1
        return broadcast(*args, **options)

    budget.trimmed = noting
    group.broadcast_object = telling
    group.broadcast = telling_tensor


def be_late(worker: Any) -> None:
    """Gives a worker's host rates that are a step old."""
    worker.specrollout_host_budget.read(HostCopy(worker.specrollout_router.board.tables.rates_SK, is_late=True))


def began_with(worker: Any) -> Any:
    """Returns what a rank began with: the sentence, the board's evidence, and the coefficients of the step model."""
    evidence_DE2 = worker.specrollout_router.board.tables.evidence_DE2
    coefficients_X = worker.specrollout_accounts.step_model._steps.coefficients_X
    return worker.specrollout_kept.warm_start.sentence, evidence_DE2.tolist(), coefficients_X.tolist()


def keep(worker: Any) -> None:
    """Lets a rank keep what it has learned, and waits for that."""
    worker.specrollout_keep_learned()
    worker.specrollout_kept.warm_start.settle()


def kept_drafts_of(worker: Any) -> Any:
    """Returns the drafts of each request that were scheduled, and those that were kept, in each step with drafts.

    The other results are the numbers of objects and of tensors that the ranks told each other, and of steps.
    """
    num_steps = worker.specrollout_accounts.trace.num_steps - worker.first_step
    return worker.kept_drafts, worker.num_told, worker.num_tensors, num_steps


def main(
    model: str, ranks: int, block: SpecrolloutConfig, *, at_random: bool, host_chooses: bool, is_late: bool
) -> None:
    llm = LLM(
        model=model,
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        enforce_eager=True,
        max_model_len=96,
        dtype="float32",
        max_num_seqs=16,
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks,
        **with_specrollout({}, block, "cpu", replace(NEWEST_VLLM, chooses_on_device=not host_chooses)),
    )
    if is_late:
        llm.collective_rpc(be_late)
    if host_chooses:
        llm.collective_rpc(note_kept_drafts)
    if at_random:
        llm.collective_rpc(randomise)
    learns = block.learned.folder is not None
    began = llm.collective_rpc(began_with) if learns else None
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=60,
            ignore_eos=True,
            detokenize=False,
            extra_args=rollout_extra_args(RolloutRequest((), i, 0)),
        )
        for i in range(8)
    ]
    outputs = llm.generate([{"prompt_token_ids": [5 + i, 6, 7]} for i in range(8)], params, use_tqdm=False)
    totals = llm.collective_rpc(WorkerCalls.specrollout_totals.__name__)
    reporting = [t for t in totals if t is not None]
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    kept = llm.collective_rpc(kept_drafts_of) if host_chooses else None
    if learns:
        llm.collective_rpc(keep)
    facts = {"ranks": len(totals), "totals": reporting, "kept_drafts": kept, "began": began}
    print(json.dumps({"tokens": tokens, **facts}))


if __name__ == "__main__":
    given = json.loads(sys.argv[3])
    at_random = given.get("budget") == {"policy": "random"}
    block = build(SpecrolloutConfig, given | ({"budget": {"policy": "fixed", "k": 8}} if at_random else {}), BLOCK_PATH)
    options = sys.argv[4:]
    main(
        sys.argv[1],
        int(sys.argv[2]),
        block,
        at_random=at_random,
        host_chooses=bool(options),
        is_late="late" in options,
    )
