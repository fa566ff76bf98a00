# SPDX-License-Identifier: Apache-2.0
"""Exactness on an older vLLM, with its own V2 model runner. Triton's interpreter runs its kernels, so requests are few."""

import asyncio
import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_policy import save_block_policy, save_dflash, save_dspark
from conftest import STEP_ADDER
from test_equality import SAMPLINGS, assert_equal, requests
from test_history_drafter import accepted, end_step, until_known
from test_near_ties import assert_kept, assert_kept_beside_log_probs
from test_racing import noisy
from test_rolling import Rolling, charge
from test_run_ahead import LONG, OLD, WORK, Branching
from vllm.config import CUDAGraphMode

from lab.bench.host_decisions import prepare
from lab.local.engine import Generation, RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.audit.noise import scheme_of
from nemo_specrollout.audit.replay import replay
from nemo_specrollout.audit.rows import RecordedRow, RowParams
from nemo_specrollout.audit.verdict import Rounding, judge
from nemo_specrollout.config import vllm_features
from nemo_specrollout.config.block import BudgetConfig, LearnedConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DRAFTERS,
    DflashDrafterConfig,
    DsparkDrafterConfig,
    Eagle3DrafterConfig,
    NgramDrafterConfig,
    RemoteDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.config.strict import ConfigError, build_tagged
from nemo_specrollout.doctor.vllm_imports import VllmSource, imports_of
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, as_bytes
from nemo_specrollout.installed.python_source import installed_source
from nemo_specrollout.installed.versions import vllm_version
from nemo_specrollout.remote.drafter.drafter_service import DrafterService
from nemo_specrollout.remote.drafter.drafter_spec import DrafterSpec
from nemo_specrollout.remote.protocol.draft_buffers import TOKENS
from nemo_specrollout.run_ahead import rolling

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


def test_doctor_finds_every_name_that_this_vllm_must_have() -> None:
    folder = installed_source("vllm")
    assert folder is not None
    found = imports_of(VllmSource(folder))
    assert found and [name for name, is_there in found.items() if not is_there] == []


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


def test_an_engine_drafts_from_the_responses_of_another(
    start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], tmp_path: Path
) -> None:
    learned = LearnedConfig(folder=str(tmp_path), warm_start=False)
    block = SpecrolloutConfig(drafters=(SUFFIX,), budget=FIXED, learned=learned)
    first, second = start(block), start(block)
    for sampling in ("T=1", "T=0"):
        assert_equal(first.generate(ASKED, **SAMPLINGS[sampling]), expected[sampling])
        assert end_step(first) == []
        until_known(second, tmp_path)
        before = accepted(second)
        assert_equal(second.generate(ASKED, **SAMPLINGS[sampling]), expected[sampling])
        assert accepted(second) > before


def test_a_head_drafts_as_deep_as_planned(
    start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    """One pass of the head for each position, and one if it only reads. Its drafts have levels of their score gaps."""
    engine = start(BLOCKS["a head and text, random budgets"])
    found: dict[str, Any] = {}

    def count_passes(worker: Any) -> None:
        model = worker.specrollout_router.model
        run_model, propose, passes = model._speculator._run_model, model._depth.propose, [0]
        found.update(depths=set[tuple[int, int]](), board=worker.specrollout_router.board)

        def count(*args: Any, **options: Any) -> Any:
            passes[0] += 1
            return run_model(*args, **options)

        def note(inputs: Any, options: Any, wanted: int) -> Any:
            passes[0] = 0
            drafts, depth = propose(inputs, options, wanted)
            assert depth == wanted
            found["depths"].add((depth, passes[0]))
            return drafts, depth

        model._speculator._run_model, model._depth.propose = count, note
        assert model.least_depth == 1

    engine.run_in_worker(count_passes)
    assert_equal(engine.generate(ASKED, **SAMPLINGS["T=1"]), expected["T=1"])
    assert all(passes == max(depth, 1) for depth, passes in found["depths"])
    depths = {depth for depth, _ in found["depths"]}
    assert 0 in depths and len(depths) > 4, depths
    num_known_E = found["board"].tables.evidence_DE2[found["board"].model, :, 1]
    assert (num_known_E > 0).sum() > 5, "drafts of all levels"
    assert engine.run_in_worker(lambda worker: worker.specrollout_router.model._speculator.num_speculative_steps) == 8


def test_each_depth_replays_a_graph_of_its_own(
    start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM captures one graph of all positions, graphs of lesser depths are captured and replayed as well.

    A graph on this CPU does what it was captured with: as many positions as the speculator had then.
    """
    module: Any = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.autoregressive.speculator")
    if not hasattr(module.AutoRegressiveSpeculator, "_generate_fused_drafts"):
        pytest.skip("this vLLM captures a graph of one position, which serves all depths")
    replayed: list[int] = []

    class Graphs(module.SpeculatorCudaGraphManager):  # type: ignore[misc]
        speculator: Any = None
        depth = 0

        def needs_capture(self) -> bool:
            return self.depth > 0

        def capture(self, forward_fn: Any, *_: Any, **__: Any) -> None:
            self.speculator = forward_fn.__self__
            self.depth = self.speculator.num_speculative_steps if self.decode_query_len == 1 else 0

        def dispatch(self, num_reqs: int, num_tokens: int, *others: Any, **named: Any) -> Any:
            found = super().dispatch(num_reqs, num_tokens, *others, **named)
            return replace(found, cg_mode=CUDAGraphMode.FULL, num_reqs=num_reqs) if self.depth else found

        def run_fullgraph(self, desc: Any) -> None:
            replayed.append(self.depth)
            had, self.speculator.num_speculative_steps = self.speculator.num_speculative_steps, self.depth
            longest = torch.full((desc.num_reqs,), 512, dtype=torch.int32)
            eager = replace(desc, cg_mode=CUDAGraphMode.NONE)
            self.speculator._multi_step_decode(desc.num_reqs, False, eager, None, longest)
            self.speculator.num_speculative_steps = had

    monkeypatch.setattr(module, "SpeculatorCudaGraphManager", Graphs)
    engine = start(SpecrolloutConfig(drafters=(HEAD,), budget=RANDOM))
    drafted: list[tuple[Any, int]] = []

    def capture(worker: Any) -> None:
        speculator, depth = worker.model_runner.speculator, worker.specrollout_router.model._depth
        speculator.use_fused_multi_step_decode = True
        speculator.capture()
        propose = depth.propose
        depth.propose = lambda *args: drafted.append(propose(*args)) or drafted[-1]

    engine.run_in_worker(capture)
    before = num_accepted(engine)
    assert_equal(engine.generate(ASKED, **SAMPLINGS["T=1"]), expected["T=1"])
    assert num_accepted(engine) > before + 20
    assert replayed == [depth for _, depth in drafted if depth > 1]
    assert set(replayed) <= {2, 3, 4, 6, 8} and len(set(replayed)) > 3, "the depths that have a graph"


@pytest.fixture(scope="module")
def block_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("block") / "policy"
    save_block_policy(folder)
    return folder


@pytest.fixture(scope="module")
def of_block_policy(start_engine: Callable[..., RolloutEngine], block_policy: Path) -> dict[str, list[Rollout]]:
    plain = start_engine(
        block_policy, SpecrolloutConfig(drafters=()), max_new_tokens=40, **SMALL, async_scheduling=False
    )
    return {name: plain.generate(ASKED, **SAMPLINGS[name]) for name in ("T=1", "T=0")}


@pytest.mark.parametrize(("name", "asynchronous"), [("dflash", True), ("dspark", True), ("reduced", False)])
def test_block_drafters_change_no_token_and_share_the_noise(
    start_engine: Callable[..., RolloutEngine],
    block_policy: Path,
    of_block_policy: dict[str, list[Rollout]],
    name: str,
    asynchronous: bool,
) -> None:
    """With noise of another position, less than 0.05 of a DFlash's first drafts are right at T=1, and 0.25 of a DSpark's."""
    folder = block_policy.parent / name
    if name == "dflash":
        drafter = DflashDrafterConfig(model=str(save_dflash(folder)))
    else:
        drafter = DsparkDrafterConfig(model=str(save_dspark(folder, block_policy, 80 if name == "reduced" else 96)))
    block = SpecrolloutConfig(drafters=(drafter,), budget=RANDOM)
    engine = start_engine(block_policy, block, max_new_tokens=40, **SMALL, async_scheduling=asynchronous)
    for sampling, expected in of_block_policy.items():
        before = engine.stats()
        assert_equal(engine.generate(ASKED, **SAMPLINGS[sampling]), expected)
        after = engine.stats()
        proposed, accepted = (
            after.proposed[0][0] - before.proposed[0][0],
            after.accepted[0][0] - before.accepted[0][0],
        )
        assert proposed > 40
        assert accepted > (0.15 if name == "dflash" else 0.35) * proposed, (sampling, accepted, proposed)


@pytest.fixture(scope="module")
def drafter() -> Iterator[DrafterService]:
    """A remote drafter in this process, whose model is the policy. A test gives it turns between the engine's steps."""
    memory = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    service = DrafterService(DrafterSpec(model=str(STEP_ADDER), max_requests=8, max_model_len=512, vllm_kwargs=memory))
    yield service
    service.close()


def test_a_remote_drafter_changes_no_token_and_is_mostly_right(
    start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], drafter: DrafterService
) -> None:
    """It draws the target's noise, so that its drafts are wrong only where rounding decides."""
    remote = RemoteDrafterConfig(model=str(STEP_ADDER), addresses=(drafter.status.address,))
    engine = start(SpecrolloutConfig(drafters=(remote,), budget=FIXED))
    for name in ("T=1", "T=0"):
        before = num_accepted(engine)
        while num_accepted(engine) < before + 20:
            generation = Generation(engine, ASKED, sampling=SAMPLINGS[name])
            while not generation.is_done:
                generation.advance(0.0)
                for _ in range(4):
                    if not drafter.turn():
                        drafter._socket.wait(0.01)
            assert_equal(generation.rollouts, expected[name])
    stats = engine.stats()
    assert stats is not None
    proposed, accepted = sum(stats.proposed[0]), sum(stats.accepted[0])
    assert accepted > 0.9 * proposed, (accepted, proposed)
    assert drafter.status.num_drafted > 40
    levels_SX = engine.run_in_worker(lambda worker: worker.specrollout_router.remote.stream.table_SX.copy())
    assert len(set(levels_SX[:, TOKENS + (levels_SX.shape[1] - TOKENS) // 2 :].ravel().tolist())) > 2, "graded drafts"


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


def test_requests_of_coming_steps_change_no_token(
    start: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take slots that are free. Their texts are beginnings of the responses, with the near-ties of all tokens."""
    engine = start(SpecrolloutConfig(drafters=(SUFFIX,), budget=FIXED, run_ahead=RunAheadConfig(most_drafts=4)))
    own = ASKED[:2]
    sampling = SAMPLINGS["T=1"]
    alone = engine.generate(own, **sampling)
    charge(engine, ([0.01] * (SMALL["max_num_seqs"] + 1), 0.0), monkeypatch)
    early = Rolling(engine, **sampling)
    coming = [replace(request, policy_version=1) for request in own]
    early.rolling.plan([early.row(request, 1) for request in coming], scale=1e-3, kept=0.9)
    assert_equal(engine.generate(own, **sampling), alone)
    made = early.end()
    assert made.figures.num_steps_beside > 2
    for request, rollout in zip(coming, engine.generate(coming, **sampling), strict=True):
        text = made.texts[request.noise_seed(engine._seed)]
        assert as_bytes(rollout.token_ids).startswith(text.tokens) and len(text.gaps) * 2 == len(text.tokens) > 8


def test_requests_that_begin_again_bring_their_branches(
    start: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change amid two requests, which ask for their near-ties. Their tokens are those of the new weights."""
    engine = start(SpecrolloutConfig(drafters=(SUFFIX,), budget=FIXED, run_ahead=RunAheadConfig(most_drafts=4)))
    charge(engine, ([0.01] * (SMALL["max_num_seqs"] + 1), 0.0), monkeypatch)
    monkeypatch.setattr(rolling, "_TIME_SHARE", 1.0)
    sampling = {**SAMPLINGS["T=1"], **LONG, "max_tokens": 40}
    new = noisy(OLD, 1, 0.03)

    async def work() -> list[Any]:
        branching = Branching(engine, **sampling)
        branching.one.expect(1.0)
        asked = [asyncio.create_task(branching.ask(i)) for i in range(2)]
        while branching.num_tokens < 40 or not branching.branches():
            await asyncio.sleep(0.001)
        await branching.change(new)
        found = list(await asyncio.gather(*asked))
        kept = branching.one.take_kept()
        assert kept.num_texts == 2 and kept.num_made > 0 and kept.gaps_G.sum() > 0
        return found

    found = asyncio.run(work())
    assert found == [(1, r.token_ids) for r in engine.generate(WORK[:2], **sampling)]
    engine.load_weights(OLD.items())


def test_every_way_of_sampling(start: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]) -> None:
    """This includes bad words, for which the kernel of vLLM 0.25 looks at the wrong draft."""
    engine = start(SpecrolloutConfig(drafters=(NGRAM, SUFFIX), budget=RANDOM))
    for name in WAYS:
        found = engine.generate(ASKED, **SAMPLINGS[name])
        assert_equal(found, expected[name])
        for rollout, plain in zip(found, expected[name], strict=True):
            np.testing.assert_allclose(rollout.logprobs, plain.logprobs, atol=2e-4)
    assert num_accepted(engine) > 50


def test_near_ties_of_early_requests_are_kept(start: Callable[..., RolloutEngine]) -> None:
    """With and without drafts, also in steps that vLLM's code samples because a request asks for more log-probs."""
    plain = start(SpecrolloutConfig(drafters=()))
    engine = start(SpecrolloutConfig(drafters=(SUFFIX,), run_ahead=RunAheadConfig(most_drafts=8)))
    for way in ("T=1", "T=0"):
        assert_kept(plain, engine, ASKED[:2], SAMPLINGS[way])
    assert_kept_beside_log_probs(engine)


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


def test_a_draft_model_in_the_policys_engine_is_refused(start: Callable[..., RolloutEngine]) -> None:
    drafter = build_tagged(DRAFTERS, {"type": "draft_model", "model": str(STEP_ADDER)}, "drafter")
    with pytest.raises(ConfigError, match=r"drafters\[1\]\.type: draft_model; with vLLM .* no draft model of its own"):
        start(SpecrolloutConfig(drafters=(NGRAM, drafter)))
