# SPDX-License-Identifier: Apache-2.0
"""The whole config of a local run, in the shape of a NeMo-RL config.

NeMo-RL's keys that the local runner does not use are allowed and listed as ignored. Unknown keys of our block are errors.
"""

import copy
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.local.run_sections import (
    DEFAULT_MAX_NUM_SEQS,
    CheckpointingConfig,
    ClusterConfig,
    DataConfig,
    GrpoConfig,
    LoggerConfig,
    LossConfig,
    PolicyConfig,
)
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.staying_requests import ARGUMENTS_FOR_TOKENS, PLUGINS, WHY_ALL_STAY, plugins_here
from nemo_specrollout.config.strict import ConfigError, bounded, build, choice, join, nearest, raise_first_mistake


@dataclass(frozen=True)
class WorkloadConfig:
    """An entry of `bench.workloads`, which is a task with a name."""

    name: str
    """The workload's name in tables and files."""
    data: DataConfig
    """The workload's problems, with the same keys as the section `data`."""


@dataclass(frozen=True)
class BenchConfig:
    """The section `bench`, which describes the comparison that `specrollout-lab bench` makes."""

    num_rounds: int = bounded(5, low=1)
    """Number of rounds. In each round all rows of the table, which are ways to decode, take turns. Figures are medians over
    rounds."""
    fixed_k: tuple[int, ...] = bounded((1, 3, 5, 7), low=1, high=64)
    """Numbers of draft tokens per engine step. Each method with a fixed number of drafts gets a row for each of these
    numbers."""
    rows: tuple[str, ...] = ()
    """Rows of the table to measure, given by the beginnings of their names, such as [stock, ours]. Empty means all but
    `control`, which is plain decoding in a second engine and shows the noise of the machine. `plain` is always measured."""
    deepen: int = bounded(1, low=1, high=64)
    """Factor by which the number of the policy's layers is multiplied. The added layers have no effect on tokens
    (`lab/policies/deep_policy.py`). Beside a deep policy, a head costs a smaller share of the time. 1 leaves the policy as it
    is."""
    useless_batches: tuple[int, ...] = bounded((), low=1)
    """Batch sizes at which to measure drafters whose drafts are always wrong. Empty skips this measurement."""
    workloads: tuple[WorkloadConfig, ...] = ()
    """Tasks to measure one after the other, each with its own tables. Empty measures only the config's `data`."""
    constant_batches: tuple[int, ...] = bounded((), low=1)
    """Batch sizes at which to measure with a constant batch, where a new request replaces each finished one. Empty skips this
    measurement."""
    rows_at_a_time: int = bounded(0, low=0)
    """Number of rows whose engines are in memory at the same time, including `plain`. 0 means all rows. Fewer rows need less
    memory. `plain` is measured together with each set of rows, and a row is compared with the measurement from its own set."""
    acceptance_k: int = bounded(0, low=0, high=64)
    """Number of draft tokens in the table that compares ways of drafting with weights. 0 skips the table."""

    def check(self, path: str) -> None:
        """Raises ConfigError if two workloads have the same name, or if `rows_at_a_time` leaves no room beside `plain`."""
        names = [workload.name for workload in self.workloads]
        raise_first_mistake(
            path,
            (len(set(names)) < len(names), "workloads", f"{names}; give each a name of its own"),
            (self.rows_at_a_time == 1, "rows_at_a_time", "1 has no room beside plain; set 2 or more, or 0 for all"),
        )


@dataclass(frozen=True)
class RunConfig:
    """The config of a run of the local runner."""

    grpo: GrpoConfig
    policy: PolicyConfig
    logger: LoggerConfig
    loss_fn: LossConfig = dataclasses.field(default_factory=LossConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    checkpointing: CheckpointingConfig = dataclasses.field(default_factory=CheckpointingConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    bench: BenchConfig = BenchConfig()
    runtime: str = choice("local", default="local")
    """Must be `local`, which means this machine. Configs with `nemo_rl` are read by `nemo_rl_config.py` and are never a
    `RunConfig`."""

    @property
    def workloads(self) -> dict[str, DataConfig]:
        """Tasks that the bench measures, by name, from `bench.workloads`. If that is empty, it is the run's own task."""
        return {w.name: w.data for w in self.bench.workloads} or {self.data.dataset_name: self.data}

    @property
    def most_in_flight(self) -> int:
        """Most requests that an engine runs at a time in this run."""
        samples = self.grpo.samples_per_step
        return min(samples, int(self.policy.generation.vllm_kwargs.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS)))

    def check(self, path: str) -> None:
        """Raises ConfigError if sections contradict each other."""
        self._check_lengths()
        self._check_rollout_workers()
        self._check_continued_requests()
        self._check_asynchrony()
        self._check_draftless()
        samples = self.grpo.samples_per_step
        batch = self.policy.train_global_batch_size
        raise_first_mistake(
            path,
            (
                samples % batch,
                "policy.train_global_batch_size",
                f"{batch} does not divide the {samples} samples of a step; choose a divisor",
            ),
            (
                self.loss_fn.force_on_policy_ratio and samples != batch,
                "loss_fn.force_on_policy_ratio",
                f"true, but a step has {samples} samples and policy.train_global_batch_size is {batch}: later optimizer steps "
                f"would be off-policy; set it to {samples}",
            ),
        )

    def _check_lengths(self) -> None:
        generation = self.policy.generation
        longest = self.policy.max_total_sequence_length
        context = generation.vllm_cfg.max_model_len
        drafts = generation.specrollout.num_speculative_tokens
        raise_first_mistake(
            "policy",
            (
                context != longest,
                "generation.vllm_cfg.max_model_len",
                f"{context} differs from policy.max_total_sequence_length {longest}; set both to the same",
            ),
            (
                drafts >= context,
                "generation.specrollout.num_speculative_tokens",
                f"{drafts} drafts do not fit a context of {context}; lower it",
            ),
            (
                generation.max_new_tokens >= context,
                "generation.max_new_tokens",
                f"{generation.max_new_tokens} leaves no room for a prompt in a context of {context}; lower it",
            ),
        )

    def _check_draftless(self) -> None:
        sources = [self.data, *self.workloads.values()]
        known = {name for data in sources for name in ([task.name for task in data.tasks] or [data.dataset_name])}
        unknown = next((t for t in self.policy.generation.specrollout.tasks_without_drafts if t not in known), None)
        raise_first_mistake(
            BLOCK_PATH,
            (
                unknown is not None,
                "tasks_without_drafts",
                f"the run has no task {unknown!r}{nearest(str(unknown), known)}",
            ),
        )

    def _check_asynchrony(self) -> None:
        asynchronous = self.grpo.async_grpo
        block = self.policy.generation.specrollout
        recomputes = asynchronous.recompute_kv_cache_after_weight_updates
        in_flight = asynchronous.in_flight_weight_updates
        verified = block.verify.requests_per_step
        fastest = block.fastest_of_n
        raise_first_mistake(
            BLOCK_PATH,
            (
                block.runs_ahead and asynchronous.enabled and not (in_flight and recomputes),
                "run_ahead",
                "with grpo.async_grpo.enabled; it then verifies requests under way again after new weights: set "
                "in_flight_weight_updates and recompute_kv_cache_after_weight_updates to true, or remove it",
            ),
        )
        raise_first_mistake(
            "",
            (
                not block.enabled
                and (
                    asynchronous.enabled
                    or self.cluster.rollout_workers > 1
                    or not self.policy.generation.colocated.enabled
                ),
                f"{BLOCK_PATH}.enabled",
                "false; several rollout workers, engines that are not colocated, and asynchronous runs need it true: set "
                "drafters: [] for no speculation",
            ),
        )
        if not asynchronous.enabled:
            return
        kv_cache = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
        raise_first_mistake(
            "",
            (
                not self.loss_fn.use_importance_sampling_correction,
                "loss_fn.use_importance_sampling_correction",
                "false; samples of an asynchronous run are of older policies: set it to true",
            ),
            (
                verified,
                f"{BLOCK_PATH}.verify.requests_per_step",
                f"{verified}; when a sample of an asynchronous run ends, the "
                "weights that made it may be gone: set it to 0",
            ),
            (
                recomputes and not in_flight,
                kv_cache,
                "true without in_flight_weight_updates; no request is running when "
                "weights change: set it to false, or in_flight_weight_updates to true",
            ),
            (
                fastest is not None and fastest.enabled and in_flight and not recomputes,
                kv_cache,
                "false with fastest_of_n; "
                "after an update, a request that moved would have another KV cache than one that stayed: set it to true",
            ),
        )

    def _check_continued_requests(self) -> None:
        """Raises ConfigError if requests may continue from their text so far, but tokens depend on where a prompt ends.

        With several engines, a request continues in another engine if it moves or its engine dies. With one engine, requests
        continue after an update in flight. Some arguments and plugins of vLLM make tokens depend on the prompt's end.
        """
        generation = self.policy.generation
        asynchronous = self.grpo.async_grpo
        has_several = self.cluster.rollout_workers > 1
        recomputes = asynchronous.enabled and asynchronous.recompute_kv_cache_after_weight_updates
        if not has_several and (not recomputes or generation.specrollout.runs_ahead):
            return
        where = "several rollout workers" if has_several else "recompute_kv_cache_after_weight_updates"
        text = f"with {where}, requests continue from the text so far, but {{}}: remove one of the two"
        plugins = plugins_here()
        raise_first_mistake(
            "", (plugins, PLUGINS, f"{plugins} are installed here; " + text.format(WHY_ALL_STAY[PLUGINS]))
        )
        raise_first_mistake(
            "policy.generation.vllm_kwargs",
            *((generation.vllm_kwargs.get(n), n, text.format(WHY_ALL_STAY[n])) for n in ARGUMENTS_FOR_TOKENS),
        )

    def _check_rollout_workers(self) -> None:
        workers = self.cluster.rollout_workers
        samples = self.grpo.samples_per_step
        text = f"{workers} workers for {samples} requests of a step; lower it"
        raise_first_mistake("cluster", (workers > samples, "rollout_workers", text))
        fastest = self.policy.generation.specrollout.fastest_of_n
        if fastest is None or not fastest.enabled:
            return
        raise_first_mistake(
            f"{BLOCK_PATH}.fastest_of_n",
            (
                workers < 2,
                "",
                "there is only one rollout worker, so requests cannot move; set cluster.rollout_workers to 2 or "
                "more, or remove the block",
            ),
            (
                fastest.max_racers > workers,
                "max_racers",
                f"{fastest.max_racers} racers for {workers} rollout workers; lower it to at most the number of workers",
            ),
            (
                len(fastest.methods) > workers,
                "methods",
                f"{len(fastest.methods)} entries for {workers} rollout workers; the "
                "last would never draft: list at most one per worker",
            ),
        )


def check_prompt(num_tokens: int, context: int) -> None:
    """Raises ConfigError for a prompt that leaves no room for a response in `context` tokens."""
    text = f"{context}; a prompt has {num_tokens} tokens, and none is left for a response: raise it"
    raise_first_mistake("policy", (num_tokens >= context, "max_total_sequence_length", text))


def read_run_config(tree: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    """Returns the run that a config tree describes, and the paths of the keys that the local runner ignores.

    Raises ConfigError with the field, the value and the fix.
    """
    ignored: list[str] = []
    known = _keep_known(RunConfig, _with_scheduler_keys(tree), "", ignored)
    return build(RunConfig, known, ""), ignored


def _with_scheduler_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `tree` whose warm-up options are in the optimizer's block, where our trainer looks for them."""
    result = copy.deepcopy(dict(tree))
    policy = result.get("policy")
    megatron = policy.get("megatron_cfg") if isinstance(policy, dict) else None
    if not isinstance(megatron, dict) or "scheduler" not in megatron:
        return result
    scheduler = megatron["scheduler"]
    optimizer = megatron.get("optimizer")
    if not isinstance(scheduler, dict):
        raise ConfigError(f"policy.megatron_cfg.scheduler: expected a block of keys, got {scheduler!r}")
    moved = {key: scheduler.pop(key) for key in ("lr_warmup_iters", "lr_warmup_init") if key in scheduler}
    if isinstance(optimizer, dict):
        optimizer.update(moved)
    if not scheduler:
        del megatron["scheduler"]
    return result


def _keep_known(cls: type, tree: Mapping[str, Any], path: str, ignored: list[str]) -> dict[str, Any]:
    """Returns `tree` without keys that are no fields of the dataclass `cls`. Adds the paths of these keys to `ignored`."""
    hints = typing.get_type_hints(cls)
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        here = join(path, key)
        hint = hints.get(key)
        if hint is None:
            ignored.append(here)
        elif dataclasses.is_dataclass(hint) and hint is not SpecrolloutConfig and isinstance(value, Mapping):
            kept[key] = _keep_known(typing.cast(type, hint), value, here, ignored)
        else:
            kept[key] = value
    return kept
