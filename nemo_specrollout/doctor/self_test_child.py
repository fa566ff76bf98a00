# SPDX-License-Identifier: Apache-2.0
"""A child of `doctor`: plain and drafted decoding of a random model on the device that is here, and what differs."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.config.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.doctor.child import Tell, answer
from nemo_specrollout.doctor.tiny_model import LONGEST_TEXT, VOCABULARY, make_tiny_model

PLAIN = SpecrolloutConfig(drafters=())
DRAFTED = SpecrolloutConfig(drafters=(SuffixDrafterConfig(), NgramDrafterConfig()), budget=BudgetConfig("random"))
TEMPERATURES = (0.0, 1.0)
NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 4, 4, 48
_SEED = 7
# The share of a GPU's memory that must be free; a tiny model takes far less.
_SHARE = 0.1


def try_engines(order: Any, tell: Tell) -> None:
    """Tells what is in force in an engine, then of each temperature how many tokens are equal, then drafts and seconds."""
    from nemo_specrollout.generation.engine import RolloutEngine

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        make_tiny_model(model)
        rollouts, stats = {}, None
        for way, block in {"plain": PLAIN, "drafted": DRAFTED}.items():
            engine = RolloutEngine(model, _generation(block), _SEED)
            tell("facts", {**engine.facts(), **engine.device_facts()})
            rollouts[way] = [engine.generate(_requests(), temperature=t) for t in TEMPERATURES]
            stats = engine.stats()
            engine.close()
    for temperature, plain, drafted in zip(TEMPERATURES, rollouts["plain"], rollouts["drafted"], strict=True):
        tell(f"T={temperature:g}", compared([r.token_ids for r in plain], [r.token_ids for r in drafted]))
    counts = ("drafters", "proposed", "accepted")
    tell("drafts", {key: getattr(stats, key) for key in counts})
    tell("seconds", time.perf_counter() - started)


def _generation(block: SpecrolloutConfig) -> GenerationConfig:
    kwargs = {"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26, "gpu_memory_utilization": _SHARE}
    engine = VllmConfig(LONGEST_TEXT, "float32", True)
    return GenerationConfig(engine, NUM_TOKENS, vllm_kwargs=kwargs, specrollout=block)


def _requests() -> list[Any]:
    """Samples of prompts that repeat themselves, so that both drafters find something."""
    from nemo_specrollout.generation.requests import RolloutRequest

    prompts = [[(7 * p + 11 * i) % VOCABULARY for i in range(8)] * 3 for p in range(NUM_PROMPTS)]
    return [
        RolloutRequest(ids, p, s, exact_length=NUM_TOKENS) for p, ids in enumerate(prompts) for s in range(NUM_SAMPLES)
    ]


def compared(plain: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Tokens that are equal at their position, all tokens, and where the first difference is; None if there is none.

    The first difference is the number of the response, the position, and both tokens; -1 stands for a response's end.
    """
    equal, total, first = 0, 0, None
    for i, (a, b) in enumerate(zip(plain, drafted, strict=True)):
        pairs = [(a[j] if j < len(a) else -1, b[j] if j < len(b) else -1) for j in range(max(len(a), len(b)))]
        equal, total = equal + sum(x == y for x, y in pairs), total + len(pairs)
        differing = next((j for j, (x, y) in enumerate(pairs) if x != y), None)
        if first is None and differing is not None:
            first = [i, differing, *pairs[differing]]
    return {"equal": equal, "total": total, "first": first}


if __name__ == "__main__":
    answer(try_engines)
