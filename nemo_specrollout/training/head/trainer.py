# SPDX-License-Identifier: Apache-2.0
"""Trains a draft head on features of the policy, by training-time test as in EAGLE-3 (Li et al., arXiv 2503.01840)."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from speculators.losses.utils import LossConfig, resolve_loss_config

from nemo_specrollout.config.block import MIXED_LOSS
from nemo_specrollout.training.features.features import SequenceFeatures
from nemo_specrollout.training.head.draft_forward import row_loss, training_loss
from nemo_specrollout.training.head.head import DraftHead
from nemo_specrollout.training.head.packing import PackedBatch, Piece, pack, plan_batches

OnStep = Callable[[int, int, float], None]
"""Called after a step with its number, the (estimated) total number of steps, and the loss."""

BATCH_TOKENS = {"cpu": 256, "cuda": 4096}
"""Default rows of a packed batch, by device. Dense attention masks make long batches slow on a CPU."""
BFLOAT16_HIDDEN = 512
"""Hidden size from which a CPU with bfloat16 matrix units trains faster in bfloat16, despite the conversions."""
TV = "tv"
"""Name of the total variation loss in `speculators`."""


def default_learning_rate(hidden_size: int) -> float:
    """Returns the learning rate of a new head: 3e-3, measured at 256, falling to the usual 1e-4 at 4096 as a power."""
    return 3e-3 * min(1.0, (256 / hidden_size) ** 1.227)


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of the training."""

    loss: str = MIXED_LOSS
    """Name of a loss of `speculators`, or JSON of several with weights. Acceptance depends on the total variation, which
    alone gives an untrained head almost no gradient; the divergence beside it does."""
    tv_after: float = 1.0
    """Share of a training after which the loss is total variation alone (Bebop, arXiv 2606.12370); 1 is never."""
    learning_rate: float = 3e-3
    """Learning rate after warm-up. See `default_learning_rate` for other hidden sizes than 256."""
    schedule: str = "cosine"
    """Course of the learning rate: `constant`, or `cosine`, which falls to a tenth at the end of the budget."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises linearly from 0."""
    ttt_steps: int = 5
    """Draft positions that are trained. The head runs on its own hidden states from the second on."""
    step_decay: float = 1.0
    """Weight of a draft position in the loss, relative to the position before."""
    batch_tokens: int = 256
    """Rows of a packed batch. Longer sequences are cut."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped."""
    train_lm_head: bool = True
    """Whether the head's LM head is trained."""
    seed: int = 0
    """Seed of the batches and their order."""

    def __post_init__(self) -> None:
        """Raises ValueError with field, value and fix."""
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"schedule {self.schedule!r}; choose cosine or constant")
        for name in ("learning_rate", "ttt_steps", "batch_tokens", "max_grad_norm", "step_decay"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if not 0 <= self.tv_after <= 1:
            raise ValueError(f"tv_after is {self.tv_after}; give a share of the run, 0 to 1")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; give 0 or more")
        resolve_loss_config(self.loss, "eager")


@dataclass(frozen=True)
class Budget:
    """Limits of a training, which ends at the first that is reached. With `seconds`, results are not repeatable."""

    steps: int | None = None
    """Optimizer steps."""
    tokens: int | None = None
    """Rows that are trained on, prompts included."""
    seconds: float | None = None
    """Seconds of training."""

    def __post_init__(self) -> None:
        """Raises ValueError if there is no limit, or one that is not positive."""
        limits = (self.steps, self.tokens, self.seconds)
        if all(limit is None for limit in limits) or any(limit is not None and limit <= 0 for limit in limits):
            raise ValueError(f"{self}: give a positive number of steps, tokens or seconds")


@dataclass
class TrainingProgress:
    """Progress of a training, and its place in the data."""

    steps: int = 0
    """Optimizer steps."""
    tokens: int = 0
    """Rows that were trained on."""
    seconds: float = 0.0
    """Seconds of training."""
    epoch: int = 0
    """Number of the current pass over the data."""
    batches_of_epoch: int = 0
    """Batches of the current pass that were trained on."""

    def used_share(self, budget: Budget) -> float:
        """Returns the share of the budget that is used, 1 at the end."""
        pairs = ((self.steps, budget.steps), (self.tokens, budget.tokens), (self.seconds, budget.seconds))
        return min(1.0, max(used / limit for used, limit in pairs if limit is not None))


@dataclass(frozen=True)
class TrainingResult:
    """Totals of a training that ended."""

    steps: int
    """Optimizer steps."""
    tokens: int
    """Rows that were trained on."""
    seconds: float
    """Seconds of training."""
    mean_loss: float
    """Mean loss of the last tenth of the steps; NaN if there were none."""


class HeadTrainer:
    """Owns a head while it learns, with the optimizer and the place in the data.

    `train` may be called several times, with a list of sequences and a budget each; the optimizer's state remains.
    After `load`, the next `train` continues the training that `save` interrupted, bit for bit if the data and the budget
    are the same. The policy's tensors never change and never get a gradient. Example:

        trainer = HeadTrainer(head, TrainingSettings())
        trainer.train(sequences, Budget(steps=500))
    """

    def __init__(self, head: DraftHead, settings: TrainingSettings) -> None:
        self.head, self.settings = head, settings
        self.num_steps = 0
        self._progress = TrainingProgress()
        head.model.lm_head.weight.requires_grad_(settings.train_lm_head)
        self._parameters = list(head.learned().values())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
        )
        implementation = "fused" if head.device.type == "cuda" else "eager"
        self._losses = [resolve_loss_config(spec, implementation) for spec in (settings.loss, TV)]

    def train(
        self,
        sequences: Sequence[SequenceFeatures],
        budget: Budget,
        on_step: OnStep = lambda step, total, loss: None,
    ) -> TrainingResult:
        """Trains until the budget is used, with as many passes over the data as that takes.

        Raises ValueError if there is nothing to learn from. Raises FloatingPointError for a loss or gradient that is not
        finite; the head is then as it was before that step.
        """
        losses: list[float] = []
        progress, batches = self._progress, self._batches(sequences)
        while progress.used_share(budget) < 1.0:
            started = time.perf_counter()
            pieces = next(batches)
            losses.append(self._step(sequences, pieces, progress.used_share(budget)))
            progress.steps += 1
            progress.batches_of_epoch += 1
            progress.tokens += sum(piece.num_rows for piece in pieces)
            progress.seconds += time.perf_counter() - started
            on_step(progress.steps, round(progress.steps / progress.used_share(budget)), losses[-1])
        self._progress = TrainingProgress()
        last = losses[-max(1, len(losses) // 10) :]
        mean_loss = sum(last) / len(last) if last else math.nan
        return TrainingResult(progress.steps, progress.tokens, progress.seconds, mean_loss)

    @property
    def tokens_so_far(self) -> int:
        """Rows that the current training has used."""
        return self._progress.tokens

    def save(self, path: Path) -> None:
        """Replaces the file `path` by the trainer's whole state."""
        state = {
            "settings": asdict(self.settings),
            "learned": {name: p.detach().cpu() for name, p in self.head.learned().items()},
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self.num_steps,
            "run": asdict(self._progress),
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            torch.save(state, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Restores what `save` wrote. Raises ValueError if the state has other settings or a head of another shape."""
        state = torch.load(path, map_location=self.head.device, weights_only=True)
        mine, others = asdict(self.settings), state["settings"]
        for name in mine.keys() | others.keys():
            if mine.get(name) != others.get(name):
                raise ValueError(f"{path}: its {name} is {others.get(name)!r}, not {mine.get(name)!r}; start again")
        learned = self.head.learned()
        shapes = ({n: t.shape for n, t in tensors.items()} for tensors in (learned, state["learned"]))
        if len({str(sorted(s.items())) for s in shapes}) > 1:
            raise ValueError(f"{path}: the state of a head of another shape; start again")
        for name, parameter in learned.items():
            parameter.data.copy_(state["learned"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps, self._progress = state["num_steps"], TrainingProgress(**state["run"])

    def _batches(self, sequences: Sequence[SequenceFeatures]) -> Iterator[list[Piece]]:
        """Yields batches without end, from the current place in the data."""
        lengths = [s.num_tokens for s in sequences]
        if max(lengths, default=0) < 3:
            raise ValueError(f"{len(lengths)} sequences, none of three tokens: nothing to learn from")
        progress = self._progress
        while True:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + progress.epoch)
            yield from plan_batches(lengths, self.settings.batch_tokens, generator)[progress.batches_of_epoch :]
            progress.epoch, progress.batches_of_epoch = progress.epoch + 1, 0

    def _step(self, sequences: Sequence[SequenceFeatures], pieces: list[Piece], used_share: float) -> float:
        """Takes an optimizer step, at a share of the budget; returns its loss."""
        settings, device = self.settings, self.head.device
        is_cuda = device.type == "cuda"
        # Compiled kernels on a GPU need batches of one shape.
        batch = pack(sequences, pieces, settings.ttt_steps, settings.batch_tokens if is_cuda else None).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda or self._has_fast_bfloat16()):
            loss = self._loss(batch, self._losses[used_share >= settings.tv_after])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, settings.max_grad_norm)
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm.item())):
            self._optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"step {self.num_steps + 1}: loss {value}, gradient norm {norm.item()}; not taken")
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(used_share)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return value

    def _loss(self, batch: PackedBatch, loss_config: LossConfig) -> torch.Tensor:
        """Returns the loss: by the fused kernels of `speculators` on a GPU, and with less work on a CPU."""
        model, settings = self.head.model, self.settings
        if self.head.device.type != "cuda":
            return training_loss(model, batch, settings.ttt_steps, settings.step_decay, row_loss(loss_config))
        _, loss, _ = model(
            **batch.arguments(),
            ttt_steps=settings.ttt_steps,
            ttt_step_loss_decay=settings.step_decay,
            loss_config=loss_config,
        )
        return loss

    def _has_fast_bfloat16(self) -> bool:
        return self.head.model.hidden_size >= BFLOAT16_HIDDEN and torch.cpu.get_capabilities().get("amx_bf16", False)

    def _learning_rate(self, used_share: float) -> float:
        settings = self.settings
        warmup = min(1.0, (self._progress.steps + 1) / (settings.warmup_steps + 1))
        decay = 1.0 if settings.schedule == "constant" else 0.1 + 0.45 * (1.0 + math.cos(math.pi * used_share))
        return settings.learning_rate * warmup * decay
