# SPDX-License-Identifier: Apache-2.0
"""Records the samples ("rows") of a local run, so that `nemo-specrollout audit` can compute their tokens again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.local.run_config import RunConfig
from lab.local.step_rollout import StepRollout
from nemo_specrollout.audit.rows import FOLDER, EngineFacts, FinishedRow, RowParams, write_rows
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.installed.versions import vllm_version


def record_rows(folder: Path, step: int, rollout: StepRollout, config: RunConfig) -> None:
    """Writes the samples of a step into the run directory `folder`, as rows that an audit can read."""
    (folder / FOLDER).mkdir(exist_ok=True)
    generation = config.policy.generation
    facts = EngineFacts(0, str(vllm_version()), generation.vllm_cfg.precision)
    rows = []
    for request, response, stats in zip(rollout.prompts.requests, rollout.rollouts, rollout.sample_stats, strict=True):
        has_moved = len((stats or {}).get("workers", ())) > 1
        unknown = ("a move between two updates of the weights",) if has_moved and _of_several(stats) else ()
        params = RowParams(generation.temperature, generation.top_k or 0, generation.top_p, unknown=unknown)
        prompt = request.prompt_token_ids
        rows.append(
            FinishedRow(request.noise_seed(config.grpo.seed), prompt, response.token_ids, response.logprobs, params)
        )
    write_rows(folder / FOLDER / f"step_{step:09d}.npz", facts, rows)


def policies_of_row(request: RolloutRequest, stats: Mapping[str, Any] | None, config: RunConfig) -> dict[str, Any]:
    """Returns the keys `policy_spans` and `read_again` for a sample's line in `samples.jsonl`.

    `policy_spans` are the policy versions that sampled the text, each with its first position. `read_again` are those first
    positions at which the new policy computed the KV cache of the whole text again. A synchronous step has one policy version,
    which is the number of the step. In an asynchronous step, `stats` already have `policy_spans` from the collector, so only
    `read_again` is returned.
    """
    asynchronous = config.grpo.async_grpo
    if not asynchronous.enabled:
        return {"policy_spans": [(request.policy_version, len(request.prompt_token_ids))], "read_again": []}
    spans = (stats or {}).get("policy_spans") or []
    again = spans[1:] if asynchronous.recompute_kv_cache_after_weight_updates else []
    return {"read_again": [first for _, first in again]}


def audit_facts(config: RunConfig, folder: Path) -> dict[str, Any] | bool:
    """Returns where an audit finds the weights of the run's policy versions, or False if the run records no rows.

    The dict has the path of the initial `model`, the path of the `checkpoints` (None without any), and `checkpoint_offset`,
    which is added to a policy version to get the number of its checkpoint.
    """
    if not config.policy.generation.specrollout.records_rows:
        return False
    checkpoints = str((folder / "checkpoints").absolute()) if config.checkpointing.enabled else None
    return {
        "model": str(Path(config.policy.model_name).absolute()),
        "checkpoints": checkpoints,
        "checkpoint_offset": -1,
    }


def _of_several(stats: Mapping[str, Any] | None) -> bool:
    return len((stats or {}).get("policy_spans") or ()) > 1
