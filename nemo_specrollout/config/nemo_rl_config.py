# SPDX-License-Identifier: Apache-2.0
"""A NeMo-RL config with our block in it: what goes to the workers, and what is wrong, without NeMo-RL and without torch."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.nemo_rl_controller import controller_findings
from nemo_specrollout.config.nemo_rl_engine import block_is_on, engine_findings
from nemo_specrollout.config.nemo_rl_fastest_of_n import tail_findings
from nemo_specrollout.config.nemo_rl_traps import (
    ASYNC_BLOCKS,
    SPECULATIVE_CONFIG,
    VLLM_CFG,
    VLLM_KWARGS,
    Finding,
    Tree,
    all_findings,
    at,
    native_drafts,
)
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.config.versions import (
    nemo_rl_is_a_release,
    nemo_rl_version,
    unsupported_version,
    vllm_version,
)

ALGORITHMS = {"grpo": "GRPO", "ppo": "PPO", "distillation": "on-policy distillation"}
"""NeMo-RL's blocks of algorithms that roll out, with their names."""
_KINDS = ("error", "warning", "note")
# What is read as a block, where it is there.
_BLOCKS = (
    "grpo", "ppo", "distillation", *ASYNC_BLOCKS, "async_rl", "data_plane", "policy.megatron_cfg", "policy.dtensor_cfg",
    "policy.draft", "policy.sequence_packing", VLLM_CFG, VLLM_KWARGS, "policy.generation.colocated",
    "policy.generation.colocated.resources", "loss_fn", "data", "data.default", "env", "cluster", "logger", "checkpointing",
)  # fmt: skip


def effective_block(tree: Tree) -> dict[str, Any] | None:
    """The block of a NeMo-RL config, complete, as plain values; None if it is absent or has `enabled: false`.

    Beside a `speculative_config` of the user's own it has no drafters: our sampler, with vLLM's drafter. Raises
    ConfigError for a block that is wrong, or that names drafters as well.
    """
    if not block_is_on(tree):
        return None
    block = at(tree, BLOCK_PATH)
    if native_drafts(tree) and isinstance(block, Mapping) and "drafters" not in block:
        block = {**block, "drafters": []}
    config = build(SpecrolloutConfig, block, BLOCK_PATH)
    if native_drafts(tree) and config.drafters:
        raise ConfigError(
            f"{BLOCK_PATH}.drafters: named beside {SPECULATIVE_CONFIG}; remove `drafters` to keep that drafter, whose drafts "
            "specrollout's exact sampler then verifies, or remove speculative_config"
        )
    return dict(_plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    """With lists for tuples, as YAML would have it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def check_nemo_rl(tree: Tree) -> list[Finding]:
    """All that is to be said about a NeMo-RL config: errors, then warnings, then notes.

    Without an enabled block the run is NeMo-RL's own, and nothing is said about its options.
    """
    found = list(malformed(tree))
    if not found and block_is_on(tree):
        found = [
            *_block(tree),
            *all_findings(tree),
            *controller_findings(tree),
            *engine_findings(tree),
            *_versions(tree),
        ]
    return sorted(found, key=lambda finding: _KINDS.index(finding.kind))


def prepare_nemo_rl(tree: Tree) -> list[Finding]:
    """The warnings and notes about a NeMo-RL config that can run. Raises ConfigError for the first of its errors."""
    findings = check_nemo_rl(tree)
    errors = [finding for finding in findings if finding.kind == "error"]
    if errors:
        more = f" ({len(errors) - 1} more: `nemo-specrollout check` lists them)" if len(errors) > 1 else ""
        raise ConfigError(f"{errors[0]}{more}")
    return findings


def malformed(tree: Tree) -> Iterator[Finding]:
    """Errors about sections that are missing, or that are no blocks: then nothing else can be said of a config."""
    if not any(isinstance(at(tree, name), Mapping) for name in ALGORITHMS):
        yield Finding("grpo", f"missing; a run that rolls out has one of the blocks {', '.join(ALGORITHMS)}", "error")
    for path in ("policy", "policy.generation"):
        if not isinstance(at(tree, path), Mapping):
            yield Finding(path, "missing; inherit one of NeMo-RL's configs, e.g. grpo_math_1B_megatron.yaml", "error")
    for path in _BLOCKS:
        if not isinstance(value := at(tree, path, {}), Mapping):
            yield Finding(path, f"expected a block of keys, got {value!r}", "error")


def _block(tree: Tree) -> Iterator[Finding]:
    try:
        block = effective_block(tree)
        if block is not None:
            yield from tail_findings(tree, block)
    except ConfigError as error:
        subject, _, text = str(error).partition(": ")
        yield Finding(subject, text, "error")


def _versions(tree: Tree) -> Iterator[Finding]:
    """Of what is installed here; the run may be elsewhere, so what is not here is no error."""
    nemo_rl, vllm = nemo_rl_version(), vllm_version()
    if nemo_rl is None:
        yield Finding("nemo-rl", "not installed here; `check` has read the config, and NeMo-RL has not", "note")
    elif nemo_rl_is_a_release():
        shared = "; its draft head shares one gradient clip with the policy" if at(tree, "policy.draft.enabled") else ""
        text = f"{nemo_rl}; releases up to v0.7.0 pin a vLLM (0.20 or older) that specrollout does not work with, and log no "
        yield Finding("nemo-rl", f"{text}speculation in asynchronous GRPO{shared}; use main of August 2026", "error")
    if vllm is not None and (sentence := unsupported_version(vllm)) is not None:
        yield Finding("vllm", sentence, "warning" if nemo_rl is None else "error")
