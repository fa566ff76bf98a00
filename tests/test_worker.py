# SPDX-License-Identifier: Apache-2.0
"""The vLLM worker: absent if the block is disabled, refused if it is not in force, and its counts add up."""

import importlib
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab.local.engine import Generation, RolloutEngine
from lab.local.engine_stats import EngineStats
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    Eagle3DrafterConfig,
    MtpDrafterConfig,
    NgramDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.drafters.device_index import MAX_LISTED
from nemo_specrollout.generation.engine import arguments
from nemo_specrollout.generation.engine.arguments import VllmAbilities, users_processors, with_specrollout
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

pytestmark = pytest.mark.integration

NUM_DRAFTS, LENGTH = 3, 60
DRAFTERS = tuple(cls(num_slots=1 << 12) for cls in (SuffixDrafterConfig, NgramDrafterConfig))
FIXED = SpecrolloutConfig(num_speculative_tokens=8, drafters=DRAFTERS, budget=BudgetConfig("fixed", k=NUM_DRAFTS))


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., RolloutEngine], tiny_model: Path) -> RolloutEngine:
    """An engine that drafts three tokens for each request in every step."""
    return start_engine(tiny_model, FIXED)


@pytest.fixture(scope="module")
def sampler_only(start_engine: Callable[..., RolloutEngine], tiny_model: Path) -> RolloutEngine:
    """An engine without drafters."""
    return start_engine(tiny_model, SpecrolloutConfig(drafters=()))


def worker_of(engine: RolloutEngine) -> Any:
    return engine._llm.llm_engine.model_executor.driver_worker.worker


def requests(num_prompts: int = 4, num_samples: int = 4) -> list[RolloutRequest]:
    """Several samples of prompts that repeat themselves, so that text drafters find something."""
    prompts = [[20 + i, 30, 31, 32, 33 + i] * 3 for i in range(num_prompts)]
    return [RolloutRequest(ids, i, s) for i, ids in enumerate(prompts) for s in range(num_samples)]


# The block as vLLM's arguments.


def test_a_disabled_block_changes_no_argument() -> None:
    given = {"max_num_seqs": 8, "speculative_config": {"method": "ngram"}, "worker_cls": "mine.Worker", "seed": 1}
    result = with_specrollout(given, SpecrolloutConfig(enabled=False), "cpu")
    assert result == given and result is not given


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_enabled_block_sets_worker_and_additional_config(device: str) -> None:
    result = with_specrollout({"max_num_seqs": 8, "additional_config": {"theirs": 1}}, FIXED, device)
    assert result["worker_cls"] == arguments.WORKER and result["max_num_seqs"] == 8
    assert result["additional_config"]["theirs"] == 1
    assert [d["type"] for d in result["additional_config"]["specrollout"]["drafters"]] == ["suffix", "ngram"]
    assert "async_scheduling" not in result


@pytest.mark.parametrize("theirs", [None, ["mine:Processor"]])
def test_vllm_asks_us_about_each_request(theirs: list[str] | None) -> None:
    """A user's own processors stay. vLLM refuses processors beside sampling masks, and on the V2 model runner before 0.32."""
    given: dict[str, Any] = {} if theirs is None else {"logits_processors": theirs}
    for block in (FIXED, SpecrolloutConfig(drafters=())):
        checked = with_specrollout(given, block, "cpu")["logits_processors"]
        assert checked == [*(theirs or []), arguments.REQUEST_CHECK] and given.get("logits_processors") == theirs
        assert users_processors(checked) == (theirs or []) == users_processors(theirs)
    masks = with_specrollout({**given, "return_sampling_mask": True}, FIXED, "cpu")
    older = with_specrollout(given, FIXED, "cpu", VllmAbilities(checks_requests=False))
    assert masks.get("logits_processors") == older.get("logits_processors") == theirs


@pytest.mark.parametrize(
    ("device", "given", "adapts"),
    [
        ("cpu", {}, False),
        ("cuda", {}, True),
        ("cuda", {"enforce_eager": True}, False),
        ("cuda", {"enforce_eager": False}, True),
    ],
)
def test_text_drafters_use_a_method_without_weights(device: str, given: dict[str, Any], adapts: bool) -> None:
    """CUDA graphs must be prepared for drafts that are chosen on the device."""
    adaptive = {"enable_adaptive_verification": True} if adapts else {}
    expected = {"method": "ngram_gpu", "num_speculative_tokens": NUM_DRAFTS, **adaptive}
    assert with_specrollout(given, FIXED, device)["speculative_config"] == expected


def test_a_drafter_with_weights_uses_vllms_own_method() -> None:
    def config(*drafters: DrafterConfig, **block: Any) -> dict[str, Any]:
        return with_specrollout({}, SpecrolloutConfig(drafters=drafters, **block), "cpu")["speculative_config"]

    head = Eagle3DrafterConfig(model="/heads/3")
    kept = {"disable_eagle_block_drop": True}
    expected = {"method": "eagle3", "model": "/heads/3", "num_speculative_tokens": 8}
    assert config(DRAFTERS[0], head) == expected | kept
    assert config(MtpDrafterConfig(), num_speculative_tokens=2) == {"method": "mtp", "num_speculative_tokens": 2} | kept


def test_a_budget_without_drafts_means_no_speculation() -> None:
    block = SpecrolloutConfig(drafters=DRAFTERS, budget=BudgetConfig("fixed", k=0))
    result = with_specrollout({"max_num_seqs": 4096, "max_num_batched_tokens": 4096}, block, "cuda")
    assert "speculative_config" not in result and result["max_num_batched_tokens"] == 4096


@pytest.mark.parametrize(
    ("max_num_seqs", "given", "expected"),
    [
        (341, None, None),
        (342, None, 2048 + 3 * 342),
        (4096, None, 2048 + 3 * 4096),
        (None, None, None),
        (512, 2048, 2048),
        (512, 9999, 9999),
    ],
)
def test_a_step_has_room_for_all_requests_with_their_drafts(
    max_num_seqs: int | None, given: int | None, expected: int | None
) -> None:
    """Each request drafts 3 tokens. If drafts take more than half of vLLM's 2,048 rows, they get rows of their own."""
    kwargs = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": given}
    result = with_specrollout({name: value for name, value in kwargs.items() if value}, FIXED, "cpu")
    assert result.get("max_num_batched_tokens") == expected


def test_without_drafters_a_users_own_speculation_stays() -> None:
    theirs = {"method": "ngram", "num_speculative_tokens": 3}
    block = SpecrolloutConfig(drafters=())
    assert with_specrollout({"speculative_config": theirs}, block, "cpu")["speculative_config"] == theirs
    assert "speculative_config" not in with_specrollout({}, block, "cpu")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"worker_cls": "mine.Worker"}, r"vllm_kwargs\.worker_cls"),
        ({"speculative_config": {"method": "ngram"}}, r"vllm_kwargs\.speculative_config"),
        (
            {"max_num_seqs": 512, "max_num_batched_tokens": 2047},
            r"vllm_kwargs\.max_num_batched_tokens: 2047; 512 requests with 3 drafts each need 2048: raise it",
        ),
    ],
)
def test_arguments_that_contradict_the_block_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_specrollout(given, FIXED, "cpu")


@pytest.mark.parametrize(("sampling", "refused"), [("shared_noise", True), ("greedy", False)])
def test_policy_and_drafter_must_have_the_same_noise(sampling: str, refused: bool) -> None:
    head = SpecrolloutConfig(drafters=(Eagle3DrafterConfig(model="folder", sampling=sampling),))
    with pytest.raises(ValueError, match=r"vllm_kwargs\.use_fp64_gumbel: true") if refused else nullcontext():
        with_specrollout({"use_fp64_gumbel": True}, head, "cpu")


def test_an_engine_with_the_block_off_is_vllms_own(tiny_model: Path, sampler_only: RolloutEngine) -> None:
    """Runs in its own process, because this one has loaded the worker. With vLLM's seeds it makes the same tokens as ours."""
    code = f"""
import sys
from pathlib import Path
from nemo_specrollout.config.block import SpecrolloutConfig
from lab.local.run_sections import GenerationConfig, VllmConfig
from lab.local.engine import RolloutEngine
from nemo_specrollout.generation.engine.requests import RolloutRequest
kwargs = {{"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 26}}
generation = GenerationConfig(VllmConfig(512), 8, vllm_kwargs=kwargs, specrollout=SpecrolloutConfig(enabled=False))
engine = RolloutEngine(Path({str(tiny_model)!r}), generation, seed=7)
tokens = engine.generate([RolloutRequest([20, 30, 31], 0, 0)])[0].token_ids
worker = engine._llm.llm_engine.model_executor.driver_worker.worker
runner = worker.model_runner
bound = [getattr(runner, name).__func__ for name in ("execute_model", "sample_tokens")]
parts = [type(worker), type(runner), type(runner.sampler), *bound]
assert all(part.__module__.startswith("vllm.") for part in parts), parts
ours = {{"vllm_worker", "drafting.draft_router", "step.verification", "step.step_accounts"}}
loaded = {{m for m in sys.modules if m.startswith("nemo_specrollout.")}}
assert not loaded & {{f"nemo_specrollout.generation.{{name}}" for name in ours}}, loaded
assert not any(m.startswith("nemo_specrollout.drafters") for m in loaded), loaded
engine.close()
print("tokens", *tokens)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ours = sampler_only.generate([RolloutRequest([20, 30, 31], 0, 0)], max_tokens=8)[0].token_ids
    assert done.stdout.splitlines()[-1].split() == ["tokens", *map(str, ours)]


# What is verified at start, on a real worker that is then tampered with.


def test_a_sound_worker_passes(engine: RolloutEngine, sampler_only: RolloutEngine) -> None:
    worker_of(engine)._verify_in_force()
    worker_of(sampler_only)._verify_in_force()


def test_a_replaced_rejection_sampler_is_refused(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    worker = worker_of(engine)
    runner = worker.model_runner
    theirs = RejectionSampler(runner.sampler, runner.speculative_config, runner.device)
    monkeypatch.setattr(runner, "rejection_sampler", theirs)
    with pytest.raises(RuntimeError, match="verification is not in force"):
        worker._verify_in_force()


def test_a_replaced_proposal_is_refused(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(engine)
    speculator = worker.model_runner.speculator
    monkeypatch.setattr(speculator, "propose", type(speculator).propose.__get__(speculator))
    with pytest.raises(RuntimeError, match=r"drafting is not in force.*with_specrollout"):
        worker._verify_in_force()


def test_a_replaced_budget_is_refused(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(engine)
    monkeypatch.setattr(worker.model_runner, "adaptive_verification", None)
    with pytest.raises(RuntimeError, match="budget is not in force"):
        worker._verify_in_force()


def test_a_missing_speculative_config_is_refused(sampler_only: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block has drafters, but vLLM was not configured to speculate."""
    worker = worker_of(sampler_only)
    monkeypatch.setattr(worker, "specrollout_config", FIXED)
    with pytest.raises(RuntimeError, match=r"drafting is not in force.*with_specrollout"):
        worker._verify_in_force()


def test_vllms_other_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    from nemo_specrollout.generation.engine import compat

    config = VllmConfig()
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    compat.verify_runner_choice(config)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", False)
    with pytest.raises(RuntimeError, match="has chosen the V1 model runner; remove VLLM_USE_V2_MODEL_RUNNER=0"):
        compat.verify_runner_choice(config)


def test_a_runner_without_needed_attributes_is_refused(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_specrollout.generation.engine import compat

    runner = worker_of(engine).model_runner
    compat.verify_model_runner(runner)
    for name in ("speculator", "req_states"):
        monkeypatch.delattr(runner, name)
    with pytest.raises(RuntimeError, match="has no req_states, speculator; this version is not supported"):
        compat.verify_model_runner(runner)


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("vllm.v1.sample.ops.topk_topp_triton", "", "_SPLIT_MAX_BATCH"),
        ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "RejectionSampler", "_verify"),
        ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "RejectionSampler", "_get_logprobs_tensors"),
        ("vllm.v1.worker.gpu.sample.sampler", "Sampler", "apply_sampling_params"),
        ("vllm.v1.worker.gpu.sample.states", "SamplingStates", "max_num_logprobs"),
    ],
)
def test_a_vllm_without_a_name_that_exactness_needs_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str, owner: str, name: str
) -> None:
    """vLLM would go on without it, and drafts could then change tokens."""
    import vllm

    from nemo_specrollout.generation.engine import compat
    from nemo_specrollout.generation.runners.installed import RUNNERS

    def enter() -> None:
        RUNNERS.verify_names()
        compat.make_top_p_independent_of_batch()

    enter()
    holder = importlib.import_module(module)
    monkeypatch.delattr(getattr(holder, owner) if owner else holder, name)
    with pytest.raises(RuntimeError, match=rf"vLLM {re.escape(vllm.__version__)}: .* has no {name}; this version"):
        enter()


def test_an_engine_does_not_start_without_such_a_name(
    start_engine: Callable[..., RolloutEngine], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.ops import topk_topp_triton

    monkeypatch.delattr(topk_topp_triton, "_SPLIT_MAX_BATCH")
    with pytest.raises(RuntimeError, match="topk_topp_triton has no _SPLIT_MAX_BATCH"):
        start_engine(tiny_model, FIXED)


def test_top_p_that_depends_on_the_batch_is_refused(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.ops import topk_topp_triton

    worker = worker_of(engine)
    worker._verify_in_force()
    monkeypatch.setattr(topk_topp_triton, "_SPLIT_MAX_BATCH", 64)
    with pytest.raises(RuntimeError, match=r"top-p is not in force.*_SPLIT_MAX_BATCH"):
        worker._verify_in_force()


def test_drafts_that_vllm_verifies_by_its_own_rule_end_the_step(
    start_engine: Callable[..., RolloutEngine], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method that our verifier overrides is still there, but vLLM calls another."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    started = start_engine(tiny_model, FIXED)
    verifier = worker_of(started).model_runner.rejection_sampler
    monkeypatch.setattr(verifier, "_has_verified", False)
    monkeypatch.setattr(verifier, "_verify", RejectionSampler._verify.__get__(verifier))
    with pytest.raises(RuntimeError, match="verification is not in force: the rejection sampler of vLLM"):
        started.generate(requests())


def test_an_unsupported_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_specrollout.generation.engine import compat

    compat.check_version()
    monkeypatch.setattr(compat, "VLLM_VERSION", "0.34.0")
    with pytest.raises(ValueError, match=r"vLLM 0\.34\.0 is not supported"):
        compat.check_version()


# Several engines in one process.


def test_closing_an_engine_leaves_the_others_working(
    start_engine: Callable[..., RolloutEngine], engine: RolloutEngine, tiny_model: Path
) -> None:
    before = [r.token_ids for r in engine.generate(requests())]
    other = start_engine(tiny_model, FIXED)
    assert [r.token_ids for r in other.generate(requests())] == before
    other.close()
    assert [r.token_ids for r in engine.generate(requests())] == before


def test_the_last_engine_releases_what_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_specrollout.generation.engine import process_state

    class Client:
        """A client whose engine releases everything when it stops, as vLLM's does."""

        def shutdown(self) -> None:
            process_state.core.cleanup_dist_env_and_memory()
            process_state.workspace.reset_workspace_manager()

    released: list[str] = []
    for module, name in process_state._RELEASES:
        monkeypatch.setattr(module, name, lambda name=name: released.append(name))
    monkeypatch.setattr(process_state, "_running", weakref.WeakSet())
    engines = [SimpleNamespace(llm_engine=SimpleNamespace(engine_core=Client())) for _ in range(2)]
    for llm in engines:
        process_state.started(llm)
    process_state.stop(engines[0])
    assert released == []
    process_state.stop(engines[1])
    assert released == ["cleanup_dist_env_and_memory", "reset_workspace_manager"]


# What newer versions of vLLM want.


def test_a_watched_output_passes_on_what_vllm_asks_for() -> None:
    from nemo_specrollout.generation.engine.step_outputs import WatchedOutput

    told: list[Any] = []
    done = SimpleNamespace(sampled_token_ids=[[1, 2]])
    output = WatchedOutput(SimpleNamespace(get_output=lambda: done, get_kv_connector_output=lambda: "kv"), told.append)
    assert output.get_output() is done and told == [[[1, 2]]]
    assert output.get_kv_connector_output() == "kv"


@pytest.mark.parametrize("copies", [True, False])
def test_sharded_sampling_knows_how_many_drafts_are_verified(monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    """Before vLLM 0.33 the ranks cannot know it, so sharded sampling is refused."""
    from nemo_specrollout.generation.step import verification_budget

    given: dict[str, Any] = {}

    def copying(self: Any, *_: Any, copy_admitted_drafts_to_host: bool = False) -> None:
        given["copies"] = copy_admitted_drafts_to_host

    def plain(self: Any, req_states: Any, query_start_loc: Any, num_bonus_tokens: int, max_total_logits: int) -> None:
        pass

    monkeypatch.setattr(verification_budget.AdaptiveVerificationManager, "__init__", copying if copies else plain)
    state, buffers = SimpleNamespace(num_new_sampled_tokens_per_step=1), SimpleNamespace(query_start_loc=None)
    runner = SimpleNamespace(req_states=None, input_buffers=buffers, model_state=state, vocab_size=96)
    drafting: Any = SimpleNamespace(board=SimpleNamespace(tables=SimpleNamespace(rates_SK=torch.ones(2, 3))))
    verification_budget.VerificationBudget(runner, drafting)
    runner.batch_sharder = SimpleNamespace(adaptive_verification_enabled=False)
    with nullcontext() if copies else pytest.raises(RuntimeError, match=r"vllm_kwargs\.enable_batch_sharded_sampling"):
        verification_budget.VerificationBudget(runner, drafting)
        assert given["copies"] and runner.batch_sharder.adaptive_verification_enabled


# What it reports.


def test_stats_of_an_engine_without_drafters(sampler_only: RolloutEngine) -> None:
    sampler_only.generate(requests())
    stats = sampler_only.stats()
    assert stats is not None and stats == EngineStats(stats.num_steps, stats.trace)
    assert len(stats.trace.rows) == stats.num_steps > 0


@pytest.fixture(scope="module")
def accounted(engine: RolloutEngine) -> tuple[list[Rollout], EngineStats, EngineStats]:
    """Responses of full length, and the engine stats before and after them."""
    before = engine.stats()
    rollouts = engine.generate(requests(), ignore_eos=True, stop_token_ids=[], max_tokens=LENGTH)
    assert before is not None
    after = engine.stats(first_step=before.num_steps)
    assert after is not None
    return rollouts, before, after


Accounted = tuple[list[Rollout], EngineStats, EngineStats]


def test_the_shape_of_engine_stats(engine: RolloutEngine, accounted: Accounted) -> None:
    _, before, after = accounted
    assert after.drafters == ["suffix", "ngram"]
    assert np.shape(after.proposed) == np.shape(after.accepted) == (2, NUM_DRAFTS)
    assert after.num_steps - before.num_steps == len(after.trace.rows) > 0
    expected = ["time_s", "seconds", "num_requests", "num_rows", "is_decode", "host_s", "draft_s"]
    expected += ["drafted_suffix", "accepted_suffix", "drafted_ngram", "accepted_ngram"]
    assert after.trace.columns == expected
    assert (np.diff(after.trace.column("time_s")) > 0).all() and (after.trace.column("host_s") >= 0).all()
    assert len(after.plain_step_s) > 64 and (np.diff(after.plain_step_s) >= 0).all()
    costs = worker_of(engine).specrollout_accounts.step_model.costs()
    assert costs.verify_s >= 0 and costs.text_s >= 0 and np.isfinite(costs.draft_row_s)
    assert costs.context_s >= 0 and costs.draft_context_s >= 0


def test_the_policy_knows_the_contexts_of_the_latest_step(engine: RolloutEngine, accounted: Accounted) -> None:
    """All requests have ended, so the last of them had its prompt and nearly all of its response as context."""
    context = worker_of(engine).specrollout_router.policy.costs.context
    assert LENGTH / 2 < context < worker_of(engine).model_runner.max_model_len


def test_accepted_drafts_are_proposed_drafts_and_prefixes(accounted: Accounted) -> None:
    _, _, after = accounted
    proposed_DK, accepted_DK = np.array(after.proposed), np.array(after.accepted)
    assert (accepted_DK <= proposed_DK).all() and accepted_DK.sum() > 0
    assert (np.diff(proposed_DK) <= 0).all() and (np.diff(accepted_DK) <= 0).all()


def test_every_token_is_accounted_for(accounted: Accounted) -> None:
    """With asynchronous scheduling one more step may run after a request has ended; its token is dropped."""
    rollouts, before, after = accounted
    assert [len(r.token_ids) for r in rollouts] == [LENGTH] * len(rollouts)
    drafted, accepted = (
        sum(after.trace.column(f"{kind}_{d}") for d in after.drafters) for kind in ("drafted", "accepted")
    )
    num_requests = after.trace.column("num_requests")
    assert 0 <= (num_requests + accepted).sum() - LENGTH * len(rollouts) <= len(rollouts)
    assert (after.trace.column("num_rows") == num_requests + drafted).all() and drafted.sum() > 200
    assert (accepted <= drafted).all() and (drafted <= NUM_DRAFTS * num_requests).all()
    for name, counts in (("proposed", drafted), ("accepted", accepted)):
        assert np.sum(getattr(after, name)) - np.sum(getattr(before, name)) == counts.sum()


def test_drafts_are_accounted_for_across_drafting_pauses(
    start_engine: Callable[..., RolloutEngine], tiny_model: Path
) -> None:
    """Pauses begin at random here, also right after a step that verified drafts."""
    engine = start_engine(tiny_model, replace(FIXED, budget=RANDOM))
    rollouts = engine.generate(requests(), ignore_eos=True, stop_token_ids=[], max_tokens=LENGTH)
    stats = engine.stats()
    assert stats is not None
    drafted, accepted = (
        sum(stats.trace.column(f"{kind}_{d}") for d in stats.drafters) for kind in ("drafted", "accepted")
    )
    num_requests = stats.trace.column("num_requests")
    assert (stats.trace.column("num_rows") == num_requests + drafted).all() and drafted.sum() > 50
    assert 0 <= (num_requests + accepted).sum() - LENGTH * len(rollouts) <= len(rollouts)


def test_requests_may_decline_speculation(engine: RolloutEngine, accounted: Accounted) -> None:
    plain = [RolloutRequest(r.prompt_token_ids, r.prompt_index, r.sample_index, speculate=False) for r in requests()]
    before = engine.counters()
    again = engine.generate(plain, ignore_eos=True, stop_token_ids=[], max_tokens=LENGTH)
    after = engine.stats()
    assert before is not None and after is not None
    assert after.proposed == before.proposed and after.num_steps - before.num_steps == LENGTH
    assert [r.token_ids for r in again] == [r.token_ids for r in accounted[0]]


# Taking a rollout in turns.


def test_turns_change_no_token_and_gaps_count_for_no_step(engine: RolloutEngine, accounted: Accounted) -> None:
    before = engine.counters()
    sampling = {"ignore_eos": True, "stop_token_ids": [], "max_tokens": LENGTH}
    generation, turns = Generation(engine, requests(), sampling=sampling), 0
    while not generation.is_done:
        engine.stood_still(1000.0)
        generation.advance(seconds=0.0)
        turns += 1
    assert before is not None and turns == engine.stats().num_steps - before.num_steps
    after = engine.stats(first_step=before.num_steps)
    assert after is not None and (after.trace.column("seconds")[1:] < 0.0).all(), "1000 s are left out of each"
    assert [r.token_ids for r in generation.rollouts] == [r.token_ids for r in accounted[0]]


def test_an_interrupted_generation_leaves_nothing_behind(engine: RolloutEngine) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests(), interrupt)
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert engine.generate(requests(1, 1))[0].token_ids


# What the text drafters have read.


def test_long_prompts_that_arrive_together_are_read_within_a_few_steps(
    start_engine: Callable[..., RolloutEngine], tiny_model: Path
) -> None:
    """Samples of a cached prompt arrive in one step, with more tokens than an index reads in a step."""
    engine = start_engine(tiny_model, FIXED, block_size=32)
    num_samples = 60
    prompt = np.random.default_rng(0).integers(20, 60, 14 * 32 + 1).tolist()  # all but its last token is cached
    engine.generate([RolloutRequest(prompt, 0, 0)], ignore_eos=True, stop_token_ids=[], max_tokens=1)
    samples = [RolloutRequest(prompt, 0, 1 + s) for s in range(num_samples)]
    generation = Generation(engine, samples, sampling={"ignore_eos": True, "stop_token_ids": [], "max_tokens": 30})
    router = worker_of(engine).specrollout_router
    ngram = router._drafters[1].lookup(1)
    states = worker_of(engine).model_runner.req_states
    num_behind = []
    for _ in range(4):
        generation.advance(0.0)
        num_behind.append(int((states.total_len.gpu - ngram.learned_S).sum()))
    assert num_behind[0] == num_samples * (len(prompt) + 1) - MAX_LISTED
    assert num_behind[1:] == [0, 0, 0]
    generation.advance()
