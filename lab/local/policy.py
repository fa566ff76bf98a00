# SPDX-License-Identifier: Apache-2.0
"""The policy of a local GRPO run, which is a Megatron-Core model with its optimizer and its checkpoints.

Shapes: B sequences of a global batch, b of a micro batch, T positions. Sequences are right-padded.
"""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.local.device import CPU, deterministic_kernels
from lab.local.grpo import LossInputs, clipped_policy_loss
from lab.local.megatron_model import TokenBatch, build_model, export_hf, install, load_hf, token_logprobs
from lab.local.model_folder_check import check_trainable
from lab.local.policy_shape import PolicyShape
from lab.local.run_sections import LossConfig, OptimizerConfig
from lab.local.sealed_folder import check_seal, seal_folder
from nemo_specrollout.storage.files import sync_folder
from nemo_specrollout.storage.model_folder import read_object, tensor_files

MICRO_BATCH_TOKENS = 2048
"""Tokens of one forward pass, including padding. They are few enough for a CPU's cache, but enough to hide the overhead of a
call."""
STATE_FILE = "rank_0_of_1.pt"
"""Name of a checkpoint's file with the policy's state. The name says that one rank has the whole model."""


class MegatronPolicy:
    """The model being trained, with its optimizer and step count.

    Model and optimizer are on one device. Batches are on the CPU, from where one micro batch at a time goes to the device, and
    log-probs return to the CPU. In bfloat16, the optimizer works on float32 copies, from which the model's weights are
    rounded.

    Invariant: weights, optimizer state and learning rate are the result of exactly `step` optimizer steps. A step that fails
    changes none of them.

        policy = MegatronPolicy.from_pretrained(folder, optimizer=OptimizerConfig(lr=1e-4))
        prev_BT = policy.logprobs(batch)
        inputs = LossInputs(batch.response_mask_BT, advantages_B, prev_BT, generation_BT)
        policy.train_step(batch, inputs, LossConfig())
        engine.load_weights(policy.hf_tensors())
    """

    def __init__(self, model: GPTModel, shape: PolicyShape, optimizer: OptimizerConfig) -> None:
        self.model = model
        self.config = optimizer
        self.step = 0
        self._shape = shape
        self._device = next(model.parameters()).device
        # What the optimizer changes, which is a float32 parameter itself or a float32 copy of another one.
        self._masters = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in model.named_parameters()
        }
        self._copied = {name: p for name, p in model.named_parameters() if p is not self._masters[name]}
        matrices, norms = (
            [p for p in self._masters.values() if (p.dim() == 1) == is_norm] for is_norm in (False, True)
        )
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=optimizer.lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            weight_decay=optimizer.weight_decay,
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        optimizer: OptimizerConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> "MegatronPolicy":
        """Loads a Qwen3 or Llama model from a Hugging Face folder (config.json and *.safetensors) to `device`.

        Raises:
            ValueError: The folder lacks a file or a tensor, or this trainer does not support the model.
        """
        install(device)
        hf_config = read_object(folder / "config.json")
        check_trainable(folder, hf_config)
        shape = PolicyShape.from_hf(hf_config)
        model = build_model(shape, dtype)
        load_hf(model, shape, {n: t for file in tensor_files(folder) for n, t in load_file(file).items()})
        return cls(model.to(device), shape, optimizer)

    @torch.no_grad()
    def logprobs(
        self, batch: TokenBatch, temperature: float = 1.0, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> Tensor:
        """Returns the log-prob of each token given the tokens before it, [B, T], with logits divided by `temperature`.

        It is 0.0 at position 0 and at padding.
        """
        install(self._device)
        logprobs_BT = torch.zeros(batch.tokens_BT.shape)
        with deterministic_kernels(self._device):
            for rows_b, longest in batch.micro_batches(micro_batch_tokens):
                tokens_bT = batch.tokens_BT[rows_b, :longest].to(self._device)
                logprobs_BT[rows_b, :longest] = token_logprobs(self.model, tokens_bT, temperature).cpu()
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
        """Takes one optimizer step on the whole batch. The gradient does not depend on the size of the micro batches.

        Returns:
            The metrics of `clipped_policy_loss` with grad_norm (before clipping), lr and num_valid_tokens. Also the log-probs
            of all tokens under the weights before the step, [B, T], as `logprobs` would return them.

        Raises:
            FloatingPointError: The gradient is not finite. The policy is unchanged.
        """
        install(self._device)
        with deterministic_kernels(self._device):
            return self._train_step(batch, inputs, loss_cfg, temperature, micro_batch_tokens)

    def _train_step(
        self,
        batch: TokenBatch,
        inputs: LossInputs,
        loss_cfg: LossConfig,
        temperature: float,
        micro_batch_tokens: int,
    ) -> tuple[dict[str, float], Tensor]:
        self._optimizer.zero_grad()
        metrics: dict[str, float] = {}
        logprobs_BT = torch.zeros(batch.tokens_BT.shape)
        for rows_b, longest in batch.micro_batches(micro_batch_tokens):
            logprobs_bT = token_logprobs(self.model, batch.tokens_BT[rows_b, :longest].to(self._device), temperature)
            inputs_b = inputs.rows(rows_b, longest).to(self._device)
            loss, figures = clipped_policy_loss(logprobs_bT, inputs_b, loss_cfg, inputs.mask_BT)
            loss.backward()
            self._collect_gradients()
            metrics = {name: metrics.get(name, 0.0) + value for name, value in figures.items()}
            logprobs_BT[rows_b, :longest] = logprobs_bT.detach().cpu()
        grad_norm = self._clip_gradient()
        lr = self._learning_rate()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._round_copies()
        self.step += 1
        num_valid_tokens = float(inputs.mask_BT.sum())
        totals = {**metrics, "grad_norm": grad_norm, "lr": lr, "num_valid_tokens": num_valid_tokens}
        return totals, logprobs_BT.where(batch.valid_mask_BT, 0.0)

    def _collect_gradients(self) -> None:
        """Adds the gradients of a micro batch to the gradients of the optimizer's float32 copies of the weights."""
        for name, parameter in self._copied.items():
            if parameter.grad is not None:
                master = self._masters[name]
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _round_copies(self) -> None:
        for name, parameter in self._copied.items():
            parameter.copy_(self._masters[name])

    def _clip_gradient(self) -> float:
        """Scales the gradient to a norm of at most `clip_grad`, and returns its norm before that."""
        masters = list(self._masters.values())
        total = torch.nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None])
        if not math.isfinite(norm := float(total)):
            raise FloatingPointError(f"the gradient norm is {norm} at optimizer step {self.step}, which is not taken")
        if self.config.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(masters, self.config.clip_grad, total)
        return norm

    def _learning_rate(self) -> float:
        """Returns the learning rate of the next optimizer step. The rate has a linear warm-up and is then constant."""
        c = self.config
        if self.step >= c.lr_warmup_iters:
            return c.lr
        return c.lr_warmup_init + (c.lr - c.lr_warmup_init) * self.step / c.lr_warmup_iters

    def wait(self) -> None:
        """Waits until the device has done its queued work, so that a clock can measure it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the Hugging Face name and a float32 copy of each weight, on the model's device.

        Later training does not change a copy.
        """
        return export_hf(self.model, self._shape)

    def save(self, folder: Path, hf_config: bytes = b"") -> None:
        """Writes weights, optimizer state and step count to `folder`, in place of an older checkpoint.

        The files are written to a temporary folder, which is then renamed. With `hf_config`, which is the content of the
        policy's config.json, the folder is also a Hugging Face folder. Its file `checksums.json` lets `load` find damaged
        files. If a write fails, for example because the disk is full, the temporary folder is removed and OSError is raised.
        """
        state = {
            "model": {name: p.detach() for name, p in self._masters.items()},
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "optimizer_config": asdict(self.config),
        }
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            _save(state, temporary / STATE_FILE)
            if hf_config:
                tensors = {name: tensor.contiguous().cpu() for name, tensor in self.hf_tensors()}
                save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
                (temporary / "config.json").write_bytes(hf_config)
            seal_folder(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        sync_folder(folder.parent)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restores the policy that `save` wrote.

        Later training gives bitwise the same weights as training without this interruption.

        Raises:
            DamagedFolder: A file is not what `save` wrote.
            ValueError: The checkpoint has another model or optimizer config.
        """
        check_seal(folder)
        state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        for field in fields(self.config):
            if (ours := getattr(self.config, field.name)) != state["optimizer_config"][field.name]:
                raise ValueError(
                    f"optimizer.{field.name}={ours}, but {folder} was trained with "
                    f"{state['optimizer_config'][field.name]}: restore the old value, or start a new run"
                )
        ours, saved = ({(n, p.shape) for n, p in tensors.items()} for tensors in (self._masters, state["model"]))
        if differing := sorted(name for name, _ in ours ^ saved):
            raise ValueError(
                f"{folder} holds another model: {differing[0]} differs; load the model it was trained from"
            )
        for name, parameter in self._masters.items():
            parameter.copy_(state["model"][name])
        self._round_copies()
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def _save(state: dict[str, Any], path: Path) -> None:
    """Calls `torch.save`.

    If a write is interrupted, raises the cause itself, such as an OSError, and not torch's RuntimeError.
    """
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            raise (error.__context__ or error) from None
