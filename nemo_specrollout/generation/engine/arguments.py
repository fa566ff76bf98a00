# SPDX-License-Identifier: Apache-2.0
"""Turns the block, which is this package's configuration, into arguments of `vllm.LLM`. vLLM is not imported."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import FolderDrafterConfig, ModelDrafterConfig
from nemo_specrollout.config.model_families import recurrent_layers
from nemo_specrollout.config.vllm_features import DEVICE_CHOICE
from nemo_specrollout.generation.engine.cuda_graphs import larger_graphs, vllms_graphs
from nemo_specrollout.storage.model_folder import text_config

WORKER = "nemo_specrollout.generation.vllm_worker.SpecrolloutWorker"
SCHEDULER = "nemo_specrollout.generation.engine.step_outputs.build_scheduler"
REQUEST_CHECK = "nemo_specrollout.generation.engine.admission:RequestCheck"
"""This package's entry in vLLM's `logits_processors`. It checks requests and changes no logits."""
TEXT_METHOD = "ngram_gpu"
"""Name of the method by which vLLM drafts without weights. It allows asynchronous scheduling. This package's drafters take the
place of vLLM's own drafter."""
HOST_CHOOSES = "specrollout_host_chooses"
"""Key in vLLM's `additional_config`. Its value is the reason why the host chooses the drafts that are verified, or null if the
device does."""
DRAFT_ROWS = "specrollout_draft_rows"
"""Key in vLLM's `additional_config`. Its value is the largest number of draft tokens that all requests of an engine step may
have together."""
_DEVICE_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", "FLASHMLA", "TRITON_MLA", "FLASH_ATTN_MLA", "CUTLASS_MLA")
"""Attention backends with which vLLM 0.32 need not know on the host how many drafts each request of an engine step has."""
_ROW_OUTPUTS = {"enable_return_routed_experts": "experts", "return_sampling_mask": "sampling masks"}
"""Arguments with which vLLM returns something for each row of an engine step. Then the host must know which rows belong to
which request."""
_WITHOUT_DRAFTS = {
    "enable_lora": "vLLM maps adapters to the rows of a step without drafts; NeMo-RL's own LoRA needs no adapters in vLLM",
    "watermark_config": "a watermark changes samples, and drafts are accepted by samples without one",
}
"""Arguments that cannot be combined with drafts, and the reasons."""
_OTHER_SAMPLER = "vLLM's own sampler then draws the tokens, and it does not tell which one came second"
_WITHOUT_TIES = {
    "use_fp64_gumbel": _OTHER_SAMPLER,
    "return_sampling_mask": _OTHER_SAMPLER,
    "enable_batch_sharded_sampling": "each GPU then samples a share of the requests, but only one is asked for near-ties",
}
"""Arguments with which an engine cannot keep near-ties, and the reasons. At a near-tie the best two scores are almost equal,
so a branch of a text made ahead may begin there."""
_FULL_GRAPHS = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
QUIET_START = {
    "use_tqdm_on_load": False,
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
    "distributed_executor_backend": "uni",
}
"""Arguments for an engine that runs in this process and prints no progress."""
_PROCESS_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment variables that keep an engine in this process, and make it start quickly and without output."""


@dataclass(frozen=True)
class VllmAbilities:
    """Abilities and defaults of the installed vLLM on which an engine's arguments depend."""

    chooses_on_device: bool = True
    """Whether vLLM can choose on the device which drafts an engine step verifies."""
    keeps_last_block: bool = True
    """Whether vLLM can reuse the last block of a cached prompt even if a draft head drafts."""
    checks_requests: bool = True
    """Whether vLLM lets logits processors check each request with the V2 model runner."""
    default_tokens: int = 2048
    """vLLM's default of `max_num_batched_tokens`."""
    default_requests: int = 128
    """vLLM's default of `max_num_seqs`."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Content of the policy's config.json. Empty if it is unknown."""
    largest_graph: int = 512
    """Number of rows of the largest CUDA graph that vLLM captures by default on this device."""


NEWEST_VLLM = VllmAbilities()


def set_process_environment() -> None:
    """Sets environment variables for an engine in this process. Call it before vllm is imported.

    Variables that are already set keep their values.
    """
    for name, value in _PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def with_specrollout(
    vllm_kwargs: Mapping[str, Any],
    block: SpecrolloutConfig,
    device: str,
    abilities: VllmAbilities = NEWEST_VLLM,
) -> dict[str, Any]:
    """Returns a copy of `vllm_kwargs` that puts the block, which is this package's configuration, into effect.

    The copy is unchanged if the block is disabled. If the block names no drafters, or if the user gives a
    `speculative_config`, only the sampler is replaced. `device` is the type of vLLM's device, such as `cuda`.

    Raises ValueError if the user's arguments contradict the block.
    """
    result = dict(vllm_kwargs)
    block = block.with_own_drafters
    if not block.enabled:
        return result
    if "worker_cls" in result:
        raise ValueError(
            f"vllm_kwargs.worker_cls: {result['worker_cls']!r}; specrollout names the worker itself; remove it"
        )
    result["worker_cls"] = WORKER
    if result.get("speculative_config") is not None and block.drafters:
        raise ValueError(
            "vllm_kwargs.speculative_config is set beside policy.generation.specrollout.drafters; remove one of them"
        )
    for name, why in _WITHOUT_DRAFTS.items():
        if result.get(name) and (block.drafters or result.get("speculative_config")):
            raise ValueError(f"vllm_kwargs.{name}: {result[name]!r} with drafts; {why}: remove it, or draft nothing")
    _check_ties(result, block)
    reason = host_choice(result, abilities)
    if result.get("speculative_config") is None and block.drafters and block.most_drafts:
        result["speculative_config"] = _speculative_config(result, block, device, abilities)
        _make_room_for_drafts(result, block, abilities)
        if reason is None and device == "cuda" and _has_full_graphs(result):
            # vLLM then prepares CUDA graphs and attention for drafts that are chosen on the device.
            result["speculative_config"]["enable_adaptive_verification"] = True
            if sizes := added_graphs(result, block, abilities):
                own = {"cudagraph_capture_sizes": [*vllms_graphs(abilities.largest_graph), *sizes]}
                result["compilation_config"] = {**(result.get("compilation_config") or {}), **own}
        result.setdefault("scheduler_cls", SCHEDULER)
    if abilities.checks_requests and not result.get("return_sampling_mask"):  # vLLM refuses both together
        result["logits_processors"] = [*users_processors(result.get("logits_processors")), REQUEST_CHECK]
    block_dict = dataclasses.asdict(block)
    block_dict["drafters"] = list(block_dict["drafters"])
    ours = {"specrollout": block_dict, HOST_CHOOSES: reason, DRAFT_ROWS: _draft_rows(result, block, abilities)}
    result["additional_config"] = {**(result.get("additional_config") or {}), **ours}
    return result


def _check_ties(arguments: Mapping[str, Any], block: SpecrolloutConfig) -> None:
    """Raises ValueError if branches of texts made ahead are wanted, but an argument rules them out (`_WITHOUT_TIES`)."""
    num_branches = block.most_paths - 1
    for name, why in _WITHOUT_TIES.items():
        if num_branches and arguments.get(name):
            raise ValueError(
                f"vllm_kwargs.{name}: {arguments[name]!r} with run_ahead.branches: {num_branches}; {why}: remove it, or set "
                "run_ahead.branches to 0"
            )


def users_processors(processors: Sequence[Any] | None) -> list[Any]:
    """Returns an engine's logits processors without `REQUEST_CHECK`, which belongs to this package and changes no logits."""
    return [processor for processor in processors or () if processor != REQUEST_CHECK]


def abilities_of(version: str | None, policy: Mapping[str, Any]) -> VllmAbilities:
    """Returns what a version of vLLM can do for a policy, without importing vLLM. None stands for the newest version.

    `policy` is the content of the policy's config.json.
    """
    return VllmAbilities(chooses_on_device=version is None or DEVICE_CHOICE.is_in(version), policy=policy)


def host_choice(arguments: Mapping[str, Any], abilities: VllmAbilities) -> str | None:
    """Returns why the host must choose the drafts that an engine step verifies, or None if vLLM lets the device choose them.

    The rules are those of vLLM's adaptive verification (config/vllm.py, v1/attention/backend.py). vLLM itself checks them only
    if it uses CUDA graphs. Therefore this package's worker asks the attention backends again.
    """
    if not abilities.chooses_on_device:
        return f"vLLM before {'.'.join(map(str, DEVICE_CHOICE.since[:2]))} cannot choose them on the device"
    if layers := recurrent_layers(abilities.policy):
        return f"the policy has recurrent layers ({layers}), whose rollback vLLM plans on the host"
    for name, what in _ROW_OUTPUTS.items():
        if arguments.get(name):
            return f"vllm_kwargs.{name}: vLLM finds the {what} of a row by numbers of drafts on the host"
    given = arguments.get("attention_config")
    backend = arguments.get("attention_backend") or (given.get("backend") if isinstance(given, Mapping) else None)
    if backend is not None and str(backend).rpartition(".")[2].upper() not in _DEVICE_BACKENDS:
        return f"vllm_kwargs: the attention backend {backend} plans a step by numbers of drafts on the host"
    return None


def added_graphs(
    arguments: Mapping[str, Any], block: SpecrolloutConfig, abilities: VllmAbilities = NEWEST_VLLM
) -> list[int]:
    """Returns the row counts of CUDA graphs that are captured in addition to vLLM's own, for engine steps with many drafts.

    The list is empty if the host chooses the drafts that are verified. It is also empty if vLLM makes no CUDA graphs of whole
    engine steps.
    """
    block = block.with_own_drafters
    if not block.enabled or not block.drafters or not _has_full_graphs(arguments):
        return []
    if host_choice(arguments, abilities):
        return []
    most_rows = _num_slots(arguments, abilities) + _draft_rows(arguments, block, abilities)
    room = arguments.get("max_num_batched_tokens") or max(abilities.default_tokens, most_rows)
    vocab_size = text_config(abilities.policy).get("vocab_size")
    return larger_graphs(arguments, min(most_rows, int(room)), abilities.largest_graph, vocab_size)


def _has_full_graphs(arguments: Mapping[str, Any]) -> bool:
    """Returns whether vLLM captures CUDA graphs of whole engine steps, as it does by default."""
    compilation = arguments.get("compilation_config")
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, Mapping) else None
    return not arguments.get("enforce_eager") and (mode is None or str(mode).rpartition(".")[2].upper() in _FULL_GRAPHS)


def native_config(drafter: ModelDrafterConfig | None, num_speculative_tokens: int) -> dict[str, Any]:
    """Returns vLLM's `speculative_config` for a drafter with weights, or for text drafters alone if `drafter` is None."""
    weights = {"model": drafter.model} if isinstance(drafter, FolderDrafterConfig) else {}
    method = TEXT_METHOD if drafter is None else drafter.type
    return {"method": method, **weights, "num_speculative_tokens": num_speculative_tokens}


def _speculative_config(
    arguments: Mapping[str, Any], block: SpecrolloutConfig, device: str, abilities: VllmAbilities
) -> dict[str, Any]:
    drafter = block.model_drafter
    if arguments.get("use_fp64_gumbel") and drafter is not None and drafter.sampling == "shared_noise":
        raise ValueError(  # otherwise only few drafts would be right
            f"vllm_kwargs.use_fp64_gumbel: true; the {drafter.type} drafter samples with float32 noise: remove it, or give "
            "the drafter `sampling: greedy`"
        )
    config = native_config(drafter, block.most_drafts)
    if drafter is not None and abilities.keeps_last_block:
        # By default vLLM recomputes the last block of a cached prompt for each sample, because the head's KV entry there
        # depends on the next token. All samples of a prompt share that token, and the policy's entries do not depend on it.
        config["disable_eagle_block_drop"] = True
    return config


def _num_slots(arguments: Mapping[str, Any], abilities: VllmAbilities) -> int:
    return int(arguments.get("max_num_seqs") or abilities.default_requests)


def _draft_rows(arguments: Mapping[str, Any], block: SpecrolloutConfig, abilities: VllmAbilities) -> int:
    """Returns the largest number of draft tokens that all requests of an engine step may have together.

    The number comes from the block. If it is too small for all requests to have `block.most_drafts` drafts at once, the
    user's `max_num_batched_tokens` may lower it further.
    """
    num_slots = _num_slots(arguments, abilities)
    rows = block.most_draft_rows(num_slots)
    given = arguments.get("max_num_batched_tokens")
    if given is None or rows == num_slots * block.most_drafts:
        return rows
    return min(rows, max(int(given) - num_slots, num_slots * block.num_speculative_tokens))


def _make_room_for_drafts(arguments: dict[str, Any], block: SpecrolloutConfig, abilities: VllmAbilities) -> None:
    """Increases vLLM's default of `max_num_batched_tokens` if drafts would take more than half of it.

    vLLM first schedules a row for each draft that a request may have, and only then leaves out the drafts that do not pay.
    With the larger value, an engine step has as much room for prompts as without drafts. Raises ValueError if the user has set
    a value that is too small for the drafts.
    """
    num_drafts = _draft_rows(arguments, block, abilities)
    given = arguments.get("max_num_batched_tokens")
    if given is None:
        if num_drafts > abilities.default_tokens // 2:
            arguments["max_num_batched_tokens"] = abilities.default_tokens + num_drafts
        return
    num_requests = int(arguments.get("max_num_seqs") or 0)
    rows = num_requests + num_drafts
    if num_requests and rows > given:
        raise ValueError(
            f"vllm_kwargs.max_num_batched_tokens: {given}; {num_requests} requests with {num_drafts // num_requests} drafts "
            f"each need {rows}: raise it, or lower max_num_seqs, num_speculative_tokens or run_ahead.most_drafts"
        )
