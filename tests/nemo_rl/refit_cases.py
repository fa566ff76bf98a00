# SPDX-License-Identifier: Apache-2.0
"""refit_cases.py native|ours BASE.yaml: a refit of a trainer's draft head into NeMo-RL's own generation worker, in this
process, on vLLM's V2 model runner.

Prints a JSON object: which of the engine's weights are those that the refit sent.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ["NEMO_SPECROLLOUT_V2_ON_CPU"] = "1"

import torch
from engine_cases import generation_config
from nemo_rl.models.generation.vllm import vllm_worker
from safetensors.torch import load_file

from nemo_specrollout.nemo_rl.engine_actors import EngineActor

HEAD = Path(os.environ["TINY"]) / "eagle3"
SPECULATIVE_CONFIG = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 2}
# Of the head and of the engine's drafter; the policy's would be overwritten if the two shared theirs.
PLACES = {"lm_head.weight": "lm_head.weight", "fc.weight": "model.fc.weight", "norm.weight": "model.norm.weight"}


def refit(worker: Any, sent: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Runs in the engine's worker."""
    runner = worker.model_runner
    policy = {name: p.clone() for name, p in runner.model.named_parameters()}
    worker._load_weights([(f"draft.{name}", tensor) for name, tensor in sent.items()])
    draft = dict(runner.speculator.model.named_parameters())
    found = {name: torch.equal(draft[place], sent[name]) for name, place in PLACES.items()}
    found["policy_kept"] = all(torch.equal(p, policy[name]) for name, p in runner.model.named_parameters())
    return found


def main(which: str, base: Path) -> dict[str, bool]:
    config = generation_config(base, {"enabled": which == "ours"}, SPECULATIVE_CONFIG)
    config["vllm_cfg"]["load_format"] = "dummy"  # as with policy.draft.enabled
    cls = {"native": vllm_worker.VllmGenerationWorkerImpl, "ours": EngineActor}[which]
    worker = cls(config, bundle_indices=[0], seed=0)
    sent = {name: tensor + 1 for name, tensor in load_file(HEAD / "model.safetensors").items()}
    (found,) = worker.llm.collective_rpc(refit, args=(sent,))
    worker.shutdown()
    return found


if __name__ == "__main__":
    print("FOUND " + json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
