# SPDX-License-Identifier: Apache-2.0
"""Exactness on an older vLLM, with its own V2 model runner. Triton's interpreter runs its kernels, so requests are few."""

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER
from test_equality import SAMPLINGS, assert_equal, requests

from lab.bench.host_decisions import prepare
from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.audit.noise import scheme_of
from nemo_specrollout.audit.replay import replay
from nemo_specrollout.audit.rows import RecordedRow, RowParams
from nemo_specrollout.audit.verdict import Rounding, judge
from nemo_specrollout.config import vllm_features
from nemo_specrollout.config.block import BudgetConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DRAFTERS,
    Eagle3DrafterConfig,
    NgramDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.config.strict import ConfigError, build_tagged
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, as_bytes
from nemo_specrollout.installed.versions import vllm_version

pytestmark = [
    pytest.mark.older_vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by `make test-pins`"),
]
HEAD_FOLDER = STEP_ADDER.parent / "step_adder_eagle3"
HEAD, SUFFIX, NGRAM = Eagle3DrafterConfig(model=str(HEAD_FOLDER)), SuffixDrafterConfig(), NgramDrafterConfig()
FIXED = BudgetConfig("fixed", k=3)
BLOCKS = {
    "a head": SpecrolloutConfig(drafters=(HEAD,), budget=FIXED),
    "a greedy head": SpecrolloutConfig(
        drafters=(Eagle3DrafterConfig(model=str(HEAD_FOLDER), sampling="greedy"),), budget=FIXED
    ),
    "text": SpecrolloutConfig(drafters=(SUFFIX, NGRAM), budget=FIXED),
    "a head and text, random budgets": SpecrolloutConfig(drafters=(HEAD, SUFFIX), budget=RANDOM),
}
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 1 << 26}
ASKED = requests(3, 2)
# Without top-k and top-p: Triton's interpreter fails in vLLM's kernel for them.
WAYS = ("T=1", "T=0", "T=0.7, penalties", "T=1, min-p, bias", "T=1, bad words, min tokens")


@pytest.fixture(scope="module")
def start(start_engine: Callable[..., RolloutEngine]) -> Callable[..., RolloutEngine]:
    def start_small(block: SpecrolloutConfig, **arguments: Any) -> RolloutEngine:
        return start_engine(STEP_ADDER, block, max_new_tokens=40, **{**SMALL, **arguments})

    return start_small


@pytest.fixture(scope="module")
def expected(start: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    """Responses of plain decoding, without asynchronous scheduling."""
    plain = start(SpecrolloutConfig(drafters=()), async_scheduling=False)
    return {name: plain.generate(ASKED, **SAMPLINGS[name]) for name in WAYS}


def num_accepted(engine: RolloutEngine) -> int:
    stats = engine.stats()
    assert stats is not None
    return stats.num_accepted


def test_the_table_of_features_tells_what_this_vllm_has() -> None:
    """`check` asks the table by the version, also where vLLM is not installed. The engine goes by names."""
    from nemo_specrollout.generation.engine import compat

    assert vllm_features.DEVICE_CHOICE.is_in(compat.VLLM_VERSION) == compat.CHOOSES_ON_DEVICE


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("name", BLOCKS)
def test_tokens_are_those_of_plain_decoding(
    start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], name: str, asynchronous: bool
) -> None:
    engine = start(BLOCKS[name], async_scheduling=asynchronous)
    facts = engine.facts()
    assert (facts["model_runner"], facts["async_scheduling"]) == ("V2", asynchronous)
    for sampling in ("T=1", "T=0"):
        before = num_accepted(engine)
        assert_equal(engine.generate(ASKED, **SAMPLINGS[sampling]), expected[sampling])
        assert num_accepted(engine) > before + 20, "next to nothing was accepted, so nothing was shown"
    sample_stats = engine.take_sample_stats(ASKED)
    assert all(s is not None for s in sample_stats)
    assert engine._llm.collective_rpc(WorkerCalls.specrollout_totals.__name__)[0]["accepted"]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("kind", ["run ahead", "random"])
def test_rates_that_are_a_step_old_change_no_token(
    start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], kind: str, asynchronous: bool
) -> None:
    """The host knows as little as on a GPU. It lets a request with a right text draft far while others draft few."""
    fixed = BudgetConfig("fixed", k=32)
    run_ahead = SpecrolloutConfig(
        drafters=(SUFFIX,), num_speculative_tokens=32, budget=fixed, run_ahead=RunAheadConfig(most_drafts=32)
    )
    block = run_ahead if kind == "run ahead" else BLOCKS["a head and text, random budgets"]
    engine = start(block, async_scheduling=asynchronous)
    engine.run_in_worker(lambda worker: prepare(worker, is_late=True))
    for sampling in ("T=1", "T=0"):
        texts = [
            as_bytes(r.token_ids) if i % 2 and kind == "run ahead" else b"" for i, r in enumerate(expected[sampling])
        ]
        asked = [replace(request, ahead=text) for request, text in zip(ASKED, texts, strict=True)]
        before = num_accepted(engine)
        assert_equal(engine.generate(asked, **SAMPLINGS[sampling]), expected[sampling])
        assert num_accepted(engine) > before + 20
    if kind == "run ahead":
        steps = [[number for _, number in step] for step in engine.run_in_worker(lambda worker: worker.verified)]
        assert any(max(step) > 16 and min(step) < 8 for step in steps), steps


def test_every_way_of_sampling(start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]) -> None:
    """This includes bad words, for which the kernel of vLLM 0.25 looks at the wrong draft."""
    engine = start(SpecrolloutConfig(drafters=(NGRAM, SUFFIX), budget=RANDOM))
    for name in WAYS:
        assert_equal(engine.generate(ASKED, **SAMPLINGS[name]), expected[name])
    assert num_accepted(engine) > 50


def test_an_audit_finds_that_drafted_tokens_are_the_policys(start: Callable[..., RolloutEngine]) -> None:
    """By weights and noise alone, with the noise of this version of vLLM and with none of the package's sampling."""
    from transformers import AutoModelForCausalLM

    engine = start(BLOCKS["a head and text, random budgets"])
    coarse = AutoModelForCausalLM.from_pretrained(STEP_ADDER, dtype=torch.float32).eval()
    fine = copy.deepcopy(coarse).double()
    replays = []
    for sampling in ("T=1", "T=0"):
        params = RowParams(temperature=SAMPLINGS[sampling]["temperature"])
        for request, rollout in zip(ASKED, engine.generate(ASKED, **SAMPLINGS[sampling]), strict=True):
            row = RecordedRow(
                0, 0, engine._seed_of(request), np.array(request.prompt_token_ids), np.array(rollout.token_ids),
                np.array(rollout.logprobs), ((0, len(request.prompt_token_ids)),), params,
            )  # fmt: skip
            noise = scheme_of(str(vllm_version()))
            replays.append(replay(row, lambda version: fine, lambda version: coarse, noise))
    rounding = Rounding.of(replays)
    verdicts = [judge(replayed, rounding) for replayed in replays]
    assert all(verdict.is_policys and not verdict.differences for verdict in verdicts), verdicts


def test_the_default_budget_and_new_weights(
    start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    from safetensors.torch import load_file

    engine = start(SpecrolloutConfig(drafters=(HEAD, SUFFIX)))
    assert_equal(engine.generate(ASKED, **SAMPLINGS["T=1"]), expected["T=1"])
    engine.load_weights(load_file(STEP_ADDER / "model.safetensors").items())
    engine.load_head(HEAD_FOLDER)
    assert_equal(engine.generate(ASKED, **SAMPLINGS["T=1"]), expected["T=1"])
    assert engine.run_in_worker(lambda worker: worker.specrollout_policy_version) == 1


@pytest.mark.parametrize("type_", ["draft_model", "remote"])
def test_drafters_that_an_older_vllm_lacks_are_refused(start: Callable[..., RolloutEngine], type_: str) -> None:
    more: dict[str, Any] = {"addresses": ("tcp://127.0.0.1:1",)} if type_ == "remote" else {}
    drafter = build_tagged(DRAFTERS, {"type": type_, "model": str(STEP_ADDER), **more}, "drafter")
    with pytest.raises(ConfigError, match=rf"drafters\[1\]\.type: {type_}; the V2 model runner of vLLM .* no place"):
        start(SpecrolloutConfig(drafters=(NGRAM, drafter)))
