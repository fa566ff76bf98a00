# SPDX-License-Identifier: Apache-2.0
"""Trains the supervised start of the real model (SmolLM2), which teaches it the form of worked solutions.

The start is a low-rank change of the weights. The model learns from solutions that are written by rule
(`worked_solutions.py`), and from texts of its own, so that it does not forget how to write.

    python -m lab.policies.smollm2_start --base models/smollm2 --out examples/models/smollm2_start

`make smollm2` adds the file that this command writes to the converted model.

Shapes: B sequences of a batch, T positions.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from lab.local.run_sections import TaskConfig
from lab.local.step_rollout import load_tokenizer
from lab.local.tasks import FreeText, ReasoningGymTask
from lab.policies.low_rank import add_low_rank, save_low_rank
from lab.policies.smollm2 import CHANGE
from lab.policies.warm_start import learning_rate_factor, token_weights, training_progress
from lab.policies.warm_start_data import IGNORED, Example, cut_batches, pad_batch
from lab.policies.worked_solutions import worked_solution
from nemo_specrollout.generation.engine.arguments import set_process_environment

TASKS = (
    TaskConfig("chain_sum", 1.0, {"min_terms": 2, "max_terms": 12, "max_digits": 2}),
    TaskConfig("leg_counting", 1.0, {"max_animals": 10}),
    TaskConfig("number_sorting", 0.3, {"max_numbers": 8, "max_decimals": 0}),
)
SYSTEM_PROMPT = "simple"
OWN_TEXTS, OWN_TEXT_TOKENS, OWN_TEXT_TEMPERATURE = 384, 256, 0.7
"""Number of the model's own texts that it learns from, their largest number of tokens, and their sampling temperature."""
OWN_TEXT_RATE = 0.12
"""Share of the examples that are the model's own texts."""
POOL = 256
"""Number of examples that are sorted by length before they are divided into batches, so that batches have little padding."""


@dataclass(frozen=True)
class StartSettings:
    """Settings of the training that makes SmolLM2's supervised start."""

    steps: int = 700
    seed: int = 0
    rank: int = 16
    learning_rate: float = 2e-3
    warm_up_steps: int = 30
    batch_tokens: int = 2048
    """Number of positions in a batch, including padding."""
    max_grad_norm: float = 1.0
    digit_weight: float = 3.0
    """Weight of a digit in the loss, relative to any other token, because digits are the hard part."""


def own_texts(base: Path, seed: int) -> list[Example]:
    """Returns texts that the model writes before its supervised start, each as token ids with the length of its prompt."""
    from lab.local.engine import RolloutEngine
    from lab.local.run_sections import GenerationConfig, VllmConfig
    from nemo_specrollout.config.block import SpecrolloutConfig
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    task = FreeText(load_tokenizer(base))
    prompts = [task.encode(problem) for problem in task.problems(seed, OWN_TEXTS)]
    generation = GenerationConfig(
        VllmConfig(max_model_len=512, precision="bfloat16"),
        OWN_TEXT_TOKENS,
        OWN_TEXT_TEMPERATURE,
        vllm_kwargs={"kv_cache_memory_bytes": 1 << 29},
        specrollout=SpecrolloutConfig(drafters=()),
    )
    engine = RolloutEngine(base, generation, seed)
    try:
        rollouts = engine.generate([RolloutRequest(ids, i, 0) for i, ids in enumerate(prompts)])
    finally:
        engine.close()
    return [([*ids, *rollout.token_ids], len(ids)) for ids, rollout in zip(prompts, rollouts, strict=True)]


def batches(
    task: ReasoningGymTask, texts: list[Example], tokenizer: Any, settings: StartSettings
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields an endless sequence of batches (ids_BT, labels_BT), padded on the right. Prompts and padding have no labels."""
    rng = random.Random(f"start-{settings.seed}")
    for pool in itertools.count():
        problems = task.problems(settings.seed, POOL, pool * POOL)
        examples: list[Example] = [rng.choice(texts) for _ in range(round(POOL * OWN_TEXT_RATE))]
        for index, problem in enumerate(problems[len(examples) :], pool * POOL):
            text = worked_solution(problem.entry, random.Random(f"solution-{settings.seed}-{index}"))
            prompt = task.encode(problem)
            response = tokenizer(text, add_special_tokens=False)["input_ids"]
            examples.append(([*prompt, *response, tokenizer.eos_token_id], len(prompt)))
        cut = cut_batches(examples, settings.batch_tokens)
        rng.shuffle(cut)
        for batch in cut:
            yield pad_batch(batch, tokenizer.pad_token_id)


def loss_of(model: Any, ids_BT: Tensor, labels_BT: Tensor, weight_V: Tensor) -> Tensor:
    """Returns the weighted mean cross-entropy over response tokens, in nats.

    Logits are computed only where there is a label.
    """
    hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
    labelled_BT = labels_BT[:, 1:] != IGNORED
    logits = model.lm_head(hidden_BTH[labelled_BT]).float()
    return F.cross_entropy(logits, labels_BT[:, 1:][labelled_BT], weight_V)


def train(base: Path, out: Path, settings: StartSettings, console: Console) -> None:
    """Trains the low-rank change of the weights, and writes it with a card to `out`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with console.status("writing texts of its own"):
        texts = own_texts(base, settings.seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    layers = add_low_rank(model, settings.rank, settings.seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    weight_V = token_weights(tokenizer, settings.digit_weight)
    source = batches(ReasoningGymTask(tokenizer, TASKS, SYSTEM_PROMPT), texts, tokenizer, settings)
    losses: list[float] = []
    num_tokens = 0
    started = time.monotonic()
    model.train()
    with training_progress(console) as progress:
        bar = progress.add_task("supervised start", total=settings.steps, loss=math.nan)
        for step in range(settings.steps):
            ids_BT, labels_BT = next(source)
            loss = loss_of(model, ids_BT, labels_BT, weight_V)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * learning_rate_factor(
                    step, settings.steps, settings.warm_up_steps
                )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            num_tokens += ids_BT.numel()
            progress.update(bar, advance=1, loss=sum(losses[-20:]) / len(losses[-20:]))
            if (step + 1) % 50 == 0:
                seconds = time.monotonic() - started
                console.print(
                    f"step {step + 1}: loss {sum(losses[-50:]) / 50:.4f}, {num_tokens} tokens, {seconds:.0f} s"
                )
    out.mkdir(parents=True, exist_ok=True)
    save_low_rank(layers, out / CHANGE)
    card = {
        "command": "python -m lab.policies.smollm2_start --base models/smollm2 --out DIR",
        "settings": asdict(settings),
        "tasks": [asdict(t) for t in TASKS],
        "system_prompt": SYSTEM_PROMPT,
        "tokens": num_tokens,
        "seconds": round(time.monotonic() - started),
        "threads": torch.get_num_threads(),
        "loss": round(sum(losses[-50:]) / len(losses[-50:]), 4),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description="Train the low-rank change of the supervised start.")
    parser.add_argument("--base", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=StartSettings.steps)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_process_environment()  # before vLLM is imported
    train(args.base, args.out, StartSettings(steps=args.steps, seed=args.seed), Console(highlight=False))


if __name__ == "__main__":
    main()
