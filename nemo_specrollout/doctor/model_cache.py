# SPDX-License-Identifier: Apache-2.0
"""Checks whether models can be downloaded to the cache of Hugging Face, and whether it has the models of a config."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_specrollout.config.nemo_rl_tree import SPECULATIVE_CONFIG, Tree, at, named_drafters, native_drafts
from nemo_specrollout.doctor.diagnosis import Diagnosis, Section

_NAME = "Hugging Face cache"
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "true", "yes", "on")
"""Values of an environment variable, in lower case, that the library huggingface_hub takes for true."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Pattern for the name of a model on the Hugging Face Hub, such as `Qwen/Qwen3-8B`. A relative path may match it too."""
_GIB = 1 << 30


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Returns the folder in which the library huggingface_hub keeps downloaded models, given the environment variables."""
    caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(environment.get("HF_HOME") or caches / "huggingface")
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or home / "hub").expanduser().absolute()


def offline_variable(environment: Mapping[str, str]) -> str | None:
    """Returns the environment variable that forbids Hugging Face's libraries to download, such as HF_HUB_OFFLINE, or None."""
    return next((name for name in _OFFLINE_VARIABLES if environment.get(name, "").lower() in _TRUE), None)


def model_cache(section: Section, environment: Mapping[str, str]) -> Diagnosis:
    """Checks that models can be downloaded to the cache of Hugging Face, unless the environment forbids downloads."""
    folder = cache_folder(environment)
    if (variable := offline_variable(environment)) is not None:
        return section.ok(_NAME, f"{folder}; {variable} is set, so nothing is downloaded")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        to_do = "Set HF_HOME to a writable folder, or name models by local folders."
        return section.warn(_NAME, f"{folder}: {existing} is not a folder", to_do)
    if not os.access(existing, os.W_OK | os.X_OK):
        to_do = "Set HF_HOME to a writable folder, or name models by local folders."
        return section.warn(_NAME, f"{folder}: {existing} is not writable", to_do)
    free = shutil.disk_usage(existing).free / _GIB
    return section.ok(_NAME, f"{folder}, writable, {free:.1f} GiB free")


def missing_models(section: Section, tree: Tree, environment: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Yields a failed diagnosis for each model of a config that is missing here and that the run could not download.

    If the environment does not forbid downloads, the run downloads missing models, so nothing is yielded.
    """
    variable = offline_variable(environment)
    if variable is None:
        return
    folder = cache_folder(environment)
    for path, name in _hub_models(tree):
        if not is_downloaded(folder, name):
            to_do = f"Unset {variable}, or download it where there is a network: `hf download {name}`."
            yield section.fail("model", f"{path}: {name} is not in {folder}, and {variable} is set", to_do)


def is_downloaded(folder: Path, name: str) -> bool:
    """Tells whether the cache in `folder` has a version of the model `name`, such as `Qwen/Qwen3-8B`."""
    snapshots = folder / f"models--{name.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(snapshots.iterdir())


def _hub_models(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yields each model that a config names by a name on the Hugging Face Hub, as the config's field and the name.

    No name comes twice.
    """
    named = [(path, at(tree, path)) for path in ("policy.model_name", "policy.tokenizer.name")]
    if native_drafts(tree):
        path = f"{SPECULATIVE_CONFIG}.model"
        named.append((path, at(tree, path)))
    else:
        named += [(f"drafter {drafter.get('type')}", drafter.get("model")) for drafter in named_drafters(tree)]
    seen = set[str]()
    for path, name in named:
        is_new = isinstance(name, str) and name not in seen
        if is_new and _HUB_NAME.fullmatch(name) and not Path(name).is_dir():
            seen.add(name)
            yield path, name
