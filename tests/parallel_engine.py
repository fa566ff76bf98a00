# SPDX-License-Identifier: Apache-2.0
"""Rolls out eight requests in a tensor-parallel engine, and prints their tokens as a line of JSON.

Usage: parallel_engine.py MODEL RANKS BLOCK, with the block as JSON. The budget
`random` stands for the policies of `lab.local.random_budgets`.
"""

import json
import sys

from vllm import LLM, SamplingParams

from lab.local.random_budgets import randomise
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation.engine.arguments import with_specrollout
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import RolloutRequest, rollout_extra_args


def main(model: str, ranks: int, block: SpecrolloutConfig, *, at_random: bool) -> None:
    llm = LLM(
        model=model,
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        enforce_eager=True,
        max_model_len=96,
        dtype="float32",
        max_num_seqs=16,
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks,
        **with_specrollout({}, block, "cpu"),
    )
    if at_random:
        llm.collective_rpc(randomise)
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
    print(
        json.dumps(
            {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "ranks": len(totals), "totals": reporting}
        )
    )


if __name__ == "__main__":
    given = json.loads(sys.argv[3])
    at_random = given.get("budget") == {"policy": "random"}
    block = build(SpecrolloutConfig, given | ({"budget": {"policy": "fixed", "k": 8}} if at_random else {}), BLOCK_PATH)
    main(sys.argv[1], int(sys.argv[2]), block, at_random=at_random)
