# SPDX-License-Identifier: Apache-2.0
"""The process of doctor's self-test: decodes with a random model, plainly and with drafts, and compares the tokens."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.config.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.doctor.child import Tell, answer

PLAIN = SpecrolloutConfig(drafters=())
DRAFTED = SpecrolloutConfig(drafters=(SuffixDrafterConfig(), NgramDrafterConfig()), budget=BudgetConfig("random"))
TEMPERATURES = (0.0, 1.0)
NUM_PROMPTS = 4
NUM_SAMPLES = 4
"""Samples of each prompt."""
NUM_TOKENS = 48
"""Length of each response, in tokens."""
VOCABULARY = 96
"""Tokens of the model's vocabulary."""
LONGEST_TEXT = 512
"""Longest text of the model, in tokens."""
_SHARPNESS = 12.0
"""Factor of the logits, with which samples differ from each other but some drafts are accepted."""
_SEED = 7
_SHARE = 0.1
"""Share of a GPU's memory that must be free; a tiny model takes far less."""


def try_engines(order: Any, tell: Tell) -> None:
    """Tells the settings in force, then for each temperature the number of equal tokens, then drafts."""
    from nemo_specrollout.generation.engine import RolloutEngine

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


def make_tiny_model(folder: Path, seed: int = 0) -> None:
    """Writes config and weights of a random Qwen3 of two layers, without a tokenizer, to `folder`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=LONGEST_TEXT, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(_SHARPNESS)
    model.save_pretrained(folder)


def _generation(block: SpecrolloutConfig) -> GenerationConfig:
    kwargs = {"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26, "gpu_memory_utilization": _SHARE}
    engine = VllmConfig(LONGEST_TEXT, "float32", True)
    return GenerationConfig(engine, NUM_TOKENS, vllm_kwargs=kwargs, specrollout=block)


def _requests() -> list[Any]:
    """Returns requests with prompts that repeat themselves, so that both drafters find continuations."""
    from nemo_specrollout.generation.requests import RolloutRequest

    prompts = [[(7 * p + 11 * i) % VOCABULARY for i in range(8)] * 3 for p in range(NUM_PROMPTS)]
    return [
        RolloutRequest(ids, p, s, exact_length=NUM_TOKENS) for p, ids in enumerate(prompts) for s in range(NUM_SAMPLES)
    ]


def compared(plain: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the number of equal tokens, of all tokens, and the first difference, None if there is none.

    A difference is the number of the response, the position, and both tokens; -1 stands for a response's end.
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
