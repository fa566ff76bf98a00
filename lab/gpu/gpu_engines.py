# SPDX-License-Identifier: Apache-2.0
"""Items of the GPU check that use the shipped policy.

They check tokens, bfloat16, waits, the head, sleep, and the defaults.
"""

import time
import warnings
from collections import Counter
from typing import Any

import torch
from safetensors.torch import load_file

from lab.gpu.gpu_stage import (
    GIB,
    POLICY,
    Findings,
    block,
    divergence,
    of_version,
    start_engine,
    task_requests,
    timed,
    verified,
)
from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM as RANDOM_BUDGET
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=0": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "T=1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}
MAX_PARTED = 1e-4
"""Largest share of tokens at which responses may part from plain decoding in float32. It is not 0, because rounding decides
near-ties."""
SYNC_TOKENS = 32
"""Number of tokens of a response in the item `syncs`."""
PLAIN = block()
TEXT = block("suffix", "ngram")
EAGLE3 = block("eagle3")
RANDOM = block("suffix", "ngram", "eagle3", budget=RANDOM_BUDGET)
ALL = block("suffix", "ngram", "eagle3")


def tokens(findings: Findings) -> None:
    """Compares the tokens of each kind of drafter with those of plain decoding, in float32 and without CUDA graphs."""
    _compare_tokens(findings, {"plain": PLAIN, "all, random budget": RANDOM, "text": TEXT, "eagle3": EAGLE3}, True)


def graphs(findings: Findings) -> None:
    """Compares the tokens of drafting with those of plain decoding, in float32 and with CUDA graphs.

    With graphs, the device chooses the drafts.
    """
    _compare_tokens(findings, {"plain": PLAIN, "all, random budget": RANDOM}, False)


def _compare_tokens(findings: Findings, ways: dict[str, SpecrolloutConfig], eager: bool) -> None:
    """Compares the tokens of each way with those of the first way, for several sampling parameters."""
    requests = task_requests(*findings.size((12, 4), (2, 2)))
    expected = dict[str, list[Rollout]]()
    for way, specrollout in ways.items():
        engine = start_engine(POLICY, specrollout, eager=eager)
        for name, sampling in SAMPLINGS.items():
            rollouts, figures = timed(engine, requests, **sampling)
            parted, compared = divergence(rollouts, expected.setdefault(name, rollouts))
            findings.note(f"{way}, {name}", {"parted": parted, **figures})
            text = f"{way}, {name}: {parted} of {len(requests)} responses part from plain decoding, {compared} tokens"
            findings.check(parted <= MAX_PARTED * compared, text)
        findings.check(not specrollout.drafters or verified(engine)[1] > 0, f"{way}: no draft was accepted")
        findings.note(way, {**engine.facts(), **as_text(engine.device_facts())}, "engines")
        engine.close()


def as_text(facts: dict[str, Any]) -> dict[str, str]:
    """Returns facts about a device as text. A list becomes one line."""
    return {name: ", ".join(value) if isinstance(value, list) else str(value) for name, value in facts.items()}


def bf16(findings: Findings) -> None:
    """Counts the responses in bfloat16 that differ between drafting and plain decoding.

    Also counts those that differ between plain decoding in one batch and in two batches of half the size. This shows the
    effect of the batch size alone.
    """
    requests = task_requests(*findings.size((32, 4), (2, 2)))
    plain = []
    for way, specrollout in {"plain": PLAIN, "text": TEXT}.items():
        engine = start_engine(POLICY, specrollout, eager=False, precision="bfloat16")
        rollouts, first = timed(engine, requests)
        _, figures = timed(engine, of_version(requests, 1))  # the first round may also compile kernels
        findings.note(way, {**figures, "ms a step at first": first["ms a step"]}, "speed")
        if way == "plain":
            plain = rollouts
            note_rate(findings, "plain in halves", in_halves(engine, requests, plain))
        else:
            note_rate(findings, way, divergence(rollouts, plain))
        engine.close()


def in_halves(engine: RolloutEngine, requests: list[RolloutRequest], plain: list[Rollout]) -> tuple[int, int]:
    """Generates the requests in two batches of half the size, and compares the responses with those of one batch, `plain`.

    Returns how many responses differ, and how many tokens were compared (`divergence`).
    """
    halves = [r for part in (requests[::2], requests[1::2]) for r in engine.generate(part)]
    return divergence(halves, [*plain[::2], *plain[1::2]])


def note_rate(findings: Findings, name: str, found: tuple[int, int]) -> None:
    """Notes how many responses differ from plain decoding, and the share of tokens at which they first differ."""
    parted, compared = found
    rate = parted / max(compared, 1)
    findings.note(f"{name} against plain", {"parted": parted, "tokens compared": compared, "a token": rate})


def syncs(findings: Findings) -> None:
    """Lists the places in the code at which the host waits for the device.

    The environment variable VLLM_GPU_SYNC_CHECK turns on torch's own check, which finds these places. Only a few dozen engine
    steps are checked, so that neither a slow host nor long responses make the item run out of time.
    """
    started = time.perf_counter()
    engine = start_engine(POLICY, ALL, eager=True)
    findings.note("start", {"seconds": time.perf_counter() - started}, "course")
    requests = task_requests(*findings.size((4, 4), (2, 2)))
    engine.generate(requests, max_tokens=SYNC_TOKENS)  # compiles kernels
    findings.note("first steps", {"seconds": time.perf_counter() - started}, "course")
    steps = engine.num_steps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.generate(of_version(requests, 1), max_tokens=SYNC_TOKENS)
    num_steps = engine.num_steps - steps
    places = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    proposed, accepted = verified(engine)
    findings.note("all", {"steps": num_steps, "drafts": proposed, "accepted": accepted}, "steps")
    for place, count in places.most_common(40):
        findings.note(place, {"waits": count, "a step": count / num_steps})
        findings.check("nemo_specrollout" not in place, f"we wait {count} times at {place}")
    engine.close()


def head(findings: Findings) -> None:
    """Measures engine steps, acceptance and drafting time of the EAGLE-3 head, by the number of tokens that it drafts."""
    _measure_head(findings, {})


def head_compiled(findings: Findings) -> None:
    """Measures the EAGLE-3 head as `head` does, but in bfloat16 and in engines with vLLM's default compilation."""
    _measure_head(findings, {"precision": "bfloat16", "compilation_config": {}})


def _measure_head(findings: Findings, options: dict[str, Any]) -> None:
    requests = task_requests(*findings.size((16, 4), (2, 2)))
    for depth in findings.size((1, 3), (2,)):
        started = time.perf_counter()
        engine = start_engine(POLICY, block("eagle3", budget=BudgetConfig("fixed", k=depth)), eager=False, **options)
        start_s = time.perf_counter() - started
        engine.generate(requests[:8])
        _, figures = timed(engine, requests)
        stats = engine.stats()
        assert stats is not None
        draft_s = stats.trace.column("draft_s")
        drafting = {"ms of drafting": 1e3 * float(draft_s.sum()) / max(int((draft_s > 0).sum()), 1)}
        findings.note(f"{depth} drafts", {"start, s": start_s, **figures, **drafting})
        findings.check(figures.get("accepted", 0) > 0, f"{depth} drafts: none was accepted")
        engine.close()


def sleep(findings: Findings) -> None:
    """Measures the GPU memory of an engine that is awake or asleep, and compares its tokens after waking with those before.

    The engine sleeps once at each of vLLM's two levels. After level 2 the weights are loaded again.
    """
    requests = task_requests(*findings.size((8, 2), (2, 2)))
    can_sleep = torch.cuda.is_available()
    engine = start_engine(POLICY, TEXT, eager=False, enable_sleep_mode=can_sleep)
    before = engine.generate(requests)
    for level in (1, 2):
        figures = {"GiB awake": _used_gib()}
        if can_sleep:
            engine._llm.sleep(level=level)
            figures["GiB asleep"] = _used_gib()
            engine._llm.wake_up()
        if level == 2:
            engine.load_weights(load_file(POLICY / "model.safetensors").items())
        parted, compared = divergence(engine.generate(requests), before)
        findings.note(f"level {level}", {**figures, "parted": parted, "tokens compared": compared})
        text = f"level {level}: {parted} of {len(requests)} responses differ after waking"
        findings.check(parted <= MAX_PARTED * compared, text)
    engine.close()


def _used_gib() -> float:
    """Returns the GiB of GPU memory that are in use, or 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def compiled(findings: Findings) -> None:
    """Measures an engine with vLLM's default compilation, which is torch.compile and CUDA graphs of all kinds and sizes."""
    started = time.perf_counter()
    engine = start_engine(POLICY, TEXT, eager=False, precision="bfloat16", compilation_config={})
    start_s = time.perf_counter() - started
    requests = task_requests(*findings.size((16, 4), (2, 2)))
    _, first = timed(engine, requests)
    _, figures = timed(engine, of_version(requests, 1))
    findings.note("text", {"start, s": start_s, "ms a step at first": first["ms a step"], **figures})
    findings.note("text", {**engine.facts(), **as_text(engine.device_facts())}, "engines")
    findings.check(figures.get("accepted", 0) > 0, "no draft was accepted")
    engine.close()
