# SPDX-License-Identifier: Apache-2.0
"""Draft heads as others publish them: the same verdict at every door, and a running engine that drafts with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import STEP_ADDER
from model_drafters import recorded
from safetensors.torch import load_file, save_file
from test_equality import requests

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import BudgetConfig, DraftRefreshConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig
from nemo_specrollout.heads.features.features import hf_features, load_policy
from nemo_specrollout.heads.files.block_heads import drafter_misfits
from nemo_specrollout.heads.files.head_facts import LAYER_IDS_FIELD
from nemo_specrollout.heads.training.acceptance import draft_logits
from nemo_specrollout.heads.training.head import load_eagle3_head
from nemo_specrollout.sampling.seeds import request_seed

pytestmark = pytest.mark.integration

Start = Callable[..., RolloutEngine]
VOCAB = 96
FIXED = BudgetConfig("fixed", k=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped head."""
    return Path(shutil.copytree(STEP_ADDER.parent / "step_adder_eagle3", tmp_path / "head"))


def rewrite(folder: Path, edit: Callable[[dict, dict], tuple[dict, dict]]) -> None:
    """Replaces the config and the tensors of a head."""
    config, tensors = edit(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_identity_maps(config: dict, tensors: dict) -> tuple[dict, dict]:
    maps = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    return config, tensors | maps


def as_specforge(config: dict, tensors: dict) -> tuple[dict, dict]:
    """Returns a head in the flat layout, with its layer ids where vLLM's V2 model runner does not look."""
    names = {"architectures": ["Eagle3Qwen3ForCausalLM"], "draft_vocab_size": VOCAB}
    ids = {LAYER_IDS_FIELD: config[LAYER_IDS_FIELD], "use_aux_hidden_state": True}
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    return {**config["transformer_layer_config"], **names, "eagle_config": ids}, tensors


def with_window(config: dict, tensors: dict) -> tuple[dict, dict]:
    window = {"layer_types": ["sliding_attention"], "sliding_window": 16, "use_sliding_window": True}
    config["transformer_layer_config"] |= window
    return config, tensors


def with_few_positions(config: dict, tensors: dict) -> tuple[dict, dict]:
    config["transformer_layer_config"]["max_position_embeddings"] = 128
    return config, tensors


def block_of(folder: Path, refreshes: bool = False) -> SpecrolloutConfig:
    refresh = DraftRefreshConfig() if refreshes else None
    return SpecrolloutConfig(drafters=(Eagle3DrafterConfig(model=str(folder)),), budget=FIXED, draft_refresh=refresh)


@pytest.mark.parametrize("refreshes", [False, True])
def test_refreshed_and_other_heads_get_the_same_verdict(folder: Path, refreshes: bool) -> None:
    block = block_of(folder, refreshes)
    for edit in (with_identity_maps, with_window, with_few_positions):
        rewrite(folder, edit)
        assert drafter_misfits(block, str(STEP_ADDER), 128) == drafter_misfits(block, str(STEP_ADDER), None) == []
    (reason,) = drafter_misfits(block, str(STEP_ADDER), 129)
    assert "max_position_embeddings 128 is less than max_model_len 129" in reason
    (folder / "model.safetensors").unlink()
    assert drafter_misfits(block, str(STEP_ADDER), 128)


@pytest.mark.parametrize("edit", [with_identity_maps, as_specforge])
def test_a_published_head_starts_in_an_engine(start_engine: Start, folder: Path, edit: Callable) -> None:
    rewrite(folder, edit)
    engine = start_engine(STEP_ADDER, block_of(folder))
    engine.generate(requests(4, 2))
    engine.load_head(folder, expected_length=3.0)
    engine.generate(requests(4, 2))
    stats = engine.stats()
    assert stats.accepted[0][0] > 0.8 * stats.proposed[0][0] > 80
    assert not engine.take_alarms()


def test_a_head_with_a_window_is_judged_by_its_drafts(start_engine: Start, folder: Path) -> None:
    """The drafts of the engine are the most likely tokens by the logits that judge a head."""
    rewrite(folder, with_window)
    engine = start_engine(STEP_ADDER, block_of(folder))
    drafts, asked = recorded(engine), requests(8, 2)
    answers = [list(rollout.token_ids) for rollout in engine.generate(asked, temperature=0.0)]
    head = load_eagle3_head(folder, STEP_ADDER)
    prompts = [list(request.prompt_token_ids) for request in asked]
    texts = [(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
    right = [0, 0]
    found = hf_features(load_policy(STEP_ADDER), texts, head.layer_ids)
    for request, features in zip(asked, found, strict=True):
        seed = request_seed(7, request.prompt_index, request.sample_index, request.policy_version)
        ids = features.token_ids_T.tolist()
        best = {k: logits.argmax(-1).tolist() for _, k, logits in draft_logits(head, features, 3, 1000)}
        for (_, position, _), tokens in ((key, t) for key, t in drafts.items() if key[0] == seed):
            for k, token in enumerate(tokens[: max(0, len(ids) - position)]):
                right[0] += best[k][position - 2] == token
                right[1] += 1
                if token != ids[position + k]:
                    break  # later drafts of the engine follow this token
    assert right[1] > 300 and right[0] >= 0.98 * right[1]
