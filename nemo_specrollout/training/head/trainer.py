# SPDX-License-Identifier: Apache-2.0
"""Trains a draft head on features of the policy: training-time test, as in EAGLE-3 (Li et al., arXiv 2503.01840)."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from speculators.losses.utils import LossConfig, resolve_loss_config

from nemo_specrollout.config.draft_refresh import MIXED_LOSS
from nemo_specrollout.training.features.features import SequenceFeatures
from nemo_specrollout.training.head.draft_forward import row_loss, training_loss
from nemo_specrollout.training.head.head import DraftHead
from nemo_specrollout.training.head.packing import PackedBatch, Piece, pack, plan_batches

OnStep = Callable[[int, int, float], None]
"""Told the step, the (estimated) total of steps, and the loss."""


BATCH_TOKENS = {"cpu": 256, "cuda": 4096}
"""Rows of a packed batch by device: dense attention masks make long ones slow on a CPU."""
BFLOAT16_HIDDEN = 512
"""Hidden size from which a CPU with matrix units for bfloat16 trains faster with them; smaller heads lose by converting."""
TV = "tv"


def default_learning_rate(hidden_size: int) -> float:
    """3e-3 up to a hidden size of 256, measured there; then falling as a power of it, to the usual 1e-4 at 4096."""
    return 3e-3 * min(1.0, (256 / hidden_size) ** 1.227)


@dataclass(frozen=True)
class TrainingSettings:
    """How a head learns."""

    loss: str = MIXED_LOSS
    """A loss of `speculators` by name, or JSON of several with weights. TV is what acceptance depends on, but alone it
    barely moves a head that knows nothing; the divergence beside it does."""
    tv_after: float = 1.0
    """Share of a run after which the loss is total variation alone (Bebop, arXiv 2606.12370); 1 is never."""
    learning_rate: float = 3e-3
    """After warm-up. Found for a hidden size of 256; larger heads want less (1e-4 is usual at 4096)."""
    schedule: str = "cosine"
    """`cosine`: falls to a tenth at the end of the budget; or `constant`."""
    warmup_steps: int = 20
    """Steps of a run over which the rate rises linearly from 0."""
    ttt_steps: int = 5
    """Draft positions that are trained: how often the head runs on its own hidden states."""
    step_decay: float = 1.0
    """Each further position weighs this much of the one before."""
    batch_tokens: int = 256
    """Rows of a packed batch; longer sequences are cut. On a CPU a row's cost grows with it (dense attention masks), and
    many small steps learn more."""
    weight_decay: float = 0.0
    """AdamW's."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm."""
    train_lm_head: bool = True
    """False: the head's LM head stays as it is."""
    seed: int = 0
    """Decides the batches and their order."""

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
    """When a run ends: at whichever comes first. Only without `seconds` is a run the same each time."""

    steps: int | None = None
    tokens: int | None = None
    """Rows that were trained on, prompts included."""
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if nothing ends the run."""
        limits = (self.steps, self.tokens, self.seconds)
        if all(limit is None for limit in limits) or any(limit is not None and limit <= 0 for limit in limits):
            raise ValueError(f"{self}: give a positive number of steps, tokens or seconds")


@dataclass
class RunCounts:
    """What a run did so far, and where it is in its data."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    batches_of_epoch: int = 0

    def progress(self, budget: Budget) -> float:
        """Share of the budget that is used, 1 at the end."""
        pairs = ((self.steps, budget.steps), (self.tokens, budget.tokens), (self.seconds, budget.seconds))
        return min(1.0, max(used / limit for used, limit in pairs if limit is not None))


@dataclass(frozen=True)
class TrainingResult:
    """Of a run; `mean_loss` is over its last steps, a tenth of all."""

    steps: int
    tokens: int
    seconds: float
    mean_loss: float


@dataclass
class _Losses:
    values: list[float] = field(default_factory=list)

    def recent_mean(self) -> float:
        recent = self.values[-max(1, len(self.values) // 10) :]
        return sum(recent) / len(recent) if recent else math.nan


class HeadTrainer:
    """Owns a head while it learns: the optimizer, the number of steps, the order of the data.

    States: idle, or within a run. A run is one budget on one list of sequences; the optimizer outlives it. A trainer
    whose state was saved within a run goes on with that run, bit for bit, if `train` is called with the same data and
    budget. Invariant: the policy's tensors never change and never get a gradient. Example:

        trainer = HeadTrainer(head, TrainingSettings())
        trainer.train(sequences, Budget(steps=500))
    """

    def __init__(self, head: DraftHead, settings: TrainingSettings) -> None:
        self.head, self.settings = head, settings
        self.num_steps = 0
        self._run = RunCounts()
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
        """Trains until the budget is used, going through the data as often as it takes.

        Raises ValueError if there is nothing to learn from, FloatingPointError for a loss or gradient that is not
        finite; the head is then as it was before that step.
        """
        losses, run = _Losses(), self._run
        batches = self._batches(sequences)
        while run.progress(budget) < 1.0:
            started = time.perf_counter()
            pieces = next(batches)
            losses.values.append(self._step(sequences, pieces, run.progress(budget)))
            run.steps += 1
            run.batches_of_epoch += 1
            run.tokens += sum(piece.num_rows for piece in pieces)
            run.seconds += time.perf_counter() - started
            on_step(run.steps, round(run.steps / run.progress(budget)), losses.values[-1])
        self._run = RunCounts()
        return TrainingResult(run.steps, run.tokens, run.seconds, losses.recent_mean())

    @property
    def run_tokens(self) -> int:
        """Rows that the run under way has trained on."""
        return self._run.tokens

    def save(self, path: Path) -> None:
        """Writes all of the state to the file `path`, whole or not at all."""
        state = {
            "settings": asdict(self.settings),
            "learned": {name: p.detach().cpu() for name, p in self.head.learned().items()},
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self.num_steps,
            "run": asdict(self._run),
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            torch.save(state, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Takes over the state that `save` wrote. Raises ValueError if it is of other settings or another head."""
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
        self.num_steps, self._run = state["num_steps"], RunCounts(**state["run"])

    def _batches(self, sequences: Sequence[SequenceFeatures]) -> Iterator[list[Piece]]:
        """From where the run is, without end."""
        lengths = [s.num_tokens for s in sequences]
        if max(lengths, default=0) < 3:
            raise ValueError(f"{len(lengths)} sequences, none of three tokens: nothing to learn from")
        run = self._run
        while True:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + run.epoch)
            yield from plan_batches(lengths, self.settings.batch_tokens, generator)[run.batches_of_epoch :]
            run.epoch, run.batches_of_epoch = run.epoch + 1, 0

    def _step(self, sequences: Sequence[SequenceFeatures], pieces: list[Piece], progress: float) -> float:
        """One optimizer step; its loss."""
        settings, device = self.settings, self.head.device
        is_cuda = device.type == "cuda"
        # On a GPU every batch has the same shape, for compiled kernels.
        batch = pack(sequences, pieces, settings.ttt_steps, settings.batch_tokens if is_cuda else None).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda or self._has_fast_bfloat16()):
            loss = self._loss(batch, self._losses[progress >= settings.tv_after])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, settings.max_grad_norm)
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm.item())):
            self._optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"step {self.num_steps + 1}: loss {value}, gradient norm {norm.item()}; not taken")
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(progress)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return value

    def _loss(self, batch: PackedBatch, loss_config: LossConfig) -> torch.Tensor:
        """The same number on any device: `speculators` has fused kernels for a GPU, this package less work for a CPU."""
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

    def _learning_rate(self, progress: float) -> float:
        settings = self.settings
        warm = min(1.0, (self._run.steps + 1) / (settings.warmup_steps + 1))
        fall = 1.0 if settings.schedule == "constant" else 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))
        return settings.learning_rate * warm * fall
