# SPDX-License-Identifier: Apache-2.0
"""A thousand rollouts with refits: memory, file descriptors and threads do not grow once all that has a bound is full."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(3600)]

NUM_ROLLOUTS, FIRST, HALF = 1000, 50, 500
# Mebibytes by which memory may grow after the first rollouts, and in the second half of all. vLLM without anything of ours
# grows by 5 in the first half and by 0.3 in the second; a leak of 0.12 a rollout, as was once measured, is 60 in each.
MAX_MIB, MAX_IN_SECOND_HALF_MIB = 16.0, 2.0


def soak(model: Path, num_rollouts: int) -> None:
    """Rolls out and refits again and again; a line of JSON for each rollout. Runs in a process of its own."""
    import psutil
    from safetensors.torch import load_file

    from lab.local.engine import RolloutEngine
    from lab.local.run_sections import GenerationConfig, VllmConfig
    from nemo_specrollout.config.block import SpecrolloutConfig
    from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    # A small KV cache and small indices: memory that is set aside at the start is first used as it is needed.
    block = SpecrolloutConfig(drafters=(SuffixDrafterConfig(num_slots=1 << 12), NgramDrafterConfig(num_slots=1 << 12)))
    kwargs = {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 21}
    generation = GenerationConfig(VllmConfig(max_model_len=128), 24, vllm_kwargs=kwargs, specrollout=block)
    engine, weights, process = (
        RolloutEngine(model, generation, seed=7),
        load_file(model / "model.safetensors"),
        psutil.Process(),
    )
    for step in range(num_rollouts):
        prompts = [[5 + (step * 7 + i * 11 + j) % 80 for j in range(24)] for i in range(4)]
        requests = [RolloutRequest(ids, 4 * step + i, s, step) for i, ids in enumerate(prompts) for s in range(2)]
        engine.generate(requests)
        engine.take_sample_stats(requests)
        stats = engine.counters()
        assert stats is not None
        engine.load_weights((name, tensor * (1 + 1e-4 * (step % 3))) for name, tensor in weights.items())
        line = {"rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads()}
        print(json.dumps(line | {"steps": stats.num_steps}), flush=True)
    engine.close()


def test_a_thousand_rollouts_leave_nothing_behind(tiny_model: Path) -> None:
    here = Path(__file__).parent
    code = f"""
import sys
sys.path[:0] = {[str(here), str(here.parent)]!r}
from pathlib import Path
import conftest, test_soak
test_soak.soak(Path({str(tiny_model)!r}), {NUM_ROLLOUTS})
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == NUM_ROLLOUTS
    mib = np.array([line["rss"] for line in lines]) / (1 << 20)
    at = {number: mib[number : number + 25].mean() for number in (0, FIRST, HALF, NUM_ROLLOUTS - 25)}
    print("RSS after n rollouts, MiB:", ", ".join(f"{number}: {size:.1f}" for number, size in at.items()))
    for name in ("fds", "threads"):
        counts = [line[name] for line in lines[FIRST:]]
        assert max(counts) - min(counts) <= 2, (name, min(counts), max(counts))
    assert at[NUM_ROLLOUTS - 25] - at[FIRST] < MAX_MIB
    assert at[NUM_ROLLOUTS - 25] - at[HALF] < MAX_IN_SECOND_HALF_MIB
