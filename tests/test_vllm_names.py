# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that we import, override or read is there, by the source of a version that need not be installed.

`VLLM_SOURCE` names the folder of an unpacked wheel; without it the installed vLLM's source is read, and not imported.
"""

import ast
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from nemo_specrollout.config.versions import version_numbers

pytestmark = pytest.mark.unit
Version = tuple[int, ...]
Function = ast.FunctionDef | ast.AsyncFunctionDef
GPU = "vllm.v1.worker.gpu"
ENOUGH = (0, 32, 0)
# Imported only where the running vLLM has it (`generation/compat.py` says when): since which version it must be there.
LATER = {
    f"{GPU}.spec_decode.adaptive_verification": ENOUGH,
    "vllm.triton_utils.dispatcher": ENOUGH,
    f"{GPU}.sample.gumbel._log1p_neg_stable": ENOUGH,
    f"{GPU}.sample.gumbel.murmur3_uniform32": ENOUGH,
    f"{GPU}.spec_decode.rejection_sampler.get_max_chunk_logits": ENOUGH,
    f"{GPU}.buffer_utils.NonUvaBuffer": ENOUGH,
    f"{GPU}.model_runner.GPUModelRunner.adaptive_verification": ENOUGH,
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.compute_draft_logits": ENOUGH,
}
# What a variable of these names is, wherever it is read in `generation` and `nemo_rl`.
OBJECTS = {
    "runner": f"{GPU}.model_runner.GPUModelRunner",
    "batch": f"{GPU}.input_batch.InputBatch",
    "input_batch": f"{GPU}.input_batch.InputBatch",
    "states": f"{GPU}.states.RequestState",
    "speculator": f"{GPU}.spec_decode.speculator.DraftModelSpeculator",
    "dflash": f"{GPU}.spec_decode.dflash.speculator.DFlashSpeculator",
    "dspark": f"{GPU}.spec_decode.dspark.speculator.DSparkSpeculator",
    "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
    "scheduled": "vllm.v1.core.sched.output.SchedulerOutput",
}
# Attributes that are our own, or of another object that goes by such a name.
OURS = {"specrollout_changes", "temperature", "seeds"}
# The worker classes that our mixins are laid over.
MIXINS = {
    "EngineWorkerMixin": "vllm.v1.worker.gpu_worker.Worker",
    "MirrorWorkerMixin": "vllm.v1.worker.gpu_worker.Worker",
}
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
    f"{GPU}.model_runner.GPUModelRunner.add_requests": "self scheduler_output",
    f"{GPU}.model_runner.GPUModelRunner.finish_requests": "self scheduler_output",
    f"{GPU}.model_runner.GPUModelRunner.sample_tokens": "self grammar_output",
    f"{GPU}.model_runner.GPUModelRunner.execute_model": "self scheduler_output",
}
ATTRIBUTES = {
    f"{GPU}.sample.sampler.Sampler": "sampling_states use_fp64_gumbel apply_sampling_params sample",
    f"{GPU}.sample.states.SamplingStates": "temperature seeds",
    f"{GPU}.states.RequestState": "req_id_to_index total_len all_token_ids prefill_len num_computed_tokens",
    "vllm.v1.core.sched.output.NewRequestData": "req_id prompt_token_ids prefill_token_ids sampling_params",
    "vllm.v1.core.sched.output.CachedRequestData": "req_ids",
    "vllm.sampling_params.SamplingParams": "seed stop_token_ids ignore_eos eos_token_id max_tokens extra_args "
    "skip_reading_prefix_cache _validate_spec_decode",
    f"{GPU}.model_runner.ExecuteModelState": "input_batch",
}


@pytest.fixture(scope="module")
def source() -> Path:
    named = os.environ.get("VLLM_SOURCE")
    spec = None if named else importlib.util.find_spec("vllm")
    if not named and (spec is None or spec.origin is None):
        pytest.skip("vLLM is not installed, and VLLM_SOURCE names no folder")
    return Path(named) if named else Path(str(spec.origin)).parent.parent


@pytest.fixture(scope="module")
def version(source: Path) -> Version:
    text = (source / "vllm" / "_version.py").read_text()
    numbers = version_numbers(re.findall(r"version = '([^']+)'", text)[-1])
    assert numbers is not None
    return numbers


def file_of(source: Path, module: str) -> Path | None:
    path = source / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def names_of(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What statements define, branches included."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((a.asname or a.name).split(".")[0], node) for a in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((t.id, node) for target in targets for t in ast.walk(target) if isinstance(t, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from names_of([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])


def find(source: Path, name: str) -> tuple[str, ast.stmt | None] | None:
    """The module that defines a dotted name, and its definition there; None if nothing does. Follows imports."""
    module, _, attribute = name.rpartition(".")
    if file_of(source, name) is not None:
        return name, None
    file = file_of(source, module)
    if file is None:
        return None
    tree = tree_of(file)
    node = dict(names_of(tree.body)).get(attribute)
    if node is None:  # vllm/__init__.py loads these when they are asked for
        lazy = [v for v in ast.walk(tree) if isinstance(v, ast.Constant) and v.value == attribute]
        return (module, None) if lazy else None
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
        real = next(a.name for a in node.names if (a.asname or a.name) == attribute)
        return find(source, f"{node.module}.{real}")
    return module, node


def members(source: Path, class_name: str) -> dict[str, ast.stmt]:
    """Methods and attributes of a class and its bases, those that methods assign included."""
    found = find(source, class_name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return {}
    module, node = found
    merged: dict[str, ast.stmt] = {}
    for base in reversed(node.bases):
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name):
            merged |= members(source, f"{module}.{name.id}")
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            merged[inner.attr] = node
    return merged | dict(names_of(node.body))


def is_later(name: str, version: Version) -> bool:
    return any(name == later or name.startswith(f"{later}.") for later, since in LATER.items() if version < since)


def our_files(*folders: str) -> list[Path]:
    return [f for folder in folders for f in sorted((ROOT / "nemo_specrollout" / folder).rglob("*.py"))]


def imported(tree: ast.Module) -> dict[str, str]:
    """Dotted names of vLLM that a file imports, by the names that it gives them."""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "vllm")
    return {a.asname or a.name: f"{n.module}.{a.name}" for n in nodes for a in n.names}


def test_what_is_imported(source: Path, version: Version) -> None:
    names = {name for file in our_files(".") for name in imported(tree_of(file)).values()}
    missing = {n for n in names if not is_later(n, version) and find(source, n) is None}
    assert len(names) > 30
    assert not missing


def test_what_is_read_of_imported_modules(source: Path, version: Version) -> None:
    """As `gumbel.gumbel_sample`; a module's name asked for by `hasattr` or `getattr` may be missing."""
    missing, count = set(), 0
    for file in our_files("."):
        modules = {as_: n for as_, n in imported(tree_of(file)).items() if file_of(source, n) is not None}
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                name = f"{modules[node.value.id]}.{node.attr}"
                count += 1
                if not is_later(name, version) and find(source, name) is None:
                    missing.add(name)
    missing -= {"vllm.v1.sample.ops.topk_topp_triton._SPLIT_MAX_BATCH"}
    assert count > 10
    assert not missing


def test_what_is_read_of_objects(source: Path, version: Version) -> None:
    asked = {
        (OBJECTS[node.value.id], node.attr)
        for file in our_files("generation", "nemo_rl")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id in OBJECTS
        and not imported(tree_of(file)).get(node.value.id)
        and "cpu_kernels" not in file.parts
    }
    asked |= {(name, attribute) for name, attributes in ATTRIBUTES.items() for attribute in attributes.split()}
    missing = {
        f"{name}.{attribute}"
        for name, attribute in asked
        if attribute not in OURS
        and not is_later(f"{name}.{attribute}", version)
        and attribute not in members(source, name)
    }
    assert len(asked) > 60
    assert not missing


def test_what_is_overridden(source: Path, version: Version) -> None:
    """Where a class of ours calls `super().method`, a base of vLLM's has it."""
    missing, count = set(), 0
    for file in our_files("generation", "nemo_rl"):
        names = imported(tree_of(file)) | MIXINS
        for node in ast.walk(tree_of(file)):
            bases = [ast.unparse(b) for b in node.bases] + [node.name] if isinstance(node, ast.ClassDef) else []
            theirs = [names[b] for b in bases if b in names]
            for call in ast.walk(node) if theirs else ():
                if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "super()":
                    count += 1
                    if not any(call.attr in members(source, b) or is_later(b, version) for b in theirs):
                        missing.add(f"{theirs[0]}.{call.attr}")
    assert count > 8
    assert not missing


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_called_with_which_arguments(source: Path, name: str) -> None:
    found = find(source, name)
    node = found[1] if found else members(source, name.rpartition(".")[0]).get(name.rpartition(".")[2])
    assert isinstance(node, Function), f"{name} is no function"
    parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    wanted = SIGNATURES[name].split()
    assert len(parameters) >= len(wanted)
    assert all(w in ("*", p) for w, p in zip(wanted, parameters, strict=False)), parameters
