# SPDX-License-Identifier: Apache-2.0
"""Trains a draft head on features of the policy, with training-time test as in EAGLE-3 (Li et al., arXiv 2503.01840)."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from speculators.losses.utils import resolve_loss_config

from nemo_specrollout.config.block import MIXED_LOSS
from nemo_specrollout.heads.features.features import SequenceFeatures
from nemo_specrollout.heads.training.head import DraftHead
from nemo_specrollout.heads.training.packing import Piece, pack, plan_batches
from nemo_specrollout.storage.files import replacing_file

OnStep = Callable[[int, int, float], None]
"""Called after a step with its number, the (estimated) total number of steps, and the loss."""

BATCH_TOKENS = {"cpu": 256, "cuda": 4096}
"""Default number of rows of a packed batch, by device. Dense attention masks make long batches slow on a CPU."""
BFLOAT16_HIDDEN = 512
"""Hidden size from which a CPU with bfloat16 matrix units trains faster in bfloat16, despite the conversions."""


def default_learning_rate(hidden_size: int) -> float:
    """Returns the default learning rate of a new head.

    It is 3e-3 up to a hidden size of 256, where this was measured, and falls by a power law to 1e-4 at 4096, which is usual.
    """
    return 3e-3 * min(1.0, (256 / hidden_size) ** 1.227)


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of the training. Raises ValueError for an unknown loss."""

    loss: str = MIXED_LOSS
    """Name of a loss of `speculators`, or JSON of several with weights. Acceptance depends on the total variation distance.
    But this alone gives an untrained head almost no gradient, so the default adds a divergence to it."""
    tv_after: float = 1.0
    """Share of a training after which the loss is total variation alone (Bebop, arXiv 2606.12370). 1 means never."""
    learning_rate: float = 3e-3
    """Learning rate after warm-up. For hidden sizes other than 256, see `default_learning_rate`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Course of the learning rate. `cosine` falls to a tenth at the end of the budget."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises linearly from 0."""
    ttt_steps: int = 5
    """Number of draft positions that are trained. From the second on, the head reads its own hidden states."""
    batch_tokens: int = 256
    """Number of rows of a packed batch. Longer sequences are cut."""
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        resolve_loss_config(self.loss, "eager")


@dataclass
class TrainingProgress:
    """Progress of a training, and its place in the data."""

    steps: int = 0
    tokens: int = 0
    """Number of rows that were trained on, including prompts."""
    seconds: float = 0.0
    epoch: int = 0
    batches_of_epoch: int = 0
    """Number of batches of the current pass that were trained on."""


@dataclass(frozen=True)
class Budget:
    """Length of a training in steps or seconds. With `seconds`, results are not repeatable."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        assert (self.steps is None) != (self.seconds is None) and (self.steps or self.seconds or 0) > 0

    def used_share(self, progress: TrainingProgress) -> float:
        """Returns the share of the budget that a training has used, which is 1 at the end."""
        if self.steps is not None:
            return min(1.0, progress.steps / self.steps)
        assert self.seconds is not None
        return min(1.0, progress.seconds / self.seconds)


class HeadTrainer:
    """Owns a head while it learns, with the optimizer and the place in the data.

    After `load`, the next `train` continues the training that `save` interrupted, bit for bit if the data and the budget
    are the same. Example: `HeadTrainer(head, TrainingSettings()).train(sequences, Budget(steps=500))`.
    """

    def __init__(self, head: DraftHead, settings: TrainingSettings) -> None:
        self.head = head
        self.settings = settings
        self.num_steps = 0
        self.progress = TrainingProgress()
        """Progress of the current training."""
        self._parameters = list(head.learned().values())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=0.0, betas=(0.9, 0.95)
        )
        self._is_cuda = head.device.type == "cuda"
        has_fast_bfloat16 = head.model.hidden_size >= BFLOAT16_HIDDEN and torch.cpu.get_capabilities().get("amx_bf16")
        self._uses_bfloat16 = self._is_cuda or bool(has_fast_bfloat16)

    def train(
        self, sequences: Sequence[SequenceFeatures], budget: Budget, on_step: OnStep = lambda step, total, loss: None
    ) -> TrainingProgress:
        """Trains until the budget is used, with as many passes over the data as that takes.

        Returns the progress at the end. Raises ValueError if there is nothing to learn from. Raises FloatingPointError for a
        loss or gradient that is not finite, and leaves the head as it was before that step.
        """
        progress = self.progress
        batches = self._batches(sequences)
        while (used_share := budget.used_share(progress)) < 1.0:
            started = time.perf_counter()
            pieces = next(batches)
            loss = self._step(sequences, pieces, used_share)
            progress.steps += 1
            progress.batches_of_epoch += 1
            progress.tokens += sum(piece.num_rows for piece in pieces)
            progress.seconds += time.perf_counter() - started
            on_step(progress.steps, round(progress.steps / budget.used_share(progress)), loss)
        self.progress = TrainingProgress()
        return progress

    def save(self, path: Path) -> None:
        """Replaces the file `path` by the trainer's whole state."""
        state = {
            "settings": asdict(self.settings),
            "learned": {name: p.detach().cpu() for name, p in self.head.learned().items()},
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self.num_steps,
            "run": asdict(self.progress),
        }
        with replacing_file(path) as temporary:
            torch.save(state, temporary)

    def load(self, path: Path) -> None:
        """Restores what `save` wrote. Raises ValueError if the state has other settings."""
        state = torch.load(path, map_location=self.head.device, weights_only=True)
        for name, mine in asdict(self.settings).items():
            if (other := state["settings"].get(name)) != mine:
                raise ValueError(f"{path}: its {name} is {other!r}, not {mine!r}; start again")
        for name, parameter in self.head.learned().items():
            parameter.data.copy_(state["learned"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        self.progress = TrainingProgress(**state["run"])

    def _batches(self, sequences: Sequence[SequenceFeatures]) -> Iterator[list[Piece]]:
        """Yields batches without end, from the current place in the data."""
        lengths = [s.num_tokens for s in sequences]
        if max(lengths, default=0) < 3:
            raise ValueError(f"{len(lengths)} sequences, none of three tokens: nothing to learn from")
        progress = self.progress
        while True:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + progress.epoch)
            yield from plan_batches(lengths, self.settings.batch_tokens, generator)[progress.batches_of_epoch :]
            progress.epoch = progress.epoch + 1
            progress.batches_of_epoch = 0

    def _step(self, sequences: Sequence[SequenceFeatures], pieces: list[Piece], used_share: float) -> float:
        """Takes an optimizer step at `used_share` of the budget, and returns its loss."""
        loss = self._loss(sequences, pieces, "tv" if used_share >= self.settings.tv_after else self.settings.loss)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm).item()
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"step {self.num_steps + 1}: loss {value}, gradient norm {norm}; not taken")
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(used_share)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return value

    def _loss(self, sequences: Sequence[SequenceFeatures], pieces: list[Piece], loss: str) -> torch.Tensor:
        """Returns the loss of the training forward of `speculators`."""
        settings = self.settings
        device = self.head.device
        # Compiled kernels on a GPU need batches of one shape. On a CPU, a batch needs a row per draft position.
        num_rows = settings.batch_tokens if self._is_cuda else settings.ttt_steps
        batch = pack(sequences, pieces, settings.ttt_steps, num_rows)
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        config = resolve_loss_config(loss, "fused" if self._is_cuda else "eager")
        with torch.autocast(device.type, torch.bfloat16, enabled=self._uses_bfloat16):
            return self.head.model(**batch, ttt_steps=settings.ttt_steps, loss_config=config)[1]

    def _learning_rate(self, used_share: float) -> float:
        settings = self.settings
        warmup = min(1.0, (self.progress.steps + 1) / (settings.warmup_steps + 1))
        decay = 1.0 if settings.schedule == "constant" else 0.1 + 0.45 * (1.0 + math.cos(math.pi * used_share))
        return settings.learning_rate * warmup * decay
