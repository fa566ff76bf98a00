# SPDX-License-Identifier: Apache-2.0
"""exact_verification.py: tokens of vLLM's V2 model runner with speculation, against those without it, at T=0 and T=1.

Runs vLLM's own engines on this CPU. Nothing of this package takes part but the platform that lets V2 start on a CPU.
Verifies by `rejection_sample_method: exact` where this vLLM has it, else by `standard`.
"""

import json
from typing import Any, get_args

from cpu_engine import MODELS
from outcome import report
from vllm import LLM, SamplingParams
from vllm.config.speculative import RejectionSampleMethod

POLICY, HEAD = str(MODELS / "step_adder"), str(MODELS / "step_adder_eagle3")
METHOD = "exact" if "exact" in get_args(RejectionSampleMethod) else "standard"
NUM_DRAFTS, MAX_TOKENS, NUM_SAMPLES = 3, 48, 4
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3, greedy drafts": {"method": "eagle3", "model": HEAD},
    "eagle3, sampled drafts": {"method": "eagle3", "model": HEAD, "draft_sample_method": "probabilistic"},
    "the policy as draft model, sampled drafts": {
        "method": "draft_model",
        "model": POLICY,
        "draft_sample_method": "probabilistic",
    },
    "n-gram": {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
TEXTS = ["12+7+5=", "3+4=", "99+1+2+3=", "8+8+8+8="]


def decode(speculative: dict[str, Any] | None) -> tuple[list[list[int]], int, int]:
    """The tokens of each request, the number of drafts that were verified and of those that were accepted."""
    llm = LLM(
        POLICY,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    tokenizer = llm.get_tokenizer()
    settings = [(text, 1.0, seed) for text in TEXTS for seed in range(NUM_SAMPLES)] + [(text, 0.0, 0) for text in TEXTS]
    outputs = llm.generate(
        [{"prompt_token_ids": tokenizer.encode(text)} for text, _, _ in settings],
        [SamplingParams(temperature=t, seed=1000 + s, max_tokens=MAX_TOKENS, ignore_eos=True) for _, t, s in settings],
        use_tqdm=False,
    )
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    drafted, accepted = (int(counts.get(f"vllm:spec_decode_num_{what}_tokens", 0)) for what in ("draft", "accepted"))
    return tokens, drafted, accepted


def main() -> None:
    plain, _, _ = decode(None)
    total, lines, is_right = sum(map(len, plain)), {}, True
    for name, drafter in DRAFTERS.items():
        config = {**drafter, "num_speculative_tokens": NUM_DRAFTS, "rejection_sample_method": METHOD}
        tokens, drafted, accepted = decode(config)
        equal = sum(a == b for p, q in zip(plain, tokens, strict=True) for a, b in zip(p, q, strict=True))
        is_right &= equal == total and accepted > 0
        lines[name] = {"equal": equal, "of": total, "drafted": drafted, "accepted": accepted}
        print(name, json.dumps(lines[name]), flush=True)
    worst = min(lines.values(), key=lambda line: line["equal"])
    report(is_right, f"`{METHOD}`: {worst['equal']} of {total} tokens equal with the worst of {len(lines)} drafters")


if __name__ == "__main__":
    main()
