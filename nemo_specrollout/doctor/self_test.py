# SPDX-License-Identifier: Apache-2.0
"""Sections "engine" and "self-test" of `doctor`, which show an engine's settings and check that drafts change no token.

This module is also the script of a child process. The child decodes with a small random model, once without and once with
drafts, and compares the tokens.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.config.nemo_rl_rules import RUNNER_VARIABLE
from nemo_specrollout.doctor.diagnosis import Diagnosis, Outcome, Section, Tell, answer, run_child

ENGINE = Section("engine")
SELF_TEST = Section("self-test")
TIMEOUT_S = 300.0
_SEND = "Send us the file of --json FILE"
CAUSES = {
    "no locator available": "Set NUMBA_CACHE_DIR to a writable folder.",
    "V2 model runner": f"Unset {RUNNER_VARIABLE}, and remove what vLLM's log says that V2 does not support.",
    "Failed to find C compiler": "Install gcc, or set CC: Triton compiles its launchers with it.",
    "undefined symbol": "Install the torch that this vLLM was built for.",
    "no kernel image": "Install a vLLM that is built for this GPU.",
    "driver version is insufficient": "Install a newer NVIDIA driver, or a torch for an older CUDA.",
    "less than desired GPU memory": "End the other process that holds the GPU's memory.",
    "out of memory": "End the other process that holds the memory, and run doctor again.",
    "No space left on device": "Free some disk in the temporary folder, or start the container with --shm-size=16g.",
}
"""Words that the log of a failed self-test may have, each with the fix. The first entry whose words are in the log counts."""
PLAIN = SpecrolloutConfig(drafters=())
DRAFTED = SpecrolloutConfig(drafters=(SuffixDrafterConfig(), NgramDrafterConfig()), budget=BudgetConfig("fixed", k=8))
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""Environment variables for comparing tokens in float32 on a GPU. Without them, Triton multiplies in tf32 precision."""
TEMPERATURES = (0.0, 1.0)
NUM_PROMPTS = 4
NUM_SAMPLES = 4
NUM_TOKENS = 48
VOCABULARY = 96
LONGEST_TEXT = 512
_SHARPNESS = 12.0
"""Factor by which the random model's logits are multiplied.

With it, the distribution is flat enough for samples to differ, and sharp enough for some drafts to be accepted.
"""
ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": LONGEST_TEXT,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "gpu_memory_utilization": 0.1,
    "seed": 7,
}
"""Arguments of vLLM for the engines of the self-test. On a GPU, a share of `gpu_memory_utilization` of the memory must be
free."""


def try_engines(module: str = __name__) -> Outcome:
    """Runs the self-test in a child process, and returns what it has reported.

    `module` is the script of the child. It is this module, except in tests.
    """
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **EXACT}
    return run_child(module, None, TIMEOUT_S, {k: v for k, v in quiet.items() if k not in os.environ})


def diagnose_engine(outcome: Outcome) -> Iterator[Diagnosis]:
    """Yields diagnoses of the settings that the engine of the self-test had, such as its scheduling and attention backend."""
    facts = outcome.told.get("facts")
    if facts is None:
        yield ENGINE.fail("engine", "it did not start", "See the self-test.")
        return
    yield ENGINE.ok("model runner", f"{facts['model_runner']}, checked by our vLLM worker when it started")
    if facts["async_scheduling"]:
        yield ENGINE.ok("scheduling", "asynchronous")
    else:
        to_do = "See vLLM's log for the reason: a GPU waits while the host prepares each step."
        yield ENGINE.warn("scheduling", "synchronous", to_do)
    yield ENGINE.ok("attention backend", ", ".join(facts["attention"]) or "not reported by this vLLM")
    yield ENGINE.ok("platform", f"{facts['platform']}, on {facts['device']}")


def diagnose_self_test(outcome: Outcome) -> Iterator[Diagnosis]:
    """Yields diagnoses of the self-test: whether tokens were equal, how many drafts were accepted, and how long it took.

    On a GPU, one more diagnosis names the precision. If the child process failed, the last diagnosis has the reason instead of
    the time.
    """
    if outcome.told.get("facts", {}).get("device") == "cuda":
        precision = os.environ.get("TRITON_F32_DEFAULT", EXACT["TRITON_F32_DEFAULT"])
        yield SELF_TEST.ok("precision", f"float32; Triton's products in {precision}. In bfloat16 some texts may part")
    for name, comparison in outcome.told.items():
        if name.startswith("T="):
            yield _tokens(f"tokens at {name}", comparison)
    if "drafts" in outcome.told:
        yield _drafts(outcome.told["drafts"])
    if outcome.failure:
        yield SELF_TEST.fail("engine", outcome.failure, _cause(outcome), outcome.log)
    else:
        yield SELF_TEST.ok("time", f"{outcome.seconds:.1f} s, including loading libraries and starting two engines")


def _tokens(name: str, comparison: Mapping[str, Any]) -> Diagnosis:
    text = f"{comparison['equal']} of {comparison['total']} tokens equal"
    if comparison["first"] is None:
        return SELF_TEST.ok(name, text)
    response, position, plain, drafted = comparison["first"]
    text += f"; first difference: response {response}, position {position}, plain {plain}, drafted {drafted}"
    return SELF_TEST.fail(name, text, f"{_SEND}: drafts must never change a token.")


def _drafts(counts: Mapping[str, Mapping[str, int]]) -> Diagnosis:
    proposed = sum(counts["proposed"].values())
    accepted = sum(counts["accepted"].values())
    if not proposed:
        return SELF_TEST.fail("drafts", "none was verified", f"{_SEND}: without drafts nothing was compared.")
    each = ", ".join(f"{name} {counts['accepted'][name]} of {count}" for name, count in counts["proposed"].items())
    text = f"{accepted} of {proposed} verified drafts accepted ({accepted / proposed:.0%}): {each}"
    return SELF_TEST.ok("drafts", text)


def _cause(outcome: Outcome) -> str:
    said = "\n".join([outcome.failure, *outcome.log])
    known = (to_do for sign, to_do in CAUSES.items() if sign in said)
    return next(known, f"{_SEND}, which has the end of the process's log.")


def compare_engines(order: Any, tell: Tell) -> None:
    """Runs in the child process, and decodes the same prompts without and with drafts.

    It reports the engine's settings, the number of equal tokens at each temperature, and how many draft tokens were proposed
    and accepted.
    """
    from nemo_specrollout.generation.engine import process_state
    from nemo_specrollout.generation.engine.hosted_engine import device_facts, engine_facts, start_vllm
    from nemo_specrollout.generation.engine.remote_calls import WorkerCalls

    responses = dict[str, list[list[list[int]]]]()
    totals = dict[str, Any]()
    with tempfile.TemporaryDirectory() as model:
        make_tiny_model(Path(model))
        for way, block in {"plain": PLAIN, "drafted": DRAFTED}.items():
            llm = start_vllm({"model": model, **ARGUMENTS}, block)
            tell("facts", {**engine_facts(llm), **device_facts(llm)})
            responses[way] = [_responses(llm, temperature) for temperature in TEMPERATURES]
            totals = llm.collective_rpc(WorkerCalls.specrollout_totals.__name__)[0]
            process_state.stop(llm)
    for temperature, plain, drafted in zip(TEMPERATURES, responses["plain"], responses["drafted"], strict=True):
        tell(f"T={temperature:g}", compared(plain, drafted))
    tell("drafts", {key: {name: sum(counts) for name, counts in totals[key]} for key in ("proposed", "accepted")})


def _responses(llm: Any, temperature: float) -> list[list[int]]:
    """Decodes several prompts at a temperature, and returns the token ids of the responses.

    The prompts repeat themselves, so that the drafters `suffix` and `ngram` find something to draft.
    """
    from nemo_specrollout.generation.engine.requests import RolloutRequest, rollout_extra_args
    from nemo_specrollout.generation.engine.vllm_requests import RolloutSamplingParams

    prompts = [[(7 * p + 11 * i) % VOCABULARY for i in range(8)] * 3 for p in range(NUM_PROMPTS)]
    requests = [RolloutRequest(ids, p, s) for p, ids in enumerate(prompts) for s in range(NUM_SAMPLES)]
    same: dict[str, Any] = {
        "temperature": temperature,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "detokenize": False,
    }
    params = [RolloutSamplingParams(**same, extra_args=rollout_extra_args(r)) for r in requests]
    texts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in requests]
    return [list(o.outputs[0].token_ids) for o in llm.generate(texts, params, use_tqdm=False)]


def make_tiny_model(folder: Path, seed: int = 0) -> None:
    """Writes the config and the weights of a small Qwen3 with random weights to `folder`, without a tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=LONGEST_TEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(_SHARPNESS)
    model.save_pretrained(folder)


def compared(plain: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compares responses that were decoded without and with drafts, token by token.

    Returns a dictionary with the number of equal tokens (`equal`), the number of all tokens (`total`), and the first
    difference (`first`), or None if there is none. The difference is a list of the response's index, the position, and both
    tokens. A token of -1 means that the response has ended.
    """
    equal, total, first = 0, 0, None
    for i, (a, b) in enumerate(zip(plain, drafted, strict=True)):
        pairs = list(zip_longest(a, b, fillvalue=-1))
        equal = equal + sum(x == y for x, y in pairs)
        total = total + len(pairs)
        differing = next((j for j, (x, y) in enumerate(pairs) if x != y), None)
        if first is None and differing is not None:
            first = [i, differing, *pairs[differing]]
    return {"equal": equal, "total": total, "first": first}


if __name__ == "__main__":
    answer(compare_engines)
