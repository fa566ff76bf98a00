# SPDX-License-Identifier: Apache-2.0
"""Replaces vLLM's CPU functions for recurrent layers, because they ignore which drafts the last engine step has accepted.

Each function takes the arguments of vLLM's own and does what vLLM's GPU kernel does, in a loop over requests.

Shapes: B requests, K draft positions, R rows, L rows of one request, C channels and W taps of a convolution, H heads of size D
with a state of size N.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops import causal_conv1d, ssu_dispatch
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


def install() -> None:
    """Replaces vLLM's functions by those of this module, in all modules that use them."""
    native = causal_conv1d.causal_conv1d_update
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.model_executor")]:
        if vars(module).get("causal_conv1d_update") is native:
            vars(module)["causal_conv1d_update"] = convolve
    scan: Any = ssu_dispatch.CPUSSUBackend
    scan.__call__ = lambda _, *args, **options: scan_states(*args, **options)
    gated: Any = gdn_attention
    gated.cpu_gdn_attention_core = apply_delta_rule


def convolve(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    null_block_id: int = 0,
    **_: Any,
) -> torch.Tensor:
    """Returns the convolved rows [R, C], and advances each request's window, like vLLM's `causal_conv1d_update`.

    If the last engine step had drafts, the window [C, W - 1 + K] begins `accepted - 1` columns later. The window keeps all
    rows of this engine step, because which of them are accepted is known only in the next engine step.
    """
    assert conv_state_indices is not None
    slots_B = conv_state_indices if conv_state_indices.dim() == 1 else conv_state_indices[:, 0]
    starts, history, out = _starts(query_start_loc, len(slots_B)), weight.shape[1] - 1, torch.zeros_like(x)
    for b, slot in enumerate(slots_B.tolist()):
        if slot == null_block_id or starts[b] == starts[b + 1]:
            continue
        begin = 0 if num_accepted_tokens is None else int(num_accepted_tokens[b]) - 1
        rows_CL = x[starts[b] : starts[b + 1]].T.to(conv_state.dtype)
        window_CL = torch.cat([conv_state[slot, :, begin : begin + history], rows_CL], dim=1)
        kept = window_CL[:, -history:] if num_accepted_tokens is None else window_CL[:, 1:]
        conv_state[slot, :, : kept.shape[1]] = kept
        made_CL = F.conv1d(window_CL[None].to(weight.dtype), weight[:, None], bias, groups=len(weight))[0]
        out[starts[b] : starts[b + 1]] = (F.silu(made_CL) if activation else made_CL).T.to(x.dtype)
    return out


def scan_states(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor,
    dst_state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    null_block_id: int = 0,
    **_: Any,
) -> None:
    """Writes the rows of a Mamba2 layer to `out` [R, H, D], like vLLM's `selective_state_update`.

    In an engine step with drafts, each row leaves its state [H, D, N] in a slot of its own. The next engine step begins at the
    slot of the last accepted token.
    """
    from_BK, to_BK = (t if t.dim() == 2 else t[:, None] for t in (state_batch_indices, dst_state_batch_indices))
    starts, per_group = _starts(cu_seqlens, len(from_BK)), state.shape[1] // B.shape[1]
    for b in range(len(from_BK)):
        slot = int(from_BK[b, 0 if num_accepted_tokens is None else max(int(num_accepted_tokens[b]) - 1, 0)])
        if slot == null_block_id:
            continue
        state_HDN = state[slot].float()
        for i, r in enumerate(range(starts[b], starts[b + 1])):
            dt_HD, x_HD = dt[r].float() + dt_bias.float(), x[r].float()
            dt_HD = F.softplus(dt_HD) if dt_softplus else dt_HD
            in_HN, out_HN = (t[r].float().repeat_interleave(per_group, 0) for t in (B, C))
            state_HDN = state_HDN * torch.exp(A * dt_HD[..., None]) + in_HN[:, None] * (dt_HD * x_HD)[..., None]
            out[r] = ((state_HDN * out_HN[:, None]).sum(-1) + x_HD * D.float()).to(out.dtype)
            target = int(to_BK[b, 0 if num_accepted_tokens is None else i])
            if target != null_block_id:
                state[target] = state_HDN.to(state.dtype)


def _starts(query_start_loc: torch.Tensor | None, num_requests: int) -> list[int]:
    return list(range(num_requests + 1)) if query_start_loc is None else query_start_loc.tolist()


def apply_delta_rule(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Writes the rows of a layer of the gated delta rule to `core_attn_out` [R, H, D], like vLLM's `cpu_gdn_attention_core`.

    vLLM's own function takes only bfloat16, in which engine steps with and without drafts round differently.
    """
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    windows, states, width = layer.kv_cache[0].transpose(-1, -2), layer.kv_cache[1], layer.conv_kernel_size
    weight, bias = layer.conv1d.weight.view(-1, 1, width), layer.conv1d.bias
    decay_RH = torch.exp(-layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float()))
    for rows, slots, accepted, goes_on in _sequences(context.attn_metadata[layer.prefix]):
        begin, rows_CL = max(accepted - 1, 0), mixed_qkv[rows].T
        window_CL = torch.cat([windows[slots[0], :, begin : begin + width - 1] * goes_on, rows_CL], dim=1)
        kept = window_CL[:, 1:] if accepted else window_CL[:, 1 - width :]
        windows[slots[0], :, : kept.shape[1]] = kept
        made_LC = F.silu(F.conv1d(window_CL[None], weight, bias, groups=len(weight))[0]).T
        state_HDN = states[slots[begin]].float() * goes_on
        for i, (row, q_HN, k_HN, v_HD) in enumerate(zip(rows, *_heads(layer, made_LC), strict=True)):
            state_HDN = state_HDN * decay_RH[row][:, None, None]
            error_HD = (v_HD - (state_HDN * k_HN[:, None]).sum(-1)) * b[row].float().sigmoid()[:, None]
            state_HDN = state_HDN + error_HD[..., None] * k_HN[:, None]
            core_attn_out[row] = (state_HDN * q_HN[:, None]).sum(-1).to(core_attn_out.dtype)
            if accepted:
                states[slots[i]] = state_HDN.to(states.dtype)
        if not accepted:
            states[slots[0]] = state_HDN.to(states.dtype)


def _heads(layer: Any, made_LC: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields queries and keys of unit length [L, H, N], and values [L, H, D]."""
    q, k, v = (t[0].float() for t in layer.rearrange_mixed_qkv(made_LC))
    for t, scale in ((q, q.shape[-1] ** -0.5), (k, 1.0)):
        unit = t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)
        yield (unit * scale).repeat_interleave(v.shape[1] // t.shape[1], dim=1)
    yield v


def _sequences(metadata: Any) -> Iterator[tuple[list[int], list[int], int, bool]]:
    """Yields each request's rows, slots of states, number of accepted tokens, and whether it has a state already.

    The number is that of the last engine step, or 0 for a request without drafts.
    """
    if metadata.num_spec_decodes:
        starts = metadata.spec_query_start_loc.tolist()
        order = range(starts[-1]) if metadata.spec_token_indx is None else metadata.spec_token_indx.tolist()
        for i in range(metadata.num_spec_decodes):
            slots, accepted = metadata.spec_state_indices_tensor[i].tolist(), int(metadata.num_accepted_tokens[i])
            yield list(order[starts[i] : starts[i + 1]]), slots, accepted, True
    num_others = metadata.num_decodes + metadata.num_prefills
    if num_others:
        starts = metadata.non_spec_query_start_loc.tolist()
        order = metadata.non_spec_token_indx
        order = range(starts[-1]) if order is None else order.tolist()
        has_state = metadata.has_initial_state
        for i in range(num_others):
            goes_on = i < metadata.num_decodes or (has_state is not None and bool(has_state[i]))
            yield list(order[starts[i] : starts[i + 1]]), [int(metadata.non_spec_state_indices_tensor[i])], 0, goes_on
