# SPDX-License-Identifier: Apache-2.0
"""What the items of the GPU check share, which are figures, engines that start quickly, and requests."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from lab.local.engine import RolloutEngine
from lab.local.run_sections import GenerationConfig, VllmConfig
from lab.local.step_addition import encode_prompt, make_problems
from lab.local.step_rollout import load_tokenizer
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DRAFTERS
from nemo_specrollout.config.strict import build_tagged
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.storage.files import write_atomically

MODELS = Path(__file__).parents[2] / "examples" / "models"
POLICY = MODELS / "step_adder"
HEAD = MODELS / "step_adder_eagle3"
SEED = 7
QUICK_GRAPHS: dict[str, Any] = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 288, 576],
}
"""Compilation config with CUDA graphs of decode steps for a few sizes, and without torch.compile. With it, an engine of a
small model starts in 10 to 25 s."""
GIB = 1 << 30
Size = TypeVar("Size")


class Findings:
    """Collects the figures of an item, and owns their file. Example: `findings.note("T=1", {"parted": 0})`.

    Figures are rows of tables. A problem makes the item fail, but only at its end, so that all figures are known.
    """

    def __init__(self, file: Path, is_rehearsal: bool, seconds: float) -> None:
        """Starts without figures. `seconds` is the time that the item may take."""
        self._file = file
        self.is_rehearsal = is_rehearsal
        self._until = time.monotonic() + seconds
        self.tables: dict[str, dict[str, dict[str, Any]]] = {}
        self.problems: list[str] = []

    def note(self, name: str, row: dict[str, Any], table: str = "") -> None:
        """Writes a row to the file at once, because later work may fail. A row of the same name is replaced."""
        self.tables.setdefault(table, {})[name] = row
        self._write()

    def check(self, is_right: bool, problem: str) -> None:
        """Notes `problem` if `is_right` is false."""
        if not is_right:
            self.problems.append(problem)
            self._write()

    def size(self, real: Size, rehearsal: Size) -> Size:
        """Returns `rehearsal` in a rehearsal, else `real`."""
        return rehearsal if self.is_rehearsal else real

    @property
    def seconds_left(self) -> float:
        """Seconds until the item is stopped."""
        return self._until - time.monotonic()

    def _write(self) -> None:
        write_atomically(self._file, json.dumps({"tables": self.tables, "problems": self.problems}, indent=1))


def block(*drafters: str, budget: BudgetConfig | None = None, head: Path = HEAD) -> SpecrolloutConfig:
    """Returns a block with drafters of these types. Without types, its engine decodes plainly with our sampler.

    `head` is the folder of the draft head for the type `eagle3`.
    """
    named = ({"type": name, "model": str(head)} if name == "eagle3" else {"type": name} for name in drafters)
    built = tuple(build_tagged(DRAFTERS, values, "drafters") for values in named)
    return SpecrolloutConfig(drafters=built, budget=budget or BudgetConfig())


STOCK = SpecrolloutConfig(enabled=False)


def start_engine(
    model: Path,
    specrollout: SpecrolloutConfig,
    *,
    eager: bool,
    precision: str = "float32",
    length: int = 512,
    **kwargs: Any,
) -> RolloutEngine:
    """Starts an engine for texts of up to `length` tokens. `kwargs` are further arguments of vllm.LLM.

    The KV cache has a fixed size, because a share of a GPU's memory would give a tiny model a million blocks. Without a GPU
    the engine is eager.
    """
    eager = eager or not torch.cuda.is_available()
    memory = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 * GIB} if torch.cuda.is_available() else {}
    defaults: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_memory_bytes": GIB // 4, **memory}
    if not eager:
        defaults["compilation_config"] = QUICK_GRAPHS
    config = GenerationConfig(
        VllmConfig(length, precision, eager),
        max_new_tokens=length // 2,
        vllm_kwargs={**defaults, **kwargs},
        specrollout=specrollout,
    )
    return RolloutEngine(model, config, SEED)


def task_requests(num_prompts: int, num_samples: int) -> list[RolloutRequest]:
    """Returns requests for the shipped policy. There are `num_samples` for each of `num_prompts` prompts."""
    tokenizer = load_tokenizer(POLICY)
    prompts = [encode_prompt(problem, tokenizer) for problem in make_problems(SEED, num_prompts)]
    return [RolloutRequest(ids, i, s) for i, ids in enumerate(prompts) for s in range(num_samples)]


def of_version(requests: Sequence[RolloutRequest], version: int) -> list[RolloutRequest]:
    """Returns requests for the same prompts with other noise, which depends on `version`.

    With equal noise, the suffix drafter would know the texts of a second round.
    """
    return [replace(request, policy_version=version) for request in requests]


def timed(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], **sampling: Any
) -> tuple[list[Rollout], dict[str, Any]]:
    """Rolls out requests. Returns the responses, and figures of tokens, engine steps, time, and drafts if there were any."""
    proposed, accepted = verified(engine)
    steps = engine.num_steps
    started = time.perf_counter()
    rollouts = engine.generate(requests, **sampling)
    seconds = time.perf_counter() - started
    num_steps = engine.num_steps - steps
    num_tokens = sum(len(r.token_ids) for r in rollouts)
    figures: dict[str, Any] = {
        "tokens": num_tokens,
        "steps": num_steps,
        "ms a step": 1e3 * seconds / num_steps,
        "tokens a second": num_tokens / seconds,
    }
    now_proposed, now_accepted = verified(engine)
    if now_proposed > proposed:
        figures |= {"drafts": now_proposed - proposed, "accepted": now_accepted - accepted}
    return rollouts, figures


def verified(engine: RolloutEngine) -> tuple[int, int]:
    """Returns how many draft tokens the engine has verified and how many it has accepted since its start."""
    counters = engine.counters()
    return (0, 0) if counters is None else (counters.num_proposed, counters.num_accepted)


def divergence(rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> tuple[int, int]:
    """Returns how many responses differ from `others`, and how many tokens were compared.

    The tokens of a response are compared up to the first one that differs.
    """
    parted, compared = 0, 0
    for a, b in zip(rollouts, others, strict=True):
        differs = [x != y for x, y in zip(a.token_ids, b.token_ids, strict=False)]
        differs += [True] * (len(a.token_ids) != len(b.token_ids) and not any(differs))
        parted += any(differs)
        compared += differs.index(True) + 1 if any(differs) else len(differs)
    return parted, compared
