# SPDX-License-Identifier: Apache-2.0
"""Finds out by names and signatures what the installed vLLM can do, and checks that it has what this package relies on.

Code for larger differences between model runners is in `generation/runners`, which has a class for each family of them.
"""

import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
import vllm
from transformers import PreTrainedConfig
from vllm import LLM
from vllm.config import SchedulerConfig, speculative
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.sample.ops import topk_topp_triton
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.strict import ConfigError, nearest
from nemo_specrollout.config.vllm_features import refusals
from nemo_specrollout.generation.engine.arguments import VllmAbilities
from nemo_specrollout.installed.versions import unsupported_version

VLLM_VERSION = vllm.__version__
RUNNER_ATTRIBUTES = (
    "execute_model",
    "execute_model_state",
    "initialize_kv_cache",
    "input_buffers",
    "max_num_reqs",
    "max_num_tokens",
    "num_speculative_steps",
    "rejection_sampler",
    "req_states",
    "reload_weights",
    "sample_tokens",
    "sampler",
    "speculator",
)
"""Attributes of vLLM's model runner that this package replaces or reads."""


def takes(function: Any, name: str) -> bool:
    """Returns whether a function has a parameter with this name."""
    return name in inspect.signature(function).parameters


HAS_MURMUR_NOISE = hasattr(gumbel, "murmur3_uniform32")
"""Whether this vLLM makes its noise with MurmurHash3 (0.31 and later) instead of Philox."""
CHOOSES_ON_DEVICE = takes(BaseSpeculator.propose, "num_speculative_tokens")
"""Whether vLLM drafts to a given depth, and chooses on the device which drafts an engine step verifies (0.32 and later)."""
HAS_REQUEST_CHECKS = importlib.util.find_spec("vllm.v1.worker.gpu.sample.logits_processor") is not None
"""Whether vLLM lets logits processors check each request with the V2 model runner (0.32 and later)."""
HAS_TEXT_METHOD = importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None
"""Whether the V2 model runner supports drafters without weights (0.32 and later)."""
_TARGET_NOISE: dict[str, Any] = {"is_drafting": False} if takes(gumbel.gumbel_sample, "is_drafting") else {}


def check_version() -> None:
    """Raises ConfigError if the version of the installed vLLM is not supported."""
    message = unsupported_version(VLLM_VERSION)
    if message is not None:
        raise ConfigError(message)


def check_features(block: SpecrolloutConfig) -> None:
    """Raises ConfigError if the block asks for something that the installed vLLM cannot do."""
    for sentence in refusals(block, VLLM_VERSION):
        raise ConfigError(sentence)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError if one of the arguments is unknown to vllm.LLM."""
    known = {field.name for field in fields(EngineArgs)} | set(inspect.signature(LLM.__init__).parameters)
    for name in arguments:
        if name not in known:
            raise ConfigError(f"vllm_kwargs.{name}: vLLM {VLLM_VERSION} has no such argument{nearest(name, known)}")


def verify_runner_choice(vllm_config: Any) -> None:
    """Raises RuntimeError if vLLM has chosen its V1 model runner for an engine.

    It is called before the runner is built, because the V1 runner would refuse `RequestCheck` without saying why.
    """
    if not vllm_config.use_v2_model_runner:
        raise RuntimeError(
            f"specrollout needs vLLM's V2 model runner, but vLLM {VLLM_VERSION} has chosen the V1 model runner; remove "
            "VLLM_USE_V2_MODEL_RUNNER=0 from the engine's environment, and the options that vLLM names as unsupported by V2"
        )


def verify_model_runner(runner: Any) -> None:
    """Raises RuntimeError unless vLLM's V2 model runner has all `RUNNER_ATTRIBUTES`."""
    require(runner, RUNNER_ATTRIBUTES, "the model runner")


def require(owner: Any, names: Iterable[str], what: str) -> None:
    """Raises RuntimeError unless a module, class or object of vLLM has all attributes in `names`.

    `what` describes `owner` in the error message.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise RuntimeError(f"vLLM {VLLM_VERSION}: {what} has no {', '.join(missing)}; this version is not supported")


def make_top_p_independent_of_batch() -> None:
    """Makes vLLM's top-p kernels give the same result for a row, however many rows its engine step has.

    Otherwise a token could depend on drafts. With up to 64 rows, vLLM's GPU kernels sum each row in slices, whose number
    depends on the number of rows. So the last bit of the sum may differ, and with it the set of tokens that top-p excludes.
    Older versions do not slice rows. Raises RuntimeError if vLLM slices rows but lacks the setting that turns this off.
    """
    if _slices_rows():
        require(topk_topp_triton, ["_SPLIT_MAX_BATCH"], topk_topp_triton.__name__)
        topk_topp_triton._SPLIT_MAX_BATCH = 0


def verify_top_p() -> None:
    """Raises RuntimeError if the result of top-p for a row may depend on how many rows its engine step has."""
    if _slices_rows() and topk_topp_triton._SPLIT_MAX_BATCH != 0:
        raise RuntimeError(
            f"specrollout's top-p is not in force: something set {topk_topp_triton.__name__}._SPLIT_MAX_BATCH"
        )


def _slices_rows() -> bool:
    return CHOOSES_ON_DEVICE or any("split" in name.lower() for name in vars(topk_topp_triton))


def draw(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    apply_temperature: bool,
    use_fp64: bool = False,
) -> torch.Tensor:
    """Returns the token that vLLM samples in each row, int64 [R], with the noise that it uses for the policy's tokens.

    `logits` are [R, V]. `slots` (request slots) and `positions` are [R]. `temperature` and `seeds` have a value for each
    request slot.
    """
    arguments = (logits, slots, temperature, seeds, positions)
    return gumbel.gumbel_sample(*arguments, apply_temperature=apply_temperature, use_fp64=use_fp64, **_TARGET_NOISE)


def output_options(vllm_config: Any) -> Any:
    """Returns the part of vLLM's config that tells which outputs an engine returns for each row in addition to its token."""
    return getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config  # the model config before 0.32


def scheduler_of(engine: Any) -> Any:
    """Returns the scheduler of an engine. Raises RuntimeError if the engine's core runs in another process."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        raise RuntimeError("a drafter's engine core must run in its own process: set VLLM_ENABLE_V1_MULTIPROCESSING=0")
    return core.scheduler


def device_type() -> str:
    """Returns the type of the device that vLLM uses in this process, such as `cuda`."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def vllm_abilities(arguments: Mapping[str, Any], is_async: bool = False) -> VllmAbilities:
    """Returns what the installed vLLM can do for an engine with these arguments.

    `is_async` is true for NeMo-RL's asynchronous engine, and false for `vllm.LLM`.
    """
    keeps_last_block = "disable_eagle_block_drop" in {field.name for field in fields(speculative.SpeculativeConfig)}
    sizes = _default_sizes(arguments, is_async)
    largest = 1024 if _is_data_center_blackwell() else 512  # as in `VllmConfig._set_cudagraph_sizes`
    return VllmAbilities(CHOOSES_ON_DEVICE, keeps_last_block, HAS_REQUEST_CHECKS, *sizes, _policy(arguments), largest)


def _is_data_center_blackwell() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_device_capability_family(100))


def _policy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the engine's model, from its folder or the Hub's cache, or {} if it cannot be read."""
    if not (model := arguments.get("model")):
        return {}
    try:
        found, _ = PreTrainedConfig.get_config_dict(model, revision=arguments.get("revision"))
    except (OSError, ValueError):
        return {}  # vLLM will report the problem, or the model is in another format
    return found


def _default_sizes(arguments: Mapping[str, Any], is_async: bool) -> tuple[int, int]:
    """Returns the defaults of `max_num_batched_tokens` and `max_num_seqs` that vLLM's `EngineArgs` would set."""
    use = UsageContext.ENGINE_CONTEXT if is_async else UsageContext.LLM_CLASS
    world_size = (arguments.get("tensor_parallel_size") or 1) * (arguments.get("pipeline_parallel_size") or 1)
    tokens, requests = EngineArgs.get_batch_defaults(world_size)
    num_tokens = tokens.get(use, SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS)
    num_requests = requests.get(use, SchedulerConfig.DEFAULT_MAX_NUM_SEQS)
    if arguments.get("performance_mode") == "throughput":
        num_tokens = 2 * num_tokens
        num_requests = 2 * num_requests
    if not arguments.get("enable_chunked_prefill", True):
        num_tokens = max(num_tokens, arguments.get("max_model_len") or 0)
    return num_tokens, num_requests
