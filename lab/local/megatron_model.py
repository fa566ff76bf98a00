# SPDX-License-Identifier: Apache-2.0
"""A Megatron-Core `GPTModel` in this process, on the CPU or a GPU, with its setup, weights, batches and log-probs.

Shapes: B sequences, b of a micro batch, T positions, V vocabulary, N heads, D head dimension. Sequences are padded on the
right. Results at padding are never used, so the causal mask is the only one that attention needs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lab.local.device import CPU
from lab.local.policy_shape import PolicyShape
from nemo_specrollout.storage.model_folder import EMBEDDING, LM_HEAD

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of torch's process group, by the type of the model's device. With one rank they only copy."""
_world: dist.ProcessGroup | None = None
"""torch's default process group at the time when Megatron's groups were made. If torch has another one now, Megatron's groups
are stale."""


def install(device: torch.device = CPU) -> None:
    """Sets up Megatron-Core's device and process groups for one process. It is cheap, so call it before each use of a model.

    Megatron-Core puts its rotary table on the device that `torch.cuda.current_device()` returns. For a model on the CPU,
    `install` replaces that function of torch by one that returns the CPU. vLLM in the same process may share torch's process
    group, and destroys it when an engine shuts down, so `install` makes missing groups again.

    Raises:
        RuntimeError: The model is to be on the CPU, but CUDA is available, so a part of it would end up on the GPU.
    """
    global _world  # noqa: PLW0603
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif torch.cuda.is_available():
        raise RuntimeError("the local policy is to be on the CPU: hide the GPUs with CUDA_VISIBLE_DEVICES=''")
    else:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if not dist.is_initialized():
        dist.init_process_group(_BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    if _world is not dist.group.WORLD:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()
        _world = dist.group.WORLD


# Batches


@dataclass(frozen=True)
class TokenBatch:
    """Prompts with their responses, right-padded. Invariant: 1 <= prompt length <= length <= T, 2 <= length."""

    tokens_BT: Tensor
    lengths_B: Tensor
    prompt_lengths_B: Tensor

    @classmethod
    def from_sequences(cls, prompts: list[list[int]], responses: list[list[int]], pad_id: int) -> "TokenBatch":
        """Returns a batch in which each prompt is followed by its response."""
        rows = [torch.tensor(p + r, dtype=torch.int64) for p, r in zip(prompts, responses, strict=True)]
        return cls(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id),
            torch.tensor([len(row) for row in rows]),
            torch.tensor([len(p) for p in prompts]),
        )

    def select(self, rows_b: Tensor) -> "TokenBatch":
        """Returns the given rows, padded to the width of the whole batch."""
        return TokenBatch(self.tokens_BT[rows_b], self.lengths_B[rows_b], self.prompt_lengths_B[rows_b])

    @property
    def valid_mask_BT(self) -> Tensor:
        """Mask that is true at tokens and false at padding, [B, T]."""
        return torch.arange(self.tokens_BT.shape[1]) < self.lengths_B.unsqueeze(1)

    @property
    def response_mask_BT(self) -> Tensor:
        """Mask that is true at generated tokens, [B, T]."""
        return self.valid_mask_BT & (torch.arange(self.tokens_BT.shape[1]) >= self.prompt_lengths_B.unsqueeze(1))

    def micro_batches(self, micro_batch_tokens: int) -> Iterator[tuple[Tensor, int]]:
        """Yields micro batches, each as its rows [b] and the length of its longest row. The rows are sorted by length.

        A micro batch has at most `micro_batch_tokens` tokens including padding, unless it has only one row.
        """
        rows: list[int] = []
        for row in self.lengths_B.argsort(stable=True).tolist():
            if rows and (len(rows) + 1) * int(self.lengths_B[row]) > micro_batch_tokens:
                yield torch.tensor(rows), int(self.lengths_B[rows[-1]])
                rows = []
            rows.append(row)
        yield torch.tensor(rows), int(self.lengths_B[rows[-1]])


# The model


class CausalAttention(MegatronModule):
    """Core attention with torch's fused kernel, which replaces Megatron's `DotProductAttention`.

    Megatron's own kernel writes out the B x N x T x T scores and is several times slower on a CPU.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Maps query [T, B, N, D], key and value [T, B, groups, D] to context [T, B, N * D]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context_BNTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return context_BNTD.permute(2, 0, 1, 3).flatten(2)


def build_model(shape: PolicyShape, dtype: torch.dtype = torch.float32) -> GPTModel:
    """Returns the model in `dtype` on the CPU, with uninitialised weights. Call `install` first."""
    model = GPTModel(
        transformer_config(shape, dtype),
        layer_spec(shape.has_qk_norm),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
        share_embeddings_and_output_weights=shape.is_tied,
    )
    return model.to(dtype)  # norms are created in float32


def transformer_config(shape: PolicyShape, dtype: torch.dtype = torch.float32) -> TransformerConfig:
    """Returns Megatron-Core's config of the network. Fused kernels are switched off, so that all devices compute alike."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.has_qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        cuda_graph_scope=[],
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
    )


def layer_spec(has_qk_norm: bool = True) -> ModuleSpec:
    """Returns the modules of a layer, which are Megatron's own except for the attention."""
    spec = get_gpt_layer_local_spec(qk_layernorm=has_qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


@torch.no_grad()
def load_hf(model: GPTModel, shape: PolicyShape, tensors: Mapping[str, Tensor]) -> None:
    """Copies the tensors of a Hugging Face folder into the model. `check_trainable` must have accepted the folder.

    Raises:
        ValueError: The config ties the LM head to the embedding, but the checkpoint has an LM head that differs from it.
    """
    if shape.is_tied and LM_HEAD in tensors and not torch.equal(tensors[LM_HEAD], tensors[EMBEDDING]):
        raise ValueError(f"{LM_HEAD} differs from {EMBEDDING}, but config.json ties the two: set tie_word_embeddings")
    parameters = dict(model.named_parameters())
    for weight in shape.weights():
        parameters[weight.megatron].copy_(weight.joined([tensors[name] for name in weight.hf]))


@torch.no_grad()
def export_hf(model: GPTModel, shape: PolicyShape) -> Iterator[tuple[str, Tensor]]:
    """Yields the Hugging Face name and a float32 copy of each weight, on the model's device."""
    parameters = dict(model.named_parameters())
    for weight in shape.weights():
        for name, tensor in zip(weight.hf, weight.split(parameters[weight.megatron].detach()), strict=True):
            yield name, tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def token_logprobs(model: GPTModel, tokens_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the log-prob of each token given the tokens before it, [B, T], with logits divided by `temperature`.

    Position 0 has no tokens before it and gets 0.0. Raises ValueError unless the temperature is positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} has no log-probs: use a positive temperature")
    logits_BTV = next_token_logits(model, tokens_BT[:, :-1])
    nll_BT = vocab_parallel_cross_entropy(logits_BTV / temperature, tokens_BT[:, 1:])
    return F.pad(-nll_BT, (1, 0))


def next_token_logits(model: GPTModel, tokens_BT: Tensor) -> Tensor:
    """Returns the logits of the token after each position, [B, T, V]."""
    positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    return model(tokens_BT, positions_BT, attention_mask=None)
