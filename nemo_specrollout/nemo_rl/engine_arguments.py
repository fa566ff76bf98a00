# SPDX-License-Identifier: Apache-2.0
"""Arguments of an engine under NeMo-RL, with the block put into effect."""

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
_WORKERS = {
    ("cpu", "VllmInternalWorkerExtension"): _CPU + "NemoRlCPUWorker",
    ("cuda", "VllmInternalWorkerExtension"): _GPU + "NemoRlGPUWorker",
    ("cuda", "VllmInternalWorkerExtensionWithCheckpointEngine"): _GPU + "NemoRlCheckpointEngineGPUWorker",
}
"""Our vLLM worker for each device and each of NeMo-RL's worker extensions."""
MTP_FROM_FOLDER = "specrollout_mtp_from_folder"
"""Key of vLLM's `additional_config`: true if the trainer does not train the native heads, so no refit brings them."""


def engine_arguments(llm_kwargs: Mapping[str, Any], generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns NeMo-RL's arguments for vLLM, with our vLLM worker, the drafters and the block. Raises ConfigError."""
    compat.check_version()
    block = build(SpecrolloutConfig, generation_config["specrollout"], BLOCK_PATH)
    compat.check_drafters(block)
    allow_text_drafters()
    if len(block.drafters_of_engines) > 1:
        block = block_of_engine(block, engine_number(generation_config["vllm_cfg"]))
    device = compat.device_type()
    arguments = with_specrollout(llm_kwargs, block, device, compat.vllm_abilities())
    if block.model_drafter is not None and arguments.get("load_format") == "dummy":
        # The drafter's weights come from its folder. NeMo-RL does the same for its own drafter if it does not train it.
        arguments["load_format"] = "auto"
    if block.model_drafter is not None and block.model_drafter.type == "mtp":
        arguments["additional_config"][MTP_FROM_FOLDER] = not generation_config.get("_mtp_weights_from_refit")
    arguments["worker_cls"] = _WORKERS[device, llm_kwargs["worker_extension_cls"].rpartition(".")[2]]
    return arguments


def engine_number(vllm_cfg: Mapping[str, Any]) -> int:
    """Returns the number of the engine that this actor leads. NeMo-RL numbers all workers, engine by engine."""
    return int(os.environ.get("RANK", "0")) // (vllm_cfg["tensor_parallel_size"] * vllm_cfg["pipeline_parallel_size"])
