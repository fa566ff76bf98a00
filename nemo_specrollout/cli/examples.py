# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout examples`: copies the recipes and the cluster file out of the installed package for editing."""

import argparse
import shutil
from pathlib import Path

from nemo_specrollout.config.strict import ConfigError

RECIPES = Path(__file__).parents[1] / "recipes"
"""Folder with the recipes for NeMo-RL and `cluster.example.yaml`."""


def copy_examples(parsed: argparse.Namespace) -> int:
    """Copies the files, prints their paths, and returns 0. Raises ConfigError if one already exists."""
    files = sorted(RECIPES.glob("*.yaml"))
    if present := [path for file in files if (path := parsed.folder / file.name).exists()]:
        raise ConfigError(f"{present[0]} exists; name another folder")
    parsed.folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        print(shutil.copyfile(file, parsed.folder / file.name))
    return 0
