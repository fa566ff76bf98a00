# SPDX-License-Identifier: Apache-2.0
"""The policy of a local GRPO run: a Megatron-Core model, its optimizer, and its checkpoints.

Shapes: B sequences of a global batch, b of a micro batch, T positions. Sequences are right-padded.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_specrollout.config.files import check_seal, seal_folder, sync_folder
from nemo_specrollout.config.run_sections import LossConfig, OptimizerConfig
from nemo_specrollout.local import megatron_host
from nemo_specrollout.local.grpo import LossInputs, LossMetrics, Normalizer, clipped_policy_loss
from nemo_specrollout.local.megatron_model import TokenBatch, build_model, token_logprobs
from nemo_specrollout.local.megatron_weights import export_hf, load_hf, weights_of
from nemo_specrollout.training.checkpoints.weight_map import Replicated

MICRO_BATCH_TOKENS = 2048
"""Padded tokens of one forward pass: few enough for a CPU's cache, enough to hide the overhead of a call."""


class MegatronPolicy:
    """The model being trained, with its optimizer and step count.

    Owns this rank's shard of the weights. With tensor parallelism, every rank calls every method with the same arguments.
    In bfloat16, the optimizer works on float32 copies, from which the model's weights are rounded.

    Invariant: weights, optimizer state and learning rate are the result of exactly `step` optimizer steps. A step that fails
    changes none of them.

        policy = MegatronPolicy.from_pretrained(folder, optimizer=OptimizerConfig(lr=1e-4))
        prev_BT = policy.logprobs(batch)
        inputs = LossInputs(batch.response_mask_BT, advantages_B, prev_BT, generation_BT)
        policy.train_step(batch, inputs, LossConfig())
        engine.load_weights(policy.hf_tensors())
    """

    def __init__(self, model: GPTModel, optimizer: OptimizerConfig, tensor_model_parallel_size: int, source: Path):
        self.model = model
        self.config = optimizer
        self.step = 0
        self._size = tensor_model_parallel_size
        self._source = source
        self._masters = {name: _master_of(p) for name, p in model.named_parameters()}
        self._optimizer = _build_optimizer(list(self._masters.values()), optimizer)
        self._scheduler = _build_scheduler(self._optimizer, optimizer)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        optimizer: OptimizerConfig,
        tensor_model_parallel_size: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> "MegatronPolicy":
        """Reads a Hugging Face folder of a Qwen3 or a Llama (config.json and *.safetensors) into a model of `dtype`.

        Raises:
            ValueError: The folder lacks a file, or this trainer does not support the model.
        """
        megatron_host.install(tensor_model_parallel_size)
        hf_config, tensors = _read_hf_folder(folder)
        model = build_model(hf_config, tensor_model_parallel_size, dtype)
        load_hf(model, tensors)
        return cls(model, optimizer, tensor_model_parallel_size, folder)

    @torch.no_grad()
    def logprobs(
        self, batch: TokenBatch, temperature: float = 1.0, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Tensor:
        """Returns log p(token | prefix) under logits / temperature, [B, T]; 0.0 at position 0 and at padding."""
        megatron_host.install(self._size)
        logprobs_BT = torch.zeros(batch.tokens_BT.shape)
        for rows_b, longest in batch.micro_batches(micro_batch_tokens):
            logprobs_BT[rows_b, :longest] = token_logprobs(self.model, batch.tokens_BT[rows_b, :longest], temperature)
        return logprobs_BT.where(batch.valid_mask_BT, 0.0)

    def train_step(
        self,
        batch: TokenBatch,
        inputs: LossInputs,
        loss_cfg: LossConfig,
        *,
        temperature: float = 1.0,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> tuple[dict[str, float], Tensor]:
        """Takes one optimizer step on the whole batch. The gradient does not depend on the micro batches.

        Returns:
            The fields of `LossMetrics` with grad_norm (before clipping), lr and num_valid_tokens; and the result that
            `logprobs` would have had before the step, [B, T].

        Raises:
            FloatingPointError: The gradient is not finite. The policy is unchanged.
        """
        megatron_host.install(self._size)
        metrics, logprobs_BT = self._backward(batch, inputs, loss_cfg, temperature, micro_batch_tokens)
        grad_norm, lr = self._clip_gradient(), self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        self._publish()
        self._scheduler.step(1)
        self.step += 1
        num_valid_tokens = float(inputs.mask_BT.sum())
        figures = {**asdict(metrics), "grad_norm": grad_norm, "lr": lr, "num_valid_tokens": num_valid_tokens}
        return figures, logprobs_BT

    def _backward(
        self, batch: TokenBatch, inputs: LossInputs, loss_cfg: LossConfig, temperature: float, micro_batch_tokens: int
    ) -> tuple[LossMetrics, Tensor]:
        """Sums the gradients of all micro batches, each normalised by the counts of the whole batch."""
        self._optimizer.zero_grad()
        normalizer, total = Normalizer.of(inputs.mask_BT), LossMetrics.zero()
        all_BT = torch.zeros(batch.tokens_BT.shape)
        for rows_b, longest in batch.micro_batches(micro_batch_tokens):
            logprobs_bT = token_logprobs(self.model, batch.tokens_BT[rows_b, :longest], temperature)
            loss, metrics = clipped_policy_loss(logprobs_bT, inputs.rows(rows_b, longest), loss_cfg, normalizer)
            loss.backward()
            self._collect_gradients()
            total = total + metrics
            all_BT[rows_b, :longest] = logprobs_bT.detach()
        return total, all_BT.where(batch.valid_mask_BT, 0.0)

    def _collect_gradients(self) -> None:
        """Moves the gradients of a micro batch from the model to its float32 copies, where there are copies."""
        for name, parameter in self.model.named_parameters():
            master = self._masters[name]
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        """Rounds the float32 copies into the model, where there are copies."""
        for name, parameter in self.model.named_parameters():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def _clip_gradient(self) -> float:
        """Completes the gradient over the ranks, scales it to at most `clip_grad`, and returns its norm before that."""
        parameters = self._masters
        split_sum, replicated_sum = torch.zeros(()), torch.zeros(())
        for weight in weights_of(self.model):
            grad = _finished_gradient(parameters[weight.megatron], weight.megatron)
            total = replicated_sum if isinstance(weight.layout, Replicated) else split_sum
            total += grad.square().sum()
        dist.all_reduce(split_sum)
        norm = math.sqrt(float(split_sum + replicated_sum))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm} at optimizer step {self.step}, which is not taken")
        if 0 < self.config.clip_grad < norm:
            for parameter in parameters.values():
                assert parameter.grad is not None
                parameter.grad.mul_(self.config.clip_grad / (norm + 1e-6))
        return norm

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full float32 tensor) for the engine: copies that later steps do not change."""
        megatron_host.install(self._size)
        return export_hf(self.model)

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer state and step count to `folder` atomically; replaces an older one.

        With `checksums.json`, `load` can tell whether the files are undamaged. Raises OSError, e.g. if the disk is full.
        """
        megatron_host.install(self._size)
        state = {
            "model": {name: p.detach() for name, p in self._masters.items()},
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "optimizer_config": asdict(self.config),
        }
        with _replacing(folder, sealed=True) as temporary:
            _save(state, temporary / self._shard_name)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Continues from what `save` wrote. The next step gives bitwise the weights that it would have given there.

        Raises:
            DamagedFolder: A file is not what `save` wrote.
            ValueError: There is no checkpoint for this number of ranks, or it has another model or optimizer config.
        """
        megatron_host.install(self._size)
        if not (file := folder / self._shard_name).is_file():
            raise ValueError(f"{folder} has no {self._shard_name}: save and load with equal tensor_model_parallel_size")
        check_seal(folder)
        state = torch.load(file, weights_only=True)
        self._check_same_optimizer(state["optimizer_config"], folder)
        _check_same_parameters(self._masters, state["model"], folder)
        for name, parameter in self._masters.items():
            parameter.copy_(state["model"][name])
        self._publish()
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = self._scheduler.num_steps = state["step"]
        self._scheduler.step(0)

    def _check_same_optimizer(self, saved: dict[str, Any], folder: Path) -> None:
        for field in fields(self.config):
            if (ours := getattr(self.config, field.name)) != saved[field.name]:
                raise ValueError(
                    f"optimizer.{field.name}={ours}, but {folder} was trained with {saved[field.name]}: "
                    "restore the old value, or start a new run from save_pretrained's folder"
                )

    @property
    def _shard_name(self) -> str:
        return f"rank_{dist.get_rank()}_of_{self._size}.pt"

    def save_pretrained(self, folder: Path) -> None:
        """Writes a Hugging Face folder: model.safetensors, and copies of the config and tokenizer files."""
        tensors = dict(self.hf_tensors())
        with _replacing(folder) as temporary:
            if dist.get_rank() == 0:
                save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
                for file in _companion_files(self._source):
                    shutil.copy(file, temporary)


def _master_of(parameter: Tensor) -> Tensor:
    """Returns the tensor that the optimizer changes: a float32 parameter itself, or a float32 copy of another."""
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()


def _build_optimizer(parameters: list[Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "wd_mult": 1.0},
        {"params": [p for p in parameters if p.dim() == 1], "wd_mult": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay)


def _build_scheduler(optimizer: torch.optim.AdamW, config: OptimizerConfig) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=0.0,
        lr_warmup_steps=config.lr_warmup_iters,
        lr_decay_steps=config.lr_warmup_iters + 1,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def _finished_gradient(parameter: Tensor, name: str) -> Tensor:
    assert parameter.grad is not None, f"{name} took no part in the loss"
    if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        # Each rank has the gradient through its own heads only. Other replicated weights have their full gradient already.
        dist.all_reduce(parameter.grad)
    return parameter.grad


def _check_same_parameters(ours: dict[str, Tensor], saved: dict[str, Tensor], folder: Path) -> None:
    shapes = [{(name, tuple(tensor.shape)) for name, tensor in tensors.items()} for tensors in (ours, saved)]
    if differing := sorted(name for name, _ in shapes[0] ^ shapes[1]):
        raise ValueError(f"{folder} holds another model: {differing[0]} differs; load the model it was trained from")


def _read_hf_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a Hugging Face model folder: it needs config.json and *.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return json.loads((folder / "config.json").read_text()), tensors


def _save(state: dict[str, Any], path: Path) -> None:
    """Calls `torch.save`, and raises the exception that interrupted a write: an OSError, or KeyboardInterrupt."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            raise (error.__context__ or error) from None


def _companion_files(folder: Path) -> list[Path]:
    files = [file for pattern in ("*.json", "*.txt", "*.jinja") for file in folder.glob(pattern)]
    return [file for file in files if not file.name.endswith(".index.json")]


@contextmanager
def _replacing(folder: Path, sealed: bool = False) -> Iterator[Path]:
    """Yields a new folder that takes the place of `folder` when the block ends without an error; all ranks together.

    `sealed` adds the checksums of its files. If the block fails, the new folder is removed, which frees a full disk.
    """
    temporary, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    try:
        yield temporary
        dist.barrier()
        if sealed and dist.get_rank() == 0:
            seal_folder(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if dist.get_rank() == 0:
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.rename(folder, old)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
