# SPDX-License-Identifier: Apache-2.0
"""Item of the GPU check with a real model: SmolLM2-135M in bfloat16, with its head and text drafters."""

from pathlib import Path

from lab.gpu.gpu_stage import (
    HEAD,
    POLICY,
    SEED,
    STOCK,
    Findings,
    block,
    start_engine,
    task_requests,
    timed,
)
from lab.gpu.items import smollm2, smollm2_head
from lab.local.step_addition import make_problems
from lab.local.step_rollout import load_tokenizer
from lab.local.tasks import encode_chat
from nemo_specrollout.generation.engine.requests import RolloutRequest


def real(findings: Findings) -> None:
    """Measures the tokens per second of stock vLLM, of our sampler without drafters, and of all drafters."""
    policy, head = findings.size((smollm2(), smollm2_head()), (POLICY, HEAD))
    warm_up, *batches = [task_requests(2, 2)] * 2 if findings.is_rehearsal else _batches(policy)
    ways = {"stock": STOCK, "no drafts": block(), "all": block("suffix", "ngram", "eagle3", head=head)}
    for way, specrollout in ways.items():
        engine = start_engine(policy, specrollout, eager=False, precision="bfloat16", length=findings.size(1024, 512))
        engine.generate(warm_up, max_tokens=64)
        for requests in batches:
            name = f"{len(requests)} requests"
            _, figures = timed(engine, requests)
            findings.note(f"{name}, {way}", figures)
            findings.check(way != "all" or figures.get("accepted", 0) > 0, f"{name}: no draft was accepted")
        engine.close()


def _batches(policy: Path) -> list[list[RolloutRequest]]:
    """Returns three batches of 64, 64 and 8 requests, with 4 samples of each prompt. A prompt asks for a sum of numbers.

    No prompt is in two batches, because drafters remember texts.
    """
    tokenizer = load_tokenizer(policy)
    sums = [" + ".join(map(str, problem.terms)) for problem in make_problems(SEED, 34)]
    texts = [f"State the final answer to the following arithmetic problem: {each} =" for each in sums]
    requests = [RolloutRequest(encode_chat(tokenizer, t), i, s) for i, t in enumerate(texts) for s in range(4)]
    return [requests[:64], requests[64:128], requests[128:]]
