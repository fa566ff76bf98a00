# SPDX-License-Identifier: Apache-2.0
"""Checks a config of NeMo-RL that has the block `specrollout`, and finds NeMo-RL's script that runs the config."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, OFF, SpecrolloutConfig
from nemo_specrollout.config.block_place import place_findings
from nemo_specrollout.config.engine_vllm import HERE, engine_vllm, vllm_differences
from nemo_specrollout.config.nemo_rl_rules import (
    backend_findings,
    engine_findings,
    fastest_of_n_findings,
    trainer_findings,
)
from nemo_specrollout.config.nemo_rl_tree import (
    ASYNC_BLOCKS,
    SPECULATIVE_CONFIG,
    VLLM_CFG,
    VLLM_KWARGS,
    Finding,
    Tree,
    at,
    block_is_on,
    native_drafts,
    nemo_rl_checkout,
)
from nemo_specrollout.config.resource_rules import resource_findings
from nemo_specrollout.config.run_ahead_rules import run_ahead_findings
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.config.v2_lacks import v2_lacks
from nemo_specrollout.config.vllm_features import refusals
from nemo_specrollout.installed.versions import (
    NEMO_RL_NEEDED,
    NEMO_RL_REFUSED,
    nemo_rl_is_a_release,
    nemo_rl_starts_alone,
    nemo_rl_version,
    unsupported_version,
)

ALGORITHMS = {"grpo": "GRPO", "ppo": "PPO", "distillation": "on-policy distillation"}
"""The algorithms of NeMo-RL that have rollouts, by the names of their blocks in a config."""
_KINDS = ("error", "warning", "note")
_BLOCKS = (
    "grpo",
    "ppo",
    "distillation",
    *ASYNC_BLOCKS,
    "async_rl",
    "data_plane",
    "policy.megatron_cfg",
    "policy.dtensor_cfg",
    "policy.draft",
    "policy.sequence_packing",
    "policy.tokenizer",
    VLLM_CFG,
    VLLM_KWARGS,
    "policy.generation.colocated",
    "policy.generation.colocated.resources",
    "loss_fn",
    "data",
    "data.default",
    "env",
    "cluster",
    "logger",
    "checkpointing",
)
"""Paths in a config that may be absent. But if they are present, they must be blocks of keys."""


def effective_config(tree: Tree) -> SpecrolloutConfig | None:
    """Returns the block `specrollout` of a NeMo-RL config, or None if it is absent or has `enabled: false`.

    If the config sets vLLM's `speculative_config`, the returned block has no drafters. vLLM's own drafter then drafts, and
    this package's sampler verifies. Raises ConfigError if the block is not valid, or if it names drafters beside
    `speculative_config`.
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
    return config


def check_nemo_rl(tree: Tree) -> list[Finding]:
    """Checks a NeMo-RL config, and returns the findings. Errors come first, then warnings and notes.

    If the block `specrollout` is off, there are only two checks. One looks for the block in a wrong place, and the other tells
    whether NeMo-RL can start engines without this package.
    """
    return _checked(tree)[1]


def prepare_nemo_rl(tree: Tree) -> tuple[SpecrolloutConfig | None, list[Finding]]:
    """Checks a NeMo-RL config before a run. Returns the block `specrollout`, or None if it is off, and the warnings and notes.

    Raises ConfigError if the config has an error. The message is about the first one.
    """
    block, found = _checked(tree)
    errors = [finding for finding in found if finding.kind == "error"]
    if errors:
        more = f" ({len(errors) - 1} more: `nemo-specrollout check` lists them)" if len(errors) > 1 else ""
        raise ConfigError(f"{errors[0]}{more}")
    return block, found


def _checked(tree: Tree) -> tuple[SpecrolloutConfig | None, list[Finding]]:
    """Checks a NeMo-RL config. Returns the block `specrollout`, or None if it is off or not valid, and all findings.

    Errors come first among the findings, then warnings and notes.
    """
    block = None
    found = list(malformed(tree))
    if not found:
        found = list(place_findings(tree))
        if block_is_on(tree):
            about_vllm = list(backend_findings(tree))
            if not about_vllm:
                block, about_block = _block(tree)
                about_vllm = [
                    *about_block,
                    *engine_findings(tree),
                    *resource_findings(tree),
                    *_about_engines(tree, block),
                ]
            found += [*about_vllm, *trainer_findings(tree), *_nemo_rl_version()]
        else:
            found += _nemo_rl_alone(tree)
    return block, sorted(found, key=lambda finding: _KINDS.index(finding.kind))


def malformed(tree: Tree) -> Iterator[Finding]:
    """Yields the errors of a config that make all other checks impossible.

    Such an error is a run without rollouts, a section that is missing, or a section that is not a block of keys.
    """
    if (without := _without_rollouts(tree)) is not None:
        yield without
        return
    if not any(isinstance(at(tree, name), Mapping) for name in ALGORITHMS):
        yield Finding("grpo", f"missing; a run that rolls out has one of the blocks {', '.join(ALGORITHMS)}", "error")
    for path in ("policy", "policy.generation"):
        if not isinstance(at(tree, path), Mapping):
            yield Finding(path, "missing; inherit one of NeMo-RL's configs, e.g. grpo_math_1B_megatron.yaml", "error")
    for path in _BLOCKS:
        if not isinstance(value := at(tree, path, {}), Mapping):
            yield Finding(path, f"expected a block of keys, got {value!r}", "error")


def _block(tree: Tree) -> tuple[SpecrolloutConfig | None, list[Finding]]:
    try:
        block = effective_config(tree)
        if block is None:
            return None, []
        ahead = run_ahead_findings(tree, block.run_ahead) if block.run_ahead is not None and block.runs_ahead else ()
        return block, [*fastest_of_n_findings(tree, block.fastest_of_n), *ahead]
    except ConfigError as error:
        return None, [Finding.error(error)]


def _nemo_rl_version() -> Iterator[Finding]:
    nemo_rl = nemo_rl_version()
    if nemo_rl is None:
        yield Finding("nemo-rl", "not installed here; `check` did not compare the config with NeMo-RL itself", "note")
    elif nemo_rl_is_a_release():
        text = f"{nemo_rl}; {NEMO_RL_REFUSED} pin a vLLM (0.20 or older) that specrollout does not support"
        yield Finding("nemo-rl", f"{text}; use {NEMO_RL_NEEDED}", "error")


def _about_engines(tree: Tree, block: SpecrolloutConfig | None) -> Iterator[Finding]:
    """Yields findings about the version of the engines' vLLM, and about parts of the config that this version cannot run.

    If this package does not support the version, the finding is an error. But it is only a warning if the run may get another
    version.
    """
    vllm = engine_vllm(tree)
    yield from vllm_differences(vllm)
    yield from v2_lacks(tree, vllm.version)
    if vllm.version is None:
        return
    if (sentence := unsupported_version(vllm.version)) is not None:
        is_certain = vllm.place != HERE or nemo_rl_version() is not None
        where = "" if vllm.place == HERE else f", {vllm.place}"
        yield Finding("vllm", sentence + where, "error" if is_certain else "warning")
        return
    for sentence in refusals(block or OFF, vllm.version):
        yield Finding.error(sentence)


def _nemo_rl_alone(tree: Tree) -> Iterator[Finding]:
    """Yields a warning if NeMo-RL alone cannot start engines with the vLLM that they will have.

    This only matters if the block `specrollout` is off.
    """
    if at(tree, "policy.generation.backend") != "vllm":
        return
    vllm = engine_vllm(tree)
    if not nemo_rl_starts_alone(nemo_rl_checkout(), None if vllm.place == HERE else vllm.version):
        text = (
            "its worker and NeMo-RL's worker extension both have a method synchronize_device, so without the block NeMo-RL "
            f"ends when an engine starts; set {BLOCK_PATH}.enabled: true, or install the vLLM that NeMo-RL pins"
        )
        yield Finding("vllm", f"{vllm.version}; {text}", "warning")


_GYM = "env.should_use_nemo_gym"


def _has(*paths: str) -> Callable[[Tree], bool]:
    return lambda tree: all(at(tree, path) for path in paths)


def _is_multimodal(tree: Tree) -> bool:
    """Tells whether a config runs GRPO on prompts with images, video or audio.

    The name of a data processor for such prompts begins with `vlm`.
    """
    return _has("grpo")(tree) and any(str(name).startswith("vlm") for name in values_of(tree.get("data"), "processor"))


def values_of(node: Any, key: str) -> Iterator[Any]:
    """Yields the values that `key` has in any block of the config `node`, at any depth and also inside lists."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from (value,) if name == key else values_of(value, key)
    elif isinstance(node, list):
        for item in node:
            yield from values_of(item, key)


_SCRIPTS: tuple[tuple[str, Callable[[Tree], bool]], ...] = (
    ("examples/run_grpo_single_controller.py", _has("async_rl")),
    ("examples/nemo_gym/run_distillation_nemo_gym.py", _has(_GYM, "distillation")),
    ("examples/run_distillation.py", _has("distillation")),
    ("examples/run_ppo.py", _has("ppo")),
    ("examples/nemo_gym/run_grpo_nemo_gym.py", _has(_GYM, "grpo")),
    ("examples/run_grpo_sliding_puzzle.py", _has("env.sliding_puzzle_game")),
    ("examples/run_vlm_grpo.py", _is_multimodal),
    ("examples/run_grpo.py", _has("grpo")),
)
"""Scripts of NeMo-RL, each with a condition on the config. The first script whose condition holds runs the config."""
_NO_ROLLOUTS = ("teachers", "sft", "dpo", "rm")
"""Blocks of NeMo-RL's algorithms that have no rollouts, because they train on given data."""


def _without_rollouts(tree: Tree) -> Finding | None:
    training = next((name for name in _NO_ROLLOUTS if at(tree, name)), None)
    if training is not None:
        return Finding(training, "a run of this kind makes no rollouts; there is nothing to speed up", "error")
    if at(tree, "eval") and not any(at(tree, name) for name in ALGORITHMS):
        return Finding("eval", "an evaluation trains nothing; specrollout speeds up the rollouts of training", "error")
    return None


def script_of(tree: Tree) -> str:
    """Returns the path of NeMo-RL's script that runs a config, relative to NeMo-RL's checkout.

    Raises ConfigError if no script with rollouts runs the config.
    """
    if (without := _without_rollouts(tree)) is not None:
        raise ConfigError(str(without))
    for script, fits in _SCRIPTS:
        if fits(tree):
            return script
    raise ConfigError("the config has no block grpo, ppo or distillation; name NeMo-RL's script with --script")
