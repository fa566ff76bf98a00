# SPDX-License-Identifier: Apache-2.0
"""What the local runner reads of a NeMo-RL-shaped config: same sections, same key names, no torch.

NeMo-RL's own keys that the local runner has no use for are allowed and listed as ignored; keys of our own block are
strict (`block.py`).
"""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import ConfigError, bounded, build, choice, join

LOWEST_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this one to it."""
PROCESSED_LOGPROBS = "processed_logprobs"
"""vLLM's name of log-probs after temperature, top-p and top-k; by default it returns those before."""
DEFAULT_MAX_NUM_SEQS = 64
"""Requests that an engine has at a time where `vllm_kwargs` does not say."""


@dataclass(frozen=True)
class AsyncGrpoConfig:
    """`grpo.async_grpo`: generation goes on while the policy is trained."""

    enabled: bool = False
    """False: generate, train, generate, train."""
    max_trajectory_age_steps: int = bounded(1, low=1, high=64)
    """Training steps by which the policy that begins a sample may be older than the one that is trained on it."""
    in_flight_weight_updates: bool = False
    """True: new weights at once, amid requests. False: when those that are under way have ended."""
    recompute_kv_cache_after_weight_updates: bool = False
    """With `in_flight_weight_updates`: the new policy reads the requests' text so far again. False: it goes on from the old
    one's KV cache, so that a token is no exact sample of either."""


@dataclass(frozen=True)
class GrpoConfig:
    """`grpo`."""

    num_prompts_per_step: int = bounded(low=1)
    """Prompts of a step."""
    num_generations_per_prompt: int = bounded(low=2)
    """Samples of each prompt: the group whose rewards are compared."""
    max_num_steps: int = bounded(low=1)
    """Steps of the whole run."""
    normalize_rewards: bool = True
    """Divide advantages by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    """Compare a sample with the mean of the others, not of all."""
    seed: int = bounded(42, low=0, high=2**32 - 1)
    """Seeds the prompts and, with prompt, sample and policy version, every request's noise."""
    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()
    """Whether generation waits for training."""

    @property
    def samples_per_step(self) -> int:
        """Requests of a step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt


@dataclass(frozen=True)
class LossConfig:
    """`loss_fn`."""

    ratio_clip_min: float = bounded(0.2, low=0.0, high=1.0)
    """The probability ratio is clipped from below at 1 - ratio_clip_min."""
    ratio_clip_max: float = bounded(0.2, low=0.0, high=1e6)
    """The probability ratio is clipped from above at 1 + ratio_clip_max."""
    ratio_clip_c: float | None = None
    """Dual clipping: where the advantage is negative, the loss is at most -advantage * c; null is off."""
    reference_policy_kl_penalty: float = bounded(0.0, low=0.0)
    """Weight of the KL to the policy that the run started from. NeMo-RL's default is 0.01; here it is opt-in."""
    reference_policy_kl_type: str = choice("k1", "k2", "k3", default="k3")
    """Estimator of that KL (Schulman 2020, joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: float | None = bounded(20.0, low=0.0)
    """The log ratio to the reference is clamped to +- this before the estimator; null is off."""
    kl_output_clamp_value: float | None = bounded(10.0, low=0.0)
    """The estimate of one token is clamped to +- this; null is off."""
    token_level_loss: bool = True
    """True: mean over all valid tokens. False: mean over sequences of each sequence's mean."""
    use_importance_sampling_correction: bool = False
    """Weigh each token by p(trainer) / p(engine) at generation time. Asynchronous GRPO needs it."""
    force_on_policy_ratio: bool = False
    """Takes the ratio of probabilities as 1, which saves the log-probs pass; needs one optimizer step a rollout."""

    def check(self, path: str) -> None:
        """Raises ConfigError for a dual clip that would cut the ordinary loss."""
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1:
            raise ConfigError(
                f"{path}.ratio_clip_c: {self.ratio_clip_c}; it must exceed 1, or be null for no dual clipping"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """`policy.megatron_cfg.optimizer`, with `scheduler.lr_warmup_iters` and `lr_warmup_init`; AdamW, constant rate."""

    lr: float = bounded(low=0.0, high=1.0)
    """Learning rate after warm-up."""
    weight_decay: float = bounded(0.01, low=0.0)
    """Not applied to norms, as in Megatron."""
    adam_beta1: float = bounded(0.9, low=0.0, below=1.0)
    """Decay of the first moment."""
    adam_beta2: float = bounded(0.999, low=0.0, below=1.0)
    """Decay of the second moment."""
    adam_eps: float = bounded(1e-8, above=0.0, high=1.0)
    """Added to the root of the second moment."""
    clip_grad: float = bounded(1.0, low=0.0)
    """Largest global gradient norm; 0 is off."""
    lr_warmup_iters: int = bounded(0, low=0)
    """The rate rises linearly from `lr_warmup_init` to `lr` over this many optimizer steps."""
    lr_warmup_init: float = bounded(0.0, low=0.0)
    """Learning rate of the first step of the warm-up."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the warm-up starts above its end."""
        if self.lr_warmup_init > self.lr:
            raise ConfigError(f"{path}.lr_warmup_init: {self.lr_warmup_init} exceeds lr {self.lr}; lower it")


@dataclass(frozen=True)
class MegatronConfig:
    """`policy.megatron_cfg`."""

    optimizer: OptimizerConfig
    """The optimizer."""
    enabled: bool = True
    """The local runner trains with Megatron-Core and nothing else."""
    tensor_model_parallel_size: int = bounded(1, low=1)
    """The local runner is one process, so 1."""

    def check(self, path: str) -> None:
        """Raises ConfigError for what only NeMo-RL itself can run."""
        if not self.enabled:
            raise ConfigError(f"{path}.enabled: false; the local runner trains with Megatron-Core only: set it to true")
        if self.tensor_model_parallel_size != 1:
            raise ConfigError(
                f"{path}.tensor_model_parallel_size: {self.tensor_model_parallel_size}; the local runner is one process: set 1"
            )


@dataclass(frozen=True)
class VllmConfig:
    """`policy.generation.vllm_cfg`."""

    max_model_len: int = bounded(low=8)
    """Longest sequence of the engine, prompt and response."""
    precision: str = choice("float32", "bfloat16", default="float32")
    """The engine's dtype; tokens are equal with and without speculation in float32."""
    enforce_eager: bool = True
    """No graph capture; on a CPU it only saves start-up time."""


OFF = SpecrolloutConfig(enabled=False)


@dataclass(frozen=True)
class GenerationConfig:
    """`policy.generation`."""

    vllm_cfg: VllmConfig
    """The engine, by NeMo-RL's names."""
    max_new_tokens: int = bounded(low=1)
    """Longest response."""
    temperature: float = bounded(1.0, low=0.0, high=2.0)
    """Sampling temperature, 0 for greedy. The trainer scores samples at it, as the engine does; greedy ones at 1."""
    top_p: float = bounded(1.0, above=0.0, high=1.0)
    """Nucleus sampling; 1 is off."""
    top_k: int | None = bounded(None, low=1)
    """Top-k sampling; null is off."""
    backend: str = choice("vllm", default="vllm")
    """The generation engine."""
    vllm_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Passed to vllm.LLM as they are."""
    specrollout: SpecrolloutConfig = OFF
    """This package's block; absent is off."""

    def check(self, path: str) -> None:
        """Raises ConfigError for a temperature at which vLLM does not sample, and for sizes that are none."""
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            size = self.vllm_kwargs.get(name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ConfigError(f"{path}.vllm_kwargs.{name}: {size!r}; it must be a whole number, at least 1")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ConfigError(
                f"{path}.temperature: {self.temperature}; vLLM samples at {LOWEST_TEMPERATURE}: write that, or 0 for greedy"
            )


@dataclass(frozen=True)
class PolicyConfig:
    """`policy`."""

    model_name: str
    """A Hugging Face folder."""
    generation: GenerationConfig
    """The rollout."""
    megatron_cfg: MegatronConfig
    """The trainer."""
    max_total_sequence_length: int = bounded(low=8)
    """Longest sequence of the trainer."""
    train_global_batch_size: int = bounded(low=1)
    """Samples of one optimizer step."""
    logprob_batch_size: int = bounded(32, low=1)
    """Sequences of `max_total_sequence_length` whose tokens one forward pass of the trainer holds at most."""
    train_micro_batch_size: int = bounded(16, low=1)
    """The same, for a forward and backward pass."""
    precision: str = choice("float32", "bfloat16", default="float32")
    """The trainer's dtype. bfloat16: weights and matrix products in bfloat16, optimizer and gradients in float32."""


@dataclass(frozen=True)
class TaskConfig:
    """One of `data.tasks`: a task of `reasoning-gym`."""

    name: str
    """Its name there, such as chain_sum."""
    weight: float = bounded(1.0, above=0.0)
    """Relative frequency of the task's problems."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its own options, as `reasoning_gym.create_dataset` takes them."""


@dataclass(frozen=True)
class DataConfig:
    """`data`: the task. Problems are made on the spot from the run's seed (docs/reference/tasks.md)."""

    dataset_name: str = choice("step_addition", "reasoning_gym", "free_text", default="step_addition")
    """`step_addition` is the demo's own task; `reasoning_gym` takes `tasks` from that package;
    `free_text` asks for stories and explanations and has no reward, so it is for `bench` only."""
    max_terms: int = bounded(16, low=2, high=16)
    """Most terms of an addition, of step_addition."""
    tasks: tuple[TaskConfig, ...] = ()
    """The tasks of reasoning_gym, mixed by weight."""
    system_prompt: str | None = None
    """The system prompt, for reasoning_gym only: a text, or the name of one of that package's prompts (default, simple,
    direct, ...). With null, the model's chat template uses its own."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless there are tasks where they are needed, each named once."""
        names = [task.name for task in self.tasks]
        if self.dataset_name == "reasoning_gym" and not names:
            raise ConfigError(f"{path}.tasks: empty; name a task of reasoning_gym, such as [{{name: chain_sum}}]")
        if self.dataset_name != "reasoning_gym" and names:
            raise ConfigError(f"{path}.tasks: {names} with dataset_name {self.dataset_name}; set it to reasoning_gym")
        if len(set(names)) < len(names):
            raise ConfigError(f"{path}.tasks: {names}; name each task once")


@dataclass(frozen=True)
class LoggerConfig:
    """`logger`."""

    log_dir: str
    """The run directory: config, metrics, summary and report go there."""


@dataclass(frozen=True)
class CheckpointingConfig:
    """`checkpointing`."""

    enabled: bool = True
    """Keep a checkpoint to resume from."""
    save_period: int = bounded(1, low=1)
    """Steps between checkpoints. The newest two are kept, in `checkpoints/` of the run directory."""


@dataclass(frozen=True)
class ClusterConfig:
    """`cluster`: one node without accelerators."""

    num_nodes: int = bounded(1, low=1, high=1)
    """The local runner uses one machine."""
    gpus_per_node: int = bounded(0, low=0, high=0)
    """The local runner uses no GPU."""
    rollout_workers: int = bounded(1, low=1, high=64)
    """Engines that roll out side by side, each in a process of one core; 1 is in the runner's own process."""
    threads: int = bounded(1, low=1, high=64)
    """OpenMP threads of the runner's own process: the engine, if there is one only, and the trainer. More than one pays for a
    model of 100 million parameters and more, on cores that nothing else uses. OMP_NUM_THREADS in the environment wins."""


@dataclass(frozen=True)
class WorkloadConfig:
    """One of `bench.workloads`: a task under a name."""

    name: str
    """The workload's name in tables and files."""
    data: DataConfig
    """Its problems, as `data` of the config."""


@dataclass(frozen=True)
class BenchConfig:
    """`bench`: what `nemo-specrollout bench` compares."""

    num_rounds: int = bounded(5, low=1)
    """Interleaved rounds; figures are medians over them."""
    fixed_k: tuple[int, ...] = bounded((1, 3, 5, 7), low=1, high=64)
    """Draft tokens a step of the rows whose method and number of drafts are fixed."""
    rows: tuple[str, ...] = ()
    """The rows to measure, by how their names begin, e.g. [stock, ours]; empty is all. `plain` is always among them."""
    deepen: int = bounded(1, low=1, high=64)
    """How many times as many layers the policy gets, the additional ones without effect: a head's cost has the proportions
    of a deep policy then (`benchmarks/policies/deep_policy.py`). 1 leaves the policy as it is."""
    useless_batches: tuple[int, ...] = bounded((), low=1)
    """Batch sizes at which to measure drafters that are always wrong; empty leaves that out."""
    workloads: tuple[WorkloadConfig, ...] = ()
    """Tasks to measure one after the other, each in tables of its own; empty is the config's `data` alone."""
    constant_batches: tuple[int, ...] = bounded((), low=1)
    """Batch sizes at which to measure the rows while finished requests are replaced; empty leaves that out."""
    rows_at_a_time: int = bounded(0, low=0)
    """Rows whose engines are in memory at the same time, `plain` among them; 0 is all. Fewer need less memory; rows are
    compared with `plain` of the same time."""
    acceptance_k: int = bounded(0, low=0, high=64)
    """Draft tokens of the table of acceptance by way of drafting, where a drafter has weights; 0 leaves that out."""

    def check(self, path: str) -> None:
        """Raises ConfigError for workloads of one name, and for groups of rows that have no room for a row."""
        names = [workload.name for workload in self.workloads]
        if len(set(names)) < len(names):
            raise ConfigError(f"{path}.workloads: {names}; give each a name of its own")
        if self.rows_at_a_time == 1:
            raise ConfigError(f"{path}.rows_at_a_time: 1 has no room beside plain; set 2 or more, or 0 for all")


@dataclass(frozen=True)
class RunConfig:
    """A whole run of the local runner."""

    grpo: GrpoConfig
    policy: PolicyConfig
    logger: LoggerConfig
    loss_fn: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    cluster: ClusterConfig = ClusterConfig()
    bench: BenchConfig = BenchConfig()
    runtime: str = choice("local", default="local")
    """`local`: this machine's CPU. A config with `nemo_rl` is NeMo-RL's (`nemo_rl_config.py`) and no `RunConfig`."""

    @property
    def workloads(self) -> dict[str, DataConfig]:
        """The tasks that the bench measures, by name: `bench.workloads`, or the run's own task if there are none."""
        return {w.name: w.data for w in self.bench.workloads} or {self.data.dataset_name: self.data}

    @property
    def most_in_flight(self) -> int:
        """Requests that the engine has at a time, at most."""
        samples = self.grpo.samples_per_step
        return min(samples, int(self.policy.generation.vllm_kwargs.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS)))

    def check(self, path: str) -> None:
        """Raises ConfigError where sections contradict each other."""
        generation, policy = self.policy.generation, self.policy
        max_len = generation.vllm_cfg.max_model_len
        if max_len != policy.max_total_sequence_length:
            raise ConfigError(
                f"policy.generation.vllm_cfg.max_model_len: {max_len} differs from policy.max_total_sequence_length "
                f"{policy.max_total_sequence_length}; set both to the same"
            )
        num_drafts = generation.specrollout.num_speculative_tokens
        if num_drafts >= max_len:
            raise ConfigError(
                f"{BLOCK_PATH}.num_speculative_tokens: {num_drafts} drafts do not fit a context of {max_len}; lower it"
            )
        if generation.max_new_tokens >= max_len:
            raise ConfigError(
                f"policy.generation.max_new_tokens: {generation.max_new_tokens} leaves no room for a prompt in a context "
                f"of {max_len}; lower it"
            )
        self._check_workers()
        self._check_asynchrony()
        samples = self.grpo.samples_per_step
        if samples % policy.train_global_batch_size:
            raise ConfigError(
                f"policy.train_global_batch_size: {policy.train_global_batch_size} does not divide the {samples} samples of "
                "a step; choose a divisor"
            )
        if self.loss_fn.force_on_policy_ratio and samples != policy.train_global_batch_size:
            raise ConfigError(
                f"loss_fn.force_on_policy_ratio: true, but a step has {samples} samples and policy.train_global_batch_size is "
                f"{policy.train_global_batch_size}: later optimizer steps would be off-policy; set it to {samples}"
            )

    def _check_asynchrony(self) -> None:
        """What asynchronous GRPO needs, and what does not go with it."""
        asynchronous, block = self.grpo.async_grpo, self.policy.generation.specrollout
        if not block.enabled and (asynchronous.enabled or self.cluster.rollout_workers > 1):
            raise ConfigError(
                f"{BLOCK_PATH}.enabled: false; several rollout workers, and asynchronous runs, need it true: set drafters: [] "
                "for no speculation"
            )
        if not asynchronous.enabled:
            return
        if not self.loss_fn.use_importance_sampling_correction:
            raise ConfigError(
                "loss_fn.use_importance_sampling_correction: false; samples of an asynchronous run are of older policies: set "
                "it to true"
            )
        if block.verify.requests_per_step:
            raise ConfigError(
                f"{BLOCK_PATH}.verify.requests_per_step: {block.verify.requests_per_step}; when a sample of an asynchronous "
                "run is there, the weights that made it may be gone: set it to 0"
            )
        recomputes = asynchronous.recompute_kv_cache_after_weight_updates
        if recomputes and not asynchronous.in_flight_weight_updates:
            raise ConfigError(
                "grpo.async_grpo.recompute_kv_cache_after_weight_updates: true without in_flight_weight_updates; no request "
                "is under way when weights change: set it to false, or in_flight_weight_updates to true"
            )
        tail = block.fastest_of_n
        if tail is not None and tail.enabled and asynchronous.in_flight_weight_updates and not recomputes:
            raise ConfigError(
                "grpo.async_grpo.recompute_kv_cache_after_weight_updates: false with fastest_of_n; after an update who moved "
                "would go on from another KV cache than who stayed: set it to true"
            )

    def _check_workers(self) -> None:
        """What is to happen between workers needs workers."""
        tail, num_workers = self.policy.generation.specrollout.fastest_of_n, self.cluster.rollout_workers
        if num_workers > self.grpo.samples_per_step:
            raise ConfigError(
                f"cluster.rollout_workers: {num_workers} workers for {self.grpo.samples_per_step} requests of a step; lower it"
            )
        if tail is None or not tail.enabled:
            return
        if num_workers < 2:
            raise ConfigError(
                f"{BLOCK_PATH}.fastest_of_n: there is one rollout worker, and none to race with; set "
                "cluster.rollout_workers to 2 or more, or remove the block"
            )
        if tail.max_racers > num_workers:
            raise ConfigError(
                f"{BLOCK_PATH}.fastest_of_n.max_racers: {tail.max_racers} racers for {num_workers} rollout workers; lower it "
                "to their number at most"
            )
        if len(tail.methods) > num_workers:
            raise ConfigError(
                f"{BLOCK_PATH}.fastest_of_n.methods: {len(tail.methods)} for {num_workers} rollout workers; the last would "
                "never draft: name one for each worker at most"
            )


# Moved into the optimizer's block, where our trainer looks for them.
_SCHEDULER_KEYS = ("lr_warmup_iters", "lr_warmup_init")


def check_prompt(num_tokens: int, context: int) -> None:
    """Raises ConfigError for a prompt that leaves no room for a response in `context` tokens."""
    if num_tokens >= context:
        raise ConfigError(
            f"policy.max_total_sequence_length: {context}; a prompt has {num_tokens} tokens, and none is left for a response: "
            "raise it"
        )


def read_run_config(tree: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    """The run that a config tree describes, and the paths of the keys that the local runner ignores.

    Raises ConfigError with the field, the value and the fix.
    """
    ignored: list[str] = []
    known = _keep_known(RunConfig, _with_scheduler_keys(tree), "", ignored)
    return build(RunConfig, known, ""), ignored


def _with_scheduler_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    result = _copy(tree)
    megatron = _block(_block(result, "policy"), "policy.megatron_cfg")
    scheduler, optimizer = (_block(megatron, f"policy.megatron_cfg.{name}") for name in ("scheduler", "optimizer"))
    moved = {key: scheduler.pop(key) for key in _SCHEDULER_KEYS if key in scheduler}
    if moved:
        megatron["optimizer"] = {**optimizer, **moved}
    if not scheduler:
        megatron.pop("scheduler", None)
    return result


def _block(parent: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The block at `path`, which is in `parent`; empty if absent. Raises ConfigError if it is no block."""
    block = parent.get(path.rpartition(".")[2], {})
    if not isinstance(block, dict):
        raise ConfigError(f"{path}: expected a block of keys, got {block!r}")
    return block


def _copy(tree: Any) -> Any:
    return {k: _copy(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree


def _keep_known(cls: type, tree: Mapping[str, Any], path: str, ignored: list[str]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        here = join(path, key)
        if key not in hints:
            ignored.append(here)
        elif (
            dataclasses.is_dataclass(hints[key]) and hints[key] is not SpecrolloutConfig and isinstance(value, Mapping)
        ):
            kept[key] = _keep_known(typing.cast(type, hints[key]), value, here, ignored)
        else:
            kept[key] = value
    return kept
