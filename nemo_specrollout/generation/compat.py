# SPDX-License-Identifier: Apache-2.0
"""All that differs between vLLM versions, and what of vLLM's inside is relied upon. Tested on 0.25.1, 0.28.0, 0.32.0.

Whoever supports another version changes this file and nothing else. Every accessor names the attribute that it needs;
`verify_model_runner` fails with a sentence when one is missing, before the engine serves a request.
"""

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import vllm
from vllm import LLM, SamplingParams
from vllm import exceptions as vllm_exceptions
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.logprobs import Logprob
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nemo_specrollout.config.strict import ConfigError, nearest
from nemo_specrollout.config.versions import unsupported_version
from nemo_specrollout.generation.identity import EXTRA_ARGS_KEY

VLLM_VERSION = vllm.__version__
RUNNER_ATTRIBUTES = (
    "_calc_spec_decode_metadata",
    "_sample",
    "input_batch",
    "max_num_reqs",
    "positions",
    "query_start_loc",
    "requests",
    "sampler",
    "seq_lens",
    "speculative_config",
)
REFUSALS = (ValueError, getattr(vllm_exceptions, "VLLMError", ValueError))
"""What vLLM raises for a request that it does not take."""
GATHERED_ROWS = 8192
"""Of a vocabulary, brought together at a time."""


class RolloutSamplingParams(SamplingParams):
    """Sampling parameters for an engine with our sampler, which applies min-p and logit bias to draft rows too."""

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        """vLLM's own rejection sampler cannot do that, so vLLM would refuse the request here."""


def check_version() -> None:
    """Raises ConfigError for a version of vLLM outside the range that is supported."""
    message = unsupported_version(VLLM_VERSION)
    if message is not None:
        raise ConfigError(message)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that vllm.LLM does not have."""
    known = {field.name for field in fields(EngineArgs)} | set(inspect.signature(LLM.__init__).parameters)
    for name in arguments:
        if name not in known:
            raise ConfigError(f"vllm_kwargs.{name}: vLLM {VLLM_VERSION} has no such argument{nearest(name, known)}")


def verify_model_runner(runner: Any) -> None:
    """Raises RuntimeError unless `runner` is vLLM's V1 model runner with everything that is bound to it here."""
    if not isinstance(runner, GPUModelRunner):
        raise RuntimeError(
            f"specrollout binds to vLLM's V1 model runner, but vLLM {VLLM_VERSION} built {type(runner).__module__}."
            f"{type(runner).__name__}; set VLLM_USE_V2_MODEL_RUNNER=0 in the engine's environment"
        )
    missing = [name for name in RUNNER_ATTRIBUTES if not hasattr(runner, name)]
    if missing:
        raise RuntimeError(
            f"vLLM {VLLM_VERSION}: the model runner has no {', '.join(missing)}; this version is not supported"
        )
    if runner.use_async_scheduling:
        raise RuntimeError("specrollout chooses drafts on the host, which needs vllm_kwargs.async_scheduling: false")


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an engine whose core runs in this process."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        raise RuntimeError("a drafter's engine core must run in its own process: set VLLM_ENABLE_V1_MULTIPROCESSING=0")
    return core.scheduler


def tokens_so_far(engine: Any, request_id: str, start: int) -> tuple[list[int], list[float]]:
    """Output tokens and their log-probs, from number `start` on, of a request that the engine has not finished."""
    outputs = engine.output_processor
    (internal_id,) = outputs.external_req_ids[request_id]
    state = outputs.request_states[internal_id]
    tokens = state.detokenizer.output_token_ids[start:]
    entries = state.logprobs_processor.logprobs[start:]
    return tokens, [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]


# What says of each token how it is sampled, and what has nothing to do with tokens. All else looks back at a response's text.
_PORTABLE_PARAMS = {
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop_token_ids", "ignore_eos", "extra_args", "seed", "logit_bias",
    "allowed_token_ids", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "output_kind", "skip_clone", "skip_reading_prefix_cache", "_all_stop_token_ids", "_eos_token_id", "_bad_words_token_ids",
}  # fmt: skip


def is_portable(prompt: Any, params: Any) -> bool:
    """Whether a request can go on in another engine from any token: a text prompt, and parameters that look at one position
    at a time. Stop strings, penalties, minimum lengths and the like need the response from its beginning."""
    if not isinstance(prompt, Mapping) or set(prompt) != {"prompt_token_ids"} or params.max_tokens is None:
        return False
    usual = type(params)(logprobs=0)
    others = set(type(params).__struct_fields__) - _PORTABLE_PARAMS
    return all((getattr(params, name) or None) == (getattr(usual, name) or None) for name in others) and (
        params.logprobs == 0
    )


def params_to_wire(params: Any) -> bytes:
    """Sampling parameters as vLLM itself sends them between its processes."""
    return msgspec.msgpack.encode(params)


def params_from_wire(wire: bytes) -> Any:
    """The inverse."""
    return msgspec.msgpack.decode(wire, type=RolloutSamplingParams)


def going_on(params: Any, prompt_length: int, prefix_length: int, *, streams: bool) -> Any:
    """The parameters of a request of which `prefix_length` tokens are made; one that streams reads no cached prefix then."""
    rest = copy.copy(params)
    rest.output_kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    if prefix_length:
        identity = {**params.extra_args[EXTRA_ARGS_KEY], "prompt_length": prompt_length}
        rest.extra_args = {**params.extra_args, EXTRA_ARGS_KEY: identity}
        rest.max_tokens = params.max_tokens - prefix_length
        rest.skip_reading_prefix_cache = streams or params.skip_reading_prefix_cache
    return rest


def finished_output(
    request_id: str, prompt_token_ids: list[int], params: Any, tokens: list[int], logprobs: list[float], reason: str
) -> RequestOutput:
    """What vLLM returns for a request that made these; without its text."""
    is_named = reason == "stop" and tokens[-1] != params.eos_token_id
    entries = [{token: Logprob(logprob)} for token, logprob in zip(tokens, logprobs, strict=True)]
    completion = CompletionOutput(
        0, "", tokens, sum(logprobs), entries, finish_reason=reason, stop_reason=tokens[-1] if is_named else None
    )
    return RequestOutput(request_id, None, prompt_token_ids, None, [completion], finished=True)


def device_type() -> str:
    """`cuda` or `cpu`: what vLLM runs on in this process."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def is_output_rank() -> bool:
    """Whether vLLM takes this rank's drafts and outputs: the first tensor-parallel rank of the last pipeline stage."""
    return get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0


def may_draft() -> bool:
    """Whether vLLM builds a drafter on this rank."""
    return get_pp_group().is_last_rank


def continues_requests(scheduler_output: Any) -> bool:
    """Whether the step goes on with a request that ran before."""
    return bool(scheduler_output.scheduled_cached_reqs.req_ids)


def output_positions(runner: Any, logits_indices_R: torch.Tensor) -> torch.Tensor:
    """Index in its sequence of the token that each logits row samples, int64 [R], on the device."""
    positions = getattr(runner.positions, "gpu", runner.positions)
    return positions[logits_indices_R] + 1


def next_positions(runner: Any, num_reqs: int) -> torch.Tensor:
    """Index in its sequence of the token that follows all that is scheduled of each request, int64 [B], on the device."""
    return runner.seq_lens[:num_reqs].to(torch.int64)


def num_scheduled_tokens(runner: Any, num_reqs: int) -> int:
    """Rows that the step's forward pass computes, prompt tokens included."""
    return int(runner.query_start_loc.np[num_reqs])


def skip_empty_draft_metadata(runner: Any) -> None:
    """Spares a step without drafts vLLM's index tensors for drafts, a tenth of a millisecond on a slow host.

    Where our router proposes, vLLM itself reads one field of such a step, and our sampler none.
    """
    calculate = runner._calc_spec_decode_metadata

    def calculate_unless_empty(num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray) -> Any:
        if num_draft_tokens.any():
            return calculate(num_draft_tokens, cu_num_scheduled_tokens)
        indices = torch.from_numpy(cu_num_scheduled_tokens - 1).to(runner.device, non_blocking=True)
        return SimpleNamespace(logits_indices=indices)

    runner._calc_spec_decode_metadata = calculate_unless_empty


def replace_output(runner: Any, req_id: str, num_kept: int, tokens: list[int]) -> None:
    """A request keeps its first `num_kept` output tokens, and goes on with `tokens`, none of them computed yet."""
    state, batch = runner.requests[req_id], runner.input_batch
    del state.output_token_ids[num_kept:]
    state.output_token_ids.extend(tokens)
    row = batch.req_id_to_index.get(req_id)
    if row is not None:
        start = int(batch.num_prompt_tokens[row]) + num_kept
        batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
        batch.is_token_ids[row, start : start + len(tokens)] = True
        batch.num_tokens_no_spec[row] = start + len(tokens)


def draft_after_bookkeeping(runner: Any) -> None:
    """Makes vLLM propose drafts after the step's tokens are on the host, near the context's end too.

    By default vLLM runs drafters with weights before that, and drafts for nobody as soon as one request comes near the
    context's end, which leaves gaps in the drafter's KV cache. Budgets are clamped for each request instead.
    """
    runner.speculative_config.disable_padded_drafter_batch = True
    runner._input_fits_in_drafter = lambda common_attn_metadata: common_attn_metadata is not None


def draft_in_few_sizes(runner: Any) -> None:
    """Pads the passes of vLLM's drafter to few different numbers of rows, as CUDA graphs have them. On a CPU only.

    There oneDNN compiles a matrix product anew for each number of rows, which takes many times as long as the product.
    """
    if runner.device.type != "cpu":
        return
    proposer, model = runner.drafter, runner.drafter.model
    determine = proposer._determine_batch_execution_and_padding

    def determine_in_few_sizes(num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        return determine(min(_padded_size(num_tokens), proposer.max_num_tokens), *args, **kwargs)

    proposer._determine_batch_execution_and_padding = determine_in_few_sizes
    for name in ("combine_hidden_states", "compute_logits"):
        if hasattr(model, name):
            setattr(model, name, _in_few_sizes(getattr(model, name)))


def _in_few_sizes(layer: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`layer`, which treats each row alike, at padded sizes."""

    @functools.wraps(layer)
    def padded(rows_NF: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows_NF)
        missing = _padded_size(num_rows) - num_rows
        return layer(torch.nn.functional.pad(rows_NF, (0, 0, 0, missing)))[:num_rows]

    return padded


def _padded_size(num_rows: int) -> int:
    """A multiple of a power of two from 8 on, an eighth to a quarter of it."""
    step = max(8, (1 << (num_rows - 1).bit_length()) // 8)
    return -(-num_rows // step) * step


def attention_of_rows(
    batch: Any, rows_b: np.ndarray, counts_b: np.ndarray, ends_b: np.ndarray, positions_N: torch.Tensor, block_size: int
) -> CommonAttentionMetadata:
    """vLLM's metadata for a pass over the last `counts_b` of the first `ends_b` tokens of a batch's requests `rows_b`.

    `batch` is the metadata of the whole batch, `positions_N` the positions of all those tokens, request by request.
    vLLM counts lengths up in place while it drafts, on both sides: they must not share memory on a CPU.
    """
    device = positions_N.device
    starts_cpu = torch.zeros(len(rows_b) + 1, dtype=torch.int32)
    torch.cumsum(torch.from_numpy(counts_b), 0, out=starts_cpu[1:])
    ends_cpu = torch.from_numpy(ends_b).to(torch.int32)
    blocks_bX = batch.block_table_tensor[torch.from_numpy(rows_b).to(device)]
    requests_N = torch.repeat_interleave(torch.from_numpy(counts_b).to(device), output_size=len(positions_N))
    return CommonAttentionMetadata(
        query_start_loc=starts_cpu.to(device),
        query_start_loc_cpu=starts_cpu,
        seq_lens=ends_cpu.to(device, copy=True),
        seq_lens_cpu_upper_bound=ends_cpu,
        num_reqs=len(rows_b),
        num_actual_tokens=len(positions_N),
        max_query_len=int(counts_b.max()),
        max_seq_len=int(ends_b.max()),
        block_table_tensor=blocks_bX,
        slot_mapping=_slots(blocks_bX, requests_N, positions_N, block_size),
        causal=True,
    )


def _slots(
    blocks_BX: torch.Tensor, requests_N: torch.Tensor, positions_N: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Where in the KV cache tokens of requests go, int64 [N]; `blocks_BX` is the block table."""
    return blocks_BX[requests_N, positions_N // block_size].to(torch.int64) * block_size + positions_N % block_size


class DecodePasses:
    """Further passes of the model over the requests of the step that was computed last, a token each; vLLM's scheduler must
    have given them room in the KV cache. Of models with one KV cache group: `is_possible`."""

    def __init__(self, runner: Any, positions_B: torch.Tensor) -> None:
        """`positions_B`: index in its sequence of each request's next token, int64 [B]."""
        num_requests = len(positions_B)
        self._runner, self._group = runner, runner.attn_groups[0]
        self._blocks_BX = runner.input_batch.block_table[0].get_device_tensor(num_requests)
        self._block_size = runner.input_batch.block_table[0].block_size
        self._starts_cpu = torch.arange(num_requests + 1, dtype=torch.int32)
        self._starts = self._starts_cpu.to(positions_B.device)
        self._rows_B = torch.arange(num_requests, device=positions_B.device)
        self._max_length = int(runner.input_batch.num_tokens_no_spec[:num_requests].max())
        self.next_positions_B = positions_B

    @staticmethod
    def is_possible(runner: Any) -> bool:
        """Whether the model has one KV cache group, and does not replay CUDA graphs: those make vLLM's own steps cheap."""
        mode = runner.vllm_config.compilation_config.cudagraph_mode
        return len(runner.attn_groups) == 1 and (mode is None or mode == CUDAGraphMode.NONE)

    def advance(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after the token of each request."""
        positions_B = self.next_positions_B
        self.next_positions_B = positions_B + 1
        self._max_length += 1
        slots_B = _slots(self._blocks_BX, self._rows_B, positions_B, self._block_size)
        lengths_B = self.next_positions_B.to(torch.int32)
        metadata = CommonAttentionMetadata(
            query_start_loc=self._starts,
            query_start_loc_cpu=self._starts_cpu,
            seq_lens=lengths_B,
            seq_lens_cpu_upper_bound=lengths_B.cpu(),
            num_reqs=len(tokens_B),
            num_actual_tokens=len(tokens_B),
            max_query_len=1,
            max_seq_len=self._max_length,
            block_table_tensor=self._blocks_BX,
            slot_mapping=slots_B,
            causal=True,
        )
        of_layers, slots = {}, {}
        for group in self._group:
            built = group.get_metadata_builder().build(0, metadata)
            of_layers.update(dict.fromkeys(group.layer_names, built))
            slots.update(dict.fromkeys(group.layer_names, slots_B))
        runner = self._runner
        with set_forward_context(of_layers, runner.vllm_config, num_tokens=len(tokens_B), slot_mapping=slots):
            hidden_BF = runner.model(input_ids=tokens_B.to(torch.int32), positions=positions_B)
        return runner.model.compute_logits(hidden_BF)


@dataclass(frozen=True)
class StepOutput:
    """What a drafter with weights reads of the target's step.

    `attention`: vLLM's metadata of the batch. `hidden_parts`: hidden states of all rows of the forward pass, [rows, features]
    each; `final_hidden`: what the LM head reads of them. By request, int64 [B]: its rows, how many of them are drafts, the
    position of its first. Bool [B]: `is_prompt_B`, it computed tokens of its prompt; `has_prompt_B`, all of its prompt is
    computed by now.
    """

    attention: Any
    hidden_parts: list[torch.Tensor]
    final_hidden: torch.Tensor
    num_rows_B: np.ndarray
    num_drafts_B: np.ndarray
    first_positions_B: np.ndarray
    is_prompt_B: np.ndarray
    has_prompt_B: np.ndarray


def computes_prompt(runner: Any) -> np.ndarray:
    """Of which requests the step that the runner has just sampled from computed tokens of the prompt, bool [B]."""
    batch, num_requests = runner.input_batch, runner.input_batch.num_reqs
    return batch.num_computed_tokens_cpu[:num_requests] < batch.num_prompt_tokens[:num_requests]


def step_output(
    runner: Any, num_drafts_B: np.ndarray, attention: Any, hidden_states: torch.Tensor, aux_hidden_states: Any
) -> StepOutput:
    """The step that the runner has just sampled from."""
    if runner.use_aux_hidden_state_outputs:
        parts = list(aux_hidden_states)
    else:
        own = getattr(runner.get_model(), "get_mtp_target_hidden_states", lambda: None)()
        parts = [hidden_states if own is None else own]
    batch, num_requests = runner.input_batch, len(num_drafts_B)
    num_rows_B = np.diff(runner.query_start_loc.np[: num_requests + 1].astype(np.int64))
    first_positions_B = batch.num_computed_tokens_cpu[:num_requests].astype(np.int64)
    has_prompt_B = first_positions_B + num_rows_B >= batch.num_prompt_tokens[:num_requests]
    return StepOutput(
        attention,
        parts,
        hidden_states,
        num_rows_B,
        num_drafts_B,
        first_positions_B,
        computes_prompt(runner),
        has_prompt_B,
    )


def num_ranks() -> int:
    """Tensor-parallel ranks."""
    return int(get_tp_group().world_size)


def broadcast_plan(follows: bool, depth: int, asked_B: np.ndarray, num_requests: int) -> None:
    """The first tensor-parallel rank tells the others whether a drafter with weights follows those who come next, how deep it
    drafts now, and for whom."""
    plan = torch.zeros(2 + num_requests, dtype=torch.int64)
    plan[0], plan[1] = follows, depth
    if depth > 0:
        plan[2:] = torch.from_numpy(asked_B)
    _broadcast(plan)


def receive_plan(num_requests: int) -> tuple[bool, int, np.ndarray]:
    """What the first tensor-parallel rank tells by `broadcast_plan`: bool, the depth, and bool [B]."""
    plan = torch.zeros(2 + num_requests, dtype=torch.int64)
    _broadcast(plan)
    return bool(plan[0]), int(plan[1]), plan[2:].numpy() > 0


def _broadcast(plan: torch.Tensor) -> None:
    group = get_tp_group()
    torch.distributed.broadcast(plan, src=group.first_rank, group=group.cpu_group)


def copy_reload_record(original: torch.nn.Module, copy: torch.nn.Module) -> None:
    """Tells vLLM's weight reloading that `copy` is made like `original`."""
    known = layerwise.get_layerwise_info(original)
    made = layerwise.get_layerwise_info(copy)
    made.restore_metadata, made.restore_device = known.restore_metadata, known.restore_device


def reload_draft_weights(runner: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Loads checkpoint tensors into the drafter's model, whatever its layers have made of their weights since."""
    draft = runner.drafter.model
    with set_current_vllm_config(runner.vllm_config), torch.device(runner.device):
        layerwise.initialize_layerwise_reload(draft)
        draft.load_weights(iter(tensors.items()))
        layerwise.finalize_layerwise_reload(draft, runner.speculative_config.draft_model_config)


def reload_native_heads(runner: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Loads the policy's own (MTP) heads, if the engine drafts with them and they are among a checkpoint's tensors; whether
    it did. vLLM's reloading of a policy leaves them out."""
    if getattr(runner.speculative_config, "method", None) != "mtp":
        return False
    end = runner.model_config.hf_text_config.num_hidden_layers
    layers = (re.search(r"layers\.(\d+)\.", name) for name in tensors)
    if not any("mtp" in name for name in tensors) and not any(m is not None and int(m[1]) >= end for m in layers):
        return False
    reload_draft_weights(runner, tensors)
    return True


def aux_layer_ids(runner: Any) -> tuple[int, ...] | None:
    """The layers before which the policy hands out hidden states; None if its class does not say."""
    model = getattr(runner.get_model(), "model", None)
    ids = getattr(model, "aux_hidden_state_layers", None)
    return None if ids is None else tuple(ids)


def policy_teachers(runner: Any) -> dict[str, torch.Tensor]:
    """The policy's embedding and LM head by Hugging Face names, on the CPU, all rows of all tensor-parallel ranks, which must
    ask together; no LM head where it is the embedding. Raises ValueError for a model that hides them."""
    layers = [m for m in runner.get_model().modules() if isinstance(m, VocabParallelEmbedding)]
    embedding = next((m for m in layers if not isinstance(m, ParallelLMHead)), None)
    lm_head = next((m for m in layers if isinstance(m, ParallelLMHead)), embedding)
    if embedding is None or lm_head is None:
        raise ValueError(f"{type(runner.get_model()).__name__} has no embedding that vLLM splits by rows")
    names = {"model.embed_tokens.weight": embedding, "lm_head.weight": lm_head}
    if lm_head.weight is embedding.weight:
        del names["lm_head.weight"]
    return {name: _all_rows(layer) for name, layer in names.items()}


def _all_rows(layer: VocabParallelEmbedding) -> torch.Tensor:
    """A vocabulary's rows, gathered a part at a time: the device has no room for all."""
    weight = layer.get_parameter("weight").detach()
    if layer.tp_size == 1:
        return weight[: layer.org_vocab_size].to("cpu", copy=True)
    rows = torch.empty(layer.tp_size, *weight.shape, dtype=weight.dtype)
    for start in range(0, len(weight), GATHERED_ROWS):
        part = weight[start : start + GATHERED_ROWS]
        gathered = get_tp_group().all_gather(part.contiguous(), dim=0)
        rows[:, start : start + GATHERED_ROWS] = gathered.view(layer.tp_size, *part.shape).cpu()
    return rows.flatten(0, 1)[: layer.org_vocab_size].clone()


def enable_all_logits_processors(runner: Any) -> None:
    """Gives a speculating engine the processors (min-p, logit bias) that vLLM leaves out there.

    vLLM's own rejection sampler cannot apply them to draft rows; ours can.
    """
    batch = runner.input_batch
    classes = {type(processor) for processor in batch.logitsprocs.all}
    missing = [cls for cls in BUILTIN_LOGITS_PROCESSORS if cls not in classes]
    if missing:
        added = [cls(runner.vllm_config, runner.device, runner.device.type != "cpu") for cls in missing]
        batch.logitsprocs = LogitsProcessors([*batch.logitsprocs.all, *added])


def is_idle(processor: Any) -> bool:
    """Whether a logits processor would leave every row of the batch as it is."""
    if isinstance(processor, MinPLogitsProcessor):
        return processor.min_p_count == 0
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return False


def apply_top_k_top_p(
    logits_RV: torch.Tensor, top_k_R: torch.Tensor | None, top_p_R: torch.Tensor | None
) -> torch.Tensor:
    """vLLM's top-k and top-p masks by one kernel, whatever the number of rows; may write into `logits_RV`.

    On a GPU 0.25.1 and 0.28.0 sort fewer than 8 rows and take a Triton kernel for more. The two cut ties at the k-th logit
    in another way, so tokens would depend on how many drafts are verified.
    """
    triton = getattr(topk_topp_sampler, "apply_top_k_top_p_triton", None) if logits_RV.is_cuda else None
    return (triton or topk_topp_sampler.apply_top_k_top_p)(logits_RV, top_k_R, top_p_R)


class _MinTokensAtDepth:
    """`min_tokens` for rows that follow some drafts, of which vLLM's own `apply` knows nothing."""

    def __init__(self, processor: Any, num_drafts_before: int) -> None:
        self.min_toks = processor.min_toks
        self.num_drafts_before = num_drafts_before

    def apply(self, logits_BV: torch.Tensor) -> torch.Tensor:
        for row, (min_tokens, output_token_ids, stop_token_ids, *_) in self.min_toks.items():
            if len(output_token_ids) + self.num_drafts_before < min_tokens:
                logits_BV[row, list(stop_token_ids)] = -float("inf")
        return logits_BV


def metadata_at_depth(metadata: Any, output_token_ids: list[list[int]], num_drafts_before: int) -> Any:
    """Sampling metadata as plain decoding would have it after `num_drafts_before` of each request's drafts."""
    if num_drafts_before == 0:
        return metadata
    processors = [
        _MinTokensAtDepth(p, num_drafts_before) if isinstance(p, MinTokensLogitsProcessor) else p
        for p in metadata.logitsprocs.non_argmax_invariant
    ]
    logitsprocs = SimpleNamespace(
        non_argmax_invariant=processors, argmax_invariant=metadata.logitsprocs.argmax_invariant
    )
    return replace(metadata, output_token_ids=output_token_ids, logitsprocs=logitsprocs)


def unsupported_sampling(metadata: Any) -> str | None:
    """The name of a requested feature that this sampler does not have, or None."""
    if metadata.max_num_logprobs == -1:
        return "logprobs=-1 (the whole vocabulary)"
    if getattr(metadata, "logprob_token_ids", None):
        return "logprob_token_ids"
    holder = getattr(metadata, "thinking_budget_state_holder", None)
    if holder is not None and holder.has_tracked_requests():
        return "a thinking token budget"
    return None


def num_drafts_array(spec_decode_metadata: Any) -> np.ndarray:
    return np.asarray(spec_decode_metadata.num_draft_tokens, dtype=np.int64)


def mend_stock_rejection_sampler() -> None:
    """Gives vLLM's own rejection sampler the temperatures that its CPU build loses (docs/upstream.md), for comparisons.

    Without it vLLM's speculation divides logits by uninitialised memory on a CPU. Our sampler never calls it.
    """
    if device_type() != "cpu":
        return

    def expand(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts.long())

    rejection_sampler.expand_batch_to_tokens = expand


def allow_several_engines() -> None:
    """Lets one process build several CPU engines, and import numba before the first.

    vLLM 0.32 registers its CPU kernels anew with each worker by scanning every loaded module, and fails on the second
    scan and on llvmlite's foreign-function objects. Registering once, with llvmlite out of sight, is all that it needs.
    """
    from vllm.platforms.cpu import CpuPlatform

    register = getattr(CpuPlatform, "register_triton_kernel_overrides", None)
    if register is None or hasattr(register, "runs_once"):
        return

    @functools.cache
    def register_once() -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
        try:
            register()
        finally:
            sys.modules.update(hidden)

    def run_once() -> None:
        register_once()

    run_once.runs_once = True  # type: ignore[attr-defined]
    CpuPlatform.register_triton_kernel_overrides = staticmethod(run_once)  # type: ignore[method-assign]
