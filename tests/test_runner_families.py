# SPDX-License-Identifier: Apache-2.0
"""The budget of older runners: drafts left out of a step, and the output that the scheduler reads later."""

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine import compat, text_method
from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity, as_bytes
from nemo_specrollout.generation.engine.transfers import HostCopy
from nemo_specrollout.generation.runners import before_0_32
from nemo_specrollout.generation.runners.before_0_32 import Before032, SwappingVerifier
from nemo_specrollout.generation.runners.graphed_depth import graph_depths
from nemo_specrollout.generation.runners.older_depth import older_depth
from nemo_specrollout.generation.runners.older_recurrent import with_rows_without_drafts
from nemo_specrollout.generation.step.host_budget import HostBudget

pytestmark = pytest.mark.integration
SLOTS = {"a": 2, "b": 0, "c": 1}


@dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int] = field(default_factory=lambda: {"a": 4, "b": 4, "c": 9, "new": 5})
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=lambda: {n: [-1] * 3 for n in "ab"})
    total_num_scheduled_tokens: int = 22
    has_structured_output_requests: bool = False


def budget_with(
    rates_BK: list[list[float]], most: int = 9, returns_experts: bool = False, is_late: bool = False
) -> HostBudget:
    """Returns a budget of `most` drafts after steps in which the drafts of `SLOTS`, in their order, had these rates."""
    rates_SK = torch.zeros(4, 3)
    rates_SK[list(SLOTS.values())] = torch.tensor(rates_BK)
    aux = SimpleNamespace(enable_return_routed_experts=returns_experts)
    runner: Any = SimpleNamespace(
        req_states=SimpleNamespace(req_id_to_index=SLOTS),
        model_config=None,
        vllm_config=SimpleNamespace(aux_output_config=aux),
    )
    drafting = DraftRouter.__new__(DraftRouter)
    drafting.host_s = 0.0
    drafting.policy = SimpleNamespace(num_drafts=lambda num_requests, available: min(available, most))
    drafting.board = SimpleNamespace(tables=SimpleNamespace(rates_SK=rates_SK))
    budget = HostBudget(runner, drafting)
    budget.read(HostCopy(rates_SK, is_late))
    for name, slot in SLOTS.items():
        budget.opened([NewRequest(slot, RequestIdentity(0, 0), 3, [5, 6, 7], 99)])
        budget.record()
        assert budget.trimmed(Scheduled()).num_scheduled_tokens[name]
    budget.record()
    return budget


def test_drafts_beyond_the_budget_are_left_out() -> None:
    scheduled = Scheduled()
    trimmed = budget_with([[0.9, 0.8, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).trimmed(scheduled)
    assert trimmed.scheduled_spec_decode_tokens == {"a": [-1, -1]}
    assert trimmed.num_scheduled_tokens == {"a": 3, "b": 1, "c": 9, "new": 5}
    assert trimmed.total_num_scheduled_tokens == 18
    assert scheduled == Scheduled(), "the scheduler reads its own output later"
    likeliest = budget_with([[0.9, 0.3, 0.7], [0.5, 0.9, 0.9], [0.9, 0.9, 0.9]], most=3).trimmed(Scheduled())
    assert likeliest.scheduled_spec_decode_tokens == {"a": [-1], "b": [-1, -1]}, (
        "0.9, 0.5 and 0.45 against 0.405 and 0.27"
    )


def test_steps_without_drafts_or_with_masks_stay_as_they_are() -> None:
    budget = budget_with([[0.0] * 3] * 3)
    for scheduled in (Scheduled(scheduled_spec_decode_tokens={}), Scheduled(has_structured_output_requests=True)):
        assert budget.trimmed(scheduled) is scheduled


def test_steps_whose_experts_are_returned_stay_as_they_are() -> None:
    scheduled = Scheduled()
    assert budget_with([[0.0] * 3] * 3, returns_experts=True).trimmed(scheduled) is scheduled


def test_a_new_request_drafts_as_far_as_its_text_while_rates_are_a_step_late() -> None:
    """The host knows no rates of request "b" yet, but those of the request that had its slot."""
    late = budget_with([[0.5, 0.5, 0.0], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]], most=4, is_late=True)
    for ahead, kept_of_a in ((as_bytes([1, 2, 3]), 1), (b"", 2)):
        late.opened([NewRequest(SLOTS["b"], RequestIdentity(0, 0, ahead=ahead), 3, [5, 6, 7], 99)])
        drafts = late.trimmed(Scheduled()).scheduled_spec_decode_tokens
        assert len(drafts["a"]) == kept_of_a and (len(drafts.get("b", ())) == 3) == bool(ahead)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(VllmConfig, "_get_v2_model_runner_unsupported_features"), (model_runner, "init_speculator")],
)
def test_an_older_vllm_without_such_a_name_is_refused(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "HAS_TEXT_METHOD", False)
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=rf"vLLM {re.escape(vllm.__version__)}: .* has no {name}; this version"):
        text_method.allow_text_drafters()
    assert not text_method._is_text_allowed


def test_an_older_vllm_without_its_rule_of_acceptance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Before032().verify_names()
    monkeypatch.delattr(rejection_sampler, "rejection_sample")
    with pytest.raises(RuntimeError, match="rejection_sampler has no rejection_sample; this version"):
        Before032().verify_names()


@pytest.mark.parametrize(
    ("sampler", "missing"),
    [
        (SimpleNamespace(), "the sampler has no bad_words_state"),
        (SimpleNamespace(bad_words_state=object()), "has no apply_bad_words"),
    ],
)
def test_an_older_vllm_that_keeps_bad_words_elsewhere_is_refused(
    sampler: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_0_32._fix_bad_words(sampler)  # vLLM 0.32 repaired them
    monkeypatch.setattr(before_0_32, "bad_words", re)  # a module without the repair
    with pytest.raises(RuntimeError, match=missing):
        before_0_32._fix_bad_words(sampler)


@pytest.mark.parametrize("most", [1, 2, 5, 8, 64])
def test_every_depth_has_a_graph_that_is_little_deeper(most: int) -> None:
    """Where vLLM captures all positions of a head in one graph."""
    depths = graph_depths(most)
    assert depths[0] == 0 and depths[-1] == most and len(depths) <= 2 + 2 * most.bit_length()
    for wanted in range(1, most + 1):
        assert wanted <= next(depth for depth in depths if depth >= wanted) <= 1.5 * wanted


def test_a_failed_capture_leaves_all_positions_or_one(caplog: pytest.LogCaptureFixture) -> None:
    """The engine goes on. A speculator of vLLM 0.29 has all that is read here."""

    def capture() -> None:
        looping.num_captured += 1

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    graphs = SimpleNamespace(needs_capture=lambda: True, capture=fail)
    looping: Any = SimpleNamespace(
        num_speculative_steps=8, num_captured=0, propose=None, init_cudagraph_manager=None, capture=capture,
        decode_cudagraph_manager=graphs, use_fused_multi_step_decode=True, on_multi_step_decode_begin=lambda _: None,
        max_num_reqs=4, _generate_fused_drafts=None, _multi_step_decode=None, model_state=None, input_buffers=None,
        block_tables=None, attn_groups=None, kv_cache_config=None, on_multi_step_decode_end=lambda _: None,
        **{f"specrollout_decode_graphs_{depth}": graphs for depth in (2, 3, 4, 6)},
    )  # fmt: skip
    depth: Any = older_depth(looping)
    assert depth._depths == list(range(9)), "before graphs are captured"
    looping.capture()
    assert looping.num_captured == 1 and looping.num_speculative_steps == 8
    assert depth._depths == [0, 1, *[8] * 7]
    assert "all positions or one" in caplog.text and "out of memory" in caplog.text


def test_an_older_rejection_sampler_that_does_not_ask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of vLLM is replaced in its module, but the sampler does not look it up there."""
    monkeypatch.setattr(rejection_sampler.RejectionSampler, "__call__", lambda *_: "accepted by another rule")
    verifier = SwappingVerifier.__new__(SwappingVerifier)
    verifier.sampler = None  # not a row sampler, which asks vLLM for no rule
    with pytest.raises(RuntimeError, match="verification is not in force"):
        verifier(None, None)


# A decoding row without drafts, of a request whose state stands where accepted drafts have left it.


def test_rows_without_drafts_count_as_rows_with_drafts_where_states_are_read() -> None:
    """Requests of a step: two drafts, none, a prompt of four tokens, a prompt's last token, and padding."""
    num_drafts_B = torch.tensor([2, -1, -1, -1, -1], dtype=torch.int32)
    starts_B1 = torch.tensor([0, 3, 4, 8, 9, 9], dtype=torch.int32)
    is_prefilling_B = torch.tensor([False, False, True, True, False])
    found_B = with_rows_without_drafts(num_drafts_B, starts_B1, is_prefilling_B)
    assert found_B.tolist() == [2, 1, -1, -1, -1] and found_B.dtype == torch.int32


def test_a_step_without_any_draft_reads_reached_states_too() -> None:
    starts_B1 = torch.tensor([0, 1, 2])
    found_B = with_rows_without_drafts(torch.full((2,), -1), starts_B1, torch.zeros(2, dtype=torch.bool))
    assert found_B.tolist() == [1, 1], "vLLM asks whether the sum is above 0"
