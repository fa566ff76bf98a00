# SPDX-License-Identifier: Apache-2.0
"""The schema of a simulated scenario, which is a tree of frozen dataclasses, and the scenarios that ship with the package.

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
"""Special values of `draft`. The first means an EAGLE-3 head of the policy's width. The second means that drafts are looked up
in texts, which takes no GPU time."""


@dataclass(frozen=True)
class ClusterConfig:
    """GPUs of a simulated run, and what they are used for."""

    device: str
    """Name of the GPU's data sheet (`data_sheets.py`), or `measured` if the costs are not of kind `roofline`."""
    num_gpus: int = bounded(low=1)
    """Number of all GPUs."""
    gpus_per_engine: int = bounded(1, low=1)
    """Tensor-parallel size of an engine."""
    train_gpus: int = bounded(0, low=0)
    """Number of GPUs that train and never generate, or 0 if generation and training take turns on all GPUs."""
    expert_parallel: bool = False
    """Whether each expert is on one GPU, instead of being split over all GPUs of an engine."""

    @property
    def generating_gpus(self) -> int:
        """Number of GPUs that generate."""
        return self.num_gpus - self.train_gpus

    @property
    def training_gpus(self) -> int:
        """Number of GPUs that train."""
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
    """Requests of a training step."""

    num_prompts: int = bounded(low=1)
    num_samples: int = bounded(low=1)
    """Number of samples for each prompt."""
    prompt_tokens: int = bounded(256, low=1)
    max_requests: int = bounded(256, low=1)
    """Most requests that an engine runs at a time, which is vLLM's `max_num_seqs`."""

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_samples


@dataclass(frozen=True)
class MethodConfig:
    """A draft method and how well its drafts are accepted."""

    name: str
    draft: str = HEAD
    """Source of the drafts, which is `eagle3`, `text`, or the name of a small model."""
    acceptance: float | None = bounded(None, low=0.0, below=1.0)
    """Probability that a draft token of the typical request is right if all before it are. Alternative to
    `acceptance_length`."""
    acceptance_length: float | None = bounded(None, low=1.0)
    """Acceptance length with `at_k` drafts. Alternative to `acceptance`."""
    at_k: int = bounded(3, low=1)
    spread: float = bounded(0.0, low=0.0, high=3.0)
    """Standard deviation over requests of the log-odds of the acceptance."""

    @cached_property
    def centre(self) -> float:
        """Probability that a draft token of the typical request is right if all before it are."""
        if self.acceptance is not None:
            return self.acceptance
        assert self.acceptance_length is not None
        return acceptance_for(self.acceptance_length, self.at_k, self.spread)

    def check(self, path: str) -> None:
        """Raises ConfigError if not exactly one of `acceptance` and `acceptance_length` is given, or if it is impossible."""
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
    """Draft methods. Every variant drafts by the first. The others are used only if engines race."""
    k: int = bounded(3, low=1, high=64)
    """Number of draft tokens per request in an engine step under a fixed budget."""
    max_k: int = bounded(8, low=1, high=64)
    """Most draft tokens per request in an engine step under other budgets."""
    methods_of_workers: tuple[str, ...] = ()
    """Names of the draft methods of engines 0, 1 and so on if engines race, repeated cyclically. Empty means each method in
    turn."""
    freed_workers_switch: bool = True
    """Whether every engine drafts by the first method until it has been idle, and then by its own method
    (`methods_of_workers`), as in SpecActor. If false, each engine drafts by its own method from the start, as with
    `fastest_of_n.methods` of the block."""
    method_correlation: float = bounded(0.5, low=0.0, high=1.0)
    """Correlation between the log-odds of two methods' acceptances on the same request."""
    drafter_gpus: tuple[int, ...] = bounded((), low=1)
    """Possible numbers of GPUs for a separate drafter. Empty means that there is none."""

    def check(self, path: str) -> None:
        """Raises ConfigError if draft methods are missing, named twice, or unsuitable for a separate drafter."""
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
    """The cost model of a scenario's engines."""

    kind: str = choice("roofline", "rounds", "linear", "tables", default="roofline")
    """Kind of cost model. `rounds` and `linear` have the forms of the two papers, and `tables` come from `specrollout-lab
    profile`."""
    rounds: RoundCosts | None = None
    linear: LinearCosts | None = None
    profile: str | None = None
    """File of cost tables, for kind `tables`."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless the key that belongs to `kind` is given, and no other."""
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
    """How updates of the weights change early texts, and how many of these are made (`run_ahead`)."""

    tokens_to_flip: float = bounded(above=0.0)
    """Mean number of response tokens until the updated weights sample another token than the weights before the update."""
    steps: int = bounded(2, low=1, high=4)
    """Most coming steps for which early texts are made. Each number from 1 to this one is simulated as a variant."""
    branches: float = bounded(0.0, low=0.0, high=16.0)
    """Mean number of branches that are decoded for an early text. Branches begin anywhere in the text, so on average half of
    them run beside it."""
    foreseen: float = bounded(0.0, low=0.0, high=1.0)
    """Where an update changes a token of an early text, the probability that a branch already has the new token."""

    def check(self, path: str) -> None:
        """Raises ConfigError if changes are foreseen without any branches."""
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
    """The parts of a step besides generation.

    Seconds that are not given are derived from the arithmetic on the training GPUs.
    """

    mode: str = choice("sync", "async", default="sync")
    """Order of generation and training. With `sync`, a step generates and then trains. With `async`, batches are generated
    while the policy is trained on earlier ones."""
    lag: int = bounded(0, low=0, high=64)
    """How many policy versions a batch may be behind at most when training on it begins. Only for `async`."""
    max_age: int | None = bounded(None, low=0)
    """Age in steps above which samples are discarded, which is NeMo-RL's `max_trajectory_age_steps`. By default it is the
    lag."""
    buffer_batches: int | None = bounded(None, low=1)
    """Number of batches in the replay buffer, including those that are being generated. By default it is one more than the
    lag."""
    data_s: float = bounded(0.0, low=0.0)
    prepare_s: float = bounded(0.0, low=0.0)
    refit_s: float = bounded(0.0, low=0.0)
    """Seconds to transfer the weights to the engines."""
    logprob_s: float | None = bounded(None, low=0.0)
    train_s: float | None = bounded(None, low=0.0)
    num_steps: int = bounded(12, low=2, high=1000)
    """Number of simulated steps if steps overlap. Only about the second half of them counts."""
    run_ahead: AheadConfig | None = None
    """Settings of variants with early requests of coming steps, or None for no such variants."""

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
"""Most requests that can be simulated. Each takes about a kilobyte."""
FOLDER = Path(__file__).parent / "scenarios"


@dataclass(frozen=True)
class Scenario:
    """A run to simulate, with its model, cluster, requests, drafting and training.

    Example: `read_scenario("nvidia-8b-zero", ["drafting.k=5"])`.
    """

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
    """Returns the scenario `name`, which ships with the package, with values changed by `overrides`.

    Raises ConfigError if there is no such scenario or a value is wrong.
    """
    return build(Scenario, load_config(FOLDER / f"{name}.yaml", overrides), "")
