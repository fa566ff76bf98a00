# SPDX-License-Identifier: Apache-2.0
"""Checks that the source of vLLM has the names that this package imports. `tests/vllm_names.py` compares far more."""

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
"""First version of vLLM that has all names in `LATER`. For older ones there is `generation/runners/before_0_32.py`."""
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
"""Names of vLLM that this package imports only if vLLM has them. They must exist from version `ENOUGH` on."""
REPLACED = {
    f"{GPU}.sample.gumbel.tl_rand32": f"{GPU}.sample.gumbel.murmur3_uniform32",
    f"{GPU}.spec_decode.autoregressive": f"{GPU}.spec_decode.target_dependent_ar.speculator",
}
"""Names of older versions of vLLM, each with the name that has replaced it. They need not exist if the newer name does."""


class VllmSource(PythonSource):
    """The source code of one version of vLLM. `folder` is the folder that contains the package `vllm`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "vllm")

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        """The three numbers of vLLM's version, such as (0, 32, 0). Raises ValueError if the source does not have them."""
        text = (self.folder / "vllm" / "_version.py").read_text(encoding="utf-8")
        numbers = [version_numbers(found) for found in re.findall(r"version = '([^']+)'", text)]
        if not numbers or numbers[-1] is None:
            raise ValueError(f"{self.folder}/vllm/_version.py names no version")
        return numbers[-1]


def imports_of(source: VllmSource) -> dict[str, bool]:
    """Returns all names of vLLM that this package uses, each with whether the source of vLLM has it.

    They are names that a module imports, and attributes of vLLM's modules that it reads. A name that this version of vLLM need
    not have (`is_later`) counts as present.
    """
    trees = [tree_of(file) for file in PACKAGE.rglob("*.py")]
    names = {name for tree in trees for name in (*imported_names(tree).values(), *names_from_modules(tree, source))}
    return {name: source.definition(name)[0] or is_later(source, name) for name in sorted(names)}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Returns the dotted names of vLLM that a Python file imports. The keys are the names under which the file uses them."""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "vllm")
    return {a.asname or a.name: f"{n.module}.{a.name}" for n in nodes for a in n.names}


def is_later(source: VllmSource, name: str, names: tuple[str, ...] = LATER) -> bool:
    """Tells whether the vLLM of `source` may lack the dotted name `name`.

    It may lack a name that only newer versions have, which are listed in `names`. It may also lack an old name if it has the
    new name instead (`REPLACED`).
    """
    for former, newer in REPLACED.items():
        if _is_in(name, former) and (source.definition(newer)[0] or source.file_of(newer) is not None):
            return True
    return source.version < ENOUGH and any(_is_in(name, later) for later in names)


def _is_in(name: str, owner: str) -> bool:
    return name == owner or name.startswith(f"{owner}.")


def attributes_of(tree: ast.Module, owners: Mapping[str, str], context: type[ast.expr_context]) -> Iterator[str]:
    """Yields the dotted names of attributes that a Python file reads or sets.

    Args:
        tree: the syntax tree of the file.
        owners: the variables whose attributes are looked for. Each is mapped to the dotted name that replaces it in the
            result.
        context: `ast.Load` for attributes that the file reads, or `ast.Store` for attributes that it sets.
    """
    found = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, context))
    for node in found:
        if isinstance(node.value, ast.Name) and node.value.id in owners:
            yield f"{owners[node.value.id]}.{node.attr}"


def names_from_modules(tree: ast.Module, source: VllmSource) -> Iterator[str]:
    """Yields the dotted names that a Python file reads from modules of vLLM which it has imported."""
    names = imported_names(tree)
    modules = {as_: name for as_, name in names.items() if source.file_of(name) is not None}
    return (name for name in attributes_of(tree, modules, ast.Load) if not name.endswith("__"))
