# SPDX-License-Identifier: Apache-2.0
"""Lists known faults of vLLM and NeMo-RL, each with its versions, the configs that it affects, and what helps against it.

Each fault was read in the code of vLLM or NeMo-RL, or seen in a run. docs/upstream/ has a proposal how to mend most of them.
Faults that can be found by looking into the installed files are not in this list, because `nemo_rl_config.py` reports them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.config.engine_vllm import HERE, engine_vllm
from nemo_specrollout.config.model_families import families_of
from nemo_specrollout.config.nemo_rl_tree import (
    GENERATION,
    VLLM_CFG,
    Tree,
    asynchronous_block,
    at,
    block_is_on,
    drafter_types,
    is_on,
    model_config,
    native_drafts,
    runtime_of,
)
from nemo_specrollout.installed.versions import nemo_rl_version, version_numbers

MOVED_MODULES = {
    "vllm.entrypoints.chat_utils": "vllm.renderers.chat_utils",
    "vllm.entrypoints.openai.engine.protocol": "vllm.entrypoints.serve.engine.protocol",
}
"""Modules of vLLM that NeMo-RL's HTTP server imports, with their new names. vLLM 0.32 renamed the first, and 0.29 the second.

This package's engine actor lets the server import them by their old names.
"""
VLLM = "vllm"
NEMO_RL = "nemo-rl"
Version = tuple[int, ...]


@dataclass(frozen=True)
class KnownTrap:
    """A known fault of vLLM or NeMo-RL that can spoil a run, often without an error."""

    package: str
    """Name of the package that has the fault, which is `VLLM` or `NEMO_RL`."""
    affects: Callable[[Tree], bool]
    """Function that tells whether the fault affects the run of a config."""
    symptom: str
    """Sentence without a full stop that says what goes wrong, and when."""
    remedy: str
    """Sentence without a full stop that says what this package does about the fault, or what the user can do."""
    since: Version | None = None
    """First version with the fault. None if the oldest supported version has it."""
    before: Version | None = None
    """First version without the fault. None if all newer versions have it."""
    is_ours: bool = True
    """True if this package avoids the fault while the block `specrollout` is on. False if only the user can avoid it."""

    def is_in(self, version: str | None) -> bool:
        """Tells whether a version of the package has the fault. If the version is not known (None), the answer is True.

        A version that does not begin with numbers counts as newer than all others.
        """
        if version is None:
            return True
        numbers = version_numbers(version)
        if numbers is None:
            return self.before is None
        is_too_old = self.since is not None and numbers < self.since
        is_mended = self.before is not None and numbers >= self.before
        return not is_too_old and not is_mended

    @property
    def versions(self) -> str:
        """Words for the package and its versions that have the fault, such as `vllm before 0.29.0`."""
        low = "" if self.since is None else f" from {_in_words(self.since)}"
        high = "" if self.before is None else f" before {_in_words(self.before)}"
        return f"{self.package}{low}{high}"


@dataclass(frozen=True)
class MetTrap:
    """A known fault of vLLM or NeMo-RL that affects the run of a config."""

    trap: KnownTrap
    version: str | None
    """Version of the faulty package that the run will have. None if it is not known, because the package is not here."""
    is_avoided: bool
    """Whether this package avoids the fault in this run."""
    place: str = HERE
    """Words for the place where the faulty package is installed, as in `EngineVllm.place`."""

    @property
    def state(self) -> str:
        """The word `avoided` or the words `not avoided`."""
        return "avoided" if self.is_avoided else "not avoided"

    def __str__(self) -> str:
        here = "not installed here" if self.version is None else f"{self.place} {self.version}"
        remedy = self.trap.remedy
        if self.trap.is_ours and not self.is_avoided:
            remedy = f"nothing avoids this, because the block is off (with it, {remedy})"
        return f"{self.trap.versions}, {here}: {self.trap.symptom}; {remedy}"


def known_traps(tree: Tree) -> list[MetTrap]:
    """Returns the known faults of vLLM and NeMo-RL that affect the run of a config.

    They depend on the version of NeMo-RL and on the version of vLLM that the engines will have. If a version is not known, all
    faults of the package count. Raises ConfigError if the config's drafters cannot be read.
    """
    vllm = engine_vllm(tree)
    versions = {VLLM: (vllm.version, vllm.place), NEMO_RL: (nemo_rl_version(), HERE)}
    met = []
    for trap in TRAPS:
        version, place = versions[trap.package]
        if trap.is_in(version) and trap.affects(tree):
            met.append(MetTrap(trap, version, trap.is_ours and block_is_on(tree), place))
    return met


def _in_words(version: Version) -> str:
    return ".".join(map(str, version))


def _samples_drafts(tree: Tree) -> bool:
    """Tells whether a drafter with weights samples its draft tokens at a temperature above 0."""
    is_sampled = at(tree, f"{GENERATION}.temperature", 1.0) != 0
    return is_sampled and not {"eagle", *MODEL_DRAFTERS}.isdisjoint(drafter_types(tree))


def _has_eagle3_head(tree: Tree) -> bool:
    return "eagle3" in drafter_types(tree)


def _has_native_head(tree: Tree) -> bool:
    """Tells whether the config's `speculative_config` for vLLM has a draft head that NeMo-RL trains or loads."""
    return bool(native_drafts(tree)) and (_head_is_trained(tree) or "mtp" in drafter_types(tree))


def _has_delta_rule(tree: Tree) -> bool:
    """Tells whether the policy has layers of the gated delta rule, and the run has drafters."""
    families = families_of(str(at(tree, "policy.model_name")), model_config(tree) or {})
    return bool(drafter_types(tree)) and any(row["name"] == "hybrid, gated delta rule" for row in families)


def _serves_http(tree: Tree) -> bool:
    """Tells whether the run's engines serve HTTP. The config or NeMo-Gym may ask NeMo-RL for it. Local engines never do."""
    serves = at(tree, f"{VLLM_CFG}.expose_http_server") or at(tree, "env.should_use_nemo_gym")
    return runtime_of(tree) == "nemo_rl" and bool(serves)


def _keeps_stale_prefixes(tree: Tree) -> bool:
    """Tells whether engines of an asynchronous run keep cached prefixes of old weights when the weights change.

    With `recompute_kv_cache_after_weight_updates`, NeMo-RL asks vLLM to drop the cached prefixes. But vLLM does so only if no
    request runs. With in-flight weight updates, some requests may run.
    """
    block = asynchronous_block(tree)
    is_controlled = at(tree, "async_rl") is not None
    is_async = runtime_of(tree) == "nemo_rl" and (is_controlled or block is not None)
    are_dropped = (
        not is_controlled
        and at(tree, f"{block}.recompute_kv_cache_after_weight_updates")
        and not at(tree, f"{block}.in_flight_weight_updates")
    )
    return is_async and at(tree, f"{VLLM_CFG}.enable_prefix_caching") is not False and not are_dropped


_head_is_trained = is_on("policy.draft.enabled")

TRAPS = (
    KnownTrap(
        VLLM,
        _samples_drafts,
        "the V2 model runner draws a draft and the token that replaces it from the same noise, so if drafts are sampled, "
        "samples are not the policy's",
        "a draft is accepted only if it is the token that the policy samples, so that shared noise is correct",
        before=(0, 29, 0),
    ),
    KnownTrap(
        VLLM,
        _has_eagle3_head,
        "if a head's config names no layers, vLLM guesses which of the policy's states the head reads, and takes two of "
        "them for a policy of four layers, which ends in a crash or in wrong rows without an error",
        "`refresh-draft` writes the layers into the config, and for policies of fewer than seven layers a head without "
        "them is refused",
    ),
    KnownTrap(
        VLLM,
        _has_eagle3_head,
        "an engine takes over the context length of a head that is shorter than the policy's and whose RoPE is of type "
        "yarn, dynamic or longrope, so that responses end early",
        "compare max_position_embeddings of the head's config with max_model_len",
        since=(0, 33, 0),
        is_ours=False,
    ),
    KnownTrap(
        VLLM,
        _has_delta_rule,
        "where the policy has layers of the gated delta rule, a request without drafts in a step goes on from an older state "
        "if drafts of the step before were accepted, so that its tokens are wrong without an error",
        "such a request counts as one with drafts there, so that vLLM reads the state that it has reached",
        before=(0, 32, 0),
    ),
    KnownTrap(
        VLLM,
        _serves_http,
        f"NeMo-RL's HTTP server imports {' and '.join(MOVED_MODULES)}, of which vLLM 0.29 renamed the second and 0.32 the "
        f"first, to {' and '.join(MOVED_MODULES.values())}, so the server does not start, and with it neither does NeMo-Gym",
        "the engine actor gives the server these modules by their old names",
        since=(0, 29, 0),
    ),
    KnownTrap(
        NEMO_RL,
        _head_is_trained,
        "the drafter shares the policy's lm_head, and each refit of a head with the policy's whole vocabulary overwrites it "
        "in the engine, which shows as a Generation KL Error of 0.08 instead of 0.0000 and not as an error",
        "the two are separated before anything is loaded, and the log-prob gap is watched",
    ),
    KnownTrap(
        NEMO_RL,
        _has_native_head,
        "it looks for the drafter where only vLLM's V1 model runner has it, so on V2 a refit leaves the draft head as it "
        "was, with a warning, and native heads (mtp) that are loaded from disk end the run",
        "its worker extension is shown the drafter of V2",
    ),
    KnownTrap(
        NEMO_RL,
        _keeps_stale_prefixes,
        "after an update of the weights, requests read prefixes that older weights have cached, because NeMo-RL drops them "
        "only with recompute_kv_cache_after_weight_updates, and then overlooks that vLLM refuses while requests run",
        "each prompt has a cache salt that names the weights, so no request finds a prefix of older ones",
    ),
)
"""The known faults of the supported versions of vLLM and NeMo-RL. The command `check` refuses other versions."""
