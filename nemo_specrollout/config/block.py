# SPDX-License-Identifier: Apache-2.0
"""The block `policy.generation.specrollout` of a config: all options of this package."""

from dataclasses import dataclass
from pathlib import Path

from nemo_specrollout.config.draft_refresh import DraftRefreshConfig
from nemo_specrollout.config.drafter_configs import (
    DRAFTERS,
    DrafterConfig,
    Eagle3DrafterConfig,
    ModelDrafterConfig,
    NgramDrafterConfig,
    RemoteDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.config.strict import ConfigError, bounded, choice, nearest, tagged

BLOCK_PATH = "policy.generation.specrollout"
BUDGET_POLICIES = ("auto", "fixed", "random")


@dataclass(frozen=True)
class BudgetConfig:
    """`budget`: the number of draft tokens of a request in a step."""

    policy: str = choice(*BUDGET_POLICIES, default="auto")
    """`auto`: as many as pay by the measured step times. `fixed`: always `k`. `random`: a random number, for tests."""
    k: int = bounded(3, low=0, high=64)
    """Draft tokens of each request under `policy: fixed`."""
    margin: float = bounded(0.03, low=0.0, high=1.0)
    """Under `policy: auto`, the relative gain in tokens a second that drafting must promise over no drafts."""


@dataclass(frozen=True)
class VerifyConfig:
    """`verify`: decodes some requests of each step again without drafts, and compares the tokens."""

    requests_per_step: int = bounded(0, low=0)
    """Requests decoded twice in each step; 0 turns the check off."""


@dataclass(frozen=True)
class SpecrolloutConfig:
    """`policy.generation.specrollout`."""

    enabled: bool = True
    """False: NeMo-RL and vLLM run as if this package were not installed."""
    num_speculative_tokens: int = bounded(8, low=1, high=64)
    """The most draft tokens of a request in one step; vLLM reserves KV cache for them."""
    drafters: tuple[DrafterConfig, ...] = tagged(DRAFTERS, default=(SuffixDrafterConfig(), NgramDrafterConfig()))
    """The drafters. The draft board picks among them for each request and step. Empty: no speculation, but the same sampler,
    hence the same tokens."""
    budget: BudgetConfig = BudgetConfig()
    """Number of draft tokens."""
    verify: VerifyConfig = VerifyConfig()
    """Check that drafts do not change tokens."""
    draft_refresh: DraftRefreshConfig | None = None
    """Trains the `eagle3` head while the policy is trained; null is off."""
    fastest_of_n: FastestOfNConfig | None = None
    """Lets engines take over or race each other's stragglers; null is off."""
    logprob_gap_alarm: float = bounded(0.02, low=0.0)
    """Mean |log-prob of the engine - log-prob of the trainer| per token above which a run raises an alarm."""
    http_seeds: str = choice("derived", "required", default="derived")
    """Requests without a seed at an engine's HTTP server. `derived`: the prompt determines the seed. `required`: refused."""

    @property
    def most_drafts(self) -> int:
        """The most draft tokens that a request gets in a step."""
        return self.budget.k if self.budget.policy == "fixed" else self.num_speculative_tokens

    @property
    def model_drafter(self) -> ModelDrafterConfig | None:
        """The first drafter with weights in the policy's engine; an engine has at most one."""
        return next((d for d in self.drafters if isinstance(d, ModelDrafterConfig)), None)

    @property
    def remote(self) -> RemoteDrafterConfig | None:
        """The drafter of type `remote`, if there is one."""
        return next((d for d in self.drafters if isinstance(d, RemoteDrafterConfig)), None)

    @property
    def drafters_of_engines(self) -> tuple[tuple[DrafterConfig, ...], ...]:
        """The drafters of each kind of engine: one kind that has all, unless `fastest_of_n.methods` lists several."""
        methods = () if self.fastest_of_n is None or not self.fastest_of_n.enabled else self.fastest_of_n.methods
        return tuple(tuple(d for d in self.drafters if d.type in types) for types in methods) or (self.drafters,)

    @property
    def head(self) -> str | None:
        """Folder, or name on the Hugging Face Hub, of the EAGLE-3 head, if one drafts."""
        return next((d.model for d in self.drafters if isinstance(d, Eagle3DrafterConfig)), None)

    @property
    def head_folder(self) -> Path | None:
        """Folder of the EAGLE-3 head; None if there is no head, or only its name on the Hub is known."""
        folder = Path(self.head or "")
        return folder if self.head and folder.is_dir() else None

    def check(self, path: str) -> None:
        """Raises ConfigError if a drafter is named twice, an engine would have two with weights, or options contradict."""
        types = [d.type for d in self.drafters]
        for name in types:
            if types.count(name) > 1:
                raise ConfigError(
                    f"{path}.drafters: {name!r} is named {types.count(name)} times; name each drafter once"
                )
        self._check_methods(f"{path}.fastest_of_n", types)
        for drafters in self.drafters_of_engines:
            with_weights = [d.type for d in drafters if isinstance(d, ModelDrafterConfig)]
            if len(with_weights) > 1:
                raise ConfigError(
                    f"{path}.drafters: {' and '.join(with_weights)}; an engine of vLLM holds one drafter with weights: keep "
                    "one, or give them to different engines by fastest_of_n.methods"
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
        """Raises ConfigError unless `methods` of `fastest_of_n`, at `path`, and the drafters' types name the same drafters."""
        fastest = self.fastest_of_n
        if fastest is None:
            return
        named = [name for types_of_engine in fastest.methods for name in types_of_engine]
        for name in named:
            if name not in types:
                raise ConfigError(
                    f"{path}.methods: {name!r} is not among the drafters{nearest(name, types)}; add it to drafters"
                )
        kinds = {frozenset(d.type for d in drafters) for drafters in self.drafters_of_engines}
        if fastest.enabled and not fastest.moving and len(kinds) == 1:
            raise ConfigError(
                f"{path}.moving: false, and all engines have the same drafters, so no request would be raced; set it to true, "
                "or give each engine its own drafters by methods"
            )
        unused = [t for t in types if fastest.methods and t not in named]
        if unused:
            raise ConfigError(
                f"{path}.methods: no engine drafts by {', '.join(unused)}; give it to one, or remove the drafter"
            )
