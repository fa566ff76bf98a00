# SPDX-License-Identifier: Apache-2.0
"""Parts of the package `nemo_rl` that need no NeMo-RL: seeds, shared tensors, metrics, the logger and its record."""

import asyncio
import json
import pickle
import re
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from nemo_rl_records import watching_logger
from run_files import undefined
from torch import nn
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.parallel_sampling import ParentRequest

from nemo_specrollout.generation.engine.admission import check_params
from nemo_specrollout.generation.engine.ahead_branches import AheadBranch, pack
from nemo_specrollout.generation.engine.identity import resolve_identity
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, RequestIdentity, as_bytes
from nemo_specrollout.generation.engine.vllm_requests import REFUSAL, shard_request, text_and_params
from nemo_specrollout.heads.serving.head_loading import part_from_policy, shared_modules
from nemo_specrollout.nemo_rl.early_rows import NextPrompt, early_gym_rows, early_rows, early_rows_of_samples
from nemo_specrollout.nemo_rl.engine_inputs import RequestSeeds, header_seed
from nemo_specrollout.nemo_rl.logger import in_a_line
from nemo_specrollout.nemo_rl.logprob_gap import gap_causes, logprob_gap
from nemo_specrollout.nemo_rl.metrics import step_metrics, weight_updates
from nemo_specrollout.nemo_rl.patch_point_table import DRIVER_POINTS, WORKER_POINTS
from nemo_specrollout.nemo_rl.patch_points import PatchPoint
from nemo_specrollout.nemo_rl.row_seeds import (
    DRAFTS_KEY,
    Conversations,
    Row,
    RowSeeds,
    Sample,
    SeedKind,
    current_sample,
    gym_row_with_seed,
    sample_seed,
)
from nemo_specrollout.nemo_rl.row_tasks import TaskOptOut, current_tasks, with_task, with_tasks
from nemo_specrollout.nemo_rl.run_record import RunRecord
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.reports.metric_table import LOGGER
from nemo_specrollout.reports.records import PREFIX
from nemo_specrollout.run_ahead.texts import TextAhead
from nemo_specrollout.telemetry.engine_stats import EngineTotals, StepTrace

pytestmark = pytest.mark.unit

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5], [1, 2, 3]]


def test_siblings_and_equal_prompts_get_different_seeds() -> None:
    assert len(set(RowSeeds(42).seeds(PROMPTS))) == 4


def test_seeds_are_reproducible_and_do_not_depend_on_other_rows() -> None:
    seeds = RowSeeds(42).seeds(PROMPTS)
    assert RowSeeds(42).seeds(PROMPTS) == seeds
    one_by_one = RowSeeds(42)
    assert [one_by_one.seeds([p])[0] for p in PROMPTS] == seeds
    assert RowSeeds(42).seeds([[4, 5]]) == seeds[2:3]


def test_run_seed_version_and_stream_change_every_seed() -> None:
    seeds = set(RowSeeds(42).seeds(PROMPTS))
    assert not seeds & set(RowSeeds(43).seeds(PROMPTS))
    assert not seeds & set(RowSeeds(42, 1).seeds(PROMPTS))
    assert not seeds & set(RowSeeds(42).seeds(PROMPTS, SeedKind.VALIDATION))


def test_a_resumed_run_has_the_seeds_of_an_uninterrupted_one() -> None:
    whole = RowSeeds(42)
    whole.seeds(PROMPTS)
    whole.begin_version(7)
    assert whole.seeds(PROMPTS) == RowSeeds(42, 7).seeds(PROMPTS)


def test_telling_the_same_version_again_does_not_repeat_samples() -> None:
    identities = RowSeeds(42, 3)
    seeds = identities.seeds(PROMPTS)
    identities.begin_version(3)
    assert not set(seeds) & set(identities.seeds(PROMPTS))


def test_a_copy_for_another_process_goes_on_by_itself() -> None:
    identities = RowSeeds(42, 3)
    identities.seeds(PROMPTS)
    copied = pickle.loads(pickle.dumps(identities))
    assert copied.seeds(PROMPTS) == identities.seeds(PROMPTS)


def resolved(params: Any) -> RequestIdentity:
    return resolve_identity(params, [1, 2], engine_seed=3)


def test_rows_of_a_task_can_opt_out_of_drafts() -> None:
    opt_out, requests = TaskOptOut(["squad"]), RequestSeeds(5)
    assert opt_out.of_rows(2) == [True, True]  # a call from outside a rollout
    decided = with_tasks(lambda policy, data, batch: opt_out.of_rows(2), None, None, {"task_name": ["squad", "math"]})
    assert decided == [False, True] and not current_tasks.get()

    async def roll_out(index: int, state: dict[str, Any], *, greedy: bool) -> tuple[int, bool, list[bool]]:
        return index, greedy, opt_out.of_rows(1)

    assert asyncio.run(with_task(roll_out, 4, {"task_name": "squad"}, greedy=True)) == (4, True, [False])
    assert not current_tasks.get()
    params = requests.of_rows(SamplingParams(), [Row(1, 2, speculate=False), Row(1, 2)])
    assert [resolved(p).speculate for p in params] == [False, True]


def test_a_row_brings_the_text_that_was_made_for_it_with_its_branches() -> None:
    requests = RequestSeeds(5)
    branches = (AheadBranch(0, 1, as_bytes([9])),)
    requests.texts.replace({1: TextAhead(as_bytes([7, 8]), branches=branches)})
    with_text, without = map(resolved, requests.of_rows(SamplingParams(), [Row(1, 2), Row(2, 2)]))
    assert (with_text.ahead, with_text.branches) == (as_bytes([7, 8]), branches)
    assert (without.ahead, without.branches) == (b"", ())


def test_rows_whose_texts_would_never_be_drafts_are_not_decoded_early() -> None:
    """The rows that are decoded early have the seeds that the step gives them, also where contents occur twice."""
    contents, tasks = [[1, 2], [3], [1, 2], [4]], ["squad", "math", "math", None]
    prompts = [NextPrompt(ids, task) for ids, task in zip(contents, tasks, strict=True)]
    rows = early_rows([*prompts, NextPrompt([5], "math", None, True)], 2, RowSeeds(42, 3), TaskOptOut(["squad"]))
    assert [row.prompt for row in rows] == [[3], [3], [1, 2], [1, 2], [4], [4]]
    of_the_step = RowSeeds(42, 3).seeds([ids for ids in contents for _ in range(2)])
    assert [row.row for row in rows] == [
        Row(seed, len(row.prompt)) for seed, row in zip(of_the_step[2:], rows, strict=True)
    ]
    assert len(early_rows(prompts, 1, RowSeeds(42), TaskOptOut([]))) == 4


def test_early_rows_under_the_controller_have_the_seeds_of_their_samples() -> None:
    """There a seed follows from the row of the dataset and the epoch. A prompt without a number cannot be begun early."""
    prompts = [NextPrompt([1, 2], "math", 7), NextPrompt([3], "squad", 8), NextPrompt([4], "math")]
    rows = early_rows_of_samples(prompts, 2, 42, 3, TaskOptOut(["squad"]))
    assert [row.row for row in rows] == [Row(sample_seed(42, Sample(7, i, 3), [1, 2]), 2) for i in range(2)]


def test_the_first_request_of_a_gym_row_brings_the_text_that_was_made_for_it() -> None:
    """The row's seed and the prompt's tokens decide. Another prompt, several samples or no drafts bring no text."""
    rows = [
        {"responses_create_params": {"input": "a"}},
        {"responses_create_params": {"input": "b"}, "agent_ref": {"name": "judge"}},
        {"responses_create_params": {"input": "c", "metadata": {"extra_body": '{"seed": 9}'}}},
        {"responses_create_params": {"input": "d"}},
    ]
    seeds = [[2 * i, 2 * i + 1] for i in range(len(rows))]
    early = early_gym_rows(rows, [[1, 2], [3], [4, 5], None], seeds, 5, ["judge"])
    assert [row.prompt for row in early] == [[1, 2], [1, 2], [4, 5], [4, 5]]
    assert early[2].row == early[3].row, "a row's own seed is kept"

    requests = RequestSeeds(5)
    requests.texts.replace(
        {early[1].row.seed: TextAhead(as_bytes([7, 8])), early[2].row.seed: TextAhead(as_bytes([6]))}
    )
    asked = [
        ({"seed": 1}, [1, 2]),
        ({"seed": 9}, [4, 5]),
        ({"seed": 0}, [1, 2]),
        ({"seed": 1}, [1, 2, 3]),
        ({"seed": 1, "n": 2}, [1, 2]),
        ({"seed": 1, "extra_args": {DRAFTS_KEY: 0}}, [1, 2]),
    ]
    made = [requests.of_requests(SamplingParams(**given), [prompt])[0] for given, prompt in asked]
    assert [params.extra_args[EXTRA_ARGS_KEY].get("ahead") for params in made] == [as_bytes([7, 8]), as_bytes([6])] + [
        None
    ] * 4
    assert made[0].extra_args[EXTRA_ARGS_KEY]["seed"] == early[1].row.seed

    async def decode(*parts: tuple[int, ...]) -> AsyncGenerator[Any, None]:
        for i, part in enumerate(parts, 1):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=part)], finished=i == len(parts))

    async def follow(params: SamplingParams, *parts: tuple[int, ...]) -> int:
        return len([output async for output in requests.texts.followed(decode(*parts), params)])

    streams = SamplingParams(extra_args=made[1].extra_args, output_kind=RequestOutputKind.DELTA)
    for params, parts in ((made[0], [(7,), (7, 3)]), (streams, [(6,), (2,)]), (made[2], [(7,)])):
        assert asyncio.run(follow(params, *parts)) == len(parts)
    kept = requests.texts.take_kept()
    assert (kept.num_brought, kept.num_texts, kept.num_right, kept.num_made) == (2, 2, 2, 3)


def test_a_request_that_moves_brings_what_lies_beyond_its_prefix() -> None:
    """The engine that goes on with it counts positions of texts made ahead from the end of the prefix."""
    texts = {"seed": 1, "ahead": as_bytes([7, 8, 9, 10]), "branches": pack([AheadBranch(0, 3, as_bytes([4, 5]))])}
    params = SamplingParams(max_tokens=8, logprobs=0, extra_args={EXTRA_ARGS_KEY: texts})
    request = shard_request((0, 0), {"prompt_token_ids": [1, 2]}, params)
    assert request.num_ahead == 4
    _, moved = text_and_params(replace(request, prefix_token_ids=(7, 8)), streams=False)
    found = resolved(moved)
    assert (found.ahead, found.branches) == (as_bytes([9, 10]), (AheadBranch(0, 1, as_bytes([4, 5])),))


@pytest.mark.parametrize(("given", "speculates"), [({}, True), ({DRAFTS_KEY: 1}, True), ({DRAFTS_KEY: 0}, False)])
def test_an_http_request_can_opt_out_of_drafts(given: dict[str, int], speculates: bool) -> None:
    """A request keeps its seed, whatever it says about drafts."""
    asked, plain = (SamplingParams(seed=4, n=1, extra_args=extra) for extra in ({**given, "other": 1}, None))
    made, native = RequestSeeds(5).of_requests([asked, plain], [[1, 2], [1, 2]])
    assert resolved(made).speculate is speculates and resolved(made).seed == resolved(native).seed
    assert DRAFTS_KEY not in made.extra_args and made.extra_args["other"] == 1


def test_an_unclear_word_on_drafts_is_refused() -> None:
    with pytest.raises(REFUSAL, match="'no' is neither 0 nor 1; send 0"):
        RequestSeeds(5).of_requests(SamplingParams(extra_args={DRAFTS_KEY: "no"}), [[1, 2]])


@pytest.mark.parametrize("seed", [1.5, "7", True, 2**63])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(REFUSAL, match=r"seed: .* is not a whole number of 64 bits"):
        RequestSeeds(5).of_requests(SamplingParams(seed=seed), [[1, 2]])


@pytest.mark.parametrize("given", ["seed=1", None, [1], {"sead": 1}, {"seed": -1}, {"seed": 1, "speculate": "no"}])
def test_a_malformed_identity_reaches_no_engine(given: Any) -> None:
    """Over HTTP a client can send a text, a number or a list. vLLM asks `check_params`; the exchange of requests asks too."""
    (params,) = RequestSeeds(5).of_requests(SamplingParams(extra_args={EXTRA_ARGS_KEY: given}), [[1, 2]])
    with pytest.raises(ValueError, match=r'^extra_args\["specrollout"\]'):
        check_params(params)
    with pytest.raises(REFUSAL, match=r'^extra_args\["specrollout"\]'):
        shard_request((0, 0), {"prompt_token_ids": [1, 2]}, params)


def test_threads_never_share_a_seed() -> None:
    identities = RowSeeds(42)
    with ThreadPoolExecutor(8) as pool:
        seeds = list(pool.map(lambda _: identities.seeds([[1, 2, 3]])[0], range(2000)))
    assert len(set(seeds)) == 2000


@pytest.mark.parametrize("point", DRIVER_POINTS + WORKER_POINTS, ids=lambda p: p.name)
def test_every_patch_point_is_on_the_page(point: PatchPoint) -> None:
    page = (ROOT / "docs" / "reference" / "nemo-rl-patch-points.md").read_text()
    file = point.module.removeprefix("nemo_rl.").removeprefix("models.generation.vllm.").replace(".", "/")
    assert re.search(rf"^\| {file}(/\w+)?\.py \|.* `{point.name}` \d+ ", page, re.MULTILINE)


def test_requests_get_seed_and_first_prompt_length_of_their_row() -> None:
    seeds, shared = RequestSeeds(), SamplingParams(extra_args={"other": 1}, max_tokens=7)
    first, second = seeds.of_rows(shared, [Row(11, 3), Row(22, 4)])
    assert first.extra_args == {"other": 1, "specrollout": {"seed": 11, "prompt_length": 3}} and first.max_tokens == 7
    assert second.extra_args["specrollout"] == {"seed": 22, "prompt_length": 4}
    assert shared.extra_args == {"other": 1} and seeds.num_derived == 0
    with pytest.raises(ValueError, match="zip"):
        seeds.of_rows([shared] * 3, [Row(11, 3), Row(22, 4)])


def seed_of(seeds: RequestSeeds, tokens: list[int], **params: Any) -> int:
    """The seed with which a request over HTTP samples, on an engine whose own seed is 3."""
    (made,) = seeds.of_requests(SamplingParams(**params), [{"prompt_token_ids": tokens}])
    return resolve_identity(made, tokens, engine_seed=3).seed


def test_a_missing_seed_is_derived_from_the_prompt() -> None:
    """Equal runs give equal seeds; repeated prompts, engines, policy versions and runs give others."""
    one, again = RequestSeeds(5), RequestSeeds(5)
    in_order = [seed_of(one, tokens) for tokens in ([1, 2], [1, 2], [3])]
    assert in_order == [seed_of(again, tokens) for tokens in ([1, 2], [1, 2], [3])] and one.num_derived == 3
    one.begin_version(1)
    others = [seed_of(one, [1, 2]), seed_of(RequestSeeds(5, engine=1), [1, 2]), seed_of(RequestSeeds(6), [1, 2])]
    assert len({*in_order, *others}) == 6


def test_a_request_keeps_the_seed_that_it_brings_on_every_engine() -> None:
    given = seed_of(RequestSeeds(5), [1, 2], seed=9)
    assert given == seed_of(RequestSeeds(5, engine=1), [1, 2], seed=9)
    assert len({given, seed_of(RequestSeeds(5), [1, 3], seed=9), seed_of(RequestSeeds(5), [1, 2], seed=8)}) == 3
    token = header_seed.set(9)
    try:
        seeds = RequestSeeds(5, required=True)
        assert seed_of(seeds, [1, 2]) == given and seeds.num_derived == 0
    finally:
        header_seed.reset(token)


def test_a_request_without_a_required_seed_is_refused() -> None:
    with pytest.raises(REFUSAL, match=r"http_seeds: required.*X-Specrollout-Seed"):
        seed_of(RequestSeeds(required=True), [1, 2])


@pytest.mark.parametrize("given", [None, 2**63 - 1])
def test_the_samples_of_one_request_have_seeds_of_their_own(given: int | None) -> None:
    prompt = {"prompt_token_ids": [1, 2]}
    (params,) = RequestSeeds().of_requests(SamplingParams(n=4, seed=given), [prompt])
    parent = ParentRequest(SimpleNamespace(params=params, request_id="r", external_req_id="r"))
    children = [parent.get_child_info(i)[1] for i in range(4)]
    seeds = {resolve_identity(child, [1, 2], engine_seed=3).seed for child in children}
    assert len(seeds) == 4 and all(0 <= child.seed < 2**63 for child in children)
    assert seeds == {resolve_identity(child, [1, 2], engine_seed=4).seed for child in children}


def test_later_turns_of_a_conversation_keep_its_group() -> None:
    told = Conversations()
    first, other = [5, 6, 7], [5, 6, 8]
    assert told.root_lengths([first, first, other]) == [3, 3, 3]
    second = [*first, 1, 2, 9]
    assert told.root_lengths([second, [*first, 4, 9], [*other, 1]]) == [3, 3, 3]
    assert told.root_lengths([[*second, 3, 3, 3, 3]]) == [3]
    assert told.root_lengths([[5, 6], [6, 7, 5], []]) == [2, 3, 0]


def test_a_rollout_that_is_tried_again_keeps_its_seeds() -> None:
    identities, row = RowSeeds(1), [1, 2, 3]

    def seeds(sample: Sample | None) -> list[int]:
        token = current_sample.set(sample)
        try:
            return identities.seeds([row])
        finally:
            current_sample.reset(token)

    first = seeds(Sample(7, 0))
    identities.begin_version(3)
    assert seeds(Sample(7, 0)) == first
    others = [seeds(s)[0] for s in (Sample(7, 1), Sample(8, 0), Sample(7, 0, epoch=1), None)]
    assert len({*first, *others}) == 5


def test_a_gym_row_brings_a_seed_to_all_its_requests() -> None:
    row = {
        "responses_create_params": {"input": "x", "metadata": {"extra_body": '{"min_p": 0.1}', "other": "y"}},
        "id": 3,
    }
    params = gym_row_with_seed(row, 5)["responses_create_params"]
    assert json.loads(params["metadata"]["extra_body"]) == {"seed": 5, "min_p": 0.1}
    assert params["metadata"]["other"] == "y" and "5" not in str(row)
    own = gym_row_with_seed({"responses_create_params": {"metadata": {"extra_body": '{"seed": 1}'}}}, 5)
    assert json.loads(own["responses_create_params"]["metadata"]["extra_body"]) == {"seed": 1}
    agent = {**row, "agent_ref": {"name": "judge"}}
    body = gym_row_with_seed(agent, 5, ["judge"])["responses_create_params"]["metadata"]["extra_body"]
    assert json.loads(body)["vllm_xargs"] == {DRAFTS_KEY: 0}
    assert gym_row_with_seed(agent, 5, ["other"])["responses_create_params"] == params


class Draft(nn.Module):
    def __init__(self, target: "Target") -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = target.embed_tokens
        self.lm_head = target.lm_head
        self.fc = nn.Linear(4, 4)


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)


def test_only_what_draft_weights_would_overwrite_is_parted() -> None:
    target = Target()
    draft = Draft(target)
    assert shared_modules(target, draft) == ["lm_head", "model.embed_tokens"]
    assert part_from_policy(target, draft, ["lm_head.weight", "fc.weight"]) == ["lm_head"]
    before = target.lm_head.weight.clone()
    draft.load_state_dict({"lm_head.weight": torch.zeros(8, 4)}, strict=False)
    assert torch.equal(target.lm_head.weight, before) and not draft.lm_head.weight.any()
    assert draft.model.embed_tokens is target.embed_tokens
    assert part_from_policy(target, draft, ["lm_head.weight"]) == []


def totals(**fields: object) -> EngineTotals:
    return EngineTotals(**fields)  # type: ignore[arg-type]


def test_totals_add_over_engines_and_survive_the_wire() -> None:
    a = totals(num_steps=3, decode_s=1.0, proposed=(("suffix", (4, 2)),), accepted=(("suffix", (3, 1)),))
    b = totals(
        num_steps=1, proposed=(("ngram", (1,)), ("suffix", (1, 1))), accepted=(("ngram", (0,)), ("suffix", (1, 0)))
    )
    both = a + b
    assert both.num_steps == 4 and dict(both.proposed) == {"suffix": (5, 3), "ngram": (1,)}
    assert dict((both - b).accepted)["suffix"] == (3, 1)
    assert EngineTotals.from_wire(json.loads(json.dumps(asdict(both)))) == both


def traced_steps(trace: StepTrace) -> None:
    """A prefill of two requests, then two decode steps: one with three drafts of which two are accepted, one without."""
    trace.begin_after_idle()
    trace.begin_step(2, 2, 10)
    trace.end_step()
    trace.begin_step(2, 5, 5)
    trace.end_step(0.001)
    trace.begin_step(2, 2, 2)
    trace.end_step()


def test_account_counts_every_step_once_and_estimates_plain_time() -> None:
    trace = StepTrace(["suffix"], lambda first, n: np.array([[0, 0], [3, 2], [0, 0]] * 2)[first : first + n])
    traced_steps(trace)
    plain_step_s = np.array([0.0, 1.0, 10.0])
    first = trace.totals(plain_step_s, num_weight_updates=1)
    assert (first.num_steps, first.num_steps_with_drafts, first.num_request_steps, first.num_rows) == (3, 1, 6, 9)
    assert first.plain_s == pytest.approx((1 + 2 / 2) * 10 + 10)
    assert first.estimated_s == first.decode_s and first.num_weight_updates == 1
    assert trace.totals(plain_step_s).num_steps == 3
    traced_steps(trace)
    assert trace.totals(None).num_steps == 6


def test_a_step_after_idleness_counts_no_idle_time() -> None:
    trace = StepTrace([])
    traced = trace.columns.index("is_decode")
    for _ in range(2):
        trace.begin_after_idle()
        trace.begin_step(1, 1, 1)  # a prompt that is cached but for its last token looks like decoding
        trace.end_step()
    assert [row[traced] for row in trace.since(0).rows] == [0, 0]


def test_step_metrics_are_ratios_of_differences() -> None:
    before = totals(
        num_steps=10, num_request_steps=20, num_rows=20, proposed=(("suffix", (8, 8)),), accepted=(("suffix", (8, 0)),)
    )
    done = totals(
        num_steps=4, num_steps_with_drafts=2, num_request_steps=8, num_rows=14, other_s=1.0, decode_s=3.0, estimated_s=3.0,
        plain_s=7.0, proposed=(("suffix", (4, 2)),), accepted=(("suffix", (3, 1)),),
    )  # fmt: skip
    figures = step_metrics([(before + done) - before])
    assert figures["specrollout/speedup_estimate"] == pytest.approx(2.0)
    assert (figures["specrollout/rollout_s"], figures["specrollout/plain_estimate_s"]) == (4.0, 8.0)
    two = step_metrics([done, totals(num_steps=2, num_request_steps=4, other_s=1.0, decode_s=1.0)])
    assert two["specrollout/rollout_s"] == 3.0, "engines work side by side"
    assert two["specrollout/num_engines"] == 2 and two["specrollout/engine_idle_share"] == pytest.approx(0.25)
    assert "specrollout/engine_idle_share" not in figures
    assert figures["specrollout/acceptance_length"] == pytest.approx(1.5)
    assert (figures["specrollout/num_tokens"], figures["specrollout/request_steps"]) == (12, 8)
    assert figures["specrollout/draft_tokens_per_request_step"] == pytest.approx(0.75)
    assert figures["specrollout/steps_with_drafts"] == 0.5
    assert figures["specrollout/suffix/acceptance"] == pytest.approx(4 / 6)
    assert figures["specrollout/suffix/acceptance_pos_2"] == 0.5
    assert figures["specrollout/suffix/share_of_drafts"] == 1.0
    assert undefined({name.removeprefix(PREFIX): value for name, value in (figures | two).items()}, LOGGER) == []


def test_a_refit_between_two_steps_counts_for_the_second() -> None:
    first, second = (totals(num_weight_updates=2 * n) for n in (1, 2))  # of two engines
    expected = {"specrollout/weight_updates": 1.0}
    assert weight_updates(totals(), first, 2) == weight_updates(first, second, 2) == expected
    assert weight_updates(second, second, 2) == {"specrollout/weight_updates": 0.0}


def test_an_idle_step_has_no_ratios() -> None:
    idle = totals(num_steps=5, num_request_steps=5)
    figures = step_metrics([idle - idle])
    assert figures["specrollout/engine_steps"] == 0 and "specrollout/speedup_estimate" not in figures


def test_logger_raises_the_alarm_and_keeps_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = watching_logger(tmp_path, causes=["weights that did not arrive"])
    logger.log_metrics({"token_mult_prob_error": 1.0, "loss": 0.5, "specrollout/engine_steps": 3.0}, 1, prefix="train")
    logger.log_metrics({"token_mult_prob_error": 1.2, "loss": 0.4}, 2, prefix="train")
    logger.log_metrics({"accuracy": 0.1}, 2, prefix="validation")
    assert logger.logged[0][0]["specrollout/logprob_gap_alarm"] == 0.0
    assert logger.logged[1][0]["specrollout/logprob_gap_alarm"] == 1.0
    assert logger.logged[2] == ({"accuracy": 0.1}, "validation")
    said = " ".join(capsys.readouterr().err.split())
    assert "ALARM, step 2" in said and "0.1823 nats" in said and "weights that did not arrive" in said
    logger.finish()
    summary = json.loads((tmp_path / "specrollout" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["alarms"] == 1
    first, second = (json.loads(line) for line in (tmp_path / "specrollout" / "metrics.jsonl").read_text().splitlines())
    assert first["engine_steps"] == 3.0 and "alarms" not in first
    assert (
        "weights that did not arrive" in second["alarms"][0]
        and "vllm" in json.loads((tmp_path / "specrollout" / "run.json").read_text())["versions"]
    )


def test_a_step_in_a_line_says_what_there_is() -> None:
    metrics = {"specrollout/logprob_gap": 1e-6, "specrollout/acceptance_length": 1.5, "loss": 0.1}
    metrics |= {"specrollout/suffix/share_of_drafts": 0.75, "specrollout/ngram/share_of_drafts": 0.25}
    line = "1.50 tokens per request and engine step; log-prob gap 1.0e-06; drafted by suffix 75%, ngram 25%"
    assert in_a_line(metrics) == line
    assert in_a_line({"specrollout/logprob_gap": 0.5}) == "log-prob gap 5.0e-01"


def test_gap_is_zero_for_equal_log_probs_and_absent_if_unlogged() -> None:
    assert logprob_gap({"token_mult_prob_error": 1.0}) == 0.0
    assert logprob_gap({"token_mult_prob_error": float(np.exp(0.08))}) == pytest.approx(0.08)
    assert logprob_gap({"loss": 1.0}) is None


def test_a_run_that_goes_on_keeps_its_record(tmp_path: Path) -> None:
    for step, gap in ((1, 0.01), (2, 0.03)):
        record = RunRecord(tmp_path, {})
        record.add(step, {"specrollout/logprob_gap": gap, "specrollout/tail/moves": 3.0}, StepLog())
        record.finish_step()
    summary = json.loads((tmp_path / "specrollout" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["largest_logprob_gap"] == 0.03


def test_files_of_a_step_lie_beside_the_records(tmp_path: Path) -> None:
    log = StepLog()
    record = RunRecord(tmp_path, {})
    for text in ("one", "two"):
        log.files["ladder.json"] = text
        record.add(1, {}, log.take())
    record.add(2, {}, log.take())
    assert (record.folder / "ladder.json").read_text() == "two"


@pytest.mark.parametrize("block", ["grpo.async_grpo", "ppo.async_ppo"])
def test_causes_name_what_the_run_has(block: str) -> None:
    algorithm, _, name = block.partition(".")
    policy = {
        "generation": {"vllm_cfg": {"precision": "bfloat16"}},
        "precision": "bfloat16",
        "draft": {"enabled": True},
    }
    causes = gap_causes({"policy": policy, algorithm: {name: {"enabled": True, "in_flight_weight_updates": True}}})
    assert "shares with the policy" in causes[0]
    assert f"{block}.max_trajectory_age_steps" in causes[1] and "KV of older weights" in causes[2]
    assert "cached prefixes" in causes[4] and "enable_prefix_caching" in causes[4]
    assert "low precision" in causes[-1]
    assert len(gap_causes({"policy": {**policy, "draft": None}, algorithm: {name: {"enabled": False}}})) == 2
