# SPDX-License-Identifier: Apache-2.0
"""All that differs between vLLM versions, and what of vLLM's inside is relied upon. Tested on 0.25.1, 0.28.0 and 0.32.0.

To support another version, change this file and `older_runners.py`, and nothing else. Every accessor names the attribute
that it needs;
`verify_model_runner` fails with a sentence when one is missing, before the engine serves a request.
"""

import copy
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

import msgspec
import numpy as np
import torch
import vllm
from vllm import LLM, SamplingParams
from vllm import exceptions as vllm_exceptions
from vllm.config import set_current_vllm_config, speculative
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.logprobs import Logprob
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.utils import torch_utils
from vllm.v1.sample.ops import topk_topp_triton
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import BLOCK_DRAFTERS, MODEL_DRAFTERS, REMOTE_DRAFTER
from nemo_specrollout.config.strict import ConfigError, nearest
from nemo_specrollout.config.versions import unsupported_version
from nemo_specrollout.generation.identity import EXTRA_ARGS_KEY

VLLM_VERSION = vllm.__version__
RUNNER_ATTRIBUTES = (
    "add_requests",
    "execute_model_state",
    "finish_requests",
    "input_buffers",
    "max_num_reqs",
    "max_num_tokens",
    "num_speculative_steps",
    "rejection_sampler",
    "req_states",
    "reload_weights",
    "sample_tokens",
    "sampler",
    "speculator",
)
REFUSALS = (ValueError, getattr(vllm_exceptions, "VLLMError", ValueError))
"""What vLLM raises for a request that it does not take."""
REFUSAL: type[Exception] = getattr(vllm_exceptions, "VLLMValidationError", ValueError)
"""What its servers, and NeMo-RL's, answer with status 400."""
GATHERED_ROWS = 8192
"""Of a vocabulary, brought together at a time."""


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


# What the running vLLM's V2 model runner can do; the comments say since when.
HAS_MARGINS = hasattr(gumbel, "murmur3_uniform32")
"""Whether its noise is the function that `draft_sampling` computes itself, so that drafts come with margins (0.32)."""
CHOOSES_ON_DEVICE = _takes(BaseSpeculator.propose, "num_speculative_tokens")
"""Whether vLLM drafts as deep as it is asked, and chooses on the device which drafts a step verifies (0.32)."""
KEEPS_LAST_BLOCK = "disable_eagle_block_drop" in {field.name for field in fields(speculative.SpeculativeConfig)}
"""Whether it can be told to take the last block of a cached prompt as it is where a head drafts (0.30)."""
HAS_TEXT_METHOD = importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None
HAS_DRAFT_MODEL = importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.standalone_ar") is not None
_ONE_NOISE: dict[str, Any] = {"is_drafting": False} if _takes(gumbel.gumbel_sample, "is_drafting") else {}
_NEXT_POSITION = 0 if _takes(DraftModelSpeculator.sample_draft, "sample_src_positions") else 1


class RolloutSamplingParams(SamplingParams):
    """Sampling parameters for an engine with our sampler, which applies min-p and logit bias to draft rows too."""

    @classmethod
    def of(cls, params: SamplingParams) -> "RolloutSamplingParams":
        """Returns a copy of `params` of this class; values that vLLM derived from others are copied too."""
        copied = cls.__new__(cls)
        for name in params.__struct_fields__:
            setattr(copied, name, getattr(params, name))
        return copied

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        """vLLM's own rejection sampler cannot do that, so vLLM would refuse the request here."""


def check_version() -> None:
    """Raises ConfigError for a version of vLLM outside the range that is supported."""
    message = unsupported_version(VLLM_VERSION)
    if message is not None:
        raise ConfigError(message)


def check_drafters(block: SpecrolloutConfig) -> None:
    """Raises ConfigError for a drafter that the running vLLM's V2 model runner has no place for."""
    lacking = set(MODEL_DRAFTERS).difference(_names(speculative.SpeculativeMethod))
    if not CHOOSES_ON_DEVICE:
        lacking.update((*BLOCK_DRAFTERS, REMOTE_DRAFTER))
    if not HAS_DRAFT_MODEL:
        lacking.add("draft_model")
    for i, drafter in enumerate(block.drafters if block.enabled else ()):
        if drafter.type in lacking:
            raise ConfigError(
                f"{BLOCK_PATH}.drafters[{i}].type: {drafter.type}; the V2 model runner of vLLM {VLLM_VERSION} has no place "
                "for it: use eagle3, mtp, ngram or suffix, or vLLM 0.32 or later"
            )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that vllm.LLM does not have."""
    known = {field.name for field in fields(EngineArgs)} | set(inspect.signature(LLM.__init__).parameters)
    for name in arguments:
        if name not in known:
            raise ConfigError(f"vllm_kwargs.{name}: vLLM {VLLM_VERSION} has no such argument{nearest(name, known)}")


def verify_model_runner(runner: Any) -> None:
    """Raises RuntimeError unless `runner` is vLLM's V2 model runner with everything that is bound to it here."""
    if not isinstance(runner, GPUModelRunner):
        raise RuntimeError(
            f"specrollout binds to vLLM's V2 model runner, but vLLM {VLLM_VERSION} built {type(runner).__module__}."
            f"{type(runner).__name__}; remove VLLM_USE_V2_MODEL_RUNNER=0 from the engine's environment, and what vLLM says "
            "that V2 does not support"
        )
    missing = [name for name in RUNNER_ATTRIBUTES if not hasattr(runner, name)]
    if missing:
        raise RuntimeError(
            f"vLLM {VLLM_VERSION}: the model runner has no {', '.join(missing)}; this version is not supported"
        )


def verify_block_speculator(speculator: Any) -> None:
    """Raises ValueError unless this is DFlash or DSpark as they are bound to here: variants of DFlash sample in kernels of
    their own."""
    generates = type(speculator)._generate_draft
    if generates not in (DFlashSpeculator._generate_draft, DSparkSpeculator._generate_draft):
        raise ValueError(
            f"specrollout.drafters: vLLM {VLLM_VERSION} drafts with {type(speculator).__name__} for this checkpoint, which "
            "samples in kernels of its own; name the checkpoint of a plain DFlash or DSpark"
        )


def norm_context_by_layer(speculator: Any) -> None:
    """Makes a DFlash or DSpark on a CPU norm the context's keys of each layer by that layer's weights. vLLM's kernel for CPUs
    takes the first layer's for all (0.32)."""
    model = speculator.model.model
    if device_type() != "cpu" or not hasattr(model, "_normalize_context_k"):
        return

    def normalize(keys_L: torch.Tensor) -> torch.Tensor:
        norms = [layer.self_attn.k_norm for layer in model.layers]
        return torch.stack([norm(keys.contiguous()) for norm, keys in zip(norms, keys_L, strict=True)])

    model._normalize_context_k = normalize


def _names(literal: Any) -> Iterator[str]:
    """The strings of a Literal, of those in it too."""
    for value in get_args(literal):
        yield from [value] if isinstance(value, str) else _names(value)


def mask_alike_whatever_the_rows() -> None:
    """Makes vLLM's top-p kernels treat a row alike, however many rows there are: tokens must not depend on drafts.

    With up to 64 rows vLLM's GPU kernels sum a row in slices, more of them the fewer rows there are, so that what top-p
    leaves out may differ in the last place.
    """
    if hasattr(topk_topp_triton, "_SPLIT_MAX_BATCH"):
        topk_topp_triton._SPLIT_MAX_BATCH = 0


def draw(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    apply_temperature: bool,
    use_fp64: bool = False,
) -> torch.Tensor:
    """vLLM's sample of each row, int64 [R], with the noise of the target's tokens."""
    arguments = (logits, slots, temperature, seeds, positions)
    return gumbel.gumbel_sample(*arguments, apply_temperature=apply_temperature, use_fp64=use_fp64, **_ONE_NOISE)


def draft_logits_and_positions(
    speculator: Any, hidden_states: torch.Tensor, positions: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """From `sample_draft`'s arguments: logits of drafts, the positions that key the target's noise, the token of each column.

    The tokens are None where the logits are of the whole vocabulary. They always are where this vLLM's own kernel samples.
    """
    places = positions + _NEXT_POSITION if _NEXT_POSITION else positions
    model: Any = getattr(speculator, "model", None)
    token_ids = reduced_vocabulary(model) if HAS_MARGINS else None
    if token_ids is not None:
        return model.logits_processor(model.lm_head, hidden_states), places, token_ids
    if hasattr(speculator, "compute_draft_logits"):
        logits = speculator.compute_draft_logits(hidden_states, step)
    else:
        logits = speculator.model.compute_logits(hidden_states)
    return logits, places, None


def reduced_vocabulary(model: Any) -> torch.Tensor | None:
    """The target's token of each token of a drafter, int64 [V], ascending; None where the drafter has the whole vocabulary."""
    offsets = getattr(model, "draft_id_to_target_id", None)
    return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an engine whose core runs in this process."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        raise RuntimeError("a drafter's engine core must run in its own process: set VLLM_ENABLE_V1_MULTIPROCESSING=0")
    return core.scheduler


def engine_facts(config: Any) -> dict[str, str | bool]:
    """Returns what a `VllmConfig` puts in force: vLLM's version, model runner, scheduling, CUDA graph mode."""
    return {
        "vllm": VLLM_VERSION,
        "model_runner": "V2",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": getattr(config.compilation_config.cudagraph_mode, "name", "NONE"),
    }


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
        identity = {"prompt_length": prompt_length, **params.extra_args[EXTRA_ARGS_KEY]}
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


def adapts(runner: Any) -> bool:
    """Whether vLLM prepares its graphs for drafts that are chosen on the device."""
    return bool(getattr(runner.speculative_config, "enable_adaptive_verification", False))


def device_type() -> str:
    """`cuda` or `cpu`: what vLLM runs on in this process."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def cpu_multiplies_bfloat16() -> bool:
    """Returns whether this CPU has instructions that multiply bfloat16."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("amx_bf16", "avx512_bf16"))


def drafting_abilities() -> dict[str, bool]:
    """What `arguments.with_specrollout` must know of the running vLLM and its device."""
    multiplies_bfloat16 = CHOOSES_ON_DEVICE and device_type() == "cpu" and cpu_multiplies_bfloat16()
    if multiplies_bfloat16:
        from nemo_specrollout.generation import bfloat16_head  # noqa: F401 - vLLM learns of the method
    return {
        "chooses_on_device": CHOOSES_ON_DEVICE,
        "keeps_last_block": KEEPS_LAST_BLOCK,
        "multiplies_bfloat16": multiplies_bfloat16,
    }


def is_output_rank() -> bool:
    """Whether vLLM takes this rank's drafts and outputs: the first tensor-parallel rank of the last pipeline stage."""
    return get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0


def may_draft() -> bool:
    """Whether vLLM builds a drafter on this rank."""
    return get_pp_group().is_last_rank


def continues_requests(scheduler_output: Any) -> bool:
    """Whether the step goes on with a request that ran before."""
    return bool(scheduler_output.scheduled_cached_reqs.req_ids)


def agreed(decision: Any) -> Any:
    """What the first tensor-parallel rank decided: all ranks must do the same, and each has a clock of its own."""
    group = get_tp_group()
    return decision if group.world_size == 1 else group.broadcast_object(decision, src=0)


def to_device(values: Sequence[int], dtype: Any, device: torch.device) -> torch.Tensor:
    """A few numbers on the device; the host does not wait for the copy."""
    return torch_utils.async_tensor_h2d(np.array(values, dtype), device=device)


def copy_reload_record(original: torch.nn.Module, copy: torch.nn.Module) -> None:
    """Tells vLLM's weight reloading that `copy` is made like `original`."""
    known = layerwise.get_layerwise_info(original)
    made = layerwise.get_layerwise_info(copy)
    made.restore_metadata, made.restore_device = known.restore_metadata, known.restore_device


def reload_draft_weights(runner: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Loads checkpoint tensors into the drafter's model, whatever its layers have made of their weights since."""
    draft = runner.speculator.model
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


def as_the_first_rank(*tensors: torch.Tensor) -> None:
    """Gives tensors on the device, in place, the values of the first tensor-parallel rank: all ranks must verify the same
    drafts, and kernels that race for a table, or a network, may have told each rank something else."""
    group = get_tp_group()
    for tensor in tensors if group.world_size > 1 else ():
        group.broadcast(tensor, src=0)
