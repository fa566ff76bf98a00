# SPDX-License-Identifier: Apache-2.0
"""The dataclasses of the block `policy.generation.specrollout` of a config, which has all options of this package."""

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
"""Values of `trigger` that earlier versions had, each with a text that tells what to write instead."""
MIXED_LOSS = '{"kl_div": 0.5, "tv": 0.5}'
"""The loss `tv+kl_div` in the notation of the library `speculators`. It is half KL divergence and half total variation.

A new draft head learns best with it (docs/benchmarks/heads.md).
"""
LOSSES = ("kl_div", "tv", "nla", "lk_hybrid", "tv+kl_div")


@dataclass(frozen=True)
class DraftRefreshConfig:
    """Options of `draft_refresh`, which trains the draft head while the policy trains.

    A config with this block turns it on, and `{}` stands for all defaults.
    """

    trigger: str = choice(*TRIGGERS, default="auto", withdrawn=WITHDRAWN_TRIGGERS)
    """When the head is trained again. `auto` trains it when this is expected to save more time than it takes, by measured
    acceptance and measured costs. `interval` trains it after every `interval` RL steps."""
    interval: int = bounded(10, low=1)
    """The number of RL steps between two refreshes, for `trigger: interval`."""
    min_gap: int = bounded(2, low=1)
    """The smallest number of RL steps between two refreshes, for `trigger: auto`."""
    margin: float = bounded(0.25, low=0.0)
    """For `trigger: auto`, how much more time a refresh must be expected to save than it takes. With 0.25, it must save 25 %
    more."""
    max_time_share: float = bounded(0.2, above=0.0, high=1.0)
    """The largest share of the run's time that refreshes may take, with either trigger. In NeMo-RL, they run in parallel to
    the RL steps."""
    trainer_gpus: int = bounded(0, low=0, high=1)
    """In NeMo-RL, the number of GPUs of the Ray actor that trains the head. They come on top of the GPUs that `cluster`
    counts. With 0, the head is trained on a CPU."""
    max_train_seconds: float | None = bounded(None, above=0.0)
    """The longest training of one refresh, in seconds. `null` means 8 s, or in NeMo-RL the time of one RL step if that is
    longer."""
    loss: str = choice(*LOSSES, default="tv+kl_div")
    """The loss that trains the head. It is the loss of that name in the library `speculators`, or the mean of two such losses.
    docs/benchmarks/heads.md compares them."""
    learning_rate: float | None = bounded(None, above=0.0, high=1.0)
    """The learning rate of AdamW. `null` means 1e-3 for hidden sizes up to 256, and less for larger ones, such as 3e-5 for
    4096. If a trained head is worse than the head in service, the next refresh uses a third of this rate."""
    ttt_steps: int = bounded(5, low=1, high=16)
    """How many positions ahead the head learns to draft. From the second position on, the head reads its own hidden states
    instead of the policy's."""
    tokens_per_batch: int | None = bounded(None, low=8)
    """The number of tokens in an optimizer step. `null` means 256 on a CPU and 4096 on a GPU."""
    rollout_capture_share: float = bounded(0.1, above=0.0, high=1.0)
    """The share of requests whose features are stored during generation. Features are the policy's hidden states that the
    head reads and is trained on. The cost of capturing them grows with the share."""
    store_bytes: int = bounded(4 << 30, low=1 << 20)
    """The most disk space for stored features, in bytes. If it is full, features of the oldest policy versions are deleted."""
    held_out_share: float = bounded(0.1, above=0.0, below=1.0)
    """The share of prompts whose samples test trained heads. The head is never trained on these samples."""
    confidence: float = bounded(0.95, low=0.5, below=1.0)
    """How sure the publish gate must be that a trained head is not worse than the head in service. With 0.95, at most 5 % of
    worse heads are published."""
    tolerance: float = bounded(0.0, low=0.0)
    """How much worse a trained head may be and still be published, in mean accepted tokens per request and engine step."""
    max_age_alarm: int | None = bounded(None, low=1)
    """The age from which the head in service raises an alarm, in policy versions. `null` means that it never does."""


@dataclass(frozen=True)
class FastestOfNConfig:
    """Options of `fastest_of_n`, by which engines that run out of requests take over stragglers of other engines or race them.

    A straggler is a request that still decodes when most others have ended. Engines race for it if each of them decodes it,
    and the first to end it wins.

    A config with this block turns it on, and `{}` stands for all defaults.
    """

    enabled: bool = True
    """Whether engines take over requests of each other. With `false`, each one decodes the requests that NeMo-RL gave it."""
    max_racers: int = bounded(2, low=1, high=8)
    """The most engines that decode one request at the same time. With 1, requests move but do not race."""
    moving: bool = True
    """Whether a request may move to another engine. With `false`, it may still be raced, but its first engine keeps
    decoding it."""
    min_gain: float = bounded(0.1, low=0.0, high=1.0)
    """The gain that a move or a race must promise. With 0.1, the slower of the two engines must be expected to end 10 %
    sooner."""
    methods: tuple[tuple[str, ...], ...] = ()
    """The drafter types of each engine, such as `[[suffix], [ngram]]`. If there are more engines than entries, the entries
    are repeated. With an empty list, every engine has all drafters."""
    ladder: str | None = None
    """A file with decode speeds that engines expect at first. It is the `ladder.json` of an earlier run, or a file that
    `specrollout-lab ladder` wrote. With `null`, engines expect the decode speeds that an earlier start of the run has saved,
    if there are any (`learned.warm_start`)."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the options allow requests neither to move nor to be raced."""
        text = "moving false and max_racers 1 leave nothing to do; allow one of them, or set enabled: false"
        raise_first_mistake(path, (self.enabled and not self.moving and self.max_racers == 1, "", text))


BLOCK_PATH = "policy.generation.specrollout"
BUDGET_POLICIES = ("auto", "fixed")


@dataclass(frozen=True)
class BudgetConfig:
    """Options of `budget`, which decides how many draft tokens a request gets in an engine step."""

    policy: str = choice(*BUDGET_POLICIES, default="auto")
    """How the number of draft tokens is chosen. `auto` chooses the number with which the engine is fastest, by the measured
    times of engine steps. `fixed` always drafts `k`."""
    k: int = bounded(3, low=0, high=64)
    """The number of draft tokens of each request in an engine step, for `policy: fixed`."""
    margin: float = bounded(0.03, low=0.0, high=1.0)
    """For `policy: auto`, the gain in speed that drafts must promise. With 0.03, they must promise 3 % more tokens per second
    than plain decoding."""


@dataclass(frozen=True)
class VerifyConfig:
    """Options of `verify`, which decodes some requests of each RL step again without drafts, and compares the tokens."""

    requests_per_step: int = bounded(0, low=0)
    """The number of requests of each RL step that are decoded again without drafts. With 0, none is. Only local runs do this.
    In NeMo-RL the number has no effect."""


MOST_STEPS_AHEAD = 4
"""The largest value of `run_ahead.steps`, which is the number of coming RL steps whose requests engines decode early."""
MOST_DRAFTS = 256
"""The largest value of `run_ahead.most_drafts`, in draft tokens per request and engine step."""
DRAFTS_OF_EACH = 32
"""Number of draft tokens that each request can always have in an engine step, although all slots share the room for them.

It is also the value of `run_ahead.most_drafts: auto` beside a drafter with weights or a remote drafter."""
ALWAYS_FIT = 64
"""Largest value of `SpecrolloutConfig.most_drafts` with which each slot has room of its own for as many draft tokens.

If `most_drafts` is larger, all slots of an engine share the room for draft tokens."""
SHARED_ROWS = 1024
"""Least number of draft tokens in an engine step, over all slots, for which slots that share the room have room together.

The room is smaller only if `most_drafts` of all slots together is less."""


@dataclass(frozen=True)
class RunAheadConfig:
    """Options of `run_ahead`, by which engines decode requests of coming RL steps early, with the weights that they have.

    The texts that they make serve as drafts when these steps come.

    A config with this block turns it on, and `{}` stands for all defaults.
    """

    enabled: bool = True
    """Whether engines decode requests of coming RL steps. With `false`, they are idle while the policy trains, and slots that
    become free toward the end of a rollout stay empty."""
    steps: int | str = auto_or_bounded(low=1, high=MOST_STEPS_AHEAD)
    """The number of coming RL steps whose requests are decoded early. `auto` means as many as free slots can hold, but fewer
    if the texts are rarely right after the weights have changed."""
    branches: int = bounded(3, low=0, high=15)
    """The largest number of branches of a text. A branch begins where the two best tokens almost tie, and continues with the
    second-best one. With 0, there are no branches."""
    most_drafts: int | str = auto_or_bounded(low=1, high=MOST_DRAFTS)
    """The most draft tokens that a request takes from an early text in one engine step. vLLM reserves KV cache for them.
    `auto` means 256, or 32 if there is also a drafter with weights or a remote drafter. With `dflash` or `dspark`, it is
    always `num_speculative_tokens`."""
    text_mib: int = bounded(1024, low=1)
    """The most memory on the driver for early texts that are kept between two rollouts, in MiB. If they need more, the driver
    first drops texts of the RL step that is farthest ahead."""

    @property
    def text_bytes(self) -> int:
        """The value of `text_mib` in bytes."""
        return self.text_mib << 20


@dataclass(frozen=True)
class LearnedConfig:
    """Options of `learned`, by which engines share what they learn and save it for the next start of the run."""

    history: bool = True
    """Whether finished responses of all engines serve as drafts for later samples of the same prompts."""
    history_mib: int = bounded(4096, low=1)
    """The most disk space for finished responses, in MiB. If it is used up, the oldest responses are deleted."""
    warm_start: bool = True
    """Whether engines begin with what an earlier start of the run has measured. An engine takes the acceptance rates and
    step times of an engine with the same settings. If engines share requests (`fastest_of_n`), it also takes decode speeds."""
    folder: str | None = None
    """The folder for finished responses and measurements. `null` means `specrollout_learned` in the folder of checkpoints, or
    in a local run `learned` in its run folder."""

    @property
    def history_bytes(self) -> int:
        """The value of `history_mib` in bytes."""
        return self.history_mib << 20


@dataclass(frozen=True)
class SpecrolloutConfig:
    """The block `policy.generation.specrollout` of a config, which has all options of this package."""

    enabled: bool = True
    """Whether this package is in effect. With `false`, or without the block, NeMo-RL and vLLM run as if it were not
    installed."""
    num_speculative_tokens: int = bounded(8, low=1, high=64)
    """The most draft tokens of a request in one engine step. vLLM reserves KV cache for them."""
    drafters: tuple[DrafterConfig, ...] = tagged(DRAFTERS, default=(SuffixDrafterConfig(), NgramDrafterConfig()))
    """The drafters, each type at most once. For each request and engine step, the package chooses the most promising one. With
    an empty list there are no drafts, but the sampler and therefore the tokens are the same."""
    budget: BudgetConfig = BudgetConfig()
    """Decides how many draft tokens a request gets in an engine step."""
    verify: VerifyConfig = VerifyConfig()
    """Decodes requests again without drafts, and compares the tokens."""
    draft_refresh: DraftRefreshConfig | None = None
    """Trains the `eagle3` head while the policy trains. `null` turns it off."""
    fastest_of_n: FastestOfNConfig | None = None
    """Lets engines take over each other's last requests, or race for them. `null` turns it off."""
    run_ahead: RunAheadConfig | None = None
    """Lets engines decode requests of coming RL steps early, in free slots. `null` turns it off."""
    learned: LearnedConfig = LearnedConfig()
    """Lets engines share what they learn, and saves it for the next start of the run."""
    audit: bool = True
    """Whether every sample is recorded for `nemo-specrollout audit`, which computes its tokens again. A token takes 4 to 7
    bytes on disk."""
    logprob_gap_alarm: float = bounded(0.02, low=0.0)
    """The log-prob gap that raises an alarm, in nats per token. The gap is the mean absolute difference between the
    log-probs of engine and trainer."""
    http_seeds: str = choice("derived", "required", default="derived")
    """What an engine's HTTP server does with a request without a seed. `derived` derives a seed from the prompt. `required`
    refuses the request."""
    tasks_without_drafts: tuple[str, ...] = ()
    """Tasks whose samples are decoded without drafts. The name of a task is the `task_name` of NeMo-RL's rows, or the name of
    the agent in NeMo-Gym."""

    @property
    def most_drafts(self) -> int:
        """The most draft tokens that a request gets in an engine step, which follows from all options of the block."""
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
        """Returns the most draft tokens of all requests together in an engine step of an engine with `num_slots` slots.

        With `run_ahead`, a single request may have up to 256 draft tokens. If many requests run, they share the room that this
        function returns, so that each of them gets fewer.
        """
        all_rows = num_slots * self.most_drafts
        if self.most_drafts <= ALWAYS_FIT:
            return all_rows
        return min(all_rows, max(num_slots * DRAFTS_OF_EACH, SHARED_ROWS))

    @property
    def records_rows(self) -> bool:
        """True if the run records its samples for `nemo-specrollout audit`."""
        return self.enabled and self.audit

    @property
    def runs_ahead(self) -> bool:
        """True if engines decode requests of coming RL steps early (`run_ahead`)."""
        return self.enabled and self.run_ahead is not None and self.run_ahead.enabled

    @property
    def most_paths(self) -> int:
        """The most early texts that a request can have as drafts: one text and its branches. It is 1 without `run_ahead`."""
        return 1 + self.run_ahead.branches if self.runs_ahead and self.run_ahead is not None else 1

    @property
    def keeps_history(self) -> bool:
        """True if finished responses are saved to serve as drafts for later samples of the same prompts."""
        return self.enabled and self.learned.history and self.learned.folder is not None and self.suffix is not None

    @property
    def suffix(self) -> SuffixDrafterConfig | None:
        """The options of the drafter `suffix`, or None if the block does not name it."""
        return next((d for d in self.drafters if isinstance(d, SuffixDrafterConfig)), None)

    @property
    def with_own_drafters(self) -> "SpecrolloutConfig":
        """This block with the drafter `ahead` added if `run_ahead` is on, and `history` if `learned.history` is on.

        The drafter `history` is only added if the block also names `suffix`, whose options it takes.
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
        """The options of the drafter with weights that runs in the policy's engine, or None. An engine has at most one."""
        return next((d for d in self.drafters if isinstance(d, ModelDrafterConfig)), None)

    @property
    def remote(self) -> RemoteDrafterConfig | None:
        """The options of the remote drafter, or None if the block does not name one."""
        return next((d for d in self.drafters if isinstance(d, RemoteDrafterConfig)), None)

    @property
    def drafters_of_engines(self) -> tuple[tuple[DrafterConfig, ...], ...]:
        """The drafters of each kind of engine. There is one kind for each entry of `fastest_of_n.methods`.

        Without entries there is one kind, which has all drafters.
        """
        methods = () if self.fastest_of_n is None or not self.fastest_of_n.enabled else self.fastest_of_n.methods
        return tuple(tuple(d for d in self.drafters if d.type in types) for types in methods) or (self.drafters,)

    def of_engine(self, engine: int) -> "SpecrolloutConfig":
        """Returns the block for engine number `engine`, from 0, with the drafters that `fastest_of_n.methods` gives to it.

        The block has no `fastest_of_n`. If the engine has no EAGLE-3 head, the block has no `draft_refresh` either.
        """
        kinds = self.drafters_of_engines
        own = replace(self, fastest_of_n=None, drafters=kinds[engine % len(kinds)])
        return own if own.head is not None else replace(own, draft_refresh=None)

    @property
    def head(self) -> str | None:
        """Folder of the EAGLE-3 head, or its name on the Hugging Face Hub. None if the block does not name such a head."""
        return next((d.model for d in self.drafters if isinstance(d, Eagle3DrafterConfig)), None)

    @property
    def head_folder(self) -> Path | None:
        """Folder of the EAGLE-3 head. None if there is no head, or if the block has its name on the Hugging Face Hub."""
        folder = Path(self.head or "")
        return folder if self.head and folder.is_dir() else None

    def check(self, path: str) -> None:
        """Raises ConfigError if options contradict each other, for example if a drafter is named twice."""
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
        """Raises ConfigError if `fastest_of_n.methods` does not fit the block. `path` is the path of `fastest_of_n`.

        `types` are the types of the block's drafters. It is an error if `methods` names another drafter, or leaves out one of
        them. It is also an error if requests may only be raced, but all engines have the same drafters.
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
"""The block that is used for a config without the block `specrollout`. It turns this package off."""
