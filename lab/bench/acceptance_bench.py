# SPDX-License-Identifier: Apache-2.0
"""Measures the acceptance of drafts, for a table with a row for each way of drafting.

The table compares the ways to sample drafts from the config's drafter with weights, under our sampler and under vLLM's. It
also has the text drafters. Every request gets `bench.acceptance_k` draft tokens in every engine step, so that the rows can be
compared. No time is measured.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.bench.bench_tables import new_table
from lab.local.engine import RolloutEngine
from lab.local.run_config import RunConfig
from lab.local.run_sections import GenerationConfig
from lab.local.statistics import count_equal
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    FolderDrafterConfig,
    NgramDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.generation.engine.arguments import native_config
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

NUM_STEPS = 2


def measure_acceptance_table(config: RunConfig) -> list[dict[str, Any]]:
    """Returns a row for each way of drafting, with its acceptance by draft position and its tokens per engine step.

    The acceptance at a position is the share of drafts whose tokens are accepted up to this position.
    """
    model = Path(config.policy.model_name)
    task = build_task(config.data, load_tokenizer(model))
    steps = (step_prompts(config, i, task).requests for i in range(NUM_STEPS))
    requests = list(itertools.chain(*steps))
    ours = _ways_of_ours(config)
    expected: list[Rollout] = []
    rows = []
    for name, generation in ours.items():
        engine = RolloutEngine(model, generation, config.grpo.seed)
        rollouts = engine.generate(requests)
        expected = expected or rollouts
        if generation.specrollout.drafters:
            equal, total = count_equal(rollouts, expected)
            rows.append({"drafting": name, **_ours(engine), "tokens_equal": equal, "tokens_total": total})
        engine.close()
    for name, generation in _ways_of_vllm(config).items():
        engine = RolloutEngine(model, generation, config.grpo.seed, disable_log_stats=False)
        engine.generate(requests)
        metrics: dict[str, Any] = {m.name: m for m in engine._llm.get_metrics()}
        num_drafts = metrics["vllm:spec_decode_num_drafts"].value
        accepted_K = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        rows.append({"drafting": name, **_figures([a / num_drafts for a in accepted_K]), "tokens_equal": None})
        engine.close()
    return [*rows, _upper_bound(config, requests, expected)]


def acceptance_table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table for the terminal with the rows of `measure_acceptance_table`."""
    table = new_table("drafts accepted, with all before them, by position")
    positions = len(rows[0]["accepted_by_position"])
    for name in ("drafting", *map(str, range(1, positions + 1)), "tok/step", "tokens equal"):
        table.add_column(name, justify="left" if name == "drafting" else "right", no_wrap=True)
    for row in rows:
        equal = "-" if row["tokens_equal"] is None else f"{row['tokens_equal']}/{row['tokens_total']}"
        shares = (f"{share:.3f}" for share in row["accepted_by_position"])
        table.add_row(row["drafting"], *shares, f"{row['acceptance_length']:.2f}", equal)
    return table


def _ways_of_ours(config: RunConfig) -> dict[str, GenerationConfig]:
    """Returns the generation configs of the ways of drafting under our sampler, by name.

    Plain decoding comes first, because the others' tokens are compared with its tokens.
    """
    generation = config.policy.generation
    k = config.bench.acceptance_k
    block = generation.specrollout
    drafter = block.model_drafter
    assert drafter is not None
    drafters: dict[str, tuple[DrafterConfig, ...]] = {
        "plain": (),
        f"{drafter.type}, shared noise": (replace(drafter, sampling="shared_noise"),),
        f"{drafter.type}, greedy": (replace(drafter, sampling="greedy"),),
        "suffix": (SuffixDrafterConfig(),),
        "n-gram": (NgramDrafterConfig(),),
    }
    fixed = replace(block, enabled=True, budget=BudgetConfig("fixed", k=k), draft_refresh=None)
    fixed = replace(fixed, num_speculative_tokens=max(k, block.num_speculative_tokens))
    return {name: replace(generation, specrollout=replace(fixed, drafters=d)) for name, d in drafters.items()}


def _ways_of_vllm(config: RunConfig) -> dict[str, GenerationConfig]:
    """Returns the generation configs of vLLM's own two ways of drafting, by name.

    vLLM's rejection sampler draws other samples of the same policy than ours, so the tokens are not compared.
    """
    generation = config.policy.generation
    drafter = generation.specrollout.model_drafter
    assert drafter is not None
    found = {}
    for method in ("greedy", "probabilistic"):
        speculative = {**native_config(drafter, config.bench.acceptance_k), "draft_sample_method": method}
        kwargs = {**generation.vllm_kwargs, "speculative_config": speculative}
        off = SpecrolloutConfig(enabled=False)
        found[f"vLLM's own, {method}"] = replace(generation, vllm_kwargs=kwargs, specrollout=off)
    return found


def _ours(engine: RolloutEngine) -> dict[str, Any]:
    stats = engine.stats()
    assert stats is not None
    proposed = stats.proposed[0]
    accepted = stats.accepted[0]
    return _figures([a / p for a, p in zip(accepted, proposed, strict=True) if p])


def _figures(shares: list[float]) -> dict[str, Any]:
    return {"accepted_by_position": shares, "acceptance_length": 1.0 + sum(shares)}


def _upper_bound(config: RunConfig, requests: list[RolloutRequest], rollouts: list[Rollout]) -> dict[str, Any]:
    """Returns a row with the highest acceptance that drafts of the config's head can have on average.

    The bound is 1 minus the total variation distance between the policy's and the head's distributions. It holds for every way
    of sampling drafts from this head.
    """
    from nemo_specrollout.heads.features.features import hf_features, load_policy
    from nemo_specrollout.heads.training.acceptance import measure_acceptance
    from nemo_specrollout.heads.training.head import load_eagle3_head

    model = Path(config.policy.model_name)
    drafter = config.policy.generation.specrollout.model_drafter
    assert isinstance(drafter, FolderDrafterConfig)
    head = load_eagle3_head(Path(drafter.model), model)
    texts = [
        ([*request.prompt_token_ids, *rollout.token_ids], len(request.prompt_token_ids))
        for request, rollout in zip(requests, rollouts, strict=True)
    ]
    features = hf_features(load_policy(model), texts, head.layer_ids)
    acceptance = measure_acceptance(head, features, config.bench.acceptance_k, config.policy.generation.temperature)
    return {
        "drafting": f"{drafter.type}, bound (1 - TV)",
        "accepted_by_position": list(acceptance.survival_rate_K),
        "acceptance_length": acceptance.expected_length,
        "tokens_equal": None,
    }
