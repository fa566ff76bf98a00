# SPDX-License-Identifier: Apache-2.0
"""A package `nemo_rl` made from the patch points alone: names, parameters and results, and nothing that runs.

With `added`, every function takes one more parameter, and one that returned nothing returns a value. The open pull requests
of NeMo-RL change its functions in these ways.
"""

from collections import defaultdict
from pathlib import Path

from nemo_specrollout.nemo_rl.patch_point_table import DRIVER_POINTS, WORKER_POINTS
from nemo_specrollout.nemo_rl.patch_points import PatchPoint

POINTS = (*DRIVER_POINTS, *WORKER_POINTS)
_VLLM = "nemo_rl.models.generation.vllm"
CONSTANTS = {"ACTOR_ENVIRONMENT_REGISTRY": "{}", "_mtp_drafter_from_disk": "False"}
ALIASES = {
    f"{_VLLM}.vllm_backend": "VllmInternalWorkerExtensionWithCheckpointEngine = type('X', (VllmInternalWorkerExtension,), {})",
    _VLLM: f"from {_VLLM}.vllm_generation import VllmGeneration",
    "nemo_rl.algorithms.async_utils.trajectory_collector": "import ray\n"
    "from nemo_rl.algorithms.async_utils import AsyncTrajectoryCollector as C\nAsyncTrajectoryCollector = ray.remote(C)",
    "nemo_rl.distributed.batched_data_dict": "from collections import UserDict\nfrom typing import Generic, TypeVar\n"
    "class BatchedDataDict(UserDict, Generic[TypeVar('T')]): ...",
}
"""Text of modules beside their patch points."""


def make_nemo_rl(folder: Path, *, added: bool = False) -> Path:
    """Writes the package into `folder`, and returns `folder`."""
    modules: dict[str, list[str]] = defaultdict(list)
    classes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for point in POINTS:
        owner, _, _ = point.name.partition(".")
        if owner == "StatefulDataLoader":
            modules[point.module].append("from torchdata.stateful_dataloader import StatefulDataLoader")
        elif "." in point.name:
            classes[point.module, owner] += _definition(point, added)
        elif owner[0].isupper() and owner not in CONSTANTS:
            classes[point.module, owner] += _constructor(point, added)
        else:
            modules[point.module] += _definition(point, added)
    for (module, name), lines in classes.items():
        if module == "nemo_rl.experience.sync_rollout_actor":
            modules[module] += ["import ray", "@ray.remote"]
        modules[module] += [f"class {name}:", *(f"    {line}" for line in lines)]
    for module, text in ALIASES.items():
        modules[module].append(text)
    for module, lines in modules.items():
        path = folder / module.replace(".", "/")
        is_package = any(other.startswith(f"{module}.") for other in modules)
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(["from contextlib import contextmanager", "CALLS = []", *lines, ""]))
    for file in list((folder / "nemo_rl").rglob("*.py")):
        for parent in file.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    return folder


def _parameters(point: PatchPoint, added: bool) -> str:
    names = [*point.needed, *(f"{name}=None" for name in point.known), *(["added=None"] if added else [])]
    is_of_class = "." in point.name or point.name[0].isupper()
    return ", ".join(["self"] * is_of_class + names)


def _constructor(point: PatchPoint, added: bool) -> list[str]:
    return [f"def __init__({_parameters(point, added)}): self.constructed = locals()"]


def _definition(point: PatchPoint, added: bool) -> list[str]:
    """Returns the lines of a function that records its arguments, and returns its own name if it returns a value."""
    leaf = point.name.rpartition(".")[2]
    if leaf in CONSTANTS:
        return [f"{leaf} = {CONSTANTS[leaf]}"]
    if leaf == "get_nsight_config_if_pattern_matches":
        return [f"def {leaf}({_parameters(point, added)}): return {{}}"]
    result = point.result.replace("nothing", "value") if added else point.result
    keyword = "async def" if result.startswith("async") else "def"
    body = {"stream": f"yield {leaf!r}", "value": f"return {leaf!r}", "nothing": "pass"}[result.split()[-1]]
    is_context = leaf == "_weight_update_lifecycle"
    lines = [
        f"{keyword} {leaf}({_parameters(point, added)}):",
        f"    CALLS.append(({leaf!r}, dict(locals())))",
        f"    {body}",
    ]
    return ["@contextmanager", *lines] if is_context else lines


def write_torchdata(folder: Path) -> None:
    """Writes a stand-in for the data loader that NeMo-RL uses."""
    (folder / "torchdata").mkdir()
    (folder / "torchdata" / "__init__.py").touch()
    (folder / "torchdata" / "stateful_dataloader.py").write_text("class StatefulDataLoader: ...\n")
