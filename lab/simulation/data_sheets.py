# SPDX-License-Identifier: Apache-2.0
"""Public figures for the roofline, which are data sheets of GPUs and shapes of transformers.

Peaks of GPUs are dense (never "with sparsity"), and link bandwidths are for one direction.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from nemo_specrollout.config.strict import ConfigError, bounded, build, nearest
from nemo_specrollout.storage.model_folder import read_object

_HEAD_VOCABULARY = 32_000
"""Vocabulary of an EAGLE-3 head (arXiv 2503.01840), which drafts only the most frequent tokens."""


@dataclass(frozen=True)
class Device:
    """Figures of a GPU's data sheet in dense operations per second, bytes per second, and bytes."""

    name: str
    source: str
    """Name of the data sheet."""
    bf16_flops: float
    fp8_flops: float | None
    """Dense fp8 operations per second, or None if the tensor cores do not support fp8."""
    hbm_bytes_per_s: float
    hbm_bytes: float
    nvlink_bytes_per_s: float
    """Bandwidth within the NVLink domain, in one direction."""
    nvlink_gpus: int
    """Number of GPUs in an NVLink domain."""
    network_bytes_per_s: float
    """Bandwidth to other GPUs, through the network adapter of the system in the data sheet."""

    def flops(self, precision: str) -> float:
        """Returns the dense operations per second in `bf16` or `fp8`. Raises ConfigError if the GPU lacks that precision."""
        peak = self.bf16_flops if precision == "bf16" else self.fp8_flops
        if peak is None:
            raise ConfigError(
                f"precision: {precision!r}; {self.name} has no such tensor cores: use bf16, or another device"
            )
        return peak

    def link_bytes_per_s(self, num_gpus: int) -> float:
        """Returns the bandwidth in one direction between GPUs of a group of `num_gpus`, in bytes per second."""
        return self.nvlink_bytes_per_s if num_gpus <= self.nvlink_gpus else self.network_bytes_per_s


_SXM = "NVIDIA {0} data sheet (SXM); DGX {1} data sheet for the network"
_B200 = "NVIDIA DGX B200 data sheet, an eighth of it"
_GB200 = "NVIDIA GB200 NVL72 data sheet, a seventy-second of it; ConnectX-7 of the DGX GB200 data sheet"

DEVICES = {
    device.name: device
    for device in (
        Device("A100", _SXM.format("A100 80GB", "A100"), 312e12, None, 2.039e12, 80e9, 300e9, 8, 25e9),
        Device("H100", _SXM.format("H100", "H100"), 989e12, 1979e12, 3.35e12, 80e9, 450e9, 8, 50e9),
        Device("H200", _SXM.format("H200", "H200"), 989e12, 1979e12, 4.8e12, 141e9, 450e9, 8, 50e9),
        Device("B200", _B200, 2.25e15, 4.5e15, 8e12, 180e9, 900e9, 8, 50e9),
        Device("GB200", _GB200, 2.5e15, 5e15, 8e12, 186e9, 900e9, 72, 50e9),
    )
}


def device_named(name: str, field: str) -> Device:
    """Returns the GPU of that name. Raises ConfigError with the field, the value and the known names."""
    if name not in DEVICES:
        raise ConfigError(f"{field}: {name!r} is not known{nearest(name, DEVICES)}")
    return DEVICES[name]


@dataclass(frozen=True)
class ModelShape:
    """Shape of a transformer with grouped-query attention and gated MLP, by the names of a Hugging Face config.json."""

    num_hidden_layers: int = bounded(low=1)
    hidden_size: int = bounded(low=1)
    num_attention_heads: int = bounded(low=1)
    num_key_value_heads: int = bounded(low=1)
    head_dim: int = bounded(low=1)
    intermediate_size: int = bounded(low=1)
    """Width of a dense layer's MLP."""
    vocab_size: int = bounded(low=1)
    num_experts: int = bounded(0, low=0)
    """Number of experts in each layer, or 0 for a dense model."""
    num_experts_per_tok: int = bounded(0, low=0)
    moe_intermediate_size: int = bounded(0, low=0)
    """Width of one expert."""

    @property
    def expert_params(self) -> int:
        """Number of parameters of one expert in one layer."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def shared_params(self) -> int:
        """Number of parameters that every token uses, in attention, dense MLPs and the output layer.

        The input embedding does not count, because it is only looked up.
        """
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        layer = self.hidden_size * self.head_dim * heads
        layer += 0 if self.num_experts else 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * layer + self.hidden_size * self.vocab_size

    @property
    def active_params(self) -> int:
        """Number of parameters that one token uses."""
        return self.shared_params + self.num_hidden_layers * self.num_experts_per_tok * self.expert_params

    @property
    def params(self) -> int:
        """Number of all parameters in memory, including the input embedding."""
        experts = self.num_hidden_layers * self.num_experts * self.expert_params
        return self.shared_params + experts + self.hidden_size * self.vocab_size

    @property
    def kv_values_per_token(self) -> int:
        """Number of values in the KV cache for each token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def params_read(self, num_rows: np.ndarray | float) -> np.ndarray | float:
        """Returns how many parameters an engine step of `num_rows` rows reads, including each expert that gets a row.

        Routing is modelled as uniform and independent. If k of E experts are used per token, an expert gets no row with
        probability (1 - k/E)^rows.
        """
        if not self.num_experts:
            return self.shared_params + 0.0 * num_rows
        share = 1.0 - (1.0 - self.num_experts_per_tok / self.num_experts) ** num_rows
        return self.shared_params + self.num_hidden_layers * self.num_experts * self.expert_params * share

    def attention_flops(self, num_rows: np.ndarray | float, context: float) -> np.ndarray | float:
        """Returns the number of operations with which `num_rows` rows attend to `context` tokens each."""
        return 4.0 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * context * num_rows


def eagle3_head(policy: ModelShape) -> ModelShape:
    """Returns the shape of an EAGLE-3 head for a policy, which is one dense layer of the same width."""
    return replace(
        policy,
        num_hidden_layers=1,
        vocab_size=_HEAD_VOCABULARY,
        num_experts=0,
        num_experts_per_tok=0,
        moe_intermediate_size=0,
    )


# From the config.json files on Hugging Face
MODELS = {
    "Qwen2.5-0.5B": ModelShape(24, 896, 14, 2, 64, 4864, 151_936),
    "Qwen2.5-1.5B": ModelShape(28, 1536, 12, 2, 128, 8960, 151_936),
    "Qwen2.5-7B": ModelShape(28, 3584, 28, 4, 128, 18_944, 152_064),
    "Qwen2.5-32B": ModelShape(64, 5120, 40, 8, 128, 27_648, 152_064),
    "Qwen3-0.6B": ModelShape(28, 1024, 16, 8, 128, 3072, 151_936),
    "Qwen3-1.7B": ModelShape(28, 2048, 16, 8, 128, 6144, 151_936),
    "Qwen3-8B": ModelShape(36, 4096, 32, 8, 128, 12_288, 151_936),
    "Qwen3-32B": ModelShape(64, 5120, 64, 8, 128, 25_600, 151_936),
    "Qwen3-30B-A3B": ModelShape(48, 2048, 32, 4, 128, 6144, 151_936, 128, 8, 768),
    "Qwen3-235B-A22B": ModelShape(94, 4096, 64, 4, 128, 12_288, 151_936, 128, 8, 1536),
}


def model_named(name: str, field: str) -> ModelShape:
    """Returns the shape of a model. `name` is the name of a known model, or a folder with a config.json.

    The name may begin with the organisation, as on Hugging Face. Raises ConfigError with the field, the value and the fix.
    """
    folder = Path(name)
    if (folder / "config.json").is_file():
        return _from_config(folder / "config.json", field)
    short = name.rpartition("/")[2].removesuffix("-Base")
    if short not in MODELS:
        raise ConfigError(f"{field}: {name!r} is neither known nor a folder with a config.json{nearest(short, MODELS)}")
    return MODELS[short]


def _from_config(path: Path, field: str) -> ModelShape:
    names = {f.name for f in fields(ModelShape)}
    try:
        tree = read_object(path)
        heads = int(tree["num_attention_heads"])
        known = {key: value for key, value in tree.items() if key in names and value is not None}
        defaults = {"head_dim": int(tree["hidden_size"]) // heads, "num_key_value_heads": heads}
        return build(ModelShape, {**defaults, **known}, field)
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ConfigError(
            f"{field}: {path} does not describe a known shape ({error}); give a folder with a Qwen3 model, or a known model"
        ) from error
