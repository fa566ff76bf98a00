# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM that this package imports, reads, sets, calls or replaces, and a check that a version has them.

The names are collected from our own source, and looked up in vLLM's source without importing it. `doctor` looks at the
imports alone.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nemo_specrollout.doctor import vllm_imports
from nemo_specrollout.doctor.vllm_imports import (
    GPU,
    PACKAGE,
    VllmSource,
    attributes_of,
    imported_names,
    names_from_modules,
)
from nemo_specrollout.installed.python_source import Function, names_of, tree_of

LOOPING = f"{GPU}.spec_decode.autoregressive.speculator.AutoRegressiveSpeculator"
OURS_LATER = (
    "vllm.model_executor.layers.mamba.ops.ssu_dispatch.CPUSSUBackend",
    f"{LOOPING}._generate_fused_drafts",
    f"{LOOPING}.on_multi_step_decode_begin",
    f"{LOOPING}.on_multi_step_decode_end",
    "vllm.config.speculative.SpeculativeConfig.disable_eagle_block_drop",
    "vllm.config.speculative.SpeculativeConfig.enable_adaptive_verification",
    f"{GPU}.model_runner.GPUModelRunner.adaptive_verification",
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.acceptance_estimator",
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.compute_draft_logits",
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.draft_token_confidence_probs",
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.enable_adaptive_verification",
    f"{GPU}.spec_decode.dspark.speculator.DSparkSpeculator._sample_logits",
    f"{GPU}.spec_decode.dspark.speculator.DSparkSpeculator.use_confidence_head",
    f"{GPU}.sample.sampler.Sampler",
    "vllm.v1.outputs.LogprobsTensors.cu_num_generated_tokens_tensor",
    f"{GPU}.spec_decode.rejection_sampler.RejectionSampler._get_logprobs_tensors",
    f"{GPU}.spec_decode.rejection_sampler.RejectionSampler.enable_adaptive_verification",
    f"{GPU}.spec_decode.rejection_sampler.RejectionSampler._verify",
)
"""More names that are used only where vLLM has them, beside those that the product imports."""
OBJECTS = {
    "runner": f"{GPU}.model_runner.GPUModelRunner",
    "batch": f"{GPU}.input_batch.InputBatch",
    "input_batch": f"{GPU}.input_batch.InputBatch",
    "states": f"{GPU}.states.RequestState",
    "speculator": f"{GPU}.spec_decode.speculator.DraftModelSpeculator",
    "dflash": f"{GPU}.spec_decode.dflash.speculator.DFlashSpeculator",
    "dspark": f"{GPU}.spec_decode.dspark.speculator.DSparkSpeculator",
    "looping": LOOPING,
    "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
    "scheduled": "vllm.v1.core.sched.output.SchedulerOutput",
}
"""Classes of vLLM, by the variable names for their objects in `FOLDERS`."""
FOLDERS = ("generation", "remote/drafter", "nemo_rl")
OURS = {"specrollout_changes", "temperature", "seeds", "use_confidence_head"}
"""Attributes of such variables that are our own, or belong to another object of that name."""
MIXINS = {
    "ShadowWorker": "vllm.v1.worker.gpu_worker.Worker",
    "VllmWorkerMixin": "vllm.v1.worker.gpu_worker.Worker",
    "_PausingMixin": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
}
"""Base classes of vLLM of our mixins, and of a class whose base is chosen by the device."""
STAND_INS = {
    f"{GPU}.model_runner.GPUModelRunner.execute_model": "generation/vllm_worker.py _execute_step",
    f"{GPU}.model_runner.GPUModelRunner.sample_tokens": "generation/vllm_worker.py _sample_step",
    f"{GPU}.sample.sampler.Sampler.sample": "remote/drafter/shadow_worker.py sample",
    f"{GPU}.spec_decode.dspark.speculator.DSparkSpeculator._sample_logits": (
        "generation/drafting/model_drafter.py sample_logits"
    ),
    f"{GPU}.spec_decode.rejection_sampler_utils.rejection_sample": "generation/step/equality_rule.py sample_and_compare",
    f"{GPU}.spec_decode.speculator.BaseSpeculator.propose": "generation/drafting/draft_router.py propose",
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.sample_draft": "generation/drafting/model_drafter.py sample_draft",
}
"""File and name of each of our functions that takes the place of one of vLLM's, by the latter's name."""
ROWS = "logits expanded_idx_mapping temperature seed pos apply_temperature"
SIGNATURES = {
    f"{GPU}.sample.gumbel.gumbel_sample": ROWS,
    f"{GPU}.spec_decode.rejection_sampler_utils.rejection_sample": "target_logits draft_logits draft_sampled cu_num_logits "
    "pos idx_mapping expanded_idx_mapping expanded_local_pos temperature seed num_speculative_steps",
    f"{GPU}.spec_decode.rejection_sampler.RejectionSampler.__init__": "self sampler spec_config device",
    f"{GPU}.spec_decode.speculator.BaseSpeculator.propose": "self input_batch attn_metadata slot_mappings last_hidden_states "
    "aux_hidden_states num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds",
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.sample_draft": "self hidden_states * idx_mapping temperature seeds "
    "draft_step draft_logits",
    f"{GPU}.model_runner.GPUModelRunner.sample_tokens": "self grammar_output",
    f"{GPU}.model_runner.GPUModelRunner.execute_model": "self scheduler_output",
    f"{GPU}.model_runner.GPUModelRunner.reload_weights": "self weights_iterator",
    f"{GPU}.sample.sampler.Sampler.apply_sampling_params": "self logits expanded_idx_mapping idx_mapping idx_mapping_np "
    "pos input_ids expanded_local_pos seq_lens_upper_bound_np",
    f"{GPU}.input_batch.get_num_sampled_and_rejected": "num_sampled seq_lens cu_num_logits idx_mapping prefill_len",
    f"{GPU}.sample.gumbel.apply_temperature": "logits expanded_idx_mapping temperature",
    f"{GPU}.sample.logprob.compute_topk_scores": "logits num_logprobs sampled_token_ids",
    f"{GPU}.sample.gumbel.murmur3_uniform32": "seed pos *",
    f"{GPU}.sample.gumbel._log1p_neg_stable": "*",
    f"{GPU}.sample.gumbel.tl_rand32": "seed offset includes_zero",
    f"{GPU}.spec_decode.adaptive_verification.AdaptiveVerificationManager.__init__": "self req_states query_start_loc "
    "num_bonus_tokens max_total_logits",
    f"{GPU}.spec_decode.dspark.speculator.DSparkSpeculator._sample_logits": "self * * * *",
    f"{GPU}.buffer_utils.StagedWriteTensor.stage_write": "self index start x",
    f"{GPU}.buffer_utils.StagedWriteTensor.stage_write_elem": "self index x",
    "vllm.model_executor.model_loader.reload.layerwise.initialize_layerwise_reload": "model",
    "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_reload": "model model_config",
}
"""Parameters of each function in their order; `*` stands for any one parameter."""
ATTRIBUTES = {
    f"{GPU}.sample.sampler.Sampler": "add_request apply_sampling_params compute_nans get_logprobs_dims logprobs_mode "
    "needs_logits_processing req_states return_sampling_mask sample sampling_states trace_replay_state use_fp64_gumbel",
    f"{GPU}.sample.states.SamplingStates": "add_request max_num_logprobs min_p seeds temperature top_k top_p vocab_size",
    f"{GPU}.spec_decode.rejection_sampler.RejectionSampler": "enable_adaptive_verification num_speculative_steps sampler",
    f"{GPU}.states.RequestState": "req_id_to_index total_len all_token_ids prefill_len num_computed_tokens "
    "num_computed_tokens_np",
    "vllm.v1.core.sched.output.NewRequestData": "req_id prompt_token_ids prefill_token_ids sampling_params",
    "vllm.v1.core.sched.output.CachedRequestData": "req_ids",
    "vllm.sampling_params.SamplingParams": "seed stop_token_ids ignore_eos eos_token_id max_tokens extra_args "
    "skip_reading_prefix_cache _validate_spec_decode verify update_from_tokenizer n min_tokens allowed_token_ids logit_bias "
    "bad_words_token_ids",
    f"{GPU}.model_runner.ExecuteModelState": "input_batch",
    f"{GPU}.sample.output.SamplerOutput": "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected",
    "vllm.v1.outputs.LogprobsTensors": "cu_num_generated_tokens cu_num_generated_tokens_tensor logprob_token_ids logprobs "
    "selected_token_ranks",
    f"{GPU}.async_utils.AsyncOutput": "model_runner_output",
    f"{GPU}.spec_decode.dspark.speculator.DSparkSpeculator": "use_confidence_head",
    f"{GPU}.spec_decode.adaptive_verification.AdaptiveVerificationManager": "_batch_budget _confidence_probs "
    "_max_total_logits num_bonus_tokens num_speculative_steps reallocate_drafts req_states",
    "vllm.config.speculative.SpeculativeConfig": "disable_eagle_block_drop draft_model_config enable_adaptive_verification "
    "method model num_speculative_tokens quantization",
    "vllm.engine.arg_utils.EngineArgs": "additional_config async_scheduling disable_log_stats "
    "distributed_executor_backend dtype enable_prefix_caching enforce_eager kv_cache_memory_bytes logits_processors "
    "logprobs_mode max_model_len max_num_batched_tokens max_num_seqs model scheduler_cls seed skip_tokenizer_init "
    "speculative_config use_tqdm_on_load worker_cls",
    "vllm.entrypoints.llm.LLM": "llm_engine collective_rpc reset_prefix_cache",
    "vllm.v1.core.sched.scheduler.Scheduler": "requests running waiting max_num_running_reqs num_spec_tokens "
    "update_draft_token_ids",
    "vllm.v1.engine.core": "cleanup_dist_env_and_memory",
    "vllm.v1.engine.core.EngineCore": "scheduler",
    "vllm.v1.engine.core_client.InprocClient": "engine_core shutdown",
    "vllm.v1.engine.llm_engine.LLMEngine": "abort_request add_request engine_core model_config output_processor step "
    "vllm_config",
    "vllm.v1.engine.output_processor.OutputProcessor": "external_req_ids request_states",
    "vllm.v1.engine.output_processor.RequestState": "detokenizer is_prefilling logprobs_processor",
    "vllm.v1.engine.async_llm.AsyncLLM": "abort collective_rpc generate output_processor reset_prefix_cache",
    "vllm.v1.outputs.ModelRunnerOutput": "req_ids sampled_token_ids",
    "vllm.v1.request.Request": "_all_token_ids _output_token_ids append_output_token_ids num_computed_tokens "
    "num_prompt_tokens num_tokens request_id",
    "vllm.v1.worker.workspace": "reset_workspace_manager",
}


class Use(StrEnum):
    """The ways in which this package uses a name of vLLM."""

    IMPORTED = "imported"
    OF_MODULE = "read of an imported module"
    OF_OBJECT = "read of an object"
    SET = "set on an object"
    OVERRIDDEN = "overridden"
    CALLED = "called or replaced, with its parameters"
    STOOD_IN_FOR = "stood in for, with its parameters and results"
    ABSTRACT = "abstract in a base class"


@dataclass(frozen=True)
class VllmName:
    """A dotted name and its use. `change` says how a version differs in it; empty if it does not."""

    name: str
    use: Use
    change: str = ""


def vllm_names(source: VllmSource, *more: Path) -> list[VllmName]:
    """Returns all names that `source` must have, once for each use, with the difference found there.

    `more` are further folders whose imports of vLLM count.
    """
    everywhere = [tree_of(file) for folder in (PACKAGE, *more) for file in folder.rglob("*.py")]
    with_objects = [tree_of(f) for name in FOLDERS for f in (PACKAGE / name).rglob("*.py")]
    uses = {(name, Use.IMPORTED) for tree in everywhere for name in imported_names(tree).values()}
    uses |= {(name, Use.OF_MODULE) for tree in everywhere for name in names_from_modules(tree, source)}
    uses |= {(name, Use.OF_OBJECT) for tree in with_objects for name in _of_objects(tree, ast.Load)}
    uses |= {(f"{owner}.{name}", Use.OF_OBJECT) for owner, names in ATTRIBUTES.items() for name in names.split()}
    uses |= {(name, Use.SET) for tree in with_objects for name in _of_objects(tree, ast.Store)}
    uses |= {(name, Use.OVERRIDDEN) for tree in with_objects for name in _overridden(tree)}
    found = [VllmName(name, use, "" if _is_there(source, name) else "absent") for name, use in uses]
    found += [VllmName(name, Use.CALLED, _misfit(source, name, p.split())) for name, p in SIGNATURES.items()]
    found += [VllmName(name, Use.STOOD_IN_FOR, _ill_fit(source, name, ours)) for name, ours in STAND_INS.items()]
    for node, base in (pair for tree in with_objects for pair in _subclasses(tree)):
        found += _methods(source, node, base)
    return sorted(found, key=lambda n: (n.use, n.name))


def _is_later(source: VllmSource, name: str) -> bool:
    """Returns whether a name came, or took its present form, only after this version."""
    return vllm_imports.is_later(source, name, (*vllm_imports.LATER, *OURS_LATER))


def _is_there(source: VllmSource, name: str) -> bool:
    return source.definition(name)[0] or _is_later(source, name)


def _of_objects(tree: ast.Module, context: type[ast.expr_context]) -> Iterator[str]:
    objects = {variable: name for variable, name in OBJECTS.items() if variable not in imported_names(tree)}
    return (name for name in attributes_of(tree, objects, context) if name.rpartition(".")[2] not in OURS)


def _subclasses(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, str]]:
    """Yields our classes that extend one of vLLM's, also as mixins, with the latter's name."""
    names = imported_names(tree)
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        for base in map(ast.unparse, node.bases):
            first, dot, rest = base.partition(".")
            if first in names:
                yield node, f"{names[first]}{dot}{rest}"
        if node.name in MIXINS:
            yield node, MIXINS[node.name]


def _overridden(tree: ast.Module) -> Iterator[str]:
    """Yields the methods that our classes call by `super()`, which their base class of vLLM must have."""
    for node, base in _subclasses(tree):
        for call in ast.walk(node):
            if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "super()" and call.attr != "__init__":
                yield f"{base}.{call.attr}"


def _methods(source: VllmSource, node: ast.ClassDef, base: str) -> Iterator[VllmName]:
    """Yields the methods of a class of vLLM that our subclass of it redefines, or must define."""
    ours = dict(names_of(node.body))
    for name, theirs in source.members(base).items():
        mine = ours.get(name)
        if isinstance(theirs, Function) and isinstance(mine, Function) and name != "__init__":
            is_fit = _is_later(source, f"{base}.{name}")
            yield VllmName(f"{base}.{name}", Use.STOOD_IN_FOR, "" if is_fit else _unlike(theirs, mine, by_name=True))
        elif _is_abstract(theirs) and mine is None and node.name not in MIXINS:
            yield VllmName(f"{base}.{name}", Use.ABSTRACT, f"abstract: {node.name} lacks it")


def _is_abstract(member: ast.stmt) -> bool:
    return isinstance(member, Function) and any(ast.unparse(d) == "abstractmethod" for d in member.decorator_list)


def _ill_fit(source: VllmSource, name: str, ours: str) -> str:
    """Returns how one of our functions fails to take the place of vLLM's, or an empty string."""
    if _is_later(source, name):
        return ""
    file, _, function = ours.partition(" ")
    mine = next(n for n in ast.walk(tree_of(PACKAGE / file)) if isinstance(n, Function) and n.name == function)
    _, theirs = source.definition(name)
    return _unlike(theirs, mine, by_name=False) if isinstance(theirs, Function) else "absent"


def _unlike(theirs: Function, mine: Function, *, by_name: bool) -> str:
    """Returns which call of vLLM's function ours would not take, or how its results differ; an empty string if neither.

    `by_name`: callers may pass each parameter by its name.
    """
    given, taken = _parameters(theirs), _parameters(mine)
    most = 0 if by_name else len(taken)
    takes_more = mine.args.vararg is not None or mine.args.kwarg is not None
    unknown = [n for i, n in enumerate(given) if n not in taken and i >= most and not takes_more]
    num_needed = len(taken) - len(mine.args.defaults) - sum(d is not None for d in mine.args.kw_defaults)
    if unknown or (num_needed > len(given) and theirs.args.vararg is None):
        return f"changed: it takes {', '.join(given)}"
    results, expected = _results(mine), _results(theirs)
    is_alike = not results or not expected or len(results) == len(expected)
    return "" if is_alike else f"changed: it returns {', '.join(expected)}"


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def _results(function: Function) -> list[str]:
    """Returns the types of the values that a function returns by its annotation; none if it does not tell."""
    returns = function.returns
    if returns is None or ast.unparse(returns) == "Any":
        return []
    text = ast.unparse(returns)
    parts = returns.slice if isinstance(returns, ast.Subscript) and text.startswith("tuple[") else None
    return [ast.unparse(t) for t in parts.elts] if isinstance(parts, ast.Tuple) else [text]


def _misfit(source: VllmSource, name: str, wanted: list[str]) -> str:
    """Returns how a function differs from one that takes the parameters `wanted`, or an empty string."""
    if _is_later(source, name):
        return ""
    _, node = source.definition(name)
    if not isinstance(node, Function):
        return "absent"
    parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    has_all = len(parameters) >= len(wanted) or node.args.kwarg is not None
    fits = has_all and all(w in ("*", p) for w, p in zip(wanted, parameters, strict=False))
    return "" if fits else f"changed: it takes {', '.join(parameters)}"
