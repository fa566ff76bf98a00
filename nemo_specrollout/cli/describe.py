# SPDX-License-Identifier: Apache-2.0
"""Writes the sentences with which the commands `check` and `doctor` describe the run of a config. It does not import torch."""

from collections.abc import Mapping
from typing import Any

from nemo_specrollout.config.addresses import is_loopback
from nemo_specrollout.config.block import FastestOfNConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    FolderDrafterConfig,
    LookupDrafterConfig,
    ModelDrafterConfig,
    RemoteDrafterConfig,
)
from nemo_specrollout.config.engine_vllm import HERE, EngineVllm, engine_vllm
from nemo_specrollout.config.model_families import families_of, options_of, row_in_words
from nemo_specrollout.config.nemo_rl_config import ALGORITHMS, effective_config, malformed, script_of
from nemo_specrollout.config.nemo_rl_tree import (
    GENERATION,
    SPECULATIVE_CONFIG,
    VLLM_CFG,
    VLLM_KWARGS,
    Tree,
    asynchronous_block,
    at,
    generating_gpus,
    model_config,
    native_drafts,
    num_engines,
    parallel_sizes,
    size_at,
)
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.arguments import VllmAbilities, abilities_of, added_graphs, host_choice
from nemo_specrollout.generation.engine.cuda_graphs import graph_bytes
from nemo_specrollout.installed.versions import installed_versions, nemo_rl_version, vllm_version
from nemo_specrollout.reports.advice import EXPERIMENTAL

_BACKEND = f"{GENERATION}.backend"
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "max_new_tokens")


def describe_racing(racing: FastestOfNConfig | None, *, alike: bool, keeps: bool) -> str:
    """Returns a sentence that says when stragglers move to another engine or are raced.

    A straggler is a request that still decodes when most others have ended. It is raced if several engines decode it, and the
    first to end it wins.

    Args:
        racing: the section `fastest_of_n` of the block, if any.
        alike: whether all engines have the same drafters. Then no engines race, because none would be faster.
        keeps: whether the run saves decode speeds for its next start (`learned.warm_start`).
    """
    if racing is None or not racing.enabled:
        return "off: each engine does its own share of the requests, as NeMo-RL deals them out"
    ways = ["move to another engine"] if racing.moving else []
    races = f"are raced by up to {racing.max_racers} engines ({EXPERIMENTAL})"
    ways += [races] if racing.max_racers > 1 and not alike else []
    speeds = "decode speeds are learned while running"
    if racing.ladder:
        speeds = f"decode speeds start from {racing.ladder}"
    elif keeps:
        speeds += ", and begin as an earlier start like this one has kept them"
    no_race = "; no engine races: all draft alike" if racing.max_racers > 1 and alike else ""
    return (
        f"stragglers {' or '.join(ways)}, where that is expected to end the slower of two engines {racing.min_gain:.0%} "
        f"sooner; {speeds}{no_race}"
    )


def sizes_in_words(model: Mapping[str, Any]) -> str:
    """Returns a phrase about the sizes of a model from its `config.json`, such as "36 layers, hidden 4096"."""
    names = {"num_hidden_layers": "{} layers", "hidden_size": "hidden {}", "vocab_size": "vocabulary {}"}
    return ", ".join(text.format(model[name]) for name, text in names.items() if name in model)


def _in_words(drafter: DrafterConfig) -> str:
    if isinstance(drafter, LookupDrafterConfig):
        return f"{drafter.type} (contexts to {drafter.max_order} tokens)"
    if isinstance(drafter, RemoteDrafterConfig):
        return f"remote ({drafter.model}, up to {drafter.most_ahead} tokens ahead)"
    if isinstance(drafter, ModelDrafterConfig):
        model = drafter.model if isinstance(drafter, FolderDrafterConfig) else "part of the policy"
        return f"{drafter.type} ({model}, {drafter.sampling})"
    return drafter.type


def describe_speculation(
    block: SpecrolloutConfig, native: Any, workers_place: str, *, begins_again: bool = False
) -> list[tuple[str, str]]:
    """Returns lines about how a run drafts and verifies, each as a name and a sentence.

    Args:
        block: the config's block `policy.generation.specrollout`.
        native: the user's own `speculative_config` for vLLM, if any.
        workers_place: phrase that says where the run starts remote drafters.
        begins_again: whether requests start over when the weights change, as in asynchronous runs. Then `run_ahead` only keeps
            the earlier texts of these requests as drafts.
    """
    if not block.enabled:
        return [("speculation", "off: exactly vLLM's own sampler and no drafts")]
    if native is not None:
        return [("speculation", f"vLLM's own {native}, under the drafter-invariant sampler")]
    if not block.drafters:
        return [("speculation", "none: no drafters; the drafter-invariant sampler alone")]
    budget = {
        "auto": "as many draft tokens as pay by the measured step times, per request, none where none pays",
        "fixed": f"{block.budget.k} draft tokens for every request, always",
    }[block.budget.policy]
    verify = block.verify.requests_per_step
    checked = f"{verify} requests per step are decoded again plainly to show it" if verify else "not re-checked"
    return [
        ("drafters", ", ".join(map(_in_words, block.drafters))),
        *([] if block.remote is None else [("placement", _remote_in_words(block.remote, workers_place))]),
        ("budget", f"{block.budget.policy}: {budget}; at most {block.num_speculative_tokens}"),
        *(
            [("run_ahead", _ahead_in_words(block, block.run_ahead, begins_again))]
            if block.run_ahead and block.runs_ahead
            else []
        ),
        ("learned", _learned_in_words(block)),
        (
            "exactness",
            "a draft is accepted only if it equals the policy's own sample: tokens do not depend on drafters; "
            + checked,
        ),
    ]


def _learned_in_words(block: SpecrolloutConfig) -> str:
    learned = block.learned
    what = []
    if learned.history and block.suffix is not None:
        what.append(
            f"responses, up to {learned.history_mib:,} MiB, which are drafts for later samples of their prompts"
        )
    if learned.warm_start:
        racing = block.fastest_of_n
        speeds = (
            "" if racing is None or not racing.enabled else ", and the decode speeds of engines that share requests"
        )
        what.append(f"acceptance rates and step times{speeds}, with which the next start begins")
    if not what:
        return "nothing is kept for the next start"
    return f"kept in {learned.folder or 'a folder beside the checkpoints'}: {'; '.join(what)}"


def _ahead_in_words(block: SpecrolloutConfig, ahead: RunAheadConfig, begins_again: bool) -> str:
    what = (
        "requests that are under way begin again when weights change; their texts"
        if begins_again
        else f"engines decode requests of {_steps_in_words(ahead)} in free slots and while the policy trains; those texts"
    )
    return f"{what} are drafts, up to {block.most_drafts} per request and engine step, with up to {ahead.branches} branches"


def _steps_in_words(ahead: RunAheadConfig) -> str:
    if ahead.steps == "auto":
        return "the next steps, as many as pay,"
    return "the next step" if ahead.steps == 1 else f"the next {ahead.steps} steps"


def _remote_in_words(drafter: RemoteDrafterConfig, workers_place: str) -> str:
    if drafter.workers:
        where = f"{drafter.workers} {workers_place}"
    else:
        reach = "this machine" if all(map(is_loopback, drafter.addresses)) else "the network, with the shared secret"
        where = f"{len(drafter.addresses)} at {', '.join(drafter.addresses)} ({reach}), started by `serve-drafter`"
    load = f"up to {drafter.max_requests} requests each, a request goes to the least loaded"
    return f"drafters: {where}; {load}; {EXPERIMENTAL}"


def describe_nemo_rl(tree: Tree) -> list[tuple[str, str]]:
    """Returns lines that describe a run in NeMo-RL, each as a name and a sentence.

    The config may have errors. But if it is malformed, so that its values cannot be read, the list is empty.
    """
    if any(malformed(tree)):
        return []
    algorithm = next(name for name in ALGORITHMS if at(tree, name) is not None)
    sizes = (f"{algorithm}.{name}" for name in ("num_prompts_per_step", "num_generations_per_prompt"))
    prompts, samples = ("?" if at(tree, size) is None else size_at(tree, size) for size in sizes)
    temperature, top_p, top_k, longest = (at(tree, f"{GENERATION}.{key}", "off") for key in _SAMPLING_KEYS)
    return [
        ("runtime", f"nemo_rl: {ALGORITHMS[algorithm]} in NeMo-RL, {_describe_asynchrony(tree)}"),
        ("script", _script_in_words(tree)),
        ("versions", _describe_versions()),
        (
            "policy",
            f"{at(tree, 'policy.model_name')}: {sizes_in_words(model_config(tree) or {}) or 'not a folder here'}, "
            f"{at(tree, 'policy.precision')}; trained by {_describe_trainer(tree)}",
        ),
        (
            "step",
            f"{prompts} prompts x {samples} samples, {at(tree, 'policy.train_global_batch_size')} of them per optimizer "
            f"step; at most {at(tree, f'{algorithm}.max_num_steps', '?')} steps in all",
        ),
        ("sampling", f"temperature {temperature}, top_p {top_p}, top_k {top_k}, up to {longest} tokens"),
        *_describe_nemo_rl_speculation(tree),
        ("placement", _describe_placement(tree)),
        ("output", str(at(tree, "logger.log_dir"))),
    ]


def _script_in_words(tree: Tree) -> str:
    try:
        return f"{script_of(tree)}, of NeMo-RL's checkout"
    except ConfigError as error:
        return str(error)


def _describe_asynchrony(tree: Tree) -> str:
    if at(tree, "async_rl") is not None:
        return f"asynchronous: SingleController, sampler {at(tree, 'async_rl.sampler.name', 'of its default')}"
    if at(tree, "data_plane.enabled"):
        return "synchronous, by the TransferQueue trainer"
    block = asynchronous_block(tree)
    if block is None:
        return "synchronous"
    age = at(tree, f"{block}.max_trajectory_age_steps", 1)
    in_flight = at(tree, f"{block}.in_flight_weight_updates")
    return f"asynchronous: samples at most {age} steps old" + (", weights updated under way" if in_flight else "")


def _describe_versions() -> str:
    versions = {**installed_versions(), "nemo-rl": nemo_rl_version(), "vllm": vllm_version()}
    names = ("nemo-specrollout", "torch", "transformers", "megatron-core", "ray", "nemo-rl", "vllm")
    here = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    missing = ", ".join(name for name in names if not versions.get(name))
    return here + (f"; not installed here: {missing}" if missing else "")


def _describe_trainer(tree: Tree) -> str:
    if not at(tree, "policy.megatron_cfg.enabled"):
        return f"DTensor, tensor parallel {size_at(tree, 'policy.dtensor_cfg.tensor_parallel_size')}"
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
    sizes = {kind: size_at(tree, f"policy.megatron_cfg.{kind}_parallel_size") for kind in kinds}
    parallel = ", ".join(f"{kind.removesuffix('_model')} parallel {n}" for kind, n in sizes.items() if n > 1)
    draft = ", with an EAGLE-3 head beside it" if at(tree, "policy.draft.enabled") else ""
    return f"Megatron{', ' if parallel else ''}{parallel}{draft}"


def _describe_nemo_rl_speculation(tree: Tree) -> list[tuple[str, str]]:
    try:
        config = effective_config(tree)
    except ConfigError:  # reported among the errors
        return []
    if config is None:
        return [("speculation", "specrollout is off: exactly NeMo-RL's own run")]
    if not _is_vllm(tree):  # reported among the errors
        return []
    native = at(tree, SPECULATIVE_CONFIG) if native_drafts(tree) else None
    is_eager = bool(at(tree, f"{VLLM_CFG}.enforce_eager", False))
    vllm = engine_vllm(tree)
    abilities = abilities_of(vllm.version, model_config(tree) or {})
    engine = engine_in_words(at(tree, VLLM_KWARGS, {}), vllm, on_gpu=True, is_eager=is_eager)
    device = f"{config.remote.gpus:g} GPU" if config.remote is not None and config.remote.gpus else "no GPU"
    place = f"in Ray actors of 1 CPU and {device} each, which Ray places and the run watches"
    lines = [
        *describe_speculation(config, native, place, begins_again=asynchronous_block(tree) is not None),
        *_describe_family(tree, vllm.version, abilities),
        ("engine", engine),
    ]
    if not is_eager and native is None and (graphs := graphs_in_words(tree, config, abilities)):
        lines.append(("graphs", graphs))
    if config.fastest_of_n is not None and (engines := num_engines(tree)) > 1:
        alike = len({frozenset(d.type for d in kind) for kind in config.drafters_of_engines[:engines]}) == 1
        lines.append(
            ("fastest_of_n", describe_racing(config.fastest_of_n, alike=alike, keeps=config.learned.warm_start))
        )
    return lines


def _describe_family(tree: Tree, version: str | None, abilities: VllmAbilities) -> list[tuple[str, str]]:
    """Returns lines about how speculative decoding works for the policy's model families and the run's options.

    If the host has to choose the drafts of each engine step, because the device cannot, a further line says why. `version` is
    the version of the engines' vLLM, or None if it is not known.
    """
    config = model_config(tree) or {}
    families = families_of(str(at(tree, "policy.model_name")), config)
    rows = [("family", row) for row in families] + [("option", row) for row in options_of(tree)]
    lines = [(kind, row_in_words(row, version)) for kind, row in rows]
    if not families:
        lines.append(
            ("family", "unknown: not tested; each engine asks vLLM at its start who may choose the drafts of a step")
        )
    if reason := host_choice(at(tree, VLLM_KWARGS, {}), abilities):
        lines.append(("choice", f"the host chooses the drafts of each step: {reason}"))
    return lines


def graphs_in_words(tree: Tree, config: SpecrolloutConfig, abilities: VllmAbilities) -> str:
    """Returns a sentence about the CUDA graphs that the block adds to vLLM's own, or an empty string if it adds none."""
    policy = abilities.policy
    sizes = added_graphs(at(tree, VLLM_KWARGS, {}), config, abilities)
    if not sizes:
        return ""
    largest = abilities.largest_graph
    num_ranks = parallel_sizes(tree)[0]
    ours, vllms = (graph_bytes(policy, rows, num_ranks) for rows in (sizes[-1], largest))
    memory = f", by the model's sizes about {(ours - vllms) / 2**20:.0f} MiB a GPU" if ours and vllms else ""
    return (
        f"of {', '.join(map(str, sizes))} rows beside vLLM's own up to {largest}, because drafts can fill such steps; vLLM "
        f"measures their memory at the start and takes it from the KV cache{memory}; "
        "vllm_kwargs.compilation_config.max_cudagraph_capture_size or cudagraph_capture_sizes takes their place"
    )


def _is_vllm(tree: Tree) -> bool:
    return at(tree, _BACKEND, "vllm") == "vllm"


def _describe_placement(tree: Tree) -> str:
    nodes = size_at(tree, "cluster.num_nodes")
    gpus = size_at(tree, "cluster.gpus_per_node")
    tensor, pipeline, _ = parallel_sizes(tree)
    if at(tree, f"{GENERATION}.colocated.enabled", True):
        where = f"generation and training share {nodes} x {gpus} GPUs"
    elif nodes == 1:
        generating = generating_gpus(tree)
        where = f"{generating} GPUs generate, {max(0, gpus - generating)} train"
    else:
        apart = size_at(tree, f"{GENERATION}.colocated.resources.num_nodes", low=0)
        where = f"{apart} nodes of {gpus} GPUs generate, {max(0, nodes - apart)} train"
    if not _is_vllm(tree):
        return f"{where}; generation by {at(tree, _BACKEND)}"
    return f"{where}; {num_engines(tree)} engines of {tensor * pipeline} GPU{'s' if tensor * pipeline > 1 else ''}"


def is_asynchronous(vllm_kwargs: Mapping[str, Any]) -> bool:
    """Tells whether vLLM schedules an engine step before the previous one has ended, given the arguments of an engine.

    By default it does, except with vLLM's own n-gram drafter.
    """
    given = vllm_kwargs.get("async_scheduling")
    native = vllm_kwargs.get("speculative_config")
    method = native.get("method") if isinstance(native, Mapping) else None
    return bool(given) if given is not None else method not in ("ngram", "[ngram]")


def engine_in_words(vllm_kwargs: Mapping[str, Any], vllm: EngineVllm, *, on_gpu: bool, is_eager: bool) -> str:
    """Returns a line about the version of an engine's vLLM, its scheduling and its CUDA graphs.

    It resembles the line that a run prints at its start, but is made without importing vLLM, because that would take too long.
    """
    compilation = vllm_kwargs.get("compilation_config")
    if is_asynchronous(vllm_kwargs):
        scheduling = "asynchronous scheduling"
    elif vllm_kwargs.get("async_scheduling") is None:
        scheduling = "synchronous scheduling (vLLM's own n-gram drafts on the host)"
    else:
        scheduling = "synchronous scheduling (async_scheduling is false: a GPU waits while the host prepares each step)"
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, Mapping) else None
    if not on_gpu or is_eager:
        graphs = f"NONE ({'enforce_eager is true' if on_gpu else 'a CPU has none'})"
    elif mode is not None:
        graphs = f"{mode}, if model and attention backend allow it"
    else:
        graphs = "as vLLM chooses by model and attention backend when it starts: only the run can tell"
    where = "" if vllm.place == HERE else f" ({vllm.place})"
    name = f"vLLM {vllm.version}{where}" if vllm.version else "vLLM (not installed here)"
    return f"{name}, V2 model runner, {scheduling}, CUDA graphs {graphs}"
