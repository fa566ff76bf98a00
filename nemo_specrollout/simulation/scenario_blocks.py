# SPDX-License-Identifier: Apache-2.0
"""The blocks of a scenario, each checked by itself: strict, frozen, without torch."""

from dataclasses import dataclass

from nemo_specrollout.config.strict import ConfigError, bounded, choice, nearest
from nemo_specrollout.simulation.costs import LinearCosts, RoundCosts

HEAD, TEXT = "eagle3", "text"
"""What may stand for a draft model: an EAGLE-3 head of the policy's width; a look-up in text, which costs no GPU time."""


@dataclass(frozen=True)
class ClusterConfig:
    """The GPUs."""

    device: str
    """A data sheet's name (`devices.py`); `measured` with costs of another kind than `roofline`."""

    num_gpus: int = bounded(low=1)
    """All of them."""

    gpus_per_engine: int = bounded(1, low=1)
    """Tensor-parallel size of a rollout worker."""

    train_gpus: int = bounded(0, low=0)
    """Of those, how many train and never generate; 0: generation and training take turns on all."""

    expert_parallel: bool = False
    """Whether experts lie whole on one GPU each."""

    @property
    def generating_gpus(self) -> int:
        """Those that generate."""
        return self.num_gpus - self.train_gpus

    @property
    def training_gpus(self) -> int:
        """Those that train."""
        return self.train_gpus or self.num_gpus

    def check(self, path: str) -> None:
        """Raises ConfigError if no engine fits."""
        if self.generating_gpus < self.gpus_per_engine:
            raise ConfigError(
                f"{path}.num_gpus: {self.num_gpus}, of which {self.train_gpus} train, leave {self.generating_gpus} to "
                f"generate; an engine needs {self.gpus_per_engine}: raise num_gpus, or lower one of the others"
            )
        if self.generating_gpus % self.gpus_per_engine:
            raise ConfigError(
                f"{path}.gpus_per_engine: {self.gpus_per_engine} does not divide the {self.generating_gpus} GPUs that "
                "generate; choose a divisor"
            )


@dataclass(frozen=True)
class BatchConfig:
    """The requests of a step."""

    num_prompts: int = bounded(low=1)
    num_samples: int = bounded(low=1)
    """Of each prompt."""

    prompt_tokens: int = bounded(256, low=1)
    max_requests: int = bounded(256, low=1)
    """That an engine decodes at a time: vLLM's max_num_seqs."""

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_samples


@dataclass(frozen=True)
class MethodConfig:
    """A way to draft."""

    name: str
    draft: str = HEAD
    """`eagle3`, `text`, or the name of a small model."""

    acceptance: float | None = bounded(None, low=0.0, below=1.0)
    """P(a draft token is right | those before it were), of the typical request. Or:"""

    acceptance_length: float | None = bounded(None, low=1.0)
    """Tokens a step with `at_k` drafts, the verifier's own included."""

    at_k: int = bounded(3, low=1)
    spread: float = bounded(0.0, low=0.0, high=3.0)
    """Standard deviation of the acceptance's log-odds over requests."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless acceptance is given once, and can be."""
        if (self.acceptance is None) == (self.acceptance_length is None):
            raise ConfigError(
                f"{path}.acceptance: {self.acceptance}, with acceptance_length {self.acceptance_length}; give one of the two"
            )
        if self.acceptance_length is not None and self.acceptance_length > self.at_k + 1:
            raise ConfigError(
                f"{path}.acceptance_length: {self.acceptance_length}; {self.at_k} drafts emit {self.at_k + 1} tokens at most: "
                "lower it, or raise at_k"
            )


@dataclass(frozen=True)
class DraftingConfig:
    """Who drafts, and how much."""

    methods: tuple[MethodConfig, ...]
    """The first drafts in every variant; the others only where methods race."""

    k: int = bounded(3, low=1, high=64)
    """Draft tokens a step where the number is fixed."""

    max_k: int = bounded(8, low=1, high=64)
    """The most where it is not."""

    methods_of_workers: tuple[str, ...] = ()
    """Where methods race: worker i has entry i, and begins again after the last. Empty: each method in turn."""

    freed_workers_switch: bool = True
    """Where methods race: a worker has the first method until it runs dry, then its own, as in SpecActor. False: its own from
    the start, as in `fastest_of_n.methods` of the block."""

    method_correlation: float = bounded(0.5, low=0.0, high=1.0)
    """Of the log-odds of two methods on the same request."""

    drafter_gpus: tuple[int, ...] = bounded((), low=1)
    """Sizes that a drafter on GPUs of its own may have; empty: none is placed."""

    def check(self, path: str) -> None:
        """Raises ConfigError if a method is missing."""
        names = [method.name for method in self.methods]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{path}.methods: {names}; name at least one, and each once")
        for name in self.methods_of_workers:
            if name not in names:
                raise ConfigError(f"{path}.methods_of_workers: {name!r} is not one of methods{nearest(name, names)}")
        if self.drafter_gpus and self.methods[0].draft in (HEAD, TEXT):
            raise ConfigError(
                f"{path}.drafter_gpus: {list(self.drafter_gpus)}; drafts of {self.methods[0].draft!r} are not made elsewhere: "
                "name a small model as the first method's draft, or leave it empty"
            )


@dataclass(frozen=True)
class CostConfig:
    """The kind of cost model."""

    kind: str = choice("roofline", "rounds", "linear", "tables", default="roofline")
    """`rounds` and `linear` are the forms of the two papers; `tables` are those of `nemo-specrollout profile`."""

    rounds: RoundCosts | None = None
    linear: LinearCosts | None = None
    profile: str | None = None
    """Of `tables`: the file."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless the kind's own block, and no other, is there."""
        given = {"rounds": self.rounds, "linear": self.linear, "tables": self.profile}
        for kind, block in given.items():
            key = "profile" if kind == "tables" else kind
            if (block is not None) != (kind == self.kind):
                fix = "give it" if block is None else f"remove it, or set kind: {kind}"
                raise ConfigError(
                    f"{path}.{key}: {'missing' if block is None else 'given'} with kind {self.kind!r}; {fix}"
                )


@dataclass(frozen=True)
class TrainingConfig:
    """The rest of a step. Seconds that are not given follow from the model's arithmetic on the GPUs that train."""

    mode: str = choice("sync", "async", default="sync")
    """`sync`: generate, then train. `async`: batches are generated while earlier ones train."""

    lag: int = bounded(0, low=0, high=64)
    """Of `async`: policy versions by which a batch may be behind when its training begins."""

    max_age: int | None = bounded(None, low=0)
    """`max_trajectory_age_steps`: samples that are older are thrown away; absent, it is the lag."""

    buffer_batches: int | None = bounded(None, low=1)
    """Batches that the replay buffer holds, those being generated included; absent, one more than the lag."""

    data_s: float = bounded(0.0, low=0.0)
    prepare_s: float = bounded(0.0, low=0.0)
    refit_s: float = bounded(0.0, low=0.0)
    """Of handing the weights to the engines."""
    logprob_s: float | None = bounded(None, low=0.0)
    train_s: float | None = bounded(None, low=0.0)
    num_steps: int = bounded(12, low=2, high=1000)
    """Steps that are simulated where they overlap; about the second half counts."""

    def check(self, path: str) -> None:
        """Raises ConfigError for a staleness that contradicts the lag."""
        if self.mode == "sync" and (self.lag or self.max_age):
            raise ConfigError(
                f"{path}.lag: {self.lag}, max_age {self.max_age}; a synchronous step has no lag: set both to 0, or mode: async"
            )
        if self.mode == "async" and self.lag == 0:
            raise ConfigError(
                f"{path}.lag: 0; asynchronous steps that may not lag wait for each other: raise it, or mode: sync"
            )
        if self.max_age is not None and self.max_age < self.lag:
            raise ConfigError(
                f"{path}.max_age: {self.max_age} throws away what a lag of {self.lag} makes; raise it to the lag, or "
                "lower that"
            )
        if self.mode == "async" and self.num_steps < 2 * self.lag + 2:
            raise ConfigError(
                f"{path}.num_steps: {self.num_steps} steps do not settle with a lag of {self.lag}; at least {2 * self.lag + 2}"
            )
        if self.buffer_batches is not None and self.buffer_batches < self.lag:
            raise ConfigError(
                f"{path}.buffer_batches: {self.buffer_batches} cannot hold the batches of a lag of {self.lag}; raise it, or "
                "lower the lag"
            )
