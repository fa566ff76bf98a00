# SPDX-License-Identifier: Apache-2.0
"""The block `policy.generation.specrollout`: all that a user may ask of this package. Strict, frozen, torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_specrollout.config.addresses import check_address
from nemo_specrollout.config.draft_refresh import DraftRefreshConfig
from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.config.strict import ConfigError, bounded, choice, nearest

BLOCK_PATH = "policy.generation.specrollout"
TEXT_DRAFTERS = ("ngram", "suffix", "random")
BLOCK_DRAFTERS = ("dflash", "dspark")
"""They propose all draft tokens of a step in one pass."""
MODEL_DRAFTERS = ("eagle3", "draft_model", "mtp", *BLOCK_DRAFTERS)
REMOTE_DRAFTER = "remote"
TYPES_WITH_FOLDER = ("eagle3", "draft_model", *BLOCK_DRAFTERS, REMOTE_DRAFTER)
DRAFT_SAMPLING = ("shared_noise", "greedy")
REMOTE_FIELDS = (
    "workers", "addresses", "gpus", "most_ahead", "max_requests", "allowed_hosts", "vllm_kwargs", "placement", "profile",
    "acceptance",
)  # fmt: skip
PLACEMENTS = ("as_written", "auto")
BUDGET_POLICIES = ("auto", "fixed", "random")


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter. Several may be named: the draft board picks among them for each request and step."""

    type: str = choice(*TEXT_DRAFTERS, *MODEL_DRAFTERS, REMOTE_DRAFTER)
    """`ngram`: the request's own text. `suffix`: its siblings and past rollouts. `random`: always wrong, for worst cases.
    `eagle3`: a head on the policy's hidden states. `draft_model`: a small model. `mtp`: the policy's own heads. `dflash`: a
    head that drafts a block in one pass. `dspark`: the same, where each token also hangs on the one before. `remote`: a small
    model in an engine of its own, which runs ahead while the policy's engine verifies."""

    model: str | None = None
    """Folder of the head or the small model: all with weights need one but `mtp`; no other has one."""

    sampling: str = choice(*DRAFT_SAMPLING, default="shared_noise")
    """What a drafter with weights samples: its own distribution with the request's noise, or its most likely token."""

    max_order: int = bounded(6, low=2, high=16)
    """Longest context, in tokens, by which a continuation is looked up."""

    num_slots: int | None = bounded(None, low=1 << 10, high=1 << 26)
    """Contexts remembered, a power of two, 40 bytes each; the least used make room. Absent: by requests and their lengths, up
    to 1 GiB."""

    workers: int = bounded(0, low=0, high=64)
    """Of `remote`: drafter processes that the run starts and looks after, in NeMo-RL through Ray; 0 with `addresses`."""

    addresses: tuple[str, ...] = ()
    """Of `remote`: where drafters listen that `serve-drafter` started, e.g. tcp://10.0.0.7:5570."""

    gpus: float = bounded(0.0, low=0.0, high=1.0)
    """Of `remote` with `workers`, in NeMo-RL: GPUs of each drafter, beside those of `cluster`; two may share one (0.5). 0 is a
    CPU."""

    most_ahead: int = bounded(24, low=1, high=64)
    """Of `remote`: draft tokens that a drafter may be ahead of a request's committed text. While as many as one step takes are
    being verified, as many again have to be drafted: less than twice `num_speculative_tokens` makes drafters wait."""

    max_requests: int = bounded(256, low=1, high=4096)
    """Of `remote`: requests that one drafter process drafts for at a time, of all engines together."""

    allowed_hosts: tuple[str, ...] = ()
    """Of `remote`: the hosts that may ask a drafter for drafts, as IP addresses; empty is any that knows the secret."""

    vllm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of `remote`: passed to the draft model's engine, e.g. gpu_memory_utilization."""

    placement: str = choice(*PLACEMENTS, default="as_written")
    """Of `remote` with `workers`: `as_written`, or `auto`: beside the policy's engine, in it, or not at all, whatever promises
    most by the times in `profile` (`scheduling/placement/auto_placement.py`)."""

    profile: str | None = None
    """Of `placement: auto`: the file that `nemo-specrollout profile` wrote on this machine."""

    acceptance: float = bounded(0.8, low=0.0, high=1.0)
    """Of `placement: auto`: the expected share of draft tokens that are accepted, of those before which all were."""

    def check(self, path: str) -> None:
        """Raises ConfigError if `num_slots` is not a power of two, or a field does not go with the type."""
        if (self.model is not None) != (self.type in TYPES_WITH_FOLDER):
            fix = "name the folder of its weights" if self.model is None else "remove it"
            raise ConfigError(f"{path}.model: {self.model!r}; type {self.type}: {fix}")
        if self.type == REMOTE_DRAFTER:
            self._check_remote(path)
        else:
            self._check_in_engine(path)
        if self.num_slots is not None and self.num_slots & (self.num_slots - 1):
            rounded = 1 << self.num_slots.bit_length()
            raise ConfigError(f"{path}.num_slots: {self.num_slots} is not a power of two; the next is {rounded}")

    def _check_in_engine(self, path: str) -> None:
        given = [name for name in REMOTE_FIELDS if getattr(self, name) != getattr(DrafterConfig, name, {})]
        if given:
            raise ConfigError(
                f"{path}: type {self.type} drafts in the policy's own engine; remove {', '.join(given)}, or use type remote"
            )

    def _check_remote(self, path: str) -> None:
        if bool(self.workers) == bool(self.addresses):
            raise ConfigError(
                f"{path}: workers {self.workers} and addresses {list(self.addresses)}; say how many drafters the run starts, "
                "or where they listen: one of the two"
            )
        if self.gpus and not self.workers:
            raise ConfigError(
                f"{path}.gpus: {self.gpus}; drafters at addresses have what `serve-drafter` finds: remove it, or set workers"
            )
        for address in self.addresses:
            check_address(f"{path}.addresses", address, any_port=False)
        if self.placement == "auto" and not (self.workers and self.profile):
            raise ConfigError(
                f"{path}.placement: 'auto' with workers {self.workers} and profile {self.profile}; let the run start the "
                "drafters, and name the file that `nemo-specrollout profile` wrote"
            )


@dataclass(frozen=True)
class BudgetConfig:
    """How many draft tokens a request gets in a step."""

    policy: str = choice(*BUDGET_POLICIES, default="auto")
    """`auto`: while the next draft token pays, by measured step times. `fixed`: always `k`. `random`: for tests."""

    k: int = bounded(3, low=0, high=64)
    """Draft tokens a request under `policy: fixed`."""

    margin: float = bounded(0.03, low=0.0, high=1.0)
    """Under `policy: auto`, the share by which drafting must beat no drafts before it is done."""


@dataclass(frozen=True)
class VerifyConfig:
    """The run's own proof: decode a sample of each step's requests again, plainly, and compare the tokens."""

    requests_per_step: int = bounded(0, low=0)
    """Requests decoded twice in each step; 0 turns the check off."""


@dataclass(frozen=True)
class SpecrolloutConfig:
    """`policy.generation.specrollout`."""

    enabled: bool = True
    """False: exactly vLLM's and NeMo-RL's own behaviour; nothing of this package is loaded in a worker."""

    num_speculative_tokens: int = bounded(8, low=1, high=64)
    """The most draft tokens a request may ever get in one step; KV room is reserved for them."""

    drafters: tuple[DrafterConfig, ...] = (DrafterConfig("suffix"), DrafterConfig("ngram"))
    """Who proposes. Empty: no speculation, but the same sampler, hence the same tokens."""

    budget: BudgetConfig = BudgetConfig()
    """How much is drafted."""

    verify: VerifyConfig = VerifyConfig()
    """How much is decoded twice to show that the tokens are equal."""

    draft_refresh: DraftRefreshConfig | None = None
    """Trains the `eagle3` head while the policy is trained; absent is off (`refresh.py`)."""

    fastest_of_n: FastestOfNConfig | None = None
    """What several rollout workers may do with each other's stragglers; absent is nothing (`tail.py`)."""

    logprob_gap_alarm: float = bounded(0.02, low=0.0)
    """Mean |log-prob of the engine - log-prob of the trainer| per token above which a run raises an alarm."""

    http_seeds: str = choice("derived", "required", default="derived")
    """Requests without a seed at the engines' HTTP server: their seed follows from their prompt, or they are refused."""

    @property
    def most_drafts(self) -> int:
        """The most draft tokens that a request gets in a step."""
        return self.budget.k if self.budget.policy == "fixed" else self.num_speculative_tokens

    @property
    def model_drafter(self) -> DrafterConfig | None:
        """The drafter with weights, if there is one; there is one at most."""
        return next((d for d in self.drafters if d.type in MODEL_DRAFTERS), None)

    @property
    def remote(self) -> DrafterConfig | None:
        """The drafter on other workers, if there is one."""
        return next((d for d in self.drafters if d.type == REMOTE_DRAFTER), None)

    @property
    def drafters_of_workers(self) -> tuple[tuple[DrafterConfig, ...], ...]:
        """The drafters of each kind of engine: all, unless `fastest_of_n` gives each worker its own."""
        methods = () if self.fastest_of_n is None or not self.fastest_of_n.enabled else self.fastest_of_n.methods
        return tuple(tuple(d for d in self.drafters if d.type in types) for types in methods) or (self.drafters,)

    @property
    def head(self) -> str | None:
        """The folder of the EAGLE-3 head that drafts, if one does."""
        return next((d.model for d in self.drafters if d.type == "eagle3"), None)

    @property
    def head_folder(self) -> Path | None:
        """The same; None for a hub's name, which has no files to look at."""
        folder = Path(self.head or "")
        return folder if self.head and folder.is_dir() else None

    def check(self, path: str) -> None:
        """Raises ConfigError if a drafter is named twice, or an engine would have two with weights."""
        types = [d.type for d in self.drafters]
        for name in types:
            if types.count(name) > 1:
                raise ConfigError(
                    f"{path}.drafters: {name!r} is named {types.count(name)} times; name each drafter once"
                )
        self._check_methods(path, types)
        for drafters in self.drafters_of_workers:
            with_weights = [d.type for d in drafters if d.type in MODEL_DRAFTERS]
            if len(with_weights) > 1:
                raise ConfigError(
                    f"{path}.drafters: {' and '.join(with_weights)}; an engine of vLLM holds one drafter with weights: keep "
                    "one, or give them to different workers by fastest_of_n.methods"
                )
        if self.draft_refresh is not None and self.head is None:
            raise ConfigError(
                f"{path}.draft_refresh: there is no head to refresh; name a drafter of type eagle3, or remove the block"
            )
        if self.budget.policy == "fixed" and self.budget.k > self.num_speculative_tokens:
            raise ConfigError(
                f"{path}.budget.k: {self.budget.k} is above num_speculative_tokens {self.num_speculative_tokens}; raise that"
            )

    def _check_methods(self, path: str, types: list[str]) -> None:
        """Every worker's drafters must be among those that are configured, and every one of those be some worker's."""
        methods = () if self.fastest_of_n is None else self.fastest_of_n.methods
        named = [name for worker in methods for name in worker]
        for name in named:
            if name not in types:
                raise ConfigError(
                    f"{path}.fastest_of_n.methods: {name!r} is none of the drafters{nearest(name, types)}; add it to drafters"
                )
        tail, kinds = self.fastest_of_n, {frozenset(d.type for d in drafters) for drafters in self.drafters_of_workers}
        if tail is not None and tail.enabled and not tail.moving and len(kinds) == 1:
            raise ConfigError(
                f"{path}.fastest_of_n.moving: false, and all workers draft alike, so none would race; set it to true, or "
                "give each worker drafters of its own by methods"
            )
        unused = [t for t in types if methods and t not in named]
        if unused:
            raise ConfigError(
                f"{path}.fastest_of_n.methods: no worker drafts by {', '.join(unused)}; give it to one, or remove the drafter"
            )
