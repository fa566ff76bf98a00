# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark: vLLM's speculators that draft a block in one pass, with the target's noise."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_policy import save_block_policy, save_dflash, save_dspark
from model_drafters import LONG, assert_same_drafts, recorded, worker_of
from safetensors.torch import load_file
from test_equality import NGRAM, assert_equal, requests

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DRAFTERS,
    BlockDrafterConfig,
    DflashDrafterConfig,
    DsparkDrafterConfig,
)
from nemo_specrollout.config.strict import build_tagged
from nemo_specrollout.generation.drafting import model_drafter
from nemo_specrollout.generation.engine.arguments import VllmAbilities, with_specrollout
from nemo_specrollout.generation.engine.requests import Rollout
from nemo_specrollout.heads.files.block_heads import misfit_of_block_drafter

pytestmark = pytest.mark.integration

SAMPLED, GREEDY = {**LONG, "temperature": 1.0}, {**LONG, "temperature": 0.0}
FOUR = BudgetConfig("fixed", k=4)
# Smallest share of right drafts among drafts after right ones: at T=1 at any position, and at T=0 at the first position.
# With noise of another seed or position, less than 0.05 of DFlash's drafts are right at T=1, and 0.25 of DSpark's.
LEAST = {"dflash": (0.25, 0.3), "dspark": (0.5, 0.8), "reduced": (0.4, 0.5)}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("block") / "policy"
    save_block_policy(folder)
    return folder


@pytest.fixture(scope="module")
def drafters(policy: Path) -> dict[str, BlockDrafterConfig]:
    """A DFlash, a DSpark, and a DSpark that drafts 80 of the 96 tokens."""
    folder = policy.parent
    return {
        "dflash": DflashDrafterConfig(model=str(save_dflash(folder / "dflash"))),
        "dspark": DsparkDrafterConfig(model=str(save_dspark(folder / "dspark", policy))),
        "reduced": DsparkDrafterConfig(model=str(save_dspark(folder / "reduced", policy, 80))),
    }


def asked() -> list[Any]:
    return requests(8, 4, first=50)


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine], policy: Path) -> dict[str, list[Rollout]]:
    plain = start_engine(policy, SpecrolloutConfig(drafters=()))
    return {"T=1": plain.generate(asked(), **SAMPLED), "T=0": plain.generate(asked(), **GREEDY)}


def rates(engine: RolloutEngine, sampling: dict[str, Any], expected: list[Rollout], drafter: int = 0) -> np.ndarray:
    """Returns the share of right drafts among drafts after right ones, at each of four positions."""
    before = engine.stats()
    assert_equal(engine.generate(asked(), **sampling), expected)
    after = engine.stats()
    proposed_K, accepted_K = (
        np.subtract(getattr(after, key)[drafter], getattr(before, key)[drafter])[:4] for key in ("proposed", "accepted")
    )
    assert proposed_K.sum() > 1000
    return accepted_K / np.maximum([proposed_K[0], *accepted_K[:-1]], 1)


@pytest.mark.parametrize(
    ("name", "is_async"),
    [
        ("dflash", True),
        ("reduced", False),
        pytest.param("dflash", False, marks=pytest.mark.slow),
        pytest.param("dspark", True, marks=pytest.mark.slow),
    ],
)
def test_block_drafters_change_no_token_and_share_the_noise(
    start_engine: Callable[..., RolloutEngine],
    policy: Path,
    drafters: dict[str, BlockDrafterConfig],
    expected: dict[str, list[Rollout]],
    name: str,
    is_async: bool,
) -> None:
    block = SpecrolloutConfig(drafters=(drafters[name],), budget=FOUR)
    engine = start_engine(policy, block, async_scheduling=is_async)
    facts = engine.facts()
    assert (facts["async_scheduling"], facts["model_runner"]) == (is_async, "V2")
    least_sampled, least_greedy = LEAST[name]
    assert (rates(engine, SAMPLED, expected["T=1"])[:3] > least_sampled).all()
    assert rates(engine, GREEDY, expected["T=0"])[0] > least_greedy
    assert engine.take_alarms() == []
    engine.load_weights(load_file(policy / "model.safetensors").items())  # embedding and LM head are the drafter's too
    assert (rates(engine, SAMPLED, expected["T=1"])[:3] > least_sampled).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_greedy_drafts_change_no_token_either(
    start_engine: Callable[..., RolloutEngine],
    policy: Path,
    drafters: dict[str, BlockDrafterConfig],
    expected: dict[str, list[Rollout]],
    name: str,
) -> None:
    drafter = replace(drafters[name], sampling="greedy")
    engine = start_engine(policy, SpecrolloutConfig(drafters=(drafter,), budget=FOUR))
    assert rates(engine, SAMPLED, expected["T=1"])[0] < LEAST[name][0]
    assert rates(engine, GREEDY, expected["T=0"])[0] > LEAST[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_drafter_reads_the_text_of_skipped_steps(
    start_engine: Callable[..., RolloutEngine],
    policy: Path,
    drafters: dict[str, BlockDrafterConfig],
    expected: dict[str, list[Rollout]],
    name: str,
) -> None:
    """The drafter drafts as if it were asked in every step, beside another drafter and with budgets down to zero.

    The blocks must have equal lengths, because the tokens of a block attend to each other.
    """
    busy_engine = start_engine(policy, SpecrolloutConfig(drafters=(drafters[name],), budget=FOUR))
    busy = recorded(busy_engine)
    assert_equal(busy_engine.generate(asked(), **SAMPLED), expected["T=1"])
    drafts = (NGRAM, drafters[name])
    block = SpecrolloutConfig(num_speculative_tokens=4, drafters=drafts, budget=RANDOM)
    engine = start_engine(policy, block)
    lazy, speculator = recorded(engine), worker_of(engine).model_runner.speculator
    passes, run_model = [], speculator._run_model
    speculator._run_model = lambda *args, **kwargs: passes.append(1) or run_model(*args, **kwargs)
    assert_equal(engine.generate(asked(), **SAMPLED), expected["T=1"])
    assert 0 < len(passes) < engine.num_steps
    other_noise = [replace(request, policy_version=1) for request in asked()]
    assert_equal(engine.generate(other_noise, **SAMPLED), busy_engine.generate(other_noise, **SAMPLED))
    assert_same_drafts(lazy, busy)


def test_each_layer_norms_the_context_by_its_own_weights(
    start_engine: Callable[..., RolloutEngine], policy: Path, drafters: dict[str, BlockDrafterConfig]
) -> None:
    """Also, zero or shared weights of a sound DFlash are not reported as faults."""
    from nemo_specrollout.heads.serving.head_service import head_health

    engine = start_engine(policy, SpecrolloutConfig(drafters=(drafters["dflash"],), budget=FOUR))
    runner = worker_of(engine).model_runner
    model = runner.speculator.model.model
    weights_L = [layer.self_attn.k_norm.weight for layer in model.layers]
    assert not torch.equal(*weights_L)
    keys_L = torch.randn(2, 7, 1, 32)
    wanted_L = torch.stack(
        [torch.nn.functional.rms_norm(k, (32,), w, 1e-6) for k, w in zip(keys_L, weights_L, strict=True)]
    )
    assert torch.allclose(model._normalize_context_k(keys_L), wanted_L, atol=1e-5)
    health = head_health(runner, None)
    assert not (health.all_zero or health.non_finite or health.shares_target_tensors)


# What needs no engine.


def test_a_block_drafter_uses_vllms_own_method(tmp_path: Path) -> None:
    block = SpecrolloutConfig(drafters=(DsparkDrafterConfig(model="a/b"), NGRAM), num_speculative_tokens=7)
    native = {"method": "dspark", "model": "a/b", "num_speculative_tokens": 7}
    assert with_specrollout({}, block, "cpu", VllmAbilities(keeps_last_block=False))["speculative_config"] == native
    assert with_specrollout({}, block, "cpu")["speculative_config"] == {**native, "disable_eagle_block_drop": True}


def test_a_speculator_with_samplers_of_its_own_is_refused() -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    with pytest.raises(
        ValueError, match=r"drafts with DFlash2Speculator for this checkpoint, which samples in kernels"
    ):
        model_drafter.patch_block_speculator(object.__new__(DFlash2Speculator), lambda: False)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("dflash", {}, None),
        ("dspark", {}, r"it is DFlashDraftModel; name the checkpoint of a dspark"),
        (
            "dflash",
            {"architectures": ["DFlash2DraftModel"]},
            r"it is DFlash2DraftModel, which samples in kernels of its own",
        ),
        ("dflash", {"speculators_model_type": "eagle3"}, r"it is eagle3; name the checkpoint of a dflash"),
        ("dflash", {"architectures": None}, r"it is of no architecture"),
        (
            "dflash",
            {"hidden_size": 32},
            r"it reads states of size 32, but the policy's have size 64; name a dflash made for ",
        ),
        ("dflash", {"vocab_size": 95}, r"it knows 95 tokens, the policy 96"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0]}}, r"no mask_token_id"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]}},
            r"layer 3 of a policy of 3 layers",
        ),
    ],
)
def test_a_checkpoint_of_another_kind_or_policy_is_refused(
    policy: Path, tmp_path: Path, kind: str, changes: dict[str, Any], words: str | None
) -> None:
    found = misfit_of_block_drafter(
        build_tagged(DRAFTERS, {"type": kind, "model": str(save_dflash(tmp_path, **changes))}, "drafter"), policy
    )
    if words is None:
        assert found is None
        return
    assert found is not None and "\n" not in found
    with pytest.raises(ValueError, match=words):
        raise ValueError(found)


def test_tensors_that_contradict_the_config_are_refused(policy: Path, tmp_path: Path) -> None:
    one_layer = {"mask_token_id": 1, "target_layer_ids": [2]}
    drafter = DflashDrafterConfig(model=str(save_dflash(tmp_path, dflash_config=one_layer)))
    found = misfit_of_block_drafter(drafter, policy)
    assert found is not None and "its fc.weight takes 128 numbers, its config.json says 64; name a dflash made" in found
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    found = misfit_of_block_drafter(drafter, policy)
    assert found is not None and "not a whole safetensors file" in found and "\n" not in found


def test_an_unreadable_checkpoint_is_refused_in_one_sentence(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    found = misfit_of_block_drafter(DflashDrafterConfig(model=str(tmp_path)), policy)
    assert found is not None and "config.json: not JSON" in found and "name another checkpoint" in found
    assert misfit_of_block_drafter(DflashDrafterConfig(model="a/b"), policy) is None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV4ForCausalLM"]}))
    assert misfit_of_block_drafter(DsparkDrafterConfig(model=str(tmp_path)), policy) is None
