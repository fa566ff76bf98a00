# SPDX-License-Identifier: Apache-2.0
"""The strict, frozen schema of a simulated scenario with its blocks, and the scenarios that ship with the package.

Calibrated figures are in `calibration` and `costs`, and `calibrated_from` names their source.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lab.simulation.costs import Calibration, LinearCosts, RoundCosts
from lab.simulation.data_sheets import device_named, model_named
from lab.simulation.workload import LengthConfig, acceptance_for
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import bounded, build, choice, join, nearest, raise_first_mistake

HEAD, TEXT = "eagle3", "text"
"""Special values of `draft`: an EAGLE-3 head of the policy's width, and a look-up in text, which costs no GPU time."""


@dataclass(frozen=True)
class ClusterConfig:
    """GPUs of a run."""

    device: str
    """Name of a data sheet (`data_sheets.py`); `measured` if the costs are not of kind `roofline`."""
    num_gpus: int = bounded(low=1)
    """All GPUs."""
    gpus_per_engine: int = bounded(1, low=1)
    """Tensor-parallel size of an engine."""
    train_gpus: int = bounded(0, low=0)
    """GPUs that train and never generate, or 0 if generation and training take turns on all GPUs."""
    expert_parallel: bool = False
    """Whether each expert lies whole on one GPU."""

    @property
    def generating_gpus(self) -> int:
        """GPUs that generate."""
        return self.num_gpus - self.train_gpus

    @property
    def training_gpus(self) -> int:
        """GPUs that train."""
        return self.train_gpus or self.num_gpus

    def check(self, path: str) -> None:
        """Raises ConfigError if the engines do not fit the GPUs."""
        left = self.generating_gpus
        size = self.gpus_per_engine
        raise_first_mistake(
            path,
            (
                left < size,
                "num_gpus",
                f"{self.num_gpus}, of which {self.train_gpus} train, leave {left} to generate; an engine needs {size}: raise "
                "num_gpus, or lower one of the others",
            ),
            (left % size, "gpus_per_engine", f"{size} does not divide the {left} GPUs that generate; choose a divisor"),
        )


@dataclass(frozen=True)
class BatchConfig:
    """Requests of a step."""

    num_prompts: int = bounded(low=1)
    num_samples: int = bounded(low=1)
    """Samples of each prompt."""
    prompt_tokens: int = bounded(256, low=1)
    max_requests: int = bounded(256, low=1)
    """Maximum number of requests in an engine: vLLM's max_num_seqs."""

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_samples


@dataclass(frozen=True)
class MethodConfig:
    """Draft method."""

    name: str
    draft: str = HEAD
    """`eagle3`, `text`, or the name of a small model."""
    acceptance: float | None = bounded(None, low=0.0, below=1.0)
    """P(a draft token is right | all before it were) of the typical request. Alternative to `acceptance_length`."""
    acceptance_length: float | None = bounded(None, low=1.0)
    """Tokens of a step with `at_k` drafts, including the verifier's own."""
    at_k: int = bounded(3, low=1)
    spread: float = bounded(0.0, low=0.0, high=3.0)
    """Standard deviation of the acceptance's log-odds over requests."""

    @cached_property
    def centre(self) -> float:
        """P(a draft token is right) of the typical request."""
        if self.acceptance is not None:
            return self.acceptance
        assert self.acceptance_length is not None
        return acceptance_for(self.acceptance_length, self.at_k, self.spread)

    def check(self, path: str) -> None:
        """Raises ConfigError unless exactly one acceptance is given and it is possible."""
        length = self.acceptance_length
        most = self.at_k + 1
        raise_first_mistake(
            path,
            (
                (self.acceptance is None) == (length is None),
                "acceptance",
                f"{self.acceptance}, with acceptance_length {length}; give one of the two",
            ),
            (
                length is not None and length > most,
                "acceptance_length",
                f"{length}; {self.at_k} drafts emit {most} tokens at most: lower it, or raise at_k",
            ),
        )


@dataclass(frozen=True)
class DraftingConfig:
    """Draft methods and draft lengths."""

    methods: tuple[MethodConfig, ...]
    """Draft methods. The first drafts in every variant, the others only if methods race."""
    k: int = bounded(3, low=1, high=64)
    """Draft tokens of a step under a fixed budget."""
    max_k: int = bounded(8, low=1, high=64)
    """Maximum draft tokens of a step under other budgets."""
    methods_of_workers: tuple[str, ...] = ()
    """Methods of engines 0, 1, ... if methods race, repeated cyclically. Empty: each method in turn."""
    freed_workers_switch: bool = True
    """Whether a racing engine has the first method until it is idle, then its own, as in SpecActor. Otherwise it has its own
    from the start, as in `fastest_of_n.methods` of the block."""
    method_correlation: float = bounded(0.5, low=0.0, high=1.0)
    """Correlation of the log-odds of two methods on the same request."""
    drafter_gpus: tuple[int, ...] = bounded((), low=1)
    """Possible sizes of a separate drafter in GPUs, or empty to disable it."""

    def check(self, path: str) -> None:
        """Raises ConfigError if methods are missing, repeated or unsuitable."""
        names = [method.name for method in self.methods]
        draft = self.methods[0].draft if names else ""
        unknown = next((name for name in self.methods_of_workers if name not in names), None)
        raise_first_mistake(
            path,
            (not names or len(set(names)) < len(names), "methods", f"{names}; name at least one, and each once"),
            (
                unknown is not None,
                "methods_of_workers",
                f"{unknown!r} is not one of methods{nearest(str(unknown), names)}",
            ),
            (
                self.drafter_gpus and draft in (HEAD, TEXT),
                "drafter_gpus",
                f"{list(self.drafter_gpus)}; drafts of {draft!r} are not made elsewhere: name a small model as the first "
                "method's draft, or leave it empty",
            ),
        )


@dataclass(frozen=True)
class CostConfig:
    """Cost model."""

    kind: str = choice("roofline", "rounds", "linear", "tables", default="roofline")
    """`rounds` and `linear` have the forms of the two papers; `tables` come from `specrollout-lab profile`."""
    rounds: RoundCosts | None = None
    linear: LinearCosts | None = None
    profile: str | None = None
    """File of cost tables, for kind `tables`."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless exactly the block of the kind is given."""
        for kind, key in (("rounds", "rounds"), ("linear", "linear"), ("tables", "profile")):
            block = getattr(self, key)
            is_kind = kind == self.kind
            raise_first_mistake(
                path,
                (is_kind and block is None, key, f"missing with kind {self.kind!r}; give it"),
                (
                    not is_kind and block is not None,
                    key,
                    f"given with kind {self.kind!r}; remove it, or set kind: {kind}",
                ),
            )


@dataclass(frozen=True)
class AheadConfig:
    """Texts that are made ahead (`run_ahead`)."""

    tokens_to_flip: float = bounded(above=0.0)
    """Mean number of tokens of a response until the updated weights sample another token than the weights before."""
    steps: int = bounded(2, low=1, high=4)
    """Most steps whose texts are in flight. Each number up to this is a variant."""
    branches: float = bounded(0.0, low=0.0, high=16.0)
    """Branches that are decoded of a text on average. They begin anywhere in it, so half as many run beside it."""
    foreseen: float = bounded(0.0, low=0.0, high=1.0)
    """Share of the places where texts part for which one of these branches is the new text."""

    def check(self, path: str) -> None:
        """Raises ConfigError if partings are foreseen by no branch."""
        raise_first_mistake(
            path,
            (
                self.foreseen and not self.branches,
                "foreseen",
                f"{self.foreseen} with 0 branches; give the number of branches that foresee so many partings",
            ),
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Training part of a step. Missing seconds are derived from the model's arithmetic on the training GPUs."""

    mode: str = choice("sync", "async", default="sync")
    """`sync`: generate, then train. `async`: generate batches while earlier ones train."""
    lag: int = bounded(0, low=0, high=64)
    """Maximum policy versions by which a batch is behind when its training begins, for `async`."""
    max_age: int | None = bounded(None, low=0)
    """`max_trajectory_age_steps`: older samples are discarded. Default: the lag."""
    buffer_batches: int | None = bounded(None, low=1)
    """Capacity of the replay buffer, including batches under generation. Default: one more than the lag."""
    data_s: float = bounded(0.0, low=0.0)
    prepare_s: float = bounded(0.0, low=0.0)
    refit_s: float = bounded(0.0, low=0.0)
    """Seconds to transfer the weights to the engines."""
    logprob_s: float | None = bounded(None, low=0.0)
    train_s: float | None = bounded(None, low=0.0)
    num_steps: int = bounded(12, low=2, high=1000)
    """Simulated steps if they overlap. About the second half counts."""
    run_ahead: AheadConfig | None = None
    """Adds synchronous steps with texts of coming steps in flight, or no such variants if it is None."""

    def check(self, path: str) -> None:
        """Raises ConfigError if a value contradicts the lag."""
        lag = self.lag
        is_async = self.mode == "async"
        least = 2 * self.lag + 2
        raise_first_mistake(
            path,
            (
                not is_async and (lag or self.max_age),
                "lag",
                f"{lag}, max_age {self.max_age}; a synchronous step has no lag: set both to 0, or mode: async",
            ),
            (
                is_async and lag == 0,
                "lag",
                "0; asynchronous steps without a lag wait for each other: raise it, or set mode: sync",
            ),
            (
                self.max_age is not None and self.max_age < lag,
                "max_age",
                f"{self.max_age} discards the samples of a lag of {lag}; raise it to the lag, or lower the lag",
            ),
            (
                is_async and self.num_steps < least,
                "num_steps",
                f"{self.num_steps} steps do not reach a steady state with a lag of {lag}; raise it to at least {least}",
            ),
            (
                self.buffer_batches is not None and self.buffer_batches < lag,
                "buffer_batches",
                f"{self.buffer_batches} cannot hold the batches of a lag of {lag}; raise it, or lower the lag",
            ),
        )


MAX_REQUESTS = 2_000_000
"""Maximum number of simulated requests, which take about a kilobyte each."""
FOLDER = Path(__file__).parent / "scenarios"


@dataclass(frozen=True)
class Scenario:
    """A scenario. Example: `read_scenario("nvidia-8b-zero", ["drafting.k=5"])`."""

    title: str
    model: str
    """Name of a known model, or a folder with a config.json."""
    cluster: ClusterConfig
    batch: BatchConfig
    lengths: LengthConfig
    drafting: DraftingConfig
    source: str = ""
    """Source of the setting, and its assumptions."""
    calibrated_from: str = ""
    """Source of the calibrated figures."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    costs: CostConfig = field(default_factory=CostConfig)
    calibration: Calibration = field(default_factory=Calibration)
    precision: str = choice("bf16", "fp8", default="bf16")
    """Precision of the engines' weights and products."""
    kv_precision: str = choice("bf16", "fp8", default="bf16")
    """Precision of the KV cache."""
    seed: int = bounded(0, low=0)
    """Seed of random draws."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the scenario cannot run."""
        cluster = self.cluster
        batch = self.batch
        is_async = self.training.mode == "async"
        num_requests = batch.num_requests * (self.training.num_steps if is_async else 1)
        raise_first_mistake(
            path,
            (
                is_async and not cluster.train_gpus,
                "cluster.train_gpus",
                "0; asynchronous training needs separate GPUs: set their number, or mode: sync",
            ),
            (
                not is_async and cluster.train_gpus,
                "cluster.train_gpus",
                f"{cluster.train_gpus}; in synchronous training all GPUs take turns: set it to 0, or mode: async",
            ),
            (
                num_requests > MAX_REQUESTS,
                "batch.num_prompts",
                f"{batch.num_prompts} of {batch.num_samples} samples make {num_requests} requests to simulate; "
                f"{MAX_REQUESTS} at most: lower one of them, or training.num_steps",
            ),
        )
        if self.costs.kind == "roofline":
            self._check_memory(path)

    def _check_memory(self, path: str) -> None:
        shape = model_named(self.model, join(path, "model"))
        device = device_named(self.cluster.device, join(path, "cluster.device"))
        device.flops(self.precision)
        size = self.cluster.gpus_per_engine
        weights = shape.params * (2 if self.precision == "bf16" else 1)
        needed = -(-weights // int(0.9 * device.hbm_bytes))
        raise_first_mistake(
            path,
            (
                weights > 0.9 * device.hbm_bytes * size,
                "cluster.gpus_per_engine",
                f"{size}; the weights of {self.model} take {weights / 1e9:.0f} GB in {self.precision}, a {device.name} has "
                f"{device.hbm_bytes / 1e9:.0f}: at least {needed}",
            ),
        )


def shipped() -> list[str]:
    """Returns the names of the scenarios that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_scenario(name: str, overrides: list[str]) -> Scenario:
    """Reads a scenario that ships with the package. Raises ConfigError."""
    return build(Scenario, load_config(FOLDER / f"{name}.yaml", overrides), "")
