# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core and Megatron-Bridge in a training process without CUDA or TransformerEngine."""

import contextlib
import functools
from typing import Any

import torch

from nemo_rl_cpu import cuda

_FUSIONS = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
)


def train_on_cpu() -> None:
    """Call before the policy worker's own constructor."""
    cuda.train_on_cpu()
    _no_rng_tracker()
    _local_layers()
    _no_compiled_helpers()
    _plain_clipping()
    _cuda_type_names()


class _NullTracker:
    """No state: a model without dropout draws nothing."""

    def fork(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    def add(self, *args: Any) -> None: ...
    def reset(self) -> None: ...
    def set_states(self, states: Any) -> None: ...

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}


def _no_rng_tracker() -> None:
    import megatron.core.tensor_parallel as package
    from megatron.core.tensor_parallel import random

    tracker = _NullTracker()
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker, True
    random.initialize_rng_tracker = lambda *a, **k: None
    random.get_cuda_rng_tracker = package.get_cuda_rng_tracker = lambda *a, **k: tracker
    random.model_parallel_cuda_manual_seed = package.model_parallel_cuda_manual_seed = lambda *a, **k: None


def _local_layers() -> None:
    """Megatron-Bridge builds a model of Megatron-Core's own layers, on the CPU and without fused kernels."""
    import megatron.bridge.models.gpt_provider as bridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from nemo_rl.models.megatron import setup

    def local_spec(config: Any, *args: Any, **kwargs: Any) -> Any:
        return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")

    provide_native = bridge.GPTModelProvider.provide

    def provide(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec, self.transformer_layer_spec, self.use_cpu_initialization = self.transformer_layer_spec, local_spec, True
        for name in _FUSIONS:
            if hasattr(self, name):
                setattr(self, name, False)
        try:
            return provide_native(self, *args, **kwargs)
        finally:
            self.transformer_layer_spec = spec

    bridge.default_layer_spec, bridge.GPTModelProvider.provide = local_spec, provide
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)


def _no_compiled_helpers() -> None:
    import megatron.core.datasets.utils as datasets
    from megatron.bridge.training import initialize

    for module in (datasets, initialize):
        for name in ("compile_helpers", "_compile_dataset_helpers", "_compile_dependencies"):
            if hasattr(module, name):
                setattr(module, name, lambda *a, **k: None)


def _plain_clipping() -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    def clip(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
        factor = max_norm / (total_norm + 1e-6)
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else list(parameters):
            gradient = getattr(parameter, "decoupled_grad", None) if use_decoupled_grad else parameter.grad
            if factor < 1.0 and gradient is not None:
                gradient.mul_(factor)

    clip_grads.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = clip


def _cuda_type_names() -> None:
    """`tensor.type()` tells Megatron's gradient buckets apart by names of CUDA types."""
    native = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return native(self).replace("torch.", "torch.cuda.")
        return native(self, dtype.replace("cuda.", "") if isinstance(dtype, str) else dtype, *args, **kwargs)

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]
