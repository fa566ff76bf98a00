# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, hybrids and router replay on an older vLLM, which alone runs them on its V1 model runner.

The package makes vLLM use V2. `older_recurrent.py` has what a CPU needs beside Triton's interpreter.
"""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import older_recurrent
import pytest
from test_model_families_exact import PLAIN, TEXT, requests
from tiny_policies import save_policy

from lab.local.engine import RolloutEngine
from lab.local.statistics import count_equal
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.v2_lacks import V2_LACKS
from nemo_specrollout.installed.versions import VLLM_RANGE, version_numbers, vllm_version

pytestmark = [
    pytest.mark.older_vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by `make test-pins`"),
]
# Mixtures come first: the first engine of a process decides whether vLLM has its group of expert parallelism.
ALL = ("Qwen3-MoE", "Mixtral", "GLM 4 MoE", "Qwen3-Next", "Nemotron-H", "Granite 4", "Falcon-H1")
ONE_OF_A_KIND = ("Qwen3-MoE", "Qwen3-Next", "Nemotron-H")
here = version_numbers(str(vllm_version())) or VLLM_RANGE[0]
FAMILIES = ALL if here == VLLM_RANGE[0] else ONE_OF_A_KIND if here < (0, 27, 0) else ("Qwen3-MoE",)
"""All on the oldest version, because each takes half a minute.

With 0.29, vLLM's CPU build computes the prompts of recurrent layers by functions of its own, which take no float32. 0.27
and 0.28 were not tried.
"""
DRAFTED = SpecrolloutConfig(drafters=TEXT, budget=BudgetConfig("fixed", k=3))
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 1 << 26}
LONGEST = 32


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_of_a_family_depends_on_drafts(
    family: str, start_engine: Callable[..., RolloutEngine], tmp_path: Path
) -> None:
    older_recurrent.install()
    folder = older_recurrent.with_names_of_older_vllm(save_policy(family, tmp_path / "policy"))
    engine, plain = (start_engine(folder, block, max_new_tokens=LONGEST, **SMALL) for block in (DRAFTED, PLAIN))
    assert engine.facts()["model_runner"] == "V2"
    equal = total = 0
    for temperature in (0.0, 1.0):
        both = (each.generate(requests(1)[:3], temperature=temperature) for each in (engine, plain))
        found = count_equal(*both)
        equal, total = equal + found[0], total + found[1]
    stats = engine.stats()
    assert stats is not None
    print(f"{family}: {equal} of {total} tokens equal, {stats.num_accepted} of {stats.num_proposed} drafts accepted")
    assert equal == total > 100
    assert 0 < stats.num_accepted < stats.num_proposed, "drafts must be right and wrong, or nothing is rolled back"


def test_router_replay_is_refused_in_the_words_of_the_table(
    start_engine: Callable[..., RolloutEngine], tmp_path: Path
) -> None:
    folder = save_policy("Qwen3-MoE", tmp_path / "policy")
    (lack,) = (lack for lack in V2_LACKS if "policy.router_replay.enabled" in lack.paths)
    if lack.taken_since <= here:
        pytest.skip("this V2 model runner takes it, but vLLM's CPU build does not")
    with pytest.raises(ValueError, match=re.escape(_words(lack.lack))):
        start_engine(folder, PLAIN, **SMALL, enable_return_routed_experts=True)


@pytest.mark.parametrize("lack", V2_LACKS, ids=lambda lack: lack.paths[0].rpartition(".")[2])
def test_the_table_has_what_this_vllm_refuses(lack: Any) -> None:
    from vllm.config import vllm as of_vllm

    # The method itself may be ours by now, which lifts a refusal (`text_method.py`).
    after = inspect.getsource(of_vllm).partition("def _get_v2_model_runner_unsupported_features")[2]
    refuses = _words(lack.lack) in after.partition("return unsupported")[0]
    is_for_some = _words(lack.lack) == "prefill context parallelism"  # which 0.26 to 0.28 take with MLA
    assert refuses == (here < lack.taken_since) or is_for_some


def _words(lack: str) -> str:
    """Returns vLLM's own words in quotation marks."""
    found = re.search('"(.+)"', lack)
    assert found is not None
    return found[1]
