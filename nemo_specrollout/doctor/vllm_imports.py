# SPDX-License-Identifier: Apache-2.0
"""Looks up the names of vLLM that this package imports in vLLM's source. `tests/vllm_names.py` compares far more."""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_specrollout.installed.python_source import PythonSource, tree_of
from nemo_specrollout.installed.versions import version_numbers

PACKAGE = Path(__file__).parents[1]
GPU = "vllm.v1.worker.gpu"
ENOUGH = (0, 32, 0)
"""First version that has every name, so that nothing of `generation/runners/before_0_32.py` is used."""
LATER = (
    f"{GPU}.spec_decode.adaptive_verification",
    "vllm.triton_utils.dispatcher",
    f"{GPU}.sample.gumbel._log1p_neg_stable",
    f"{GPU}.sample.gumbel.murmur3_uniform32",
    f"{GPU}.spec_decode.rejection_sampler.get_max_chunk_logits",
    f"{GPU}.buffer_utils.NonUvaBuffer",
    f"{GPU}.sample.logprob.compute_topk_scores",
    f"{GPU}.sample.logits_processor",
    f"{GPU}.attn_utils.get_query_lens_mismatch_unsupported_backend",
    "vllm.v1.sample.ops.topk_topp_triton._SPLIT_MAX_BATCH",
)
"""Names that are imported only where vLLM has them. They must exist from version `ENOUGH` on."""
REPLACED = {
    f"{GPU}.sample.gumbel.tl_rand32": f"{GPU}.sample.gumbel.murmur3_uniform32",
    f"{GPU}.spec_decode.autoregressive": f"{GPU}.spec_decode.target_dependent_ar.speculator",
}
"""Names that are used only where vLLM does not yet have another name, which is the value here."""


class VllmSource(PythonSource):
    """The source of one version of vLLM, in the package `vllm` in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "vllm")

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        """The three numbers of vLLM's version. Raises ValueError if the source does not tell them."""
        text = (self.folder / "vllm" / "_version.py").read_text(encoding="utf-8")
        numbers = [version_numbers(found) for found in re.findall(r"version = '([^']+)'", text)]
        if not numbers or numbers[-1] is None:
            raise ValueError(f"{self.folder}/vllm/_version.py names no version")
        return numbers[-1]


def imports_of(source: VllmSource) -> dict[str, bool]:
    """Returns all names that this package imports, or reads of imported modules, and whether `source` has each."""
    trees = [tree_of(file) for file in PACKAGE.rglob("*.py")]
    names = {name for tree in trees for name in (*imported_names(tree).values(), *names_from_modules(tree, source))}
    return {name: source.definition(name)[0] or is_later(source, name) for name in sorted(names)}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Returns the dotted names of vLLM that a file imports, by the names that the file gives them."""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "vllm")
    return {a.asname or a.name: f"{n.module}.{a.name}" for n in nodes for a in n.names}


def is_later(source: VllmSource, name: str, names: tuple[str, ...] = LATER) -> bool:
    """Returns whether this version of vLLM need not have a name, because it is too old for it or has already replaced it."""
    for former, newer in REPLACED.items():
        if _is_in(name, former) and (source.definition(newer)[0] or source.file_of(newer) is not None):
            return True
    return source.version < ENOUGH and any(_is_in(name, later) for later in names)


def _is_in(name: str, owner: str) -> bool:
    return name == owner or name.startswith(f"{owner}.")


def attributes_of(tree: ast.Module, owners: Mapping[str, str], context: type[ast.expr_context]) -> Iterator[str]:
    """Yields the dotted names of the attributes that a file reads or sets of the variables in `owners`.

    `owners` maps a variable's name to the name of what it holds, with which the results begin. `context` is `ast.Load` for
    attributes that are read, and `ast.Store` for those that are set.
    """
    found = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, context))
    for node in found:
        if isinstance(node.value, ast.Name) and node.value.id in owners:
            yield f"{owners[node.value.id]}.{node.attr}"


def names_from_modules(tree: ast.Module, source: VllmSource) -> Iterator[str]:
    """Yields the names that a file reads of modules of vLLM that it imports."""
    names = imported_names(tree)
    modules = {as_: name for as_, name in names.items() if source.file_of(name) is not None}
    return (name for name in attributes_of(tree, modules, ast.Load) if not name.endswith("__"))
