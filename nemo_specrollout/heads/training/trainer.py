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
"""Function that is called after each training step with the number of the step, the total number of steps and the loss. If the
training is limited in seconds, the total is an estimate."""

BATCH_TOKENS = {"cpu": 256, "cuda": 4096}
"""Default number of rows of a packed batch, by device type. It is small for a CPU, because dense attention masks make long
batches slow there."""
BFLOAT16_HIDDEN = 512
"""Smallest hidden size at which a CPU with bfloat16 matrix units trains faster in bfloat16 than in float32. Smaller heads do
not repay the time for converting weights and activations."""


def default_learning_rate(hidden_size: int) -> float:
    """Returns the default learning rate of a new head.

    It is 3e-3 up to a hidden size of 256, for which this value was measured. Above 256 it falls by a power law, and at 4096 it
    is 1e-4, which is usual there.
    """
    return 3e-3 * min(1.0, (256 / hidden_size) ** 1.227)


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of the training of a head. Raises ValueError for an unknown loss."""

    loss: str = MIXED_LOSS
    """Name of a loss function of `speculators`, or JSON with the weights of several. The acceptance rate depends on the total
    variation distance between head and policy. But this distance alone gives an untrained head almost no gradient, so the
    default adds a divergence to it."""
    tv_after: float = 1.0
    """Share of the training after which the loss is the total variation distance alone (Bebop, arXiv 2606.12370). 1 means
    never."""
    learning_rate: float = 3e-3
    """Learning rate after warm-up. For hidden sizes other than 256, see `default_learning_rate`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rate changes after the warm-up. With `cosine`, it falls to a tenth until the end of the training."""
    warmup_steps: int = 20
    """Number of training steps over which the learning rate rises linearly from 0."""
    ttt_steps: int = 5
    """Number of draft positions that are trained. From the second position on, the head reads its own hidden states instead of
    the policy's."""
    batch_tokens: int = 256
    """Maximum number of rows of a packed batch. A row is one token of a sequence with its states. Longer sequences are cut
    into pieces."""
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        resolve_loss_config(self.loss, "eager")


@dataclass
class TrainingProgress:
    """How far a training has come, and which part of the data it has used."""

    steps: int = 0
    tokens: int = 0
    """Number of tokens that were trained on, including those of prompts."""
    seconds: float = 0.0
    epoch: int = 0
    """Number of complete passes over the data."""
    batches_of_epoch: int = 0
    """Number of batches that were trained on in the current pass over the data."""


@dataclass(frozen=True)
class Budget:
    """Length of a training, in steps or in seconds. A training of a given number of seconds cannot be repeated exactly."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        assert (self.steps is None) != (self.seconds is None) and (self.steps or self.seconds or 0) > 0

    def used_share(self, progress: TrainingProgress) -> float:
        """Returns which share of its length a training has completed, from 0 to 1."""
        if self.steps is not None:
            return min(1.0, progress.steps / self.steps)
        assert self.seconds is not None
        return min(1.0, progress.seconds / self.seconds)


class HeadTrainer:
    """Trains a head. Owns the head, the optimizer, and the place in the data, until training ends.

    `save` writes the whole state to a file. After `load`, the next `train` continues from that state. If the data and the
    number of steps are the same, the result is equal, bit for bit, to that of a training without interruption. Example:
    `HeadTrainer(head, TrainingSettings()).train(sequences, Budget(steps=500))`.
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
        """Trains the head for as long as `budget` says, in as many passes over the data as are needed.

        Returns the progress at the end. Calls `on_step` after each step. Raises ValueError if no sequence is long enough to
        learn from. Raises FloatingPointError for a loss or gradient that is not finite, and then leaves the head as it was
        before that step.
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
        """Writes the whole state of the trainer to the file `path`, and replaces a file that is there."""
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
        """Restores the state that `save` wrote to `path`. Raises ValueError if it was saved with other settings."""
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
        """Yields the batches of the training without end, each as a list of its pieces.

        The first one is the batch at which `progress` stands, so that a resumed training continues there. Raises ValueError if
        no sequence has three tokens.
        """
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
        """Takes one optimizer step on a batch of `pieces`, and returns its loss.

        `used_share` is the share of the training that is completed.
        """
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
        """Returns the loss of a batch of `pieces`, from the training forward pass of `speculators`.

        `loss` names the loss function.
        """
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
