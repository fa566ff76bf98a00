# SPDX-License-Identifier: Apache-2.0
"""The start of an engine: vLLM's default sizes, the budget while memory is profiled, and what is compiled before requests."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER

from lab.local.engine import RolloutEngine
from nemo_specrollout.config import vllm_features
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig, DraftModelDrafterConfig, NgramDrafterConfig
from nemo_specrollout.generation.engine.arguments import QUIET_START, with_specrollout
from nemo_specrollout.generation.engine.requests import RolloutRequest

pytestmark = pytest.mark.integration
EIGHT_DRAFTS = SpecrolloutConfig(num_speculative_tokens=8)


@pytest.fixture(scope="module")
def runner(start_engine: Callable[..., RolloutEngine], tiny_model: Path) -> Any:
    """The model runner of an engine that drafts. It generates nothing, because tests spoil it."""
    engine = start_engine(tiny_model, SpecrolloutConfig(budget=BudgetConfig("fixed", k=3)), max_num_seqs=12)
    runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.compilation_config.max_cudagraph_capture_size = 12
    return runner


# vLLM's default sizes.


def test_the_table_of_features_tells_what_this_vllm_has() -> None:
    """`check` asks the table by the version, also where vLLM is not installed. The engine goes by names."""
    from nemo_specrollout.generation.engine import compat

    assert vllm_features.DEVICE_CHOICE.is_in(compat.VLLM_VERSION) == compat.CHOOSES_ON_DEVICE


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "given",
    [{}, {"performance_mode": "throughput"}, {"enable_chunked_prefill": False, "max_model_len": 8192}],
    ids=str,
)
def test_default_sizes_are_those_of_vllms_config(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], is_async: bool
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from nemo_specrollout.generation.engine import compat

    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    arguments = {"model": str(tiny_model), "max_model_len": 512, **QUIET_START, **given}
    arguments.pop("use_tqdm_on_load")
    use = UsageContext.ENGINE_CONTEXT if is_async else UsageContext.LLM_CLASS
    scheduler = EngineArgs(**arguments).create_engine_config(use).scheduler_config
    abilities = compat.vllm_abilities(arguments, is_async)
    assert abilities.default_tokens == scheduler.max_num_batched_tokens
    assert abilities.default_requests == scheduler.max_num_seqs


@pytest.mark.parametrize(
    ("is_async", "max_num_seqs", "expected"),
    [
        (False, 256, None),
        (False, None, None),
        (False, 2048, 16384 + 8 * 2048),
        (True, 64, None),
        (True, 256, 2048 + 8 * 256),
        (True, None, None),
    ],
)
def test_an_h100_keeps_vllms_default_if_drafts_fit(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, max_num_seqs: int | None, expected: int | None
) -> None:
    """`vllm.LLM` has 16,384 tokens a step there. NeMo-RL's asynchronous engine has 2,048, and 128 requests."""
    from vllm.engine import arg_utils

    from nemo_specrollout.generation.engine import compat

    h100 = {"get_device_total_memory.return_value": 80 << 30, "get_device_name.return_value": "NVIDIA H100"}
    others = {"is_cpu.return_value": False, "is_tpu.return_value": False}
    monkeypatch.setattr(arg_utils, "current_platform", mock.MagicMock(**h100, **others))
    given = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
    result = with_specrollout(given, EIGHT_DRAFTS, "cuda", compat.vllm_abilities(given, is_async))
    assert result.get("max_num_batched_tokens") == expected


# The budget.


def test_the_budget_is_ours_while_graph_memory_is_profiled(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own would time steps, and refuse to start if none of them was a CUDA graph."""
    from vllm.v1.worker.gpu.cudagraph_utils import _init_minimal_kv_cache_for_profiling

    from nemo_specrollout.generation.step.verification_budget import VerificationBudget

    before = runner.adaptive_verification
    _init_minimal_kv_cache_for_profiling(runner)
    assert isinstance(runner.adaptive_verification, VerificationBudget)
    assert runner.adaptive_verification is not before
    assert runner.rejection_sampler.enable_adaptive_verification
    graphs = SimpleNamespace(needs_capture=lambda: True, capture=mock.Mock(), captured_token_counts=lambda: [12])
    monkeypatch.setattr(runner, "cudagraph_manager", graphs)
    monkeypatch.setattr(torch.accelerator, "empty_cache", mock.Mock())
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    runner.capture_model(profile_only=True)
    assert graphs.capture.called


def test_attention_that_cannot_adapt_leaves_the_host_a_choice(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM alone would end the engine."""
    from vllm.v1.worker.gpu.cudagraph_utils import _init_minimal_kv_cache_for_profiling

    monkeypatch.setattr(runner.speculator, "enable_adaptive_verification", True)
    _init_minimal_kv_cache_for_profiling(runner)
    assert runner.adaptive_verification is None and not runner.rejection_sampler.enable_adaptive_verification
    assert "the host chooses the drafts of each step: Adaptive verification" in caplog.text
    assert "but CPUAttentionBackend allows none" in caplog.text


@pytest.mark.parametrize(("num_slots", "num_drafts"), [(1, 3), (2, 1), (2, 2), (3, 1), (3, 3), (8, 1), (12, 3), (9, 8)])
def test_no_budget_is_compiled_in_a_step(
    runner: Any, monkeypatch: pytest.MonkeyPatch, num_slots: int, num_drafts: int
) -> None:
    """Counts what torch.compile would build for the GPU. Sizes that are equal by chance must make no difference."""
    from torch._dynamo.testing import CompileCounter
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllm_budget

    from nemo_specrollout.generation.engine.transfers import to_device
    from nemo_specrollout.generation.step.verification_budget import VerificationBudget

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(vllm_budget._assign_draft_token_budget, dynamic=True, backend=counter)
    monkeypatch.setattr(vllm_budget, "_assign_draft_token_budget_compiled", compiled)
    states = SimpleNamespace(
        max_num_reqs=num_slots, num_speculative_steps=num_drafts, device=runner.device, max_num_batched_tokens=64
    )
    monkeypatch.setattr(runner, "req_states", states)
    tables = SimpleNamespace(rates_SK=torch.zeros(num_slots, num_drafts))
    drafting: Any = SimpleNamespace(board=SimpleNamespace(tables=tables))
    budget = VerificationBudget(runner, drafting)
    budget.warm_up()
    num_compiled = counter.frame_count
    assert num_compiled == min(num_slots * num_drafts - 1, 2) + (num_slots > 1) * min(num_drafts - 1, 2)
    with torch.inference_mode():
        for num_requests in range(1, num_slots + 1):
            names = [str(b) for b in range(num_requests)]
            most = num_requests * num_drafts
            for num_verified in range(most + 1):
                budget._batch_budget = (dict.fromkeys(names, num_drafts), dict.fromkeys(names, 1), num_verified)
                slots_B = to_device(range(num_requests), np.int64, runner.device)
                starts_B1, *_ = budget.reallocate_drafts(names, slots_B)
                assert starts_B1[-1] == num_requests + num_verified
    assert counter.frame_count == num_compiled


# The warm-up.


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(NgramDrafterConfig(), id="ngram", marks=pytest.mark.slow),
        pytest.param(DraftModelDrafterConfig(model=str(STEP_ADDER)), id="draft_model"),
    ],
)
def test_vllm_warms_its_own_speculator_up(
    start_engine: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch, drafter: DrafterConfig
) -> None:
    """The engine takes the steps by which vLLM warms a GPU up. Drafting must learn nothing from them."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    warm_up, proposed = CPUWorker.compile_or_warm_up_model, []

    def warm_up_like_a_gpu(worker: Any) -> Any:
        drafting = worker.specrollout_router
        native, before = drafting._native_propose, [table.clone() for table in drafting.board.tables]
        levels_DBK = drafting.board.tables._fields.index("levels_DBK")  # a model that samples grades its drafts
        drafting._native_propose = lambda *args, **options: proposed.append(args) or native(*args, **options)
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        drafting._native_propose = native
        after = enumerate(zip(before, drafting.board.tables, strict=True))
        assert all(torch.equal(*tables) for i, tables in after if i != levels_DBK)
        return warm_up(worker)

    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", warm_up_like_a_gpu)
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(drafter,), budget=BudgetConfig("fixed", k=3)))
    assert len(proposed) == 6, "a step with prompts, and five kinds of decode steps"
    engine.generate([RolloutRequest([5, 6, 7, 5, 6, 7], 0, 0)])
    stats = engine.stats()
    assert stats is not None and np.sum(stats.proposed) > 0
