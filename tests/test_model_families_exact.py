# SPDX-License-Identifier: Apache-2.0
"""Exactness for each model family, and what vLLM returns beside tokens: equal with drafts and without."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_policies import FAMILIES, save_policy

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from lab.local.statistics import count_equal
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    Eagle3DrafterConfig,
    NgramDrafterConfig,
    RandomDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.config.model_families import recurrent_layers
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.storage.model_folder import read_object

pytestmark = pytest.mark.integration

TEXT = (SuffixDrafterConfig(num_slots=1 << 12), NgramDrafterConfig(num_slots=1 << 12))
PLAIN = SpecrolloutConfig(drafters=())
MIXED = SpecrolloutConfig(drafters=(*TEXT, RandomDrafterConfig()), budget=RANDOM)
BLOCKS = {
    "fixed": SpecrolloutConfig(drafters=TEXT, budget=BudgetConfig("fixed", k=4)),
    "auto": SpecrolloutConfig(drafters=TEXT),
}
RECURRENT = {"Qwen3-Next", "Nemotron-H", "Granite 4", "Falcon-H1"}
Start = Callable[..., RolloutEngine]


def requests(num_samples: int = 2) -> list[RolloutRequest]:
    """Returns requests for prompts of 20 tokens, which two samples share, and of 40, which end beyond a block."""
    prompts = [[(7 * i + j) % 12 + 5 for j in range(20 + 20 * (i % 2))] for i in range(4)]
    return [RolloutRequest(ids, i, s) for i, ids in enumerate(prompts) for s in range(num_samples)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that makes a model of a family when it is first asked for."""
    root = tmp_path_factory.mktemp("policies")

    def make(family: str) -> Path:
        folder = root / family.replace(" ", "_")
        return folder if folder.exists() else save_policy(family, folder)

    return make


def assert_equal(engine: RolloutEngine, plain: RolloutEngine, at_least: int, accepted: int = 11) -> None:
    """Compares texts at T=0 and T=1, twice, so that the second time prompts come from the prefix cache."""
    equal = total = 0
    for temperature in (0.0, 1.0, 0.0):
        both = (e.generate(requests(), temperature=temperature) for e in (engine, plain))
        found = count_equal(*both)
        equal, total = equal + found[0], total + found[1]
    stats = engine.stats()
    assert equal == total > at_least, f"{total - equal} of {total} tokens differ"
    assert stats is not None and stats.num_accepted >= accepted, "hardly a draft was right, so the test shows little"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_of_a_family_depends_on_drafts(
    family: str, folder_of: Callable[[str], Path], start_engine: Start
) -> None:
    """Compares texts whose drafts are right, wrong or cut short at random."""
    folder = folder_of(family)
    engine, plain = (start_engine(folder, block, max_new_tokens=48) for block in (MIXED, PLAIN))
    assert_equal(engine, plain, 300)
    assert bool(engine.facts()["host_chooses_drafts"]) == (family in RECURRENT)


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Qwen3-Next"])
def test_an_untrained_head_changes_no_token(
    family: str, folder_of: Callable[[str], Path], start_engine: Start, tmp_path: Path
) -> None:
    from nemo_specrollout.heads.training.head import create_head, save_head

    folder, head = folder_of(family), tmp_path / "head"
    save_head(create_head(folder, layer_ids=(0, 1), draft_token_ids=range(1, 96, 2)), head)
    block = SpecrolloutConfig(drafters=(*TEXT, Eagle3DrafterConfig(model=str(head))), budget=RANDOM)
    engine, plain = (start_engine(folder, b, max_new_tokens=48) for b in (block, PLAIN))
    assert_equal(engine, plain, 300)


def test_a_head_for_a_policy_without_its_interface_is_refused(
    folder_of: Callable[[str], Path], start_engine: Start, tmp_path: Path
) -> None:
    from nemo_specrollout.heads.training.head import create_head, save_head

    save_head(create_head(folder_of("GLM 4 MoE"), layer_ids=(0, 1)), tmp_path / "head")
    block = SpecrolloutConfig(drafters=(Eagle3DrafterConfig(model=str(tmp_path / "head")),))
    with pytest.raises(ConfigError, match=r"policy\.model_name: vLLM has no EAGLE-3 drafter for this model"):
        start_engine(folder_of("GLM 4 MoE"), block)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_budgets_of_users_are_exact_for_each_family(
    family: str, name: str, folder_of: Callable[[str], Path], start_engine: Start
) -> None:
    folder = folder_of(family)
    for kwargs in ({}, {"enable_prefix_caching": False}, {"async_scheduling": False}, {"max_num_batched_tokens": 80}):
        engine, plain = (
            start_engine(folder, block, 96, **{"max_num_seqs": 8, **kwargs}) for block in (BLOCKS[name], PLAIN)
        )
        assert_equal(engine, plain, 500, 11 if name == "fixed" else 0)  # "auto" drafts by measured times


@pytest.mark.parametrize("family", FAMILIES)
def test_recurrent_layers_are_seen_in_a_config(family: str, folder_of: Callable[[str], Path]) -> None:
    assert bool(recurrent_layers(read_object(folder_of(family) / "config.json"))) == (family in RECURRENT)


def test_a_backend_that_vllm_refuses_is_found_without_its_name(
    folder_of: Callable[[str], Path], start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config says nothing of recurrent layers here: the worker asks the attention backends themselves."""
    monkeypatch.setattr("nemo_specrollout.generation.engine.arguments.host_choice", lambda *_: None)
    reason = start_engine(folder_of("Nemotron-H"), MIXED).facts()["host_chooses_drafts"]
    assert "plans a step by numbers of drafts on the host" in str(reason)


# Outputs whose rows follow tokens.


def outputs(engine: RolloutEngine, sampling: dict[str, Any]) -> list[Any]:
    """Returns vLLM's completions of the requests."""
    asked = [engine._text_and_params(request, sampling) for request in requests()]
    prompts = [{"prompt_token_ids": text} for text, _ in asked]
    return [o.outputs[0] for o in engine._llm.generate(prompts, [params for _, params in asked], use_tqdm=False)]


def experts(completion: Any) -> Any:
    return np.asarray(completion.routed_experts).tolist()


def masks(completion: Any) -> Any:
    return str(completion.sampling_mask)


def logprobs(completion: Any) -> Any:
    """Returns ids, ranks and rounded log-probs at each position."""
    return [{i: (p.rank, round(p.logprob, 2)) for i, p in entry.items()} for entry in completion.logprobs]


SIDE_OUTPUTS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], Any]]] = {
    "experts": ({"enable_return_routed_experts": True}, {}, experts),
    "sampling masks": ({"return_sampling_mask": True}, {"top_k": 5, "top_p": 0.9}, masks),
    "log-probs of given ids": ({}, {"logprobs": 3, "logprob_token_ids": [5, 7, 11]}, logprobs),
    "best log-probs": ({}, {"logprobs": 5}, logprobs),
}


@pytest.mark.parametrize("name", SIDE_OUTPUTS)
def test_outputs_beside_tokens_do_not_depend_on_drafts(
    name: str, folder_of: Callable[[str], Path], start_engine: Start
) -> None:
    arguments, sampling, of = SIDE_OUTPUTS[name]
    start = partial(start_engine, folder_of("Qwen3-MoE"), max_new_tokens=48, **arguments)
    engine, plain = start(MIXED), start(PLAIN)
    for temperature in (0.7, 1.0):
        both = [outputs(e, {"temperature": temperature, **sampling}) for e in (engine, plain)]
        assert [list(c.token_ids) for c in both[0]] == [list(c.token_ids) for c in both[1]]
        assert [of(c) for c in both[0]] == [of(c) for c in both[1]]
    assert engine.stats().num_accepted > 10
    assert bool(engine.facts()["host_chooses_drafts"]) == bool(arguments)
