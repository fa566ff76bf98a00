# SPDX-License-Identifier: Apache-2.0
"""Functions that the stages of the GPU check share: figures, extent, engines and requests."""

import json
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DRAFTERS
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.config.strict import build_tagged
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.generation.requests import RolloutRequest
from nemo_specrollout.local.step_addition import encode_prompt, make_problems
from nemo_specrollout.local.step_rollout import load_tokenizer

MODELS = Path(__file__).parents[2] / "examples" / "models"
POLICY, HEAD = MODELS / "step_adder", MODELS / "step_adder_eagle3"
SEED = 7
Size = TypeVar("Size")


class Extent(Enum):
    """Amount of work of a check."""

    FULL = "full"
    QUICK = "quick"
    REHEARSAL = "rehearsal"


class Stage:
    """Collects the figures of a stage, and owns their file. Example: `stage.note("T=1", {"equal": 96})`."""

    def __init__(self, file: Path, extent: Extent) -> None:
        self._file, self.extent = file, extent
        self._notes: dict[str, Any] = {}

    def note(self, name: str, figures: Any) -> None:
        """Writes figures to the file at once, because later work may fail."""
        self._notes[name] = figures
        write_atomically(self._file, json.dumps(self._notes, indent=1))

    def size(self, full: Size, quick: Size, rehearsal: Size) -> Size:
        """Returns the argument for the stage's extent."""
        return {Extent.FULL: full, Extent.QUICK: quick, Extent.REHEARSAL: rehearsal}[self.extent]

    @property
    def on_gpu(self) -> bool:
        return self.extent is not Extent.REHEARSAL


def block(*drafters: str, budget: BudgetConfig | None = None) -> SpecrolloutConfig:
    """Returns a block with drafters of these types. Without any, it is plain decoding with our sampler."""
    named = ({"type": name, "model": str(HEAD)} if name == "eagle3" else {"type": name} for name in drafters)
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
    """Starts an engine for texts of `length` tokens; `kwargs` are further arguments of vllm.LLM."""
    memory = {"gpu_memory_utilization": 0.8} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 1 << 28}
    vllm_kwargs = {"max_num_seqs": 64, **memory, **kwargs}
    config = GenerationConfig(
        VllmConfig(length, precision, eager),
        max_new_tokens=length // 2,
        vllm_kwargs=vllm_kwargs,
        specrollout=specrollout,
    )
    return RolloutEngine(model, config, SEED)


def task_requests(num_prompts: int, num_samples: int) -> list[RolloutRequest]:
    """Returns requests for the shipped policy, in groups of samples of one prompt."""
    tokenizer = load_tokenizer(POLICY)
    prompts = [encode_prompt(problem, tokenizer) for problem in make_problems(SEED, num_prompts)]
    return [RolloutRequest(ids, i, s) for i, ids in enumerate(prompts) for s in range(num_samples)]
