# SPDX-License-Identifier: Apache-2.0
"""The block `policy.generation.specrollout` of a config: all options of this package."""

from dataclasses import dataclass, replace
from pathlib import Path

from nemo_specrollout.config.drafter_configs import (
    DRAFTERS,
    AheadDrafterConfig,
    BlockDrafterConfig,
    DrafterConfig,
    Eagle3DrafterConfig,
    HistoryDrafterConfig,
    ModelDrafterConfig,
    NgramDrafterConfig,
    RemoteDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.config.strict import AUTO, auto_or_bounded, bounded, choice, nearest, raise_first_mistake, tagged

TRIGGERS = ("auto", "interval")
WITHDRAWN_TRIGGERS = {
    "every_step": "write trigger: interval, with interval: 1",
    "never": "remove draft_refresh to keep the head as it is; to record a local run for a comparison of triggers, set "
    "logger.record_for_replay to true",
}
"""Triggers that only comparisons needed, with what to write instead."""
MIXED_LOSS = '{"kl_div": 0.5, "tv": 0.5}'
"""A loss that is half KL divergence and half total variation, in the notation of `speculators`.

It is the best one for a new head (docs/benchmarks/heads.md).
"""
LOSSES = ("kl_div", "tv", "nla", "lk_hybrid", "tv+kl_div")


@dataclass(frozen=True)
class DraftRefreshConfig:
    """`draft_refresh`: trains the draft head while the policy trains.

    A config with this block turns it on, and `{}` stands for all defaults.
    """

    trigger: str = choice(*TRIGGERS, default="auto", withdrawn=WITHDRAWN_TRIGGERS)
    """When the head is trained again. `auto` trains when that pays, by measured acceptance and measured costs. `interval`
    trains after every `interval` RL steps."""
    interval: int = bounded(10, low=1)
    """RL steps between two refreshes, for `trigger: interval`."""
    min_gap: int = bounded(2, low=1)
    """The fewest RL steps between two refreshes, for `trigger: auto`."""
    margin: float = bounded(0.25, low=0.0)
    """For `trigger: auto`, the share by which the time that a refresh is expected to save must exceed the time that it
    takes."""
    max_time_share: float = bounded(0.2, above=0.0, high=1.0)
    """The largest share of the run's time that refreshes may take, whatever triggers them. In NeMo-RL they run in parallel
    to the RL steps."""
    trainer_gpus: int = bounded(0, low=0, high=1)
    """In NeMo-RL, the GPUs of the Ray actor that trains the head. They come on top of the GPUs that `cluster` counts. With
    0, the head is trained on a CPU."""
    max_train_seconds: float | None = bounded(None, above=0.0)
    """The longest training of one refresh, in seconds. `null` means 8 s, or in NeMo-RL the time of one RL step if that is
    longer."""
    loss: str = choice(*LOSSES, default="tv+kl_div")
    """The loss that trains the head. It is the loss of that name in `speculators`, or the mean of two of them, which
    docs/benchmarks/heads.md compares."""
    learning_rate: float | None = bounded(None, above=0.0, high=1.0)
    """The learning rate of AdamW. `null` means 1e-3 up to a hidden size of 256, falling to 3e-5 at a hidden size of 4096.
    After a candidate that is worse than the head in service, this default is cut to a third."""
    ttt_steps: int = bounded(5, low=1, high=16)
    """How many positions ahead the head learns to draft from its own features."""
    tokens_per_batch: int | None = bounded(None, low=8)
    """Tokens of an optimizer step. `null` means 256 on a CPU and 4096 on a GPU."""
    rollout_capture_share: float = bounded(0.1, above=0.0, high=1.0)
    """The share of requests whose features are stored during generation. Features are the policy's hidden states that the
    head reads and is trained on. The cost of capturing them grows with the share."""
    store_bytes: int = bounded(4 << 30, low=1 << 20)
    """The most disk space for stored features, in bytes. Features of the oldest policy versions make room for new ones."""
    held_out_share: float = bounded(0.1, above=0.0, below=1.0)
    """The share of prompts that judge candidates. No sample of these prompts is ever trained on."""
    confidence: float = bounded(0.95, low=0.5, below=1.0)
    """How sure the publish gate must be that a candidate is not worse than the head in service. With 0.95, at most 5 % of
    worse candidates are published."""
    tolerance: float = bounded(0.0, low=0.0)
    """How much worse a candidate may be and still be published, in mean accepted tokens per request and engine step."""
    max_age_alarm: int | None = bounded(None, low=1)
    """The age of the serving head, in policy versions, that raises an alarm. `null` never raises one."""


@dataclass(frozen=True)
class FastestOfNConfig:
    """`fastest_of_n`: engines that run out of requests take over stragglers of other engines, or race for them.

    A config with this block turns it on, and `{}` stands for all defaults.
    """

    enabled: bool = True
    """Whether engines help each other. With `false`, each engine decodes the requests that NeMo-RL has given it."""
    max_racers: int = bounded(2, low=1, high=8)
    """The most engines that decode one request at the same time. With 1, requests move but do not race."""
    moving: bool = True
    """Whether a request may move to another engine. With `false`, it may still be raced, but its first engine keeps
    decoding it."""
    min_gain: float = bounded(0.1, low=0.0, high=1.0)
    """The share by which a move or a race must be expected to shorten the time until the slower of two engines ends."""
    methods: tuple[tuple[str, ...], ...] = ()
    """The drafter types of each engine, such as `[[suffix], [ngram]]`. If there are more engines than entries, they use the
    entries in turn. With an empty list, every engine has all drafters."""
    ladder: str | None = None
    """A file of decode speeds to start from. It is the `ladder.json` of an earlier run, or a file that `specrollout-lab
    ladder` wrote. With `null`, the run starts from what an earlier start has kept (`learned.warm_start`), or from
    nothing."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the options allow neither moves nor races."""
        text = "moving false and max_racers 1 leave nothing to do; allow one of them, or set enabled: false"
        raise_first_mistake(path, (self.enabled and not self.moving and self.max_racers == 1, "", text))


BLOCK_PATH = "policy.generation.specrollout"
BUDGET_POLICIES = ("auto", "fixed")


@dataclass(frozen=True)
class BudgetConfig:
    """`budget`: the number of draft tokens of a request in an engine step."""

    policy: str = choice(*BUDGET_POLICIES, default="auto")
    """How the number of draft tokens is chosen. `auto` drafts as many as pay, judged by the measured times of engine steps.
    `fixed` always drafts `k`."""
    k: int = bounded(3, low=0, high=64)
    """Draft tokens of each request in an engine step, for `policy: fixed`."""
    margin: float = bounded(0.03, low=0.0, high=1.0)
    """For `policy: auto`, the gain that drafting must promise. It is the share by which drafting must make more tokens per
    second than plain decoding."""


@dataclass(frozen=True)
class VerifyConfig:
    """`verify`: decodes some requests of each step again without drafts, and compares the tokens."""

    requests_per_step: int = bounded(0, low=0)
    """Requests of each step that are decoded a second time without drafts. Only local runs do this, and it has no effect in
    NeMo-RL. 0 turns the check off."""


MOST_STEPS_AHEAD = 4
"""The most coming steps of which engines may decode requests early."""
MOST_DRAFTS = 256
"""The most draft tokens that a request may take from a text made ahead in one engine step."""
DRAFTS_OF_EACH = 32
"""Draft tokens for which every request has room in an engine step in which all slots are taken."""
ALWAYS_FIT = 64
"""If `most_drafts` is at most this, every engine step has room for all of them in all slots. Else requests share the rows."""
SHARED_ROWS = 1024
"""The fewest draft rows for which an engine step has room if requests share them."""


@dataclass(frozen=True)
class RunAheadConfig:
    """`run_ahead`: engines decode requests of coming steps with the weights that they have. The texts serve as drafts later.

    A config with this block turns it on, and `{}` stands for all defaults.
    """

    enabled: bool = True
    """Whether engines decode requests of coming steps. With `false`, they are idle while the policy trains, and slots that
    become free toward the end of a rollout stay empty."""
    steps: int | str = auto_or_bounded(low=1, high=MOST_STEPS_AHEAD)
    """How many coming steps have requests in flight. `auto` plans as many as free slots can hold, and fewer if weight
    updates leave little of their texts right."""
    branches: int = bounded(3, low=0, high=15)
    """The most branches of a text. A branch goes on with the runner-up where two tokens almost tie. With 0, no branches are
    made."""
    most_drafts: int | str = auto_or_bounded(low=1, high=MOST_DRAFTS)
    """The most draft tokens that a request takes from such a text in one engine step. vLLM reserves KV cache for them. `auto`
    means 256, or 32 beside a drafter with weights or a remote drafter. Beside `dflash` or `dspark`, the most is always
    `num_speculative_tokens`."""
    text_mib: int = bounded(1024, low=1)
    """The most memory on the driver for texts that are kept between two rollouts, in MiB. If it does not suffice, texts of the
    farthest step are dropped first."""

    @property
    def text_bytes(self) -> int:
        """`text_mib` in bytes."""
        return self.text_mib << 20


@dataclass(frozen=True)
class LearnedConfig:
    """`learned`: what engines learn is shared by all of them, and kept for the next start of the run."""

    history: bool = True
    """Whether finished responses serve as drafts for later samples of their prompts. All engines share them."""
    history_mib: int = bounded(4096, low=1)
    """The most disk space for these responses, in MiB. The oldest make room for new ones."""
    warm_start: bool = True
    """Whether engines begin with what was measured before. An engine takes the acceptance rates and step times of an engine
    like it, and engines that share requests take the decode speeds of engines like them."""
    folder: str | None = None
    """The folder where all of this is kept. `null` means `specrollout_learned` in the folder of checkpoints, or in a local
    run `learned` in its run folder."""

    @property
    def history_bytes(self) -> int:
        """`history_mib` in bytes."""
        return self.history_mib << 20


@dataclass(frozen=True)
class SpecrolloutConfig:
    """`policy.generation.specrollout`: all options of this package."""

    enabled: bool = True
    """Whether this package is in effect. With `false`, or without the block, NeMo-RL and vLLM run as if it were not
    installed."""
    num_speculative_tokens: int = bounded(8, low=1, high=64)
    """The most draft tokens of a request in one engine step. vLLM reserves KV cache for them."""
    drafters: tuple[DrafterConfig, ...] = tagged(DRAFTERS, default=(SuffixDrafterConfig(), NgramDrafterConfig()))
    """The drafters, each type at most once. The draft board picks among them for each request and engine step. An empty list
    means no speculation, but the same sampler and therefore the same tokens."""
    budget: BudgetConfig = BudgetConfig()
    """How many draft tokens a request gets in an engine step."""
    verify: VerifyConfig = VerifyConfig()
    """Decodes requests again without drafts, and compares the tokens."""
    draft_refresh: DraftRefreshConfig | None = None
    """Trains the `eagle3` head while the policy trains. `null` is off."""
    fastest_of_n: FastestOfNConfig | None = None
    """Lets engines take over each other's stragglers, or race for them. `null` is off."""
    run_ahead: RunAheadConfig | None = None
    """Lets engines draft responses of coming steps in free slots. `null` is off."""
    learned: LearnedConfig = LearnedConfig()
    """What engines learn, which is shared by all engines and kept for the next start of the run."""
    audit: bool = True
    """Whether every row is recorded for `nemo-specrollout audit`, which computes its tokens again. A token takes 4 to 7
    bytes."""
    logprob_gap_alarm: float = bounded(0.02, low=0.0)
    """The log-prob gap that raises an alarm, in nats per token. The gap is the mean absolute difference between the
    log-probs of engine and trainer."""
    http_seeds: str = choice("derived", "required", default="derived")
    """What an engine's HTTP server does with a request without a seed. `derived` derives the seed from the prompt.
    `required` refuses the request."""
    tasks_without_drafts: tuple[str, ...] = ()
    """Tasks whose rows are decoded without drafts. They are the `task_name` of NeMo-RL's rows, or the agent's name of
    NeMo-Gym's."""

    @property
    def most_drafts(self) -> int:
        """The most draft tokens that a request gets in an engine step."""
        if self.budget.policy == "fixed":
            return self.budget.k
        has_fixed_length = isinstance(self.model_drafter, BlockDrafterConfig)
        if self.run_ahead is None or not self.runs_ahead or has_fixed_length:
            return self.num_speculative_tokens
        ahead = self.run_ahead.most_drafts
        if ahead == AUTO:  # a drafter with weights would have buffers and CUDA graphs for as many positions
            ahead = MOST_DRAFTS if self.model_drafter is None and self.remote is None else DRAFTS_OF_EACH
        return max(self.num_speculative_tokens, int(ahead))

    def most_draft_rows(self, num_slots: int) -> int:
        """Returns the most draft tokens of one engine step, over all requests, for an engine with `num_slots` slots.

        A request with a text made ahead may have many drafts, because few requests are left when a rollout ends. The more
        requests are in an engine step, the fewer drafts each of them may have, so that the step has no more draft rows than
        this.
        """
        all_rows = num_slots * self.most_drafts
        if self.most_drafts <= ALWAYS_FIT:
            return all_rows
        return min(all_rows, max(num_slots * DRAFTS_OF_EACH, SHARED_ROWS))

    @property
    def records_rows(self) -> bool:
        """True if the run records its rows for an audit."""
        return self.enabled and self.audit

    @property
    def runs_ahead(self) -> bool:
        """True if engines decode requests of coming steps early."""
        return self.enabled and self.run_ahead is not None and self.run_ahead.enabled

    @property
    def most_paths(self) -> int:
        """The most texts that a request brings along: the one that was made ahead, and its branches."""
        return 1 + self.run_ahead.branches if self.runs_ahead and self.run_ahead is not None else 1

    @property
    def keeps_history(self) -> bool:
        """True if finished responses are kept and serve as drafts for later samples of their prompts."""
        return self.enabled and self.learned.history and self.learned.folder is not None and self.suffix is not None

    @property
    def suffix(self) -> SuffixDrafterConfig | None:
        """The drafter of type `suffix`, if there is one."""
        return next((d for d in self.drafters if isinstance(d, SuffixDrafterConfig)), None)

    @property
    def with_own_drafters(self) -> "SpecrolloutConfig":
        """The block with the drafters `ahead` and `history` added, if `run_ahead` and `learned.history` need them.

        The drafter `history` looks up texts in the same way as `suffix`, so it is not added to a block without `suffix`.
        """
        added = list[DrafterConfig]()
        if self.keeps_history and self.suffix is not None:
            added.append(HistoryDrafterConfig(max_order=self.suffix.max_order))
        if self.runs_ahead:
            added.append(AheadDrafterConfig())
        types = {drafter.type for drafter in self.drafters}
        missing = [drafter for drafter in added if drafter.type not in types]
        return replace(self, drafters=(*self.drafters, *missing)) if missing else self

    @property
    def model_drafter(self) -> ModelDrafterConfig | None:
        """The first drafter with weights that runs in the policy's engine, if there is one. An engine has at most one."""
        return next((d for d in self.drafters if isinstance(d, ModelDrafterConfig)), None)

    @property
    def remote(self) -> RemoteDrafterConfig | None:
        """The drafter of type `remote`, if there is one."""
        return next((d for d in self.drafters if isinstance(d, RemoteDrafterConfig)), None)

    @property
    def drafters_of_engines(self) -> tuple[tuple[DrafterConfig, ...], ...]:
        """The drafters of each kind of engine. Without `fastest_of_n.methods`, there is one kind, which has all drafters."""
        methods = () if self.fastest_of_n is None or not self.fastest_of_n.enabled else self.fastest_of_n.methods
        return tuple(tuple(d for d in self.drafters if d.type in types) for types in methods) or (self.drafters,)

    def of_engine(self, engine: int) -> "SpecrolloutConfig":
        """Returns the block of engine number `engine`, with the drafters of its kind and without `fastest_of_n`.

        It has no `draft_refresh` if no EAGLE-3 head is among these drafters.
        """
        kinds = self.drafters_of_engines
        own = replace(self, fastest_of_n=None, drafters=kinds[engine % len(kinds)])
        return own if own.head is not None else replace(own, draft_refresh=None)

    @property
    def head(self) -> str | None:
        """Folder of the EAGLE-3 head, or its name on the Hugging Face Hub; None if no drafter is of type `eagle3`."""
        return next((d.model for d in self.drafters if isinstance(d, Eagle3DrafterConfig)), None)

    @property
    def head_folder(self) -> Path | None:
        """Folder of the EAGLE-3 head; None if there is no head, or only its name on the Hub is known."""
        folder = Path(self.head or "")
        return folder if self.head and folder.is_dir() else None

    def check(self, path: str) -> None:
        """Raises ConfigError if the options contradict each other.

        Examples are a drafter that is named twice, and two drafters with weights in one engine.
        """
        types = [d.type for d in self.drafters]
        twice = next((name for name in types if types.count(name) > 1), "")
        raise_first_mistake(
            path, (twice, "drafters", f"{twice!r} is named {types.count(twice)} times; name each drafter once")
        )
        self._check_methods(f"{path}.fastest_of_n", types)
        with_weights = (
            [d.type for d in kind if isinstance(d, ModelDrafterConfig)] for kind in self.drafters_of_engines
        )
        several = next((" and ".join(names) for names in with_weights if len(names) > 1), "")
        raise_first_mistake(
            path,
            (
                several,
                "drafters",
                f"{several}; an engine of vLLM holds one drafter with weights: keep one, or give them to "
                "different engines by fastest_of_n.methods",
            ),
            (
                self.draft_refresh is not None and self.head is None,
                "draft_refresh",
                "there is no head to refresh; name a drafter of type eagle3, or remove the block",
            ),
            (
                self.budget.policy == "fixed" and self.budget.k > self.num_speculative_tokens,
                "budget.k",
                f"{self.budget.k} is above num_speculative_tokens {self.num_speculative_tokens}; raise that",
            ),
        )

    def _check_methods(self, path: str, types: list[str]) -> None:
        """Raises ConfigError unless `fastest_of_n.methods` is empty, or names exactly the drafters of these `types`.

        It also raises one if requests may only race, but all engines have the same drafters. `path` is that of `fastest_of_n`.
        """
        fastest = self.fastest_of_n
        if fastest is None:
            return
        named = [name for types_of_engine in fastest.methods for name in types_of_engine]
        unknown = next((name for name in named if name not in types), None)
        kinds = {frozenset(d.type for d in drafters) for drafters in self.drafters_of_engines}
        unused = [t for t in types if fastest.methods and t not in named]
        raise_first_mistake(
            path,
            (
                unknown is not None,
                "methods",
                f"{unknown!r} is not among the drafters{nearest(str(unknown), types)}; add it to drafters",
            ),
            (
                fastest.enabled and not fastest.moving and len(kinds) == 1,
                "moving",
                "false, and all engines have the same drafters, so no request would be raced; set it to true, or give each "
                "engine its own drafters by methods",
            ),
            (unused, "methods", f"no engine drafts by {', '.join(unused)}; give it to one, or remove the drafter"),
        )


OFF = SpecrolloutConfig(enabled=False)
"""The block that stands for a config without a block."""
