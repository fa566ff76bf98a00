# SPDX-License-Identifier: Apache-2.0
"""dummy_lm_head.py: whether an EAGLE-3 drafter's lm_head is the policy's where all weights are to come later."""

import os
from typing import Any

from cpu_engine import MODELS
from outcome import report
from vllm import LLM

PLACES = {"1": "speculator", "0": "drafter"}
"""Attribute of the model runner that owns the draft model, by the value of VLLM_USE_V2_MODEL_RUNNER."""


def shares_lm_head(worker: Any, owner: str) -> bool:
    """Runs in the engine's worker."""
    runner = worker.model_runner
    return getattr(runner, owner).model.lm_head.weight is runner.model.lm_head.weight


def main() -> None:
    found = {}
    for value, owner in PLACES.items():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = value
        llm = LLM(
            str(MODELS / "step_adder"),
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            speculative_config={
                "method": "eagle3",
                "model": str(MODELS / "step_adder_eagle3"),
                "num_speculative_tokens": 2,
            },
        )
        (found[f"V{int(value) + 1}"],) = llm.collective_rpc(shares_lm_head, args=(owner,))
        llm.llm_engine.engine_core.shutdown()
    said = ", ".join(f"{runner} {'shared' if is_shared else 'its own'}" for runner, is_shared in found.items())
    report(not any(found.values()), f"lm_head of the drafter: {said}")


if __name__ == "__main__":
    main()
