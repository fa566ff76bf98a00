# SPDX-License-Identifier: Apache-2.0
"""Prints the tokens of an engine with drafters as JSON: for each kind of sampling, the token ids of each request.

With TRITON_INTERPRET=1, Triton interprets vLLM's own kernels instead of our bodies for a CPU. `test_kernels.py` runs this.
"""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from conftest import STEP_ADDER
from test_equality import SAMPLINGS, SUFFIX, requests

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from lab.local.run_sections import GenerationConfig, VllmConfig
from lab.vllm_on_cpu.platform import CpuPlatformForV2
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig

if os.environ.get("TRITON_INTERPRET") == "1":
    CpuPlatformForV2.register_triton_kernel_overrides = staticmethod(lambda: None)
head = Eagle3DrafterConfig(model=str(STEP_ADDER.parent / "step_adder_eagle3"))
block = SpecrolloutConfig(drafters=(head, SUFFIX), budget=RANDOM)
small = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 1 << 26}
generation = GenerationConfig(VllmConfig(max_model_len=512), 40, vllm_kwargs=small, specrollout=block)
engine = RolloutEngine(STEP_ADDER, generation, seed=7)
made = {name: engine.generate(requests(8, 2), **SAMPLINGS[name]) for name in ("T=1", "T=0")}
stats = engine.stats()
assert stats is not None
print("TOKENS", json.dumps({name: [r.token_ids for r in rollouts] for name, rollouts in made.items()}))
print("ACCEPTED", sum(map(sum, stats.accepted)))
engine.close()
