# SPDX-License-Identifier: Apache-2.0
"""Distils a small draft model, which is a few layers of a policy, trained until they sample what the policy samples.

    python -m lab.policies.distilled_draft --base models/smollm2_start --layers 4 --out models/smollm2_draft

The draft model begins as some layers of the policy. It also has the policy's embedding and LM head, which are not trained. It
learns on texts that the policy sampled at temperature 1. The loss has two halves. The first is the distance of the draft
model's last state from the policy's at each position. The second is the divergence between the two models' distributions over
the vocabulary. The divergence is computed at a share of the positions only, because a small draft model spends most of its
time on the LM head.

Everything is in bfloat16 except the trained weights. This is 2.5 times as fast as float32 on a CPU with AVX512-BF16. The
folder is written after every few hundred steps, so a training that is stopped leaves a usable draft model.

Shapes: B texts of a batch, T positions, N response positions, V vocabulary, H hidden size, K draft positions.
"""

import argparse
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from lab.local.run_sections import TaskConfig
from lab.local.step_rollout import load_tokenizer
from lab.local.tasks import FreeText, ReasoningGymTask, Task
from lab.policies.warm_start import learning_rate_factor, training_progress
from lab.policies.warm_start_data import Example, cut_batches, pad_batch
from nemo_specrollout.generation.engine.arguments import set_process_environment

TASKS = (
    TaskConfig("chain_sum", 1.0, {"min_terms": 2, "max_terms": 12, "max_digits": 2}),
    TaskConfig("leg_counting", 1.0, {"max_animals": 12}),
    TaskConfig("number_sorting", 0.5, {"max_numbers": 12, "max_decimals": 0}),
)
"""The tasks of `examples/configs/smollm2_cpu.yaml`."""
SYSTEM_PROMPT = "simple"
TEXTS = "texts.json"
TEXT_TOKENS, SAMPLED_AT_ONCE = 256, 64
HELD_OUT = 32
"""Number of texts at the end of the list that are never trained on."""
NUM_POSITIONS = 8
"""Number of draft positions whose acceptance is measured."""


@dataclass(frozen=True)
class DraftSettings:
    """Settings that determine the draft model."""

    layers: int = 4
    steps: int = 1200
    seed: int = 0
    texts: int = 512
    """Number of texts that the policy samples, alternately for tasks and for free text."""
    learning_rate: float = 1e-3
    warm_up_steps: int = 30
    batch_tokens: int = 1024
    """Number of positions in a batch, including padding."""
    head_share: float = 0.25
    """Share of the response positions at which the distributions of both models are compared."""
    state_weight: float = 1.0
    """Weight in the loss of the distance between the last layers' states. The divergence in nats has the weight 1."""
    max_grad_norm: float = 1.0


# Texts


def own_texts(base: Path, settings: DraftSettings) -> list[Example]:
    """Returns texts that the policy samples at temperature 1, each as token ids with the length of its prompt."""
    from lab.local.engine import RolloutEngine
    from lab.local.run_sections import GenerationConfig, VllmConfig
    from nemo_specrollout.config.block import SpecrolloutConfig
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    tokenizer = load_tokenizer(base)
    tasks: tuple[Task, ...] = (ReasoningGymTask(tokenizer, TASKS, SYSTEM_PROMPT), FreeText(tokenizer))
    lists = [[task.encode(p) for p in task.problems(settings.seed, -(-settings.texts // 2))] for task in tasks]
    prompts = [prompt for pair in zip(*lists, strict=True) for prompt in pair][: settings.texts]
    generation = GenerationConfig(
        VllmConfig(max_model_len=1024, precision="bfloat16"),
        TEXT_TOKENS,
        1.0,
        vllm_kwargs={"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": SAMPLED_AT_ONCE, "block_size": 32},
        specrollout=SpecrolloutConfig(drafters=()),
    )
    engine = RolloutEngine(base, generation, settings.seed)
    try:
        rollouts = engine.generate([RolloutRequest(ids, i, 0) for i, ids in enumerate(prompts)])
    finally:
        engine.close()
    return [([*ids, *rollout.token_ids], len(ids)) for ids, rollout in zip(prompts, rollouts, strict=True)]


def stored_texts(base: Path, out: Path, settings: DraftSettings) -> list[Example]:
    """Returns the texts to train on.

    They are read from `out` if it has texts of the same policy, seed and number. Otherwise they are made and stored there.
    """
    key = {"base": str(base), "seed": settings.seed, "texts": settings.texts, "tokens": TEXT_TOKENS}
    path = out / TEXTS
    if path.is_file():
        found = json.loads(path.read_text())
        if found["key"] == key:
            return [(ids, prompt_length) for ids, prompt_length in found["texts"]]
    texts = own_texts(base, settings)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": key, "texts": texts}))
    return texts


def batches(texts: Sequence[Example], settings: DraftSettings) -> Iterator[list[int]]:
    """Yields batches without end, each as the indices of its texts in `texts`. Each epoch has every text once."""
    rng = random.Random(f"draft-{settings.seed}")
    while True:
        # Random tokens are added to the lengths, so that every epoch has other batches.
        keyed = [([0] * (len(ids) + rng.randrange(24)), i) for i, (ids, _) in enumerate(texts)]
        cut = cut_batches(keyed, settings.batch_tokens)
        rng.shuffle(cut)
        for batch in cut:
            yield [i for _, i in batch]


# Models


def start_of(policy: Any, num_layers: int) -> Any:
    """Returns the draft model before training, in float32. It has `num_layers` layers of the policy.

    It also has the policy's embedding and head, which are frozen.
    """
    from transformers import AutoModelForCausalLM

    config = type(policy.config).from_dict(policy.config.to_dict() | {"num_hidden_layers": num_layers})
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    kept = kept_layers(policy.config.num_hidden_layers, num_layers)
    tensors = {}
    for name, tensor in policy.state_dict().items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if int(parts[2]) not in kept:
                continue
            parts[2] = str(kept.index(int(parts[2])))
        tensors[".".join(parts)] = tensor.float()
    draft.load_state_dict(tensors)
    draft.tie_weights()
    draft.requires_grad_(False)
    draft.model.layers.requires_grad_(True)
    draft.model.norm.requires_grad_(True)
    return draft


def kept_layers(num_policy: int, num_draft: int) -> list[int]:
    """Returns the indices of the policy's layers of which the untrained draft model consists.

    They are spread evenly from the first layer to the last. With SmolLM2-135M, the loss falls faster from these layers than
    from the lowest ones or from those at both ends.
    """
    if not 1 <= num_draft <= num_policy:
        raise ValueError(f"layers is {num_draft}, but the policy has {num_policy}; choose 1 to {num_policy}")
    return [round(i * (num_policy - 1) / max(1, num_draft - 1)) for i in range(num_draft)]


def states_of(model: Any, texts: Sequence[Example]) -> Tensor:
    """Returns a model's states after the last norm, [N, H], one for each response token of the texts in their order.

    The state of a token is the one from which the model predicts this token.
    """
    ids_BT, _ = pad_batch(texts, 0)
    hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    rows = zip(hidden_BTH, texts, strict=True)
    return torch.cat([hidden_TH[start - 1 : len(ids) - 1] for hidden_TH, (ids, start) in rows])


class PolicyStates:
    """The policy's last states on each text. They are computed when a text is first used, and kept in bfloat16."""

    def __init__(self, policy: Any, texts: Sequence[Example]) -> None:
        self._policy = policy
        self._texts = texts
        self._states: dict[int, Tensor] = {}

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """Returns the policy's last states on the texts with the indices `numbers`, [N, H], as `states_of` does."""
        new = [i for i in numbers if i not in self._states]
        if new:
            texts = [self._texts[i] for i in new]
            with torch.inference_mode():
                found = states_of(self._policy, texts).bfloat16()
            lengths = [len(ids) - start for ids, start in texts]
            self._states.update({i: s.clone() for i, s in zip(new, found.split(lengths), strict=True)})
        return torch.cat([self._states[i] for i in numbers]).clone()


# Training


def loss_of(draft: Any, texts: Sequence[Example], wanted_NH: Tensor, settings: DraftSettings, seed: int) -> Tensor:
    """Returns the scalar loss of one batch. `wanted_NH` are the policy's states.

    `seed` determines the positions at which the distributions of both models are compared.
    """
    with torch.autocast("cpu", torch.bfloat16):
        state_NH = states_of(draft, texts)
        generator = torch.Generator().manual_seed(seed)
        chosen_N = torch.rand(len(state_NH), generator=generator) < settings.head_share
        head_VH = draft.lm_head.weight.detach().bfloat16()
        draft_logits = F.linear(state_NH[chosen_N].bfloat16(), head_VH)
        with torch.no_grad():
            policy_logits = F.linear(wanted_NH[chosen_N], head_VH)
    wanted_log = policy_logits.float().log_softmax(-1)
    divergence = F.kl_div(draft_logits.float().log_softmax(-1), wanted_log, log_target=True, reduction="batchmean")
    wanted = wanted_NH.float()
    distance = (state_NH.float() - wanted).square().mean() / wanted.square().mean()
    return divergence + settings.state_weight * distance


def train(base: Path, out: Path, settings: DraftSettings, save_every: int, console: Console) -> None:
    """Trains the draft model, and writes it with a card to `out` after every `save_every` steps and at the end."""
    from transformers import AutoModelForCausalLM

    with console.status("the policy samples texts"):
        texts = stored_texts(base, out, settings)
    policy: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    torch.manual_seed(settings.seed)
    draft = start_of(policy, settings.layers)
    trained, held_out = texts[:-HELD_OUT], texts[-HELD_OUT:]
    states = PolicyStates(policy, trained)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, settings.learning_rate, (0.9, 0.98), weight_decay=0.01, fused=True)
    source = batches(trained, settings)
    losses: list[float] = []
    num_tokens, started = 0, time.monotonic()
    with training_progress(console) as progress:
        bar = progress.add_task("draft model", total=settings.steps, loss=math.nan)
        for step in range(settings.steps):
            numbers = next(source)
            batch = [trained[i] for i in numbers]
            loss = loss_of(draft, batch, states(numbers), settings, step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
            for group in optimizer.param_groups:
                factor = learning_rate_factor(step, settings.steps, settings.warm_up_steps)
                group["lr"] = settings.learning_rate * factor
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            num_tokens += sum(len(ids) for ids, _ in batch)
            progress.update(bar, advance=1, loss=sum(losses[-20:]) / len(losses[-20:]))
            if (step + 1) % save_every == 0 or step + 1 == settings.steps:
                card = {
                    "command": f"python -m lab.policies.distilled_draft --base {base} --layers {settings.layers} --out DIR",
                    "settings": asdict(settings),
                    "steps": step + 1,
                    "tokens": num_tokens,
                    "seconds": round(time.monotonic() - started),
                    "threads": torch.get_num_threads(),
                    "loss": round(sum(losses[-50:]) / len(losses[-50:]), 4),
                    "acceptance": acceptance(policy, draft, held_out, settings.seed),
                }
                save(draft, base, card, out)
                console.print(
                    f"step {step + 1}: loss {card['loss']}, {num_tokens} tokens, {card['seconds']} s, "
                    f"acceptance {card['acceptance']}"
                )


def save(draft: Any, base: Path, card: dict[str, Any], out: Path) -> None:
    """Writes the draft model as a Hugging Face folder in bfloat16, with the policy's tokenizer.

    `out` is never left half written.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    folder.chmod(0o755)
    state = {name: tensor.bfloat16() for name, tensor in draft.state_dict().items()}
    draft.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2, sort_keys=True) + "\n")
    for file in base.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not (folder / file.name).exists():
            shutil.copy(file, folder / file.name)
    if (out / TEXTS).is_file():
        shutil.copy(out / TEXTS, folder / TEXTS)
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(folder, out)


# Acceptance


@torch.inference_mode()
def acceptance(policy: Any, draft: Any, texts: Sequence[Example], seed: int) -> list[float]:
    """Returns the acceptance rate at each of K draft positions, given that all drafts before it are right.

    A draft is right if the policy samples it too under the same noise. The noise is drawn so that the policy samples exactly
    the given text. So right drafts are the text's own tokens, and the draft after them has the text as its context. Therefore
    one forward pass over the text tells for each position whether the draft model is right there.
    """
    generator = torch.Generator().manual_seed(seed)
    right, tried = torch.zeros(NUM_POSITIONS), torch.zeros(NUM_POSITIONS)
    for text in texts:
        ids, start = text
        with torch.autocast("cpu", torch.bfloat16):
            policy_logits = policy.lm_head(states_of(policy, [text]))
            draft_logits = draft.lm_head(states_of(draft, [text]))
        same_N = same_tokens(policy_logits.float(), draft_logits.float(), torch.tensor(ids[start:]), generator)
        for k in range(NUM_POSITIONS):
            windows = same_N.unfold(0, k + 1, 1) if len(same_N) > k else same_N.new_zeros(0, k + 1)
            open_N = windows[:, :k].all(1)
            tried[k] += open_N.sum()
            right[k] += (open_N & windows[:, k]).sum()
    return [round(float(share), 4) for share in right / tried.clamp(min=1)]


def same_tokens(policy_NV: Tensor, draft_NV: Tensor, token_N: Tensor, generator: torch.Generator) -> Tensor:
    """Returns at which positions the draft model samples the same token as the policy, bool [N].

    Both sample with the same Gumbel noise, which is drawn so that the policy samples `token_N`. For this, the policy's sum of
    log-prob and noise is drawn first for `token_N`. The sums of all other tokens are then drawn below it.
    """
    policy_NV = policy_NV.log_softmax(-1)

    def gumbel(like: Tensor) -> Tensor:
        return -torch.empty_like(like).exponential_(generator=generator).log()

    index_N1 = token_N[:, None]
    largest_N1 = gumbel(policy_NV[:, :1])
    sum_NV = -torch.logaddexp(-largest_N1, -(policy_NV + gumbel(policy_NV)))
    sum_NV.scatter_(1, index_N1, largest_N1)
    drawn_N = (draft_NV + (sum_NV - policy_NV)).argmax(-1)
    return drawn_N == token_N


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, default=Path("models/smollm2_start"), help="policy (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--layers", type=int, default=DraftSettings.layers, help="layers (default %(default)s)")
    parser.add_argument("--steps", type=int, default=DraftSettings.steps, help="training steps (default %(default)s)")
    parser.add_argument("--texts", type=int, default=DraftSettings.texts, help="sampled texts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of texts and training (default %(default)s)")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default %(default)s)")
    args = parser.parse_args()
    settings = DraftSettings(layers=args.layers, steps=args.steps, seed=args.seed, texts=args.texts)
    set_process_environment()  # before vLLM is imported
    train(args.base, args.out, settings, args.save_every, Console(highlight=False, soft_wrap=True))


if __name__ == "__main__":
    main()
