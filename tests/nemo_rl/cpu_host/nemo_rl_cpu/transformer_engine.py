# SPDX-License-Identifier: Apache-2.0
"""Stands in for TransformerEngine, which Megatron-Bridge and ModelOpt import, and which needs CUDA.

Megatron-Core is imported first, so that it finds none and uses its own layers; then every name of TransformerEngine is
an empty module class. ModelOpt's EAGLE module gets plain layers.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_STOOD_IN = ("transformer_engine", "transformer_engine_torch")
# Imported while there is no TransformerEngine, because they look for it on import.
_FIRST = (
    "modelopt.torch.quantization",
    "modelopt.torch.opt",
    "modelopt.torch.speculative.plugins.megatron_eagle",
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.fp4_utils",
    "megatron.core.fp8_utils",
    "megatron.core.full_cuda_graph",
    "megatron.core.inference.engines",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mamba.mamba_layer_specs",
    "megatron.core.models.multimodal.llava_model",
    "megatron.core.optimizer",
    "megatron.core.post_training.modelopt.gpt.model_specs",
    "megatron.core.transformer.cuda_graphs",
    "megatron.core.transformer.moe.experts",
)


def stand_in() -> None:
    """Call before NeMo-RL's Megatron worker is imported."""
    for name in _FIRST:
        importlib.import_module(name)
    sys.meta_path.append(_Finder())
    _plain_eagle_layers()


class _AnyName(type(torch.nn.Module)):  # type: ignore[misc]
    def __getattr__(cls, name: str) -> Any:
        return _name_in(cls, name)


def _name_in(holder: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = _AnyName(name, (torch.nn.Module,), {"__init__": lambda self, *a, **k: torch.nn.Module.__init__(self)})
    setattr(holder, name, made)
    return made


class _AnyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _name_in(self, name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".", maxsplit=1)[0] in _STOOD_IN else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _AnyModule(spec.name)
        module.__path__ = []
        module.__version__ = "2.14.1"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def _plain_eagle_layers() -> None:
    import modelopt.torch.speculative.plugins.megatron_eagle as eagle
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def spec(config: Any, use_arbitrary_attention_mask: bool = False, **kwargs: Any) -> Any:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        mask = AttnMaskType.arbitrary if use_arbitrary_attention_mask else AttnMaskType.causal
        layer.submodules.self_attention.params["attn_mask_type"] = mask
        return layer

    class PlainLinear(torch.nn.Linear):
        def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool = False, **kwargs: Any) -> None:
            super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), None

    eagle.get_gpt_modelopt_spec = spec
    eagle.TENorm = lambda config, hidden_size, eps=1e-5: WrappedTorchNorm(config, hidden_size, eps=eps)
    eagle.TELinear = PlainLinear
    eagle.TEDotProductAttention = type("TEDotProductAttention", (), {})
