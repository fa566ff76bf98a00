# SPDX-License-Identifier: Apache-2.0
"""engine_cases.py native|ours BASE.yaml: NeMo-RL's own generation worker in this process, natively or with ours.

Prints a JSON object: for each case of sampling parameters the tokens, of ours with and without drafts; natively also
whether the arguments with which NeMo-RL would start vLLM are the same with the block off as without one.
"""

import copy
import json
import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
# NeMo-RL gives it to the actor of an engine. Its own engine is on vLLM's usual model runner for a CPU.
os.environ.setdefault("NEMO_SPECROLLOUT_V2_ON_CPU", str(int(sys.argv[1] == "ours")))

import ray
import torch
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.models.generation.vllm import vllm_worker

from nemo_specrollout.config.load import load_config
from nemo_specrollout.nemo_rl.engine_actors import EngineActor
from nemo_specrollout.nemo_rl.installation import install
from nemo_specrollout.nemo_rl.row_seeds import SEEDS_KEY, RowSeeds

ray.get_gpu_ids = lambda: [0]  # NeMo-RL's worker asks for its GPU; here it is no actor

BLOCK = {"enabled": True, "budget": {"policy": "fixed", "k": 8}}
# What NeMo-RL passes to SamplingParams, one at a time. Where tokens are compared with NeMo-RL's own engine, whose noise
# is another, the case is one that leaves no choice: greedy, or a filter that keeps a single token.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "stop_token_ids": {"greedy": True, "stop_token_ids": list(range(100, 160))},
    "stop_strings": {"greedy": True, "stop_strings": ["2"]},
    "bad_words": {"greedy": True, "bad_words": ["1"]},
    "ignore_eos": {"greedy": True, "ignore_eos": True, "stop_token_ids": []},
    "max_new_tokens": {"greedy": True, "max_new_tokens": 7},
    "context_end": {"greedy": True, "max_new_tokens": 200, "vllm_cfg.cap_max_tokens_to_context": True},
    "temperature": {"temperature": 0.7},
    "sampled_top_k_top_p": {"top_k": 20, "top_p": 0.9},
}


def generation_config(
    base: Path, block: dict[str, Any] | None, speculative_config: dict[str, Any] | None = None
) -> dict[str, Any]:
    folder = f"logger.log_dir={mkdtemp()}"  # none of the checkout
    tree = load_config(base, ["policy.generation.vllm_cfg.skip_tokenizer_init=false", folder])
    if block is not None:
        tree["policy"]["generation"]["specrollout"] = block
    if speculative_config is not None:
        tree["policy"]["generation"]["vllm_kwargs"] = {"speculative_config": speculative_config}
    config = MasterConfig(**tree)
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(config.policy["generation"], tokenizer)
    config.policy["generation"]["model_name"] = config.policy["model_name"]
    config.policy["generation"]["vllm_cfg"] |= {"load_format": "auto", "skip_tokenizer_init": False}
    install(config)
    return config.policy["generation"]


def prompts() -> BatchedDataDict[Any]:
    rows = [[40 + i, 50, 60 + i, 70] for i in range(6)]
    data = BatchedDataDict({"input_ids": torch.tensor(rows), "input_lengths": torch.full((6,), 4)})
    data[SEEDS_KEY] = torch.tensor(RowSeeds(42).seeds(rows))
    return data


def tokens(worker: Any, case: dict[str, Any]) -> list[list[int]]:
    """Each row's response under the worker's own config, changed as the case says."""
    native, case = worker.cfg, dict(case)
    worker.cfg = copy.deepcopy(native)
    greedy = case.pop("greedy", False)
    for name, value in case.items():
        block, _, key = name.rpartition(".")
        (worker.cfg[block] if block else worker.cfg)[key] = value
    out = worker.generate(prompts(), greedy=greedy)
    worker.cfg = native
    ends = out["unpadded_sequence_lengths"].tolist()
    return [row[4:end].tolist() for row, end in zip(out["output_ids"], ends, strict=True)]


def answers(cls: Any, config: dict[str, Any]) -> dict[str, Any]:
    worker = cls(config, bundle_indices=[0], seed=0)
    found = {name: tokens(worker, case) for name, case in CASES.items()}
    worker.shutdown()
    return found


class _NoEngine(vllm_worker.VllmGenerationWorkerImpl):
    """NeMo-RL's worker up to the moment when it would start vLLM."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        self.llm, self.llm_kwargs = None, llm_kwargs


def engine_kwargs(config: dict[str, Any]) -> str:
    return json.dumps(_NoEngine(config, bundle_indices=[0], seed=0).llm_kwargs, sort_keys=True, default=str)


def native(base: Path) -> dict[str, Any]:
    """A process of its own: vLLM appends NeMo-RL's extension to its own worker class, of which ours is a subclass."""
    absent, off = generation_config(base, None), generation_config(base, {"enabled": False})
    return {
        "same_engine_arguments": engine_kwargs(absent) == engine_kwargs(off),
        "changed_keys": [k for k in absent if k != "specrollout" and absent[k] != off.get(k)],
        "native": answers(vllm_worker.VllmGenerationWorkerImpl, off),
    }


def ours(base: Path) -> dict[str, Any]:
    return {
        "plain": answers(EngineActor, generation_config(base, {"enabled": True, "drafters": []})),
        "drafted": answers(EngineActor, generation_config(base, BLOCK)),
    }


if __name__ == "__main__":
    print("ANSWERS " + json.dumps({"native": native, "ours": ours}[sys.argv[1]](Path(sys.argv[2]))))
