# SPDX-License-Identifier: Apache-2.0
"""What is in force in an engine of this process beside `compat.engine_facts`: for `nemo-specrollout doctor`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_specrollout.generation.engine import RolloutEngine


def in_force(engine: "RolloutEngine") -> dict[str, Any]:
    """The engine's facts, and with them vLLM's platform class, its device and the names of the attention backends."""
    from vllm.platforms import current_platform

    return {
        **engine.facts(),
        "attention": engine.run_in_worker(_attention_backends),
        "platform": type(current_platform).__name__,
        "device": str(current_platform.device_type),
    }


def _attention_backends(worker: Any) -> list[str]:
    """Returns the backends' names; an empty list if this version's model runner does not tell them."""
    groups = [group for layers in getattr(worker.model_runner, "attn_groups", ()) for group in layers]
    return sorted({group.backend.get_name() for group in groups if hasattr(group, "backend")})
