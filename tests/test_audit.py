# SPDX-License-Identifier: Apache-2.0
"""The audit against a real engine: it finds that rows are the policy's own, and it finds each kind of tampering."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER

from lab.local.engine import RolloutEngine
from lab.local.step_addition import encode_prompt, make_problems
from lab.local.step_rollout import load_tokenizer
from nemo_specrollout.audit.noise import MURMUR
from nemo_specrollout.audit.replay import RowReplay, replay
from nemo_specrollout.audit.rows import RecordedRow, RowParams
from nemo_specrollout.audit.verdict import judge
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.sampling.seeds import request_seed

pytestmark = pytest.mark.integration

DRAFTED = SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), budget=BudgetConfig("fixed", k=4))
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.05, "temperature": 1.3},
    "top-k and top-p": {"top_k": 8, "top_p": 0.8, "temperature": 0.9},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {10: 1.5, 11: -1.0}},
    "allowed": {"allowed_token_ids": list(range(2, 60))},
    "minimum": {"min_tokens": 40},
    "bad words": {"_bad_words_token_ids": [[12], [10, 11]]},
}


def params_of(kind: dict[str, Any], stop: tuple[int, ...]) -> RowParams:
    given = dict(kind)
    bad_words = tuple(map(tuple, given.pop("_bad_words_token_ids", ())))
    allowed = tuple(given.pop("allowed_token_ids", ()))
    return RowParams(**given, bad_words=bad_words, allowed_token_ids=allowed, stop_token_ids=stop)


def decode(engine: RolloutEngine) -> dict[str, list[RecordedRow]]:
    """Decodes four requests of each kind, all in one batch."""
    tokenizer = load_tokenizer(STEP_ADDER)
    prompts = [encode_prompt(problem, tokenizer) for problem in make_problems(5, 4)]
    requests = [(kind, i) for kind in KINDS for i in range(len(prompts))]
    inputs = [engine._text_and_params(RolloutRequest(prompts[i], i, 0), dict(KINDS[kind])) for kind, i in requests]
    found = engine._llm.generate(
        [{"prompt_token_ids": text} for text, _ in inputs], [params for _, params in inputs], use_tqdm=False
    )
    rows: dict[str, list[RecordedRow]] = {kind: [] for kind in KINDS}
    for (kind, i), (text, params), output in zip(requests, inputs, found, strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)]
        stop = tuple(sorted(params.all_stop_token_ids))
        rows[kind].append(
            RecordedRow(
                0, request_seed(7, i, 0, 0), np.array(text), np.array(tokens), np.array(logprobs), ((0, len(text)),),
                params_of(KINDS[kind], stop),
            )  # fmt: skip
        )
    return rows


@pytest.fixture(scope="module")
def rows(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[RecordedRow]]:
    return decode(start_engine(STEP_ADDER, DRAFTED))


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(STEP_ADDER, dtype=torch.float32).eval()


def replayed(row: RecordedRow, model: Any) -> RowReplay:
    return replay(row, lambda version: model, MURMUR)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_each_kind_is_the_policys_own(rows: dict[str, list[RecordedRow]], model: Any, kind: str) -> None:
    for number, row in enumerate(rows[kind]):
        found = replayed(row, model)
        verdict = judge(number, found, "float32")
        print(kind, verdict, found.logprob_differences.max(), (found.gaps > 0).sum(), found.largest_logits.max())
        assert verdict.is_policys, verdict
        assert verdict.num_differ == 0


def test_a_changed_token_is_named(rows: dict[str, list[RecordedRow]], model: Any) -> None:
    row = rows["free"][0]
    changed = row.token_ids.copy()
    changed[5] = (changed[5] + 1) % 50
    verdict = judge(0, replayed(replace(row, token_ids=changed), model), "float32")
    assert verdict.first_foreign == 5


def test_another_seed_is_named(rows: dict[str, list[RecordedRow]], model: Any) -> None:
    row = rows["free"][0]
    assert not judge(0, replayed(replace(row, seed=row.seed + 1), model), "float32").is_policys


def test_a_weight_changed_by_a_thousandth_is_named(rows: dict[str, list[RecordedRow]], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    changed = AutoModelForCausalLM.from_pretrained(STEP_ADDER, dtype=torch.float32).eval()
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    verdicts = [judge(i, replayed(row, changed), "float32") for i, row in enumerate(rows["free"])]
    print([v.first_foreign for v in verdicts], [replayed(row, changed).logprob_differences.max() for row in rows['free']])
    assert not all(verdict.is_policys for verdict in verdicts)
