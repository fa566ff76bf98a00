# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM that this package imports, overrides or reads, and a check that a version of vLLM has them.

The names are collected from this package's own source, and looked up in vLLM's source without importing it.
`tests/test_vllm_names.py` and `nemo-specrollout doctor` use the check.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nemo_specrollout.config.versions import version_numbers

PACKAGE = Path(__file__).parents[1]
GPU = "vllm.v1.worker.gpu"
ENOUGH = (0, 32, 0)
"""First version that has everything, so that none of `older_runners.py` is in force."""
LATER = (
    f"{GPU}.spec_decode.adaptive_verification",
    "vllm.triton_utils.dispatcher",
    f"{GPU}.sample.gumbel._log1p_neg_stable",
    f"{GPU}.sample.gumbel.murmur3_uniform32",
    f"{GPU}.spec_decode.rejection_sampler.get_max_chunk_logits",
    f"{GPU}.buffer_utils.NonUvaBuffer",
    f"{GPU}.model_runner.GPUModelRunner.adaptive_verification",
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.compute_draft_logits",
)
"""Names that are used only where vLLM has them. They must exist from version `ENOUGH` on."""
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
"""Classes of vLLM, by the variable names for their objects in `FOLDERS`."""
FOLDERS = ("generation", "remote/drafter", "nemo_rl")
OURS = {"specrollout_changes", "temperature", "seeds"}
"""Attributes of such variables that are our own, or belong to another object of that name."""
MIXINS = {"VllmWorkerMixin": "vllm.v1.worker.gpu_worker.Worker"}
"""Base classes of vLLM that our mixins are combined with."""
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
}
"""Parameters of each function in their order; `*` stands for any one parameter."""
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
Function = ast.FunctionDef | ast.AsyncFunctionDef


def installed_source() -> Path | None:
    """Returns the folder that holds the installed package `vllm`; None if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent.parent


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """Returns the syntax tree of a file, and caches it."""
    return ast.parse(file.read_text(encoding="utf-8"))


def names_of(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the names that statements define, also in branches, with their definitions."""
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


class VllmSource:
    """The source of one version of vLLM, in the package `vllm` in `folder`.

    Example: `VllmSource(folder).find("vllm.v1.worker.gpu.sample.gumbel.gumbel_sample")`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        """The three numbers of vLLM's version. Raises ValueError if the source does not tell them."""
        text = (self.folder / "vllm" / "_version.py").read_text(encoding="utf-8")
        numbers = [version_numbers(found) for found in re.findall(r"version = '([^']+)'", text)]
        if not numbers or numbers[-1] is None:
            raise ValueError(f"{self.folder}/vllm/_version.py names no version")
        return numbers[-1]

    def file_of(self, module: str) -> Path | None:
        """Returns the file of a dotted module; None if there is none."""
        path = self.folder / module.replace(".", "/")
        return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)

    def find(self, name: str) -> tuple[str, ast.stmt | None] | None:
        """Returns the module that defines a dotted name, and the definition; None if no module does. Follows imports."""
        module, _, attribute = name.rpartition(".")
        if self.file_of(name) is not None:
            return name, None
        file = self.file_of(module)
        if file is None:
            return None
        tree = tree_of(file)
        node = dict(names_of(tree.body)).get(attribute)
        if node is None:  # vllm/__init__.py loads some names lazily
            lazy = [v for v in ast.walk(tree) if isinstance(v, ast.Constant) and v.value == attribute]
            return (module, None) if lazy else None
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            real = next(a.name for a in node.names if (a.asname or a.name) == attribute)
            return self.find(f"{node.module}.{real}")
        return module, node

    def members(self, class_name: str) -> dict[str, ast.stmt]:
        """Returns methods and attributes of a class and its bases, including attributes that methods assign."""
        found = self.find(class_name)
        module, node = found or ("", None)
        if not isinstance(node, ast.ClassDef):
            return {}
        merged: dict[str, ast.stmt] = {}
        for base in reversed(node.bases):
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                merged |= self.members(f"{module}.{name.id}")
        stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        merged |= {n.attr: node for n in stored if ast.unparse(n.value) == "self"}
        return merged | dict(names_of(node.body))

    def definition(self, name: str) -> tuple[bool, ast.stmt | None]:
        """Returns whether a module or class defines a dotted name, and the definition, which a module lacks."""
        found = self.find(name)
        if found is not None:
            return True, found[1]
        owner, _, attribute = name.rpartition(".")
        node = self.members(owner).get(attribute)
        return node is not None, node


class Use(StrEnum):
    """The ways in which this package uses a name of vLLM."""

    IMPORTED = "imported"
    OF_MODULE = "read of an imported module"
    OF_OBJECT = "read of an object"
    OVERRIDDEN = "overridden"
    CALLED = "called or replaced, with its parameters"


@dataclass(frozen=True)
class VllmName:
    """A dotted name and its use. `change` says how a version differs in it; empty if it does not."""

    name: str
    use: Use
    change: str = ""


def vllm_names(source: VllmSource) -> list[VllmName]:
    """Returns all names that `source` must have, once for each use, with the difference found there."""
    everywhere = [tree_of(f) for f in (*PACKAGE.rglob("*.py"), *PACKAGE.with_name("vllm_v2_cpu").rglob("*.py"))]
    with_objects = [tree_of(f) for name in FOLDERS for f in (PACKAGE / name).rglob("*.py")]
    uses = {(name, Use.IMPORTED) for tree in everywhere for name in imported_names(tree).values()}
    uses |= {(name, Use.OF_MODULE) for tree in everywhere for name in _of_modules(tree, source)}
    uses |= {(name, Use.OF_OBJECT) for tree in with_objects for name in _of_objects(tree)}
    uses |= {(f"{owner}.{name}", Use.OF_OBJECT) for owner, names in ATTRIBUTES.items() for name in names.split()}
    uses |= {(name, Use.OVERRIDDEN) for tree in with_objects for name in _overridden(tree)}
    found = [VllmName(name, use, "" if _is_there(source, name) else "absent") for name, use in uses]
    found += [VllmName(name, Use.CALLED, _misfit(source, name, p.split())) for name, p in SIGNATURES.items()]
    return sorted(found, key=lambda n: (n.use, n.name))


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Returns the dotted names of vLLM that a file imports, by the names that the file gives them."""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "vllm")
    return {a.asname or a.name: f"{n.module}.{a.name}" for n in nodes for a in n.names}


def _is_there(source: VllmSource, name: str) -> bool:
    is_later = any(name == later or name.startswith(f"{later}.") for later in LATER)
    return source.definition(name)[0] or (is_later and source.version < ENOUGH)


def _read(tree: ast.Module, owners: Mapping[str, str]) -> Iterator[str]:
    """Yields the attributes that a file reads of variables, with their `owners` by the variables' names."""
    reads = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
    for node in reads:
        if isinstance(node.value, ast.Name) and node.value.id in owners:
            yield f"{owners[node.value.id]}.{node.attr}"


def _of_modules(tree: ast.Module, source: VllmSource) -> Iterator[str]:
    names = imported_names(tree)
    return _read(tree, {as_: name for as_, name in names.items() if source.file_of(name) is not None})


def _of_objects(tree: ast.Module) -> Iterator[str]:
    objects = {variable: name for variable, name in OBJECTS.items() if variable not in imported_names(tree)}
    return (name for name in _read(tree, objects) if name.rpartition(".")[2] not in OURS)


def _overridden(tree: ast.Module) -> Iterator[str]:
    """Yields the methods that our classes call by `super()`, which their base class of vLLM must have."""
    names = imported_names(tree) | MIXINS
    for node in ast.walk(tree):
        bases = [ast.unparse(b) for b in node.bases] + [node.name] if isinstance(node, ast.ClassDef) else []
        theirs = [names[b] for b in bases if b in names]
        for call in ast.walk(node) if theirs else ():
            if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "super()":
                yield f"{theirs[0]}.{call.attr}"


def _misfit(source: VllmSource, name: str, wanted: list[str]) -> str:
    """Returns how a function differs from one that takes the parameters `wanted`, or an empty string."""
    _, node = source.definition(name)
    if not isinstance(node, Function):
        return "absent"
    parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    fits = len(parameters) >= len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parameters, strict=False))
    return "" if fits else f"changed: it takes {', '.join(parameters)}"
