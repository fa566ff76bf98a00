# SPDX-License-Identifier: Apache-2.0
"""Known faults of vLLM and NeMo-RL that spoil a run without an error: configs, symptoms, our remedies (docs/upstream/)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.config.nemo_rl_tree import GENERATION, Tree, at, block_is_on, drafter_types, is_on, native_drafts
from nemo_specrollout.installed.versions import nemo_rl_version, version_numbers, vllm_version

VLLM, NEMO_RL = "vllm", "nemo-rl"


@dataclass(frozen=True)
class KnownTrap:
    package: str
    affects: Callable[[Tree], bool]
    text: str
    """Condition and symptom."""
    remedy: str
    before: tuple[int, ...] | None = None
    """First version without the fault; None if there is none yet."""

    def is_in(self, version: str | None) -> bool:
        """Returns whether `version` has the fault. Of a run elsewhere it is None, and probably recent."""
        numbers = None if version is None else version_numbers(version)
        return self.before is None or (numbers is not None and numbers < self.before)


def known_traps(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yields state and sentence of each trap that affects a config, of the versions here and of packages that are missing."""
    versions = {VLLM: vllm_version(), NEMO_RL: nemo_rl_version()}
    for trap in TRAPS:
        version = versions[trap.package]
        if trap.is_in(version) and trap.affects(tree):
            here = "not installed here" if version is None else f"here {version}"
            is_avoided = block_is_on(tree)
            remedy = trap.remedy if is_avoided else f"not avoided, because the block is off ({trap.remedy})"
            yield "avoided" if is_avoided else "not avoided", f"{trap.package}, {here}: {trap.text}; {remedy}"


def _samples_drafts(tree: Tree) -> bool:
    samples = at(tree, f"{GENERATION}.temperature", 1.0) != 0
    return samples and not {"eagle", *MODEL_DRAFTERS}.isdisjoint(drafter_types(tree))


_head_is_trained = is_on("policy.draft.enabled")


def _has_native_head(tree: Tree) -> bool:
    return bool(native_drafts(tree)) and (_head_is_trained(tree) or "mtp" in drafter_types(tree))


TRAPS = (
    KnownTrap(
        VLLM,
        _samples_drafts,
        "the V2 model runner draws a draft and the token that replaces it from the same noise: "
        "if drafts are sampled, samples are not the policy's",
        "a draft is accepted only if it is the token that the policy samples, so that shared noise is correct",
        before=(0, 29, 0),
    ),
    KnownTrap(
        VLLM,
        lambda t: "eagle3" in drafter_types(t),
        "if a head's config names no layers, vLLM guesses which of the "
        "policy's states the head reads, and two of them for a policy of four layers: a crash, or wrong rows without "
        "an error",
        "`refresh-draft` writes the layers into the config; for policies of fewer than seven layers a head "
        "without them is refused",
    ),
    KnownTrap(
        NEMO_RL,
        _head_is_trained,
        "the drafter shares the policy's lm_head, and each refit of a head with the policy's "
        "whole vocabulary overwrites it in the engine: Generation KL Error 0.08 instead of 0.0000, without an error",
        "the two are separated before anything is loaded, and the log-prob gap is watched",
    ),
    KnownTrap(
        NEMO_RL,
        _has_native_head,
        "it looks for the drafter where only vLLM's V1 model runner has it: on V2 a refit "
        "leaves the draft head as it was, with a warning, and native heads (mtp) that are loaded from disk end the run",
        "its worker extension is shown the drafter of V2",
    ),
)
"""Faults of versions that specrollout works with; `check` refuses all others."""
