# SPDX-License-Identifier: Apache-2.0
"""Builds a scenario for the simulator from a run's config.

Response lengths and acceptance rates are assumed, and the scenario's `source` says so. A block `simulation` of the config,
for example `simulation.lengths.median=900`, overrides derived values. Error messages name the keys of that block.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.local.run_config import RunConfig
from lab.placement.cost_tables import CostTables
from lab.simulation.scenario import HEAD, TEXT, Scenario
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    BlockDrafterConfig,
    DrafterConfig,
    DraftModelDrafterConfig,
    RandomDrafterConfig,
    RemoteDrafterConfig,
    TextDrafterConfig,
)
from nemo_specrollout.config.nemo_rl_config import effective_config
from nemo_specrollout.config.nemo_rl_tree import GENERATION, VLLM_CFG, Tree, at, generating_gpus, size_at
from nemo_specrollout.config.strict import ConfigError, build

OWN_BLOCK = "simulation"
"""Key of the config's block that overrides values of the scenario."""
_ASSUMED_LENGTHS = {"sigma": 0.8}
_MEDIAN_SHARE = 0.25
ASSUMED_ACCEPTANCE = {
    "eagle3": 0.75,
    "mtp": 0.75,
    "draft_model": 0.75,
    "remote": 0.75,
    "ahead": 0.75,
    "history": 0.55,
    "suffix": 0.5,
    "ngram": 0.4,
    "random": 0.0,
}
"""Probability that a draft token is accepted if all before it are, by type of drafter. It is used where nothing was
measured."""
_SPREAD = 0.4
USELESS = "random"
"""Type of the drafter that stands for an engine without drafters."""
_SOURCE = "the config; assumed: response lengths (unless --trace), acceptances, the calibration of the roofline"


def of_nemo_rl(tree: Tree, device: str) -> Scenario:
    """Returns the scenario of a NeMo-RL run on GPUs of the type `device`. Raises ConfigError if the config has a mistake."""
    block = effective_config(tree) or SpecrolloutConfig()
    generating = generating_gpus(tree)
    all_gpus = size_at(tree, "cluster.num_nodes") * size_at(tree, "cluster.gpus_per_node")
    is_async = bool(at(tree, "grpo.async_grpo.enabled"))
    lag = size_at(tree, "grpo.async_grpo.max_trajectory_age_steps", low=0)
    max_tokens = size_at(tree, f"{GENERATION}.max_new_tokens", size_at(tree, "policy.max_total_sequence_length", 4096))
    found = {
        "title": f"{at(tree, 'policy.model_name')} on {all_gpus} {device}",
        "source": _SOURCE,
        "model": str(at(tree, "policy.model_name", "")),
        "precision": "fp8" if at(tree, f"{VLLM_CFG}.precision") == "fp8" else "bf16",
        "cluster": {
            "device": device,
            "num_gpus": all_gpus,
            "train_gpus": all_gpus - generating,
            "gpus_per_engine": size_at(tree, f"{VLLM_CFG}.tensor_parallel_size"),
            "expert_parallel": size_at(tree, f"{VLLM_CFG}.expert_parallel_size") > 1,
        },
        "batch": {
            "num_prompts": size_at(tree, "grpo.num_prompts_per_step"),
            "num_samples": size_at(tree, "grpo.num_generations_per_prompt"),
            "max_requests": size_at(tree, f"{GENERATION}.vllm_kwargs.max_num_seqs", 256),
        },
        "lengths": {"median": _MEDIAN_SHARE * max_tokens, "max_tokens": max_tokens, **_ASSUMED_LENGTHS},
        "drafting": _drafting(block),
        "training": {"mode": "async", "lag": lag, "num_steps": max(12, 4 * (lag + 1))}
        if is_async
        else {"mode": "sync"},
    }
    return _scenario(found, tree)


def of_local(config: RunConfig, tree: Tree, profile: Path) -> Scenario:
    """Returns the scenario of a local run. It has only rollouts, in engines of the smallest size that was measured.

    The simulator does not model that engines compete for the machine's memory and caches.
    """
    size = min(curve.size for curve in CostTables.read(profile, "--profile").verify_s)
    generation = config.policy.generation
    num_engines = config.cluster.rollout_workers
    found = {
        "title": f"{config.policy.model_name} on this machine, rollouts alone",
        "source": _SOURCE,
        "model": config.policy.model_name,
        "cluster": {"device": "measured", "num_gpus": num_engines * size, "gpus_per_engine": size},
        "batch": {
            "num_prompts": config.grpo.num_prompts_per_step,
            "num_samples": config.grpo.num_generations_per_prompt,
            "prompt_tokens": 16,
            "max_requests": config.most_in_flight,
        },
        "lengths": {
            "median": max(1.0, _MEDIAN_SHARE * generation.max_new_tokens),
            "max_tokens": generation.max_new_tokens,
            **_ASSUMED_LENGTHS,
        },
        "drafting": _drafting(generation.specrollout),
        "costs": {"kind": "tables", "profile": str(profile)},
    }
    return _scenario(found, tree)


def _drafting(block: SpecrolloutConfig) -> dict[str, Any]:
    """Returns the part of a scenario that describes a block's drafting. Drafters with weights come before text drafters.

    The first drafter of an engine stands for all of them, because the draft board takes the best drafts. A drafter that is
    always wrong stands for an engine without drafters.
    """
    drafters = sorted(block.drafters, key=lambda drafter: isinstance(drafter, TextDrafterConfig))
    if not all(block.drafters_of_engines) and USELESS not in [drafter.type for drafter in drafters]:
        drafters.append(RandomDrafterConfig())
    types = [drafter.type for drafter in drafters]
    given = block.fastest_of_n.methods if block.fastest_of_n is not None else ()
    of_workers = [min(of_worker or (USELESS,), key=types.index) for of_worker in given]
    methods = [_method(d) for d in drafters if d.type in (of_workers or types[:1])]
    k = block.budget.k if block.budget.policy == "fixed" else min(3, block.num_speculative_tokens)
    is_apart = block.remote is not None and methods[0]["draft"] not in (HEAD, TEXT)
    return {
        "k": max(k, 1),
        "max_k": block.num_speculative_tokens,
        "methods": methods,
        "methods_of_workers": of_workers,
        "freed_workers_switch": False,
        "drafter_gpus": [1] if is_apart else [],
    }


def _method(drafter: DrafterConfig) -> dict[str, Any]:
    if isinstance(drafter, BlockDrafterConfig):
        raise ConfigError(
            f"{BLOCK_PATH}.drafters.type: {drafter.type!r} drafts all tokens in one pass, but the simulator assumes "
            "a pass for each token: choose another drafter to simulate"
        )
    draft = TEXT if isinstance(drafter, TextDrafterConfig) else HEAD
    if isinstance(drafter, DraftModelDrafterConfig | RemoteDrafterConfig):
        draft = drafter.model
    acceptance = ASSUMED_ACCEPTANCE[drafter.type]
    return {"name": drafter.type, "draft": draft, "acceptance": acceptance, "spread": _SPREAD if acceptance else 0.0}


def _scenario(found: dict[str, Any], tree: Tree) -> Scenario:
    """Returns the scenario with the derived values `found`, which the config's own block `simulation` overrides."""
    own = tree.get(OWN_BLOCK, {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"{OWN_BLOCK}: expected a block of keys, got {own!r}")
    return build(Scenario, _merged(found, own), OWN_BLOCK)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        result[key] = _merged(below[key], value) if both else value
    return result
