# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers of an older vLLM on a CPU: bodies of what its CPU build lacks, or Triton's interpreter cannot run.

All other kernels of such layers are vLLM's own, in Triton's interpreter. What these bodies are told, such as the slots of
states and the numbers of accepted tokens, is vLLM's own, too.

Shapes: C channels and W taps of a convolution, R rows, L rows of one request.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


def install() -> None:
    """Puts the bodies in place. Call it before the first engine of the process.

    On a CPU with AMX, vLLM would pack the taps of a convolution for an operator that takes bfloat16 alone, so it is told
    that there is no AMX.
    """
    from vllm.model_executor.layers.mamba.ops import causal_conv1d
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.model_executor.models import falcon_h1, granitemoehybrid, nemotron_h, qwen3_next  # noqa: F401

    from lab.vllm_on_cpu.recurrent import apply_delta_rule

    torch.cpu._is_amx_tile_supported = lambda: False
    rule: Any = gdn_attention
    rule.cpu_gdn_attention_core = apply_delta_rule  # a layer registers it as an operator when it is made
    native = causal_conv1d.causal_conv1d_fn
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.model_executor")]:
        if vars(module).get("causal_conv1d_fn") is native:
            vars(module)["causal_conv1d_fn"] = convolve_prompts
    _try_one_configuration()


def _try_one_configuration() -> None:
    """Leaves each kernel of recurrent layers its first configuration, because the interpreter cannot time several."""
    from triton.runtime.autotuner import Autotuner

    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.model_executor.layers.mamba")]:
        for named in vars(module).values():
            kernel = named
            while hasattr(kernel, "run") and not isinstance(kernel, Autotuner):
                kernel = vars(kernel).get("fn")
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """Returns the convolved rows [C, R] of prompts, and keeps each request's last taps, like vLLM's `causal_conv1d_fn`."""
    history = weight.shape[1] - 1
    out_CR = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    for b, slot in enumerate(cache_indices.tolist()):
        rows = slice(starts[b], starts[b + 1])
        goes_on = has_initial_state is not None and bool(has_initial_state[b])
        window_CL = torch.cat([conv_states[slot, :, :history] * goes_on, x[:, rows]], dim=1)
        conv_states[slot, :, :history] = window_CL[:, -history:]
        made_CL = F.conv1d(window_CL[None], weight[:, None], bias, groups=len(weight))[0]
        out_CR[:, rows] = F.silu(made_CL) if activation else made_CL
    return out_CR


def with_names_of_older_vllm(folder: Path) -> Path:
    """Renames the input embedding of a saved Nemotron-H as NVIDIA's own checkpoints name it, and returns the folder."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = {name.replace(".embedding.", ".embeddings."): weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return folder
