# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights for tests: heads of the shipped policy, and records of what such drafters draft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import STEP_ADDER
from test_equality import SAMPLINGS, requests

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    DraftModelDrafterConfig,
    Eagle3DrafterConfig,
)
from nemo_specrollout.drafters.base import Texts
from nemo_specrollout.generation.engine.requests import Rollout

# (seed of the request, position of the first draft, depth): the draft tokens.
Drafts = dict[tuple[int, int, int], list[int]]
ITSELF = DraftModelDrafterConfig(model=str(STEP_ADDER))
LONG = {"max_tokens": 128, "ignore_eos": True, "stop_token_ids": []}


def untrained_head(folder: Path) -> DrafterConfig:
    """Writes an EAGLE-3 head of random weights to `folder`. Its drafts are useless but reproducible.

    Its LM head is not the policy's, which vLLM would let it share, in the policy's precision.
    """
    from nemo_specrollout.heads.training.head import create_head, save_head

    untrained = create_head(STEP_ADDER)
    untrained.model.lm_head.weight.data.mul_(1.25)
    save_head(untrained, folder)
    return Eagle3DrafterConfig(model=str(folder))


def head_of_few_tokens(folder: Path) -> DrafterConfig:
    """Writes a head that drafts only a part of the policy's vocabulary to `folder`."""
    from nemo_specrollout.heads.training.head import create_head, save_head

    save_head(create_head(STEP_ADDER, draft_token_ids=range(5, 60)), folder)
    return Eagle3DrafterConfig(model=str(folder))


def plain_rollouts(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    """Returns what an engine without drafters samples, by the name of the sampling parameters."""
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    return {name: plain.generate(requests(8, 4), **sampling) for name, sampling in SAMPLINGS.items()}


def drafts_in_every_step(start_engine: Callable[..., RolloutEngine], head: DrafterConfig) -> Drafts:
    """Returns the drafts of a head that is asked in every step."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,), budget=BudgetConfig("fixed", k=3)), 128)
    drafts = recorded(engine)
    engine.generate(requests(6, 4, first=50), **LONG)
    return drafts


def worker_of(engine: RolloutEngine) -> Any:
    core = engine._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker


def drafting_of(engine: RolloutEngine) -> Any:
    return worker_of(engine).specrollout_router


def recorded(engine: RolloutEngine) -> Drafts:
    """Returns a record to which every later draft of the engine's drafter with weights is added."""
    drafting, found, seed_of = drafting_of(engine), Drafts(), {}
    board, open_requests = drafting.board, drafting.open
    choose = board.choose

    def note_seeds(new_requests: Any) -> None:
        seed_of.update({r.slot: r.identity.seed for r in new_requests})
        open_requests(new_requests)

    def record(texts: Texts, *others: Any) -> None:
        for row, slot in enumerate(texts.slots_B.tolist()):
            depth = int(board.tables.found_DB[board.model, row])
            if depth > 0:
                tokens = board.tables.tokens_DBK[board.model, row, :depth].tolist()
                found[seed_of[slot], int(texts.total_len_S[slot]), depth] = tokens
        choose(texts, *others)

    drafting.open, board.choose = note_seeds, record
    return found


def assert_same_drafts(drafts: Drafts, of_a_busy_drafter: Drafts) -> None:
    """Asserts equal drafts at the same positions of the same requests, except for rare near-ties."""
    wanted = {(request, position): tokens for (request, position, _), tokens in of_a_busy_drafter.items()}
    pairs = [
        (wanted[request, position], tokens[:3])
        for (request, position, _), tokens in drafts.items()
        if (request, position) in wanted
    ]
    assert len(pairs) > 500
    different = sum(a[: len(b)] != b for a, b in pairs)
    assert different <= len(pairs) // 200, f"{different} of {len(pairs)} drafts differ"


def policy_tensors(scale: float = 1.0) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    tensors = load_file(STEP_ADDER / "model.safetensors")
    return [(name, t.float() * (scale if "layers.1.mlp" in name else 1.0)) for name, t in tensors.items()]
