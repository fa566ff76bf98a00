# SPDX-License-Identifier: Apache-2.0
"""Sections of the local runner's config, named as in NeMo-RL: `grpo`, `loss_fn`, `policy`, `data`, `logger`, `cluster`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.config.block import OFF, SpecrolloutConfig
from nemo_specrollout.config.strict import bounded, choice, raise_first_mistake

_LOWEST_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this one to it."""
PROCESSED_LOGPROBS = "processed_logprobs"
"""vLLM's name of log-probs after temperature, top-p and top-k. By default it returns the log-probs before them."""
DEFAULT_MAX_NUM_SEQS = 64
"""Requests that an engine runs at a time if `vllm_kwargs` does not say."""


@dataclass(frozen=True)
class AsyncGrpoConfig:
    """`grpo.async_grpo`: generation continues while the policy is trained."""

    enabled: bool = False
    """Whether generation and training overlap. With false they take turns."""
    max_trajectory_age_steps: int = bounded(1, low=1, high=64)
    """Training steps by which the policy that starts a sample may be older than the policy that is trained on it."""
    in_flight_weight_updates: bool = False
    """Whether new weights are loaded at once, while requests run. With false, they wait until these have ended."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Whether, after an update in flight, the new policy computes the KV cache of running requests again. With false, requests
    keep the KV cache of the old policy, so that their tokens are exact samples of neither policy."""


@dataclass(frozen=True)
class GrpoConfig:
    """`grpo`."""

    num_prompts_per_step: int = bounded(low=1)
    """Prompts of a step."""
    num_generations_per_prompt: int = bounded(low=2)
    """Samples of each prompt, which are the group whose rewards are compared."""
    max_num_steps: int = bounded(low=1)
    """Steps of the whole run."""
    normalize_rewards: bool = True
    """Divide advantages by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    """Compare the reward of a sample with the mean of the other samples of its group, not of all of them."""
    seed: int = bounded(42, low=0, high=2**32 - 1)
    """Seed of the prompts. Together with prompt, sample and policy version, it also seeds the noise of each request."""
    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()
    """Overlap of generation and training."""

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
    """The c of dual clipping. If the advantage is negative, the loss is at most -advantage * c. Null switches it off."""
    reference_policy_kl_penalty: float = bounded(0.0, low=0.0)
    """Weight of the KL divergence to the initial policy. NeMo-RL's default is 0.01. Here it is opt-in."""
    reference_policy_kl_type: str = choice("k1", "k2", "k3", default="k3")
    """Estimator of that KL divergence (Schulman 2020, joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: float | None = bounded(20.0, low=0.0)
    """The log ratio to the reference is clamped to +- this before the estimator. Null switches it off."""
    kl_output_clamp_value: float | None = bounded(10.0, low=0.0)
    """The estimate of one token is clamped to +- this. Null switches it off."""
    token_level_loss: bool = True
    """Whether the loss is the mean over all valid tokens. With false, it is the mean of the means of the sequences."""
    use_importance_sampling_correction: bool = False
    """Weight each token by its probability for the trainer divided by the one with which the engine sampled it. Asynchronous
    GRPO needs this."""
    force_on_policy_ratio: bool = False
    """Takes the probability ratio as 1, which saves the log-probs pass. Needs one optimizer step per rollout."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the dual clip would cut the ordinary loss."""
        text = f"{self.ratio_clip_c}; it must exceed 1, or be null for no dual clipping"
        raise_first_mistake(path, (self.ratio_clip_c is not None and self.ratio_clip_c <= 1, "ratio_clip_c", text))


@dataclass(frozen=True)
class OptimizerConfig:
    """`policy.megatron_cfg.optimizer`, with `scheduler.lr_warmup_iters` and `lr_warmup_init`; AdamW, constant rate."""

    lr: float = bounded(low=0.0, high=1.0)
    """Learning rate after the warm-up."""
    weight_decay: float = bounded(0.01, low=0.0)
    """Not applied to norms, as in Megatron."""
    adam_beta1: float = bounded(0.9, low=0.0, below=1.0)
    """Decay of the first moment."""
    adam_beta2: float = bounded(0.999, low=0.0, below=1.0)
    """Decay of the second moment."""
    adam_eps: float = bounded(1e-8, above=0.0, high=1.0)
    """Added to the root of the second moment."""
    clip_grad: float = bounded(1.0, low=0.0)
    """Largest global gradient norm. 0 switches clipping off."""
    lr_warmup_iters: int = bounded(0, low=0)
    """Optimizer steps over which the rate rises linearly from `lr_warmup_init` to `lr`."""
    lr_warmup_init: float = bounded(0.0, low=0.0)
    """Learning rate of the first step of the warm-up."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the warm-up starts above its end."""
        text = f"{self.lr_warmup_init} exceeds lr {self.lr}; lower it"
        raise_first_mistake(path, (self.lr_warmup_init > self.lr, "lr_warmup_init", text))


@dataclass(frozen=True)
class MegatronConfig:
    """`policy.megatron_cfg`."""

    optimizer: OptimizerConfig
    """The optimizer."""
    enabled: bool = True
    """Must be true, because the local runner trains only with Megatron-Core."""
    tensor_model_parallel_size: int = bounded(1, low=1)
    """Must be 1, because the local runner is one process."""

    def check(self, path: str) -> None:
        """Raises ConfigError for values that only NeMo-RL can run."""
        size = self.tensor_model_parallel_size
        raise_first_mistake(
            path,
            (not self.enabled, "enabled", "false; the local runner trains with Megatron-Core only: set it to true"),
            (size != 1, "tensor_model_parallel_size", f"{size}; the local runner is one process: set 1"),
        )


@dataclass(frozen=True)
class VllmConfig:
    """`policy.generation.vllm_cfg`."""

    max_model_len: int = bounded(low=8)
    """Longest sequence of the engine, prompt and response, in tokens."""
    precision: str = choice("float32", "bfloat16", default="float32")
    """The engine's dtype. Tokens are equal with and without speculation in float32."""
    enforce_eager: bool = True
    """Whether the engine captures no graphs. On a CPU this only saves start-up time. On a GPU use false, because steps there
    need CUDA graphs."""


@dataclass(frozen=True)
class ColocatedConfig:
    """`policy.generation.colocated`."""

    enabled: bool = True
    """True: engines and trainer take turns on the same cores. False: engines have processes and cores of their own, so with
    `run_ahead` they also work while the policy is trained."""


@dataclass(frozen=True)
class GenerationConfig:
    """`policy.generation`."""

    vllm_cfg: VllmConfig
    """The engine, by NeMo-RL's names."""
    max_new_tokens: int = bounded(low=1)
    """Longest response, in tokens."""
    temperature: float = bounded(1.0, low=0.0, high=2.0)
    """Sampling temperature, 0 for greedy. The trainer scores samples at it too, and greedy samples at 1."""
    top_p: float = bounded(1.0, above=0.0, high=1.0)
    """Probability mass of nucleus sampling. 1 switches it off."""
    top_k: int | None = bounded(None, low=1)
    """Number of tokens of top-k sampling. Null switches it off."""
    backend: str = choice("vllm", default="vllm")
    """The generation engine."""
    colocated: ColocatedConfig = ColocatedConfig()
    """Whether engines and trainer share the cores."""
    vllm_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of vllm.LLM, passed on unchanged."""
    specrollout: SpecrolloutConfig = OFF
    """This package's block. The package is off without it."""

    def check(self, path: str) -> None:
        """Raises ConfigError for a temperature that vLLM changes, and for sizes that are not positive integers."""
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            size = self.vllm_kwargs.get(name)
            is_wrong = size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1)
            raise_first_mistake(
                path, (is_wrong, f"vllm_kwargs.{name}", f"{size!r}; it must be a whole number, at least 1")
            )
        text = f"{self.temperature}; vLLM samples at {_LOWEST_TEMPERATURE}: write that, or 0 for greedy"
        raise_first_mistake(path, (0 < self.temperature < _LOWEST_TEMPERATURE, "temperature", text))


@dataclass(frozen=True)
class PolicyConfig:
    """`policy`."""

    model_name: str
    """Folder of the policy, in Hugging Face format."""
    generation: GenerationConfig
    """The rollout."""
    megatron_cfg: MegatronConfig
    """The trainer."""
    max_total_sequence_length: int = bounded(low=8)
    """Longest sequence of the trainer, in tokens."""
    train_global_batch_size: int = bounded(low=1)
    """Samples of one optimizer step."""
    logprob_batch_size: int = bounded(32, low=1)
    """Size of one forward pass of the trainer, in sequences of `max_total_sequence_length` tokens."""
    train_micro_batch_size: int = bounded(16, low=1)
    """Size of one forward and backward pass of the trainer, in the same unit."""
    precision: str = choice("float32", "bfloat16", default="float32")
    """The trainer's dtype. With bfloat16, weights and matrix products are in bfloat16, but the optimizer and the gradients are
    in float32."""


@dataclass(frozen=True)
class TaskConfig:
    """An entry of `data.tasks`: a task of `reasoning-gym`."""

    name: str
    """Name of the task in reasoning-gym, such as chain_sum."""
    weight: float = bounded(1.0, above=0.0)
    """Relative frequency of the task's problems."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The task's own options, as `reasoning_gym.create_dataset` takes them."""


@dataclass(frozen=True)
class DataConfig:
    """`data`: the task. Problems are generated from the run's seed (docs/get-started/local.md)."""

    dataset_name: str = choice("step_addition", "reasoning_gym", "free_text", default="step_addition")
    """`step_addition`: the demo's own task. `reasoning_gym`: the `tasks` of that package. `free_text`: stories and
    explanations without a reward, for `bench` only."""
    max_terms: int = bounded(16, low=2, high=16)
    """Largest number of terms in an addition of `step_addition`."""
    tasks: tuple[TaskConfig, ...] = ()
    """The tasks of reasoning_gym, mixed by weight."""
    system_prompt: str | None = None
    """System prompt, for reasoning_gym only: a text, or the name of one of its prompts (default, simple, direct, ...). null:
    the default of the model's chat template."""

    def check(self, path: str) -> None:
        """Raises ConfigError if tasks are missing, superfluous or named twice."""
        names = [task.name for task in self.tasks]
        has_tasks = self.dataset_name == "reasoning_gym"
        raise_first_mistake(
            path,
            (has_tasks and not names, "tasks", "empty; name a task of reasoning_gym, such as [{name: chain_sum}]"),
            (
                names and not has_tasks,
                "tasks",
                f"{names} with dataset_name {self.dataset_name}; set it to reasoning_gym",
            ),
            (len(set(names)) < len(names), "tasks", f"{names}; name each task once"),
        )


@dataclass(frozen=True)
class LoggerConfig:
    """`logger`."""

    log_dir: str
    """The run directory, with config, metrics, summary and report."""
    record_for_replay: bool = False
    """True: with `draft_refresh`, the head is never refreshed. The captured features of all policies stay, and their LM heads
    are written beside them, so that `lab/heads/drift.py` can replay the run with any trigger."""


@dataclass(frozen=True)
class CheckpointingConfig:
    """`checkpointing`."""

    enabled: bool = True
    """Keep a checkpoint to resume from."""
    save_period: int = bounded(1, low=1)
    """Steps between checkpoints. The newest two are kept, in `checkpoints/` of the run directory."""


@dataclass(frozen=True)
class ClusterConfig:
    """`cluster`: one node, with or without a GPU."""

    num_nodes: int = bounded(1, low=1, high=1)
    """The local runner uses one machine."""
    gpus_per_node: int = bounded(0, low=0, high=1)
    """1: trainer and engines share one CUDA GPU. 0: they share the CPU."""
    weights_by_handle: bool = True
    """With a GPU, new weights reach an engine in another process as handles of the GPU's memory. False: they go through the
    host's memory, for machines that refuse such handles."""
    rollout_workers: int = bounded(1, low=1, high=64)
    """Engines that roll out side by side, each in a process with one core. A single one is in the runner's own process,
    unless `policy.generation.colocated.enabled` is false."""
    threads: int = bounded(1, low=1, high=64)
    """OpenMP threads of the runner's own process, which has the trainer and a single engine. More than one pays for models of
    100 million parameters or more, on otherwise idle cores. OMP_NUM_THREADS in the environment overrides it."""
