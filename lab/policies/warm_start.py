# SPDX-License-Identifier: Apache-2.0
"""Trains the small policy that the demo's RL run starts from, and measures it.

`python -m lab.policies.warm_start --out DIR` trains on worked responses and saves a Hugging Face folder. `python -m
lab.policies.warm_start --evaluate DIR` samples at temperature 1 and prints how well the policy does.

The number of steps is fixed, and not the time, so that the same seed and number of threads give the same policy. Training
stops before the task is mastered, because RL needs something left to learn.

Shapes: B requests, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lab.local.step_addition import build_tokenizer
from lab.policies.warm_start_data import BATCH_TOKENS, DEFAULT_STEPS, IGNORED, WarmStart, make_batches
from lab.policies.warm_start_evaluation import Evaluation, evaluate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


@dataclass(frozen=True)
class PolicyShape:
    """Sizes of a Qwen3 model."""

    hidden: int
    layers: int


SHIPPED = PolicyShape(hidden=256, layers=4)


def main() -> None:
    args = _parse_args()
    if args.evaluate is not None:
        model, tokenizer = load(args.evaluate)
        Console().print(asdict(evaluate(model, tokenizer, args.samples)))
        return
    settings = WarmStart(steps=args.steps, seed=args.seed)
    run(settings, args.out, args.samples, PolicyShape(args.hidden, args.layers))


def run(settings: WarmStart, out: Path, num_samples: int, shape: PolicyShape = SHIPPED) -> None:
    """Trains a policy, measures it, and saves it to `out` with a card.

    An earlier policy in `out` is replaced only once everything is written.
    """
    if out.exists() and not (out / "card.json").exists():
        raise ValueError(f"out is {out}, which holds something else than a warm start; name another folder")
    started = time.monotonic()
    model = build_model(settings.seed, shape)
    tokenizer = build_tokenizer()
    loss = train(model, tokenizer, settings)
    seconds = time.monotonic() - started
    model = model.bfloat16().float()  # measure the rounded weights that are shipped
    measured = evaluate(model, tokenizer, num_samples)
    card = build_card(settings, shape, loss, seconds, measured)
    save(model, tokenizer, card, out)
    Console().print(card)


def build_model(seed: int, shape: PolicyShape = SHIPPED) -> Qwen3ForCausalLM:
    """Returns a float32 Qwen3 model initialised from `seed`. With the shipped shape it has about 3 million parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> float:
    """Trains the model in place, with a loss on response tokens only.

    Returns the mean weighted loss of the last tenth of the steps, in nats per token.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, settings.steps, settings.warm_up_steps)
    )
    batches = make_batches(tokenizer, settings)
    weight_V = token_weights(tokenizer, settings.digit_weight)
    losses: list[float] = []
    model.train()
    with training_progress() as progress:
        bar = progress.add_task("warm start", total=settings.steps, loss=math.nan)
        for _ in range(settings.steps):
            loss = training_loss(model, *next(batches), weight_V)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(bar, advance=1, loss=sum(losses[-50:]) / len(losses[-50:]))
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def learning_rate_factor(step: int, num_steps: int, num_warm_up: int) -> float:
    """Returns a factor on the learning rate. It grows linearly to 1 during warm-up, then falls by half a cosine to 0."""
    if step < num_warm_up:
        return (step + 1) / num_warm_up
    rest = max(1, num_steps - num_warm_up)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - num_warm_up) / rest)))


def token_weights(tokenizer: PreTrainedTokenizerFast, digit_weight: float) -> torch.Tensor:
    """Returns the weight of each token in the loss, [V], which is `digit_weight` for digits and 1 for all others."""
    weight_V = torch.ones(len(tokenizer))
    weight_V[tokenizer.convert_tokens_to_ids(list("0123456789"))] = digit_weight
    return weight_V


def training_loss(
    model: Qwen3ForCausalLM, ids_BT: torch.Tensor, labels_BT: torch.Tensor, weight_V: torch.Tensor
) -> torch.Tensor:
    """Returns the weighted mean cross-entropy over response tokens. Padding is on the right, so the causal mask hides it."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), weight_V, ignore_index=IGNORED)


def build_card(
    settings: WarmStart, shape: PolicyShape, loss: float, seconds: float, measured: Evaluation
) -> dict[str, object]:
    """Returns a checkpoint's card, which says how the checkpoint was made and how well it does."""
    import transformers

    command = f"python -m lab.policies.warm_start --out DIR --steps {settings.steps} --seed {settings.seed}"
    if shape != SHIPPED:
        command += f" --hidden {shape.hidden} --layers {shape.layers}"
    return {
        "command": command,
        "settings": asdict(settings),
        "batch_tokens": BATCH_TOKENS,
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 1),
        "loss": round(loss, 4),
        "measured": asdict(measured),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, card: dict[str, object], out: Path) -> None:
    """Writes a Hugging Face folder in bfloat16 beside `out`, then moves it there, so that `out` is never half written."""
    from transformers import GenerationConfig

    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    folder.chmod(0o755)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(folder, out)


def load(folder: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Returns a saved policy in float32 and its tokenizer. Raises ValueError if `folder` has none."""
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    if not (folder / "config.json").is_file():
        raise ValueError(f"evaluate is {folder}, which has no config.json; name a folder that warm_start wrote")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


def training_progress(console: Console | None = None) -> Progress:
    """Returns a progress bar of training steps, whose task has a field `loss`."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train or measure the demo's starting policy.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="folder to write the policy to")
    action.add_argument("--evaluate", type=Path, help="folder of a policy to measure")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="training steps (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and problems (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=SHIPPED.hidden, help="hidden size (default %(default)s)")
    parser.add_argument("--layers", type=int, default=SHIPPED.layers, help="layers (default %(default)s)")
    parser.add_argument("--samples", type=int, default=512, help="problems to measure on (default %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
