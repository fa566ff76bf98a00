# SPDX-License-Identifier: Apache-2.0
"""The words of `check` about an engine agree with the config that vLLM derives from its arguments."""

from typing import Any

import pytest
from conftest import STEP_ADDER

from nemo_specrollout.cli.describe import engine_in_words, is_asynchronous
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig, DraftModelDrafterConfig, Eagle3DrafterConfig
from nemo_specrollout.config.engine_vllm import HERE, PINNED, EngineVllm, vllm_here
from nemo_specrollout.generation.engine.arguments import QUIET_START, with_specrollout

pytestmark = pytest.mark.integration

HEAD = str(STEP_ADDER.parent / "step_adder_eagle3")
NO_DRAFTERS = SpecrolloutConfig(drafters=())


def drafting_by(*drafters: DrafterConfig) -> SpecrolloutConfig:
    return SpecrolloutConfig(drafters=drafters)


@pytest.mark.parametrize(
    ("block", "kwargs"),
    [
        (SpecrolloutConfig(), {}),
        (SpecrolloutConfig(), {"async_scheduling": False}),
        (SpecrolloutConfig(enabled=False), {}),
        (NO_DRAFTERS, {}),
        (NO_DRAFTERS, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}),
        (NO_DRAFTERS, {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3, "model": HEAD}}),
        (drafting_by(Eagle3DrafterConfig(model=HEAD)), {}),
        (drafting_by(DraftModelDrafterConfig(model=str(STEP_ADDER))), {"async_scheduling": True}),
    ],
)
def test_the_words_agree_with_vllms_config(block: SpecrolloutConfig, kwargs: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = {"model": str(STEP_ADDER), "dtype": "float32", "max_model_len": 512, **QUIET_START, **kwargs}
    arguments.pop("use_tqdm_on_load")
    config = EngineArgs(**with_specrollout(arguments, block, "cpu")).create_engine_config(UsageContext.LLM_CLASS)
    words = engine_in_words(kwargs, vllm_here(), on_gpu=False, is_eager=False)
    assert config.scheduler_config.async_scheduling == is_asynchronous(kwargs) == ("asynchronous" in words)
    assert config.use_v2_model_runner and ", V2 model runner, " in words
    assert f"CUDA graphs {config.compilation_config.cudagraph_mode.name} " in words


def test_the_words_say_what_only_the_run_can_tell() -> None:
    nowhere = EngineVllm(None, HERE, None, None)
    words = engine_in_words({}, nowhere, on_gpu=True, is_eager=False)
    assert words.startswith("vLLM (not installed here), V2 model runner") and words.endswith("only the run can tell")
    assert "CUDA graphs NONE (enforce_eager is true)" in engine_in_words({}, nowhere, on_gpu=True, is_eager=True)
    given = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    assert "CUDA graphs PIECEWISE, if model" in engine_in_words(given, nowhere, on_gpu=True, is_eager=False)


def test_the_words_name_where_the_engines_vllm_is_from() -> None:
    pinned = EngineVllm("0.25.1", PINNED, None, None)
    assert engine_in_words({}, pinned, on_gpu=True, is_eager=True).startswith(
        "vLLM 0.25.1 (pinned by NeMo-RL's checkout), V2 model runner"
    )
