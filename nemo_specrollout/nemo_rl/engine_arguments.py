# SPDX-License-Identifier: Apache-2.0
"""The arguments of an engine under NeMo-RL: its own, with the block put into effect."""

import os
from collections.abc import Mapping
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.arguments import with_specrollout
from nemo_specrollout.generation.older_runners import allow_text_drafters
from nemo_specrollout.racing.engine_blocks import block_of_engine

_CPU, _GPU = "nemo_specrollout.nemo_rl.cpu_engine_worker.", "nemo_specrollout.nemo_rl.gpu_engine_workers."
_WORKER_OF = {
    ("cpu", "VllmInternalWorkerExtension"): _CPU + "NemoRlCPUWorker",
    ("cuda", "VllmInternalWorkerExtension"): _GPU + "NemoRlGPUWorker",
    ("cuda", "VllmInternalWorkerExtensionWithCheckpointEngine"): _GPU + "NemoRlCheckpointEngineGPUWorker",
}
MTP_FROM_FOLDER = "specrollout_mtp_from_folder"
"""Key of vLLM's `additional_config`: the trainer does not train the native heads, so no refit brings them."""


def engine_arguments(llm_kwargs: Mapping[str, Any], generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """`llm_kwargs`, as NeMo-RL would pass them to vLLM, with our worker, drafters and block. Raises ConfigError."""
    compat.check_version()
    block = build(SpecrolloutConfig, generation_config["specrollout"], BLOCK_PATH)
    compat.check_drafters(block)
    allow_text_drafters()
    if len(block.drafters_of_workers) > 1:
        block = block_of_engine(block, engine_number(generation_config["vllm_cfg"]))
    device = compat.device_type()
    arguments = with_specrollout(llm_kwargs, block, device, **compat.drafting_abilities())
    if block.model_drafter is not None and arguments.get("load_format") == "dummy":
        # A drafter's weights come from its folder, as NeMo-RL does it for a drafter of its own that it does not train.
        arguments["load_format"] = "auto"
    if block.model_drafter is not None and block.model_drafter.type == "mtp":
        arguments["additional_config"][MTP_FROM_FOLDER] = not generation_config.get("_mtp_weights_from_refit")
    arguments["worker_cls"] = _WORKER_OF[device, llm_kwargs["worker_extension_cls"].rpartition(".")[2]]
    return arguments


def engine_number(vllm_cfg: Mapping[str, Any]) -> int:
    """Which of the fleet's engines this actor leads: NeMo-RL numbers all workers, those of an engine one after another."""
    return int(os.environ.get("RANK", "0")) // (vllm_cfg["tensor_parallel_size"] * vllm_cfg["pipeline_parallel_size"])
