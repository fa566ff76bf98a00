# SPDX-License-Identifier: Apache-2.0
"""Features from a Megatron-Core policy, caught by forward hooks in a log-prob pass that runs anyway.

The hooks copy the kept rows and return nothing: results and gradients stay bitwise what they are without them. What
they copied is brought together after the pass, so that nothing of ours is in flight beside the pipeline's messages.

Shapes: S positions of a forward, B rows of it (1 if packed), b rows of it that are kept, T tokens of a sequence, N kept
tokens of the whole pass, A auxiliary layers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_specrollout.training.features.features import SequenceFeatures

_FINAL = -1
"""The key of the final hidden states among the layer ids."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FAILED = -1


@dataclass(frozen=True)
class KeptRow:
    """A sequence to keep of one forward: its tokens, and that they lie at [start : start + T, row] of the [S, B] input."""

    token_ids_T: Tensor
    prompt_length: int
    row: int
    start: int = 0


def padded_rows(
    tokens_BT: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, rows: Sequence[int]
) -> tuple[KeptRow, ...]:
    """The given rows of a right-padded batch that is one forward."""
    return tuple(KeptRow(tokens_BT[row, : int(lengths_B[row])], int(prompt_lengths_B[row]), row) for row in rows)


def packed_rows(
    tokens_S: Tensor, cu_seqlens: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, sequences: Sequence[int]
) -> tuple[KeptRow, ...]:
    """The given sequences of a packed forward [S, 1]: sequence i begins at `cu_seqlens[i]`, padding between allowed."""
    starts = [int(cu_seqlens[i]) for i in sequences]
    return tuple(
        KeptRow(tokens_S[start : start + int(lengths_B[i])], int(prompt_lengths_B[i]), 0, start)
        for start, i in zip(starts, sequences, strict=True)
    )


class MegatronFeatureCapture:
    """Catches the features of chosen rows while the model's own forwards run.

    Entry n of `forwards` says what to keep of the n-th forward of the decoder after entering. A log-prob pass may leave
    out a batch's last position; the longest rows then have one feature less. With tensor parallelism all ranks must
    enter, with sequence parallelism the kept rows are gathered over them; only the first rank keeps a copy. With
    pipeline parallelism each stage catches the layers that it owns. Owns its hooks while entered, and what they caught.

        with MegatronFeatureCapture(model, (1, 2, 3), [padded_rows(tokens, lengths, prompts, [0, 5])], 7) as capture:
            logprobs = policy.get_logprobs(...)
        features = capture.collect()
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        layer_ids: Sequence[int],
        forwards: Sequence[Sequence[KeptRow]],
        policy_version: int,
    ):
        """`model`: a GPTModel or this rank's part of one, wrapped (DDP, Float16Module) or not. `layer_ids`: global; the
        feature of layer i is what goes into layer i. Raises ValueError for a parallelism or a layer that it lacks."""
        self._model = _gpt_model(model)
        self._config = self._model.config
        _check_parallelism(self._config)
        _check_layer_ids(layer_ids, self._config.num_layers)
        self._layer_ids = tuple(layer_ids)
        self._forwards = forwards
        self._policy_version = policy_version
        self._tensor_group, self._pipeline_group = _groups(self._config)
        self._owned = self._owned_modules()
        self._handles: list[Any] = []
        self._caught: list[dict[int, Tensor]] = []
        self._counts: list[list[int]] = []
        self._embedded_ids: Tensor | None = None
        self._is_in_forward = False
        self._problem = ""

    def __enter__(self) -> "MegatronFeatureCapture":
        assert not self._handles and not self._caught, "a capture is good for one pass"
        decoder = self._model.decoder
        self._handles = [
            decoder.register_forward_pre_hook(self._begin_forward),
            decoder.register_forward_hook(self._end_forward, always_call=True),
        ]
        if (embedding := getattr(self._model, "embedding", None)) is not None:
            self._handles.append(embedding.register_forward_pre_hook(self._see_ids, with_kwargs=True))
        for key, module in self._owned.items():
            self._handles.append(self._hook(key, module))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def collect(self) -> list[SequenceFeatures]:
        """The features, by forward and row; on the last pipeline stage's first tensor-parallel rank, elsewhere [].

        Every rank calls it once, after the pass. Raises ValueError where the forwards were not those announced.
        """
        if not any(self._forwards) or _rank(self._tensor_group) > 0:
            return []
        if self._pipeline_group is not None and not self._is_last_stage:
            self._send()
            self._raise_problem()
            return []
        self._find_problem()
        pieces = {} if self._problem else self._own_pieces()
        for stage in range(_size(self._pipeline_group) - 1):
            pieces |= self._receive(stage)
        self._raise_problem()
        return self._as_features(pieces)

    def _owned_modules(self) -> dict[int, nn.Module]:
        """The modules of this stage that are hooked, by layer id."""
        decoder = self._model.decoder
        layers = {int(layer.layer_number) - 1: layer for layer in decoder.layers}
        owned = {i: layers[i] for i in self._layer_ids if i in layers}
        if self._is_last_stage:
            if decoder.final_layernorm is None:
                raise ValueError("the last pipeline stage has no decoder.final_layernorm: features need its output")
            owned[_FINAL] = decoder.final_layernorm
        return owned

    @property
    def _is_last_stage(self) -> bool:
        return _rank(self._pipeline_group) == _size(self._pipeline_group) - 1

    def _hook(self, key: int, module: nn.Module) -> Any:
        if key == _FINAL:
            return module.register_forward_hook(lambda _module, _args, output: self._catch(key, output))
        return module.register_forward_pre_hook(
            lambda _module, args, kwargs: self._catch(key, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )

    def _see_ids(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._embedded_ids = args[0] if args else kwargs["input_ids"]

    def _begin_forward(self, *_: Any) -> None:
        self._is_in_forward = True
        self._caught.append({})
        self._counts.append([])
        if self._embedded_ids is not None:
            self._check_tokens(self._embedded_ids)
        self._embedded_ids = None

    def _check_tokens(self, ids_BS: Tensor) -> None:
        """The first stage sees the tokens: rows in another order than announced would be mistaken silently."""
        forward = len(self._caught) - 1
        for r in self._forwards[forward] if forward < len(self._forwards) else ():
            given = ids_BS[r.row, r.start : r.start + len(r.token_ids_T)] if r.row < len(ids_BS) else ids_BS[:0, 0]
            if not torch.equal(given, r.token_ids_T[: len(given)].to(given)):
                self._problem = (
                    f"forward {forward}: row {r.row} from position {r.start} has other tokens than announced"
                )
                return

    def _end_forward(self, *_: Any) -> None:
        self._is_in_forward = False

    @torch.no_grad()
    def _catch(self, key: int, hidden: Tensor) -> None:
        """Copy the kept rows of [S, B, H] (sequence parallel: this rank's part of S). Never raises: that would end the
        policy's forward; `collect` tells. Layers that run outside a forward are recomputed by a backward pass."""
        forward = len(self._caught) - 1
        if not self._is_in_forward or forward >= len(self._forwards) or not self._forwards[forward]:
            return
        kept = self._forwards[forward]
        if hidden.dim() != 3 or hidden.shape[2] != self._config.hidden_size:
            self._problem = f"forward {forward}: hidden states {tuple(hidden.shape)}, not [S, B, H]"
        elif (row := max(r.row for r in kept)) >= hidden.shape[1]:
            self._problem = f"forward {forward}: row {row} is kept, but it has {hidden.shape[1]} rows"
        else:
            columns = sorted({r.row for r in kept})
            self._keep(key, kept, columns, self._whole_sequence(hidden.detach()[:, columns]))

    def _keep(self, key: int, kept: Sequence[KeptRow], columns: list[int], hidden_SbH: Tensor) -> None:
        counts = [min(len(r.token_ids_T), hidden_SbH.shape[0] - r.start) for r in kept]
        forward = len(self._caught) - 1
        for r, count in zip(kept, counts, strict=True):
            if count < max(1, len(r.token_ids_T) - 1):
                self._problem = f"forward {forward}: {hidden_SbH.shape[0]} positions, but a row of {len(r.token_ids_T)}"
                return
        if _rank(self._tensor_group) == 0:
            spans = [hidden_SbH[r.start : r.start + n, columns.index(r.row)] for r, n in zip(kept, counts, strict=True)]
            self._caught[-1][key] = torch.cat(spans).cpu()
            self._counts[-1] = counts

    def _whole_sequence(self, hidden: Tensor) -> Tensor:
        if not self._config.sequence_parallel or self._tensor_group is None:
            return hidden
        whole = hidden.new_empty(hidden.shape[0] * _size(self._tensor_group), *hidden.shape[1:])
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self._tensor_group)
        return whole

    def _find_problem(self) -> None:
        if self._problem:
            return
        if len(self._caught) != len(self._forwards):
            self._problem = f"{len(self._caught)} forwards ran, but {len(self._forwards)} were announced"
        elif any(
            kept and self._owned.keys() - caught for kept, caught in zip(self._forwards, self._caught, strict=True)
        ):
            self._problem = "a hook was never called: CUDA graphs of layers bypass hooks; turn them off for this pass"

    def _raise_problem(self) -> None:
        if self._problem:
            raise ValueError(f"no features from this pass: {self._problem}")

    def _own_pieces(self) -> dict[int, Tensor]:
        """[N, H] of each owned key."""
        return {key: torch.cat([c[key] for c in self._caught if c]) for key in self._owned}

    def _send(self) -> None:
        """To the last stage: dtype, N and which layers are ours, then one [N, H] a layer."""
        self._find_problem()
        pieces = {} if self._problem else self._own_pieces()
        dtype = next((_DTYPES.index(piece.dtype) for piece in pieces.values()), 0)
        num_tokens = sum(map(sum, self._counts))
        header = [_FAILED if self._problem else dtype, num_tokens, *(int(i in pieces) for i in self._layer_ids)]
        device, last = _wire_device(self._pipeline_group), _size(self._pipeline_group) - 1
        dist.send(torch.tensor(header, device=device), group=self._pipeline_group, group_dst=last)
        for key in (i for i in self._layer_ids if i in pieces):
            dist.send(pieces[key].to(device), group=self._pipeline_group, group_dst=last)

    def _receive(self, stage: int) -> dict[int, Tensor]:
        device = _wire_device(self._pipeline_group)
        header = torch.empty(2 + len(self._layer_ids), dtype=torch.int64, device=device)
        dist.recv(header, group=self._pipeline_group, group_src=stage)
        dtype, num_tokens, *is_owned = header.tolist()
        if dtype == _FAILED:
            self._problem = self._problem or f"pipeline stage {stage} failed to catch them"
            return {}
        pieces = {}
        for key in (i for i, owned in zip(self._layer_ids, is_owned, strict=True) if owned):
            piece = torch.empty(num_tokens, self._config.hidden_size, dtype=_DTYPES[dtype], device=device)
            dist.recv(piece, group=self._pipeline_group, group_src=stage)
            pieces[key] = piece.cpu()
        return pieces

    def _as_features(self, pieces: dict[int, Tensor]) -> list[SequenceFeatures]:
        counts = [count for forward in self._counts for count in forward]
        aux = torch.cat([pieces[i] for i in self._layer_ids], 1).split(counts)
        final = pieces[_FINAL].split(counts)
        kept = [r for forward in self._forwards for r in forward]
        return [
            SequenceFeatures(
                r.token_ids_T[:n].to("cpu", torch.int32), aux_TF, final_TH, r.prompt_length, self._policy_version
            )
            for r, n, aux_TF, final_TH in zip(kept, counts, aux, final, strict=True)
        ]


def _gpt_model(model: nn.Module | Sequence[nn.Module]) -> Any:
    """The GPTModel inside the wrappers."""
    if not isinstance(model, nn.Module):
        if len(model) != 1:
            raise ValueError(f"{len(model)} model chunks on a rank: virtual pipeline parallelism is not supported")
        model = model[0]
    inner: Any = model
    while not hasattr(inner, "decoder") and hasattr(inner, "module"):
        inner = inner.module
    if not hasattr(inner, "decoder") or not hasattr(inner, "config"):
        raise ValueError(f"{type(model).__name__} is not a Megatron-Core GPTModel: it has no decoder")
    return inner


def _check_parallelism(config: Any) -> None:
    if (config.virtual_pipeline_model_parallel_size or 1) > 1:
        raise ValueError("virtual pipeline parallelism is not supported: features need one model chunk a rank")
    if config.context_parallel_size > 1:
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size} is not supported: it cuts a sequence over ranks"
        )


def _check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    if not layer_ids or len(set(layer_ids)) != len(layer_ids) or not all(0 <= i < num_layers for i in layer_ids):
        raise ValueError(
            f"layer ids {tuple(layer_ids)}: name different ones of 0 to {num_layers - 1}, the policy's layers"
        )


def _groups(config: Any) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Of tensor and of pipeline parallelism; None for a group of one."""
    if config.tensor_model_parallel_size == 1 and config.pipeline_model_parallel_size == 1:
        return None, None
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_group() if config.tensor_model_parallel_size > 1 else None,
        parallel_state.get_pipeline_model_parallel_group() if config.pipeline_model_parallel_size > 1 else None,
    )


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a tensor must lie to be sent over the group."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")
    )
