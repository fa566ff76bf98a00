# SPDX-License-Identifier: Apache-2.0
"""Sections of the local runner's config, which have the names of NeMo-RL's sections, such as `grpo` and `policy`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.config.block import OFF, SpecrolloutConfig
from nemo_specrollout.config.strict import bounded, choice, raise_first_mistake

_LOWEST_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this value to this value."""
PROCESSED_LOGPROBS = "processed_logprobs"
"""vLLM's name for log-probs after temperature, top-p and top-k. Its default is log-probs before these."""
DEFAULT_MAX_NUM_SEQS = 64
"""Number of requests that an engine runs at a time if `vllm_kwargs` does not set it."""


@dataclass(frozen=True)
class AsyncGrpoConfig:
    """The section `grpo.async_grpo`, about generation that continues while the policy is trained."""

    enabled: bool = False
    """Whether generation and training overlap. With false they take turns."""
    max_trajectory_age_steps: int = bounded(1, low=1, high=64)
    """Largest age of a sample when it is trained on, in training steps. The age is counted from the policy version that began
    the sample."""
    in_flight_weight_updates: bool = False
    """Whether engines load new weights at once, while requests run. With false, the weights wait until all requests have
    ended."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Whether the new policy computes the KV cache of running requests again after an update in flight. With false, requests
    keep the KV cache of the old policy, so their later tokens are exact samples of neither policy."""


@dataclass(frozen=True)
class GrpoConfig:
    """The section `grpo`, about the samples of a step and their advantages."""

    num_prompts_per_step: int = bounded(low=1)
    """Number of prompts in a step."""
    num_generations_per_prompt: int = bounded(low=2)
    """Number of samples for each prompt. They are a group, whose rewards are compared with each other."""
    max_num_steps: int = bounded(low=1)
    """Number of steps of the whole run."""
    normalize_rewards: bool = True
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    use_leave_one_out_baseline: bool = True
    """Whether a sample's reward is compared with the mean of the other samples of its group. With false, the mean includes the
    sample."""
    seed: int = bounded(42, low=0, high=2**32 - 1)
    """Seed from which prompts are drawn. Together with prompt, sample and policy version, it also seeds the noise of each
    request."""
    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()
    """Settings for generation that overlaps with training."""

    @property
    def samples_per_step(self) -> int:
        """Number of requests in a step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt


@dataclass(frozen=True)
class LossConfig:
    """The section `loss_fn`, about the clipped policy loss."""

    ratio_clip_min: float = bounded(0.2, low=0.0, high=1.0)
    """The probability ratio is clipped from below at 1 - ratio_clip_min."""
    ratio_clip_max: float = bounded(0.2, low=0.0, high=1e6)
    """The probability ratio is clipped from above at 1 + ratio_clip_max."""
    ratio_clip_c: float | None = None
    """The constant c of dual clipping. If the advantage is negative, the loss is at most -advantage * c. Null switches it
    off."""
    reference_policy_kl_penalty: float = bounded(0.0, low=0.0)
    """Weight of the KL divergence to the initial policy. NeMo-RL's default is 0.01, but here the default is 0."""
    reference_policy_kl_type: str = choice("k1", "k2", "k3", default="k3")
    """Estimator of the KL divergence to the initial policy (Schulman 2020, joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: float | None = bounded(20.0, low=0.0)
    """Bound to which the absolute log ratio to the reference policy is clamped before the KL is estimated. Null switches it
    off."""
    kl_output_clamp_value: float | None = bounded(10.0, low=0.0)
    """Bound to which the absolute KL estimate of a token is clamped. Null switches it off."""
    token_level_loss: bool = True
    """Whether the loss is the mean over all valid tokens. With false, it is the mean over sequences of the mean over their
    tokens."""
    use_importance_sampling_correction: bool = False
    """Whether each token is weighted by its probability for the trainer, divided by the probability with which the engine
    sampled it. Asynchronous GRPO needs this."""
    force_on_policy_ratio: bool = False
    """Whether the probability ratio is taken as 1, which saves a forward pass for log-probs. Needs one optimizer step per
    rollout."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless `ratio_clip_c` is null or more than 1.

        Otherwise dual clipping would cut the ordinary loss.
        """
        text = f"{self.ratio_clip_c}; it must exceed 1, or be null for no dual clipping"
        raise_first_mistake(path, (self.ratio_clip_c is not None and self.ratio_clip_c <= 1, "ratio_clip_c", text))


@dataclass(frozen=True)
class OptimizerConfig:
    """The section `policy.megatron_cfg.optimizer`, and two keys of the section `scheduler` beside it.

    The optimizer is AdamW with a constant learning rate. The keys of `scheduler` are `lr_warmup_iters` and `lr_warmup_init`.
    """

    lr: float = bounded(low=0.0, high=1.0)
    """Learning rate after the warm-up."""
    weight_decay: float = bounded(0.01, low=0.0)
    """Weight decay, which is not applied to norms, as in Megatron."""
    adam_beta1: float = bounded(0.9, low=0.0, below=1.0)
    """Decay of the first moment."""
    adam_beta2: float = bounded(0.999, low=0.0, below=1.0)
    """Decay of the second moment."""
    adam_eps: float = bounded(1e-8, above=0.0, high=1.0)
    """Number that is added to the square root of the second moment."""
    clip_grad: float = bounded(1.0, low=0.0)
    """Largest global norm of the gradient, above which it is scaled down. 0 switches clipping off."""
    lr_warmup_iters: int = bounded(0, low=0)
    """Number of optimizer steps in which the learning rate rises linearly from `lr_warmup_init` to `lr`."""
    lr_warmup_init: float = bounded(0.0, low=0.0)
    """Learning rate of the first step of the warm-up."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the warm-up starts from a rate above `lr`."""
        text = f"{self.lr_warmup_init} exceeds lr {self.lr}; lower it"
        raise_first_mistake(path, (self.lr_warmup_init > self.lr, "lr_warmup_init", text))


@dataclass(frozen=True)
class MegatronConfig:
    """The section `policy.megatron_cfg`, about the trainer."""

    optimizer: OptimizerConfig
    """The optimizer of the trainer."""
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
    """The section `policy.generation.vllm_cfg`, about the engine."""

    max_model_len: int = bounded(low=8)
    """Longest sequence of prompt and response that the engine can decode, in tokens."""
    precision: str = choice("float32", "bfloat16", default="float32")
    """The engine's dtype. In float32, tokens are equal with and without speculation."""
    enforce_eager: bool = True
    """Whether the engine captures no graphs. On a CPU this only saves start-up time. On a GPU use false, because steps there
    need CUDA graphs."""


@dataclass(frozen=True)
class ColocatedConfig:
    """The section `policy.generation.colocated`, about the cores of engines and trainer."""

    enabled: bool = True
    """Whether engines and trainer take turns on the same cores. With false, engines have processes and cores of their own, so
    with `run_ahead` they also work while the policy is trained."""


@dataclass(frozen=True)
class GenerationConfig:
    """The section `policy.generation`, about the rollout."""

    vllm_cfg: VllmConfig
    """Settings of the engine, with NeMo-RL's names."""
    max_new_tokens: int = bounded(low=1)
    """Longest response, in tokens."""
    temperature: float = bounded(1.0, low=0.0, high=2.0)
    """Sampling temperature, where 0 means greedy decoding. The trainer computes log-probs at the same temperature, or at 1 for
    greedy samples."""
    top_p: float = bounded(1.0, above=0.0, high=1.0)
    """Probability mass of nucleus sampling. 1 switches it off."""
    top_k: int | None = bounded(None, low=1)
    """Number of tokens of top-k sampling. Null switches it off."""
    backend: str = choice("vllm", default="vllm")
    """Name of the generation engine."""
    colocated: ColocatedConfig = ColocatedConfig()
    """Setting that says whether engines and trainer share the cores."""
    vllm_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments, which are passed to vllm.LLM unchanged."""
    specrollout: SpecrolloutConfig = OFF
    """This package's block. Without it, the package is switched off."""

    def check(self, path: str) -> None:
        """Raises ConfigError for a temperature that vLLM would replace by a higher one.

        Raises it also for sizes in `vllm_kwargs` that are not positive integers.
        """
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
    """The section `policy`, about the model, its rollouts and its training."""

    model_name: str
    """Folder of the policy, in Hugging Face format."""
    generation: GenerationConfig
    """Settings of the rollout."""
    megatron_cfg: MegatronConfig
    """Settings of the trainer."""
    max_total_sequence_length: int = bounded(low=8)
    """Longest sequence of the trainer, in tokens."""
    train_global_batch_size: int = bounded(low=1)
    """Number of samples in an optimizer step."""
    logprob_batch_size: int = bounded(32, low=1)
    """Most sequences of `max_total_sequence_length` tokens in a forward pass of the trainer. More sequences fit if they are
    shorter."""
    train_micro_batch_size: int = bounded(16, low=1)
    """Most sequences of `max_total_sequence_length` tokens in a forward and backward pass. More sequences fit if they are
    shorter."""
    precision: str = choice("float32", "bfloat16", default="float32")
    """The trainer's dtype. With bfloat16, weights and matrix products are in bfloat16, but the optimizer and the gradients are
    in float32."""


@dataclass(frozen=True)
class TaskConfig:
    """An entry of `data.tasks`, which is a task of `reasoning-gym`."""

    name: str
    """Name of the task in reasoning-gym, such as chain_sum."""
    weight: float = bounded(1.0, above=0.0)
    """Relative frequency of the task's problems."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The task's own options, as `reasoning_gym.create_dataset` takes them."""


@dataclass(frozen=True)
class DataConfig:
    """The section `data`, about the task. Problems are generated from the run's seed (docs/get-started/local.md)."""

    dataset_name: str = choice("step_addition", "reasoning_gym", "free_text", default="step_addition")
    """Kind of task. `step_addition` is the demo's own task, and `reasoning_gym` are the `tasks` of that package. `free_text`
    are stories and explanations without a reward, for `bench` only."""
    max_terms: int = bounded(16, low=2, high=16)
    """Largest number of terms in an addition of `step_addition`."""
    tasks: tuple[TaskConfig, ...] = ()
    """The tasks of `reasoning_gym`. Problems of all tasks are mixed by the tasks' weights."""
    system_prompt: str | None = None
    """System prompt, for `reasoning_gym` only. It is a text, or the name of one of that package's prompts, such as default,
    simple or direct. With null it is the default of the model's chat template."""

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
    """The section `logger`, about the run directory."""

    log_dir: str
    """Path of the run directory, which gets config, metrics, summary and report."""
    record_for_replay: bool = False
    """Whether a run with `draft_refresh` only records what refreshes need, and never refreshes the head. It then keeps the
    captured features and the LM heads of all policy versions, so that `lab/heads/drift.py` can replay the run with any
    trigger."""


@dataclass(frozen=True)
class CheckpointingConfig:
    """The section `checkpointing`, about checkpoints of the run."""

    enabled: bool = True
    """Whether the run keeps checkpoints, so that it can be resumed."""
    save_period: int = bounded(1, low=1)
    """Number of steps between checkpoints. The newest two are kept, in `checkpoints/` of the run directory."""


@dataclass(frozen=True)
class ClusterConfig:
    """The section `cluster`, about the machine."""

    num_nodes: int = bounded(1, low=1, high=1)
    """Must be 1, because the local runner uses one machine."""
    gpus_per_node: int = bounded(0, low=0, high=1)
    """With 1, trainer and engines share one CUDA GPU. With 0, they share the CPU."""
    weights_by_handle: bool = True
    """Whether new weights on a GPU are sent to an engine in another process as handles to the GPU's memory. With false, they
    are copied through the host's memory, for machines that refuse such handles."""
    rollout_workers: int = bounded(1, low=1, high=64)
    """Number of engines that roll out at the same time, each in a process with one core. A single engine is in the runner's
    own process, unless `policy.generation.colocated.enabled` is false."""
    threads: int = bounded(1, low=1, high=64)
    """Number of OpenMP threads of the runner's own process, which has the trainer and a single engine. More than one thread
    pays for models of 100 million parameters or more, on cores that are idle otherwise. The environment variable
    OMP_NUM_THREADS overrides it."""
