# SPDX-License-Identifier: Apache-2.0
"""Every kind of request that vLLM takes: the same completions with drafts and without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import STEP_ADDER
from tiny_policies import save_byte_tokenizer, save_policy

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from lab.local.step_addition import encode_prompt, make_problems
from lab.local.step_rollout import load_tokenizer
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, RandomDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest

pytestmark = pytest.mark.integration

TEXT = (SuffixDrafterConfig(), NgramDrafterConfig())
BLOCKS = {
    "fixed": SpecrolloutConfig(drafters=TEXT, budget=BudgetConfig("fixed", k=4)),
    "mixed": SpecrolloutConfig(drafters=(*TEXT, RandomDrafterConfig()), budget=RANDOM),
}
OBJECT = {
    "type": "object", "properties": {"sum": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["sum", "ok"],
    "additionalProperties": False,
}  # fmt: skip
REASONING = {"reasoning_start_str": "so", "reasoning_end_str": "answer"}
DIGITS = {"type": "integer", "minimum": 10, "maximum": 9999}
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "min_p": 0.05}
SEEDED = {"seed": 5, "extra_args": None}
"""A seed to which vLLM adds the number of the sample."""
KINDS: dict[str, dict[str, Any]] = {
    "stop strings": {"stop": ["answer", "total"], "detokenize": True},
    "stop strings that stay": {"stop": ["5 ,"], "detokenize": True, "include_stop_str_in_output": True},
    "bad words": {"_bad_words_token_ids": [[12], [10, 11]]},
    "min tokens": {"min_tokens": 40},
    "allowed ids": {"allowed_token_ids": list(range(2, 60))},
    "bias": {"logit_bias": {10: 1.5, 11: -1.0}},
    "penalties with min-p": PENALTIES,
    "several samples": {"n": 3, **SEEDED},
    "prompt log-probs": {"prompt_logprobs": 2},
    "log-probs of given ids": {"logprobs": 2, "logprob_token_ids": [7, 12]},
    "best log-probs": {"logprobs": 4},
    "a thinking budget": {"thinking_token_budget": 6},
    "a regex": {"structured_outputs": {"regex": r"(we|so)(add[0-9]{2,4}[+=]){3}answer:[0-9]{1,3}"}},
    "a regex with a stop string": {
        "structured_outputs": {"regex": r"(so|we)(add[0-9]{1,3},){2,9}done"}, "stop": ["7 ,"], "detokenize": True
    },
    "a choice": {"structured_outputs": {"choice": ["so12", "we12+5=17", "so12+5=17", "now17"]}},
    "a JSON number": {"structured_outputs": {"json": DIGITS}},
    "several structured samples": {"structured_outputs": {"regex": r"(so|we)add[0-9]{2,6}"}, "n": 4, **SEEDED},
}  # fmt: skip


@pytest.fixture(scope="module")
def start(start_engine: Callable[..., RolloutEngine]) -> Callable[..., RolloutEngine]:
    def start(block: SpecrolloutConfig, **vllm_kwargs: Any) -> RolloutEngine:
        return start_engine(STEP_ADDER, block, skip_tokenizer_init=False, reasoning_config=REASONING, **vllm_kwargs)

    return start


@pytest.fixture(scope="module")
def plain(start: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start(SpecrolloutConfig(drafters=()))


def completions(engine: RolloutEngine, kind: dict[str, Any], temperature: float) -> list[Any]:
    """Returns what vLLM returns for requests of a kind and for free ones, which share the engine's steps."""
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer, inputs = load_tokenizer(STEP_ADDER), []
    prompts = [encode_prompt(p, tokenizer) for p in make_problems(3, 6)]
    for i, prompt in enumerate(prompts):
        own = dict(kind) if i < 4 else {}
        if "structured_outputs" in own:  # vLLM changes the object
            own["structured_outputs"] = StructuredOutputsParams(**own["structured_outputs"])
        inputs.append(engine._text_and_params(RolloutRequest(prompt, i, 0), {"temperature": temperature, **own}))
    texts = [{"prompt_token_ids": text} for text, _ in inputs]
    found = engine._llm.generate(texts, [params for _, params in inputs], use_tqdm=False)
    return [
        (list(c.token_ids), c.text, c.finish_reason, c.stop_reason, _rounded(c.logprobs), _rounded(o.prompt_logprobs))
        for o in found
        for c in o.outputs
    ]


def _rounded(logprobs: Any) -> Any:
    return logprobs and [e and {i: (p.rank, round(p.logprob, 2) + 0.0) for i, p in e.items()} for e in logprobs]


@pytest.fixture(scope="module")
def drafted(start: Callable[..., RolloutEngine]) -> dict[str, RolloutEngine]:
    return {name: start(block) for name, block in BLOCKS.items()}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_nothing_that_vllm_returns(
    drafted: dict[str, RolloutEngine], plain: RolloutEngine, kind: str, name: str
) -> None:
    engine = drafted[name]
    for temperature in (0.7 if "n" in KINDS[kind] else 0.0, 1.0):
        found, expected = (completions(e, KINDS[kind], temperature) for e in (engine, plain))
        assert found == expected
    assert engine.stats().num_accepted > 0


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_drafts_change_no_token_of_a_json_object(
    start_engine: Callable[..., RolloutEngine], tmp_path: Path, backend: str
) -> None:
    """The policy has a tokenizer of bytes, which llguidance needs."""
    folder = save_policy("Llama", tmp_path / "policy", save_byte_tokenizer(tmp_path / "bytes"))
    kwargs = {"skip_tokenizer_init": False, "structured_outputs_config": {"backend": backend}}
    engine, plain = (start_engine(folder, b, **kwargs) for b in (BLOCKS["mixed"], SpecrolloutConfig(drafters=())))
    kind = {"structured_outputs": {"json": OBJECT}, "stop_token_ids": [], "detokenize": True}
    for temperature in (0.0, 1.0):
        found, expected = (completions(e, kind, temperature) for e in (engine, plain))
        assert found == expected and all(text.lstrip().startswith("{") for _, text, *_ in found[:4])


def test_drafts_change_no_token_of_several_turns(start: Callable[..., RolloutEngine], plain: RolloutEngine) -> None:
    """Each turn begins with the last one's text and a tool's answer. Prompts are computed in parts, and cached."""
    engine = start(BLOCKS["mixed"], max_num_batched_tokens=40, max_num_seqs=4, block_size=32)
    tokenizer = load_tokenizer(STEP_ADDER)
    texts = [encode_prompt(p, tokenizer) for p in make_problems(5, 4)]
    for turn in range(3):
        asked = [RolloutRequest(text, 10 * turn + i, 0) for i, text in enumerate(texts)]
        found, expected = (e.generate(asked, temperature=1.0, max_tokens=30) for e in (engine, plain))
        assert [r.token_ids for r in found] == [r.token_ids for r in expected]
        answer = tokenizer.encode("so 1 2 + 5 = 1 7 ,", add_special_tokens=False)
        texts = [[*text, *r.token_ids, *answer] for text, r in zip(texts, expected, strict=True)]
    assert engine.stats().num_accepted > 0
