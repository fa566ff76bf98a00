# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout examples`: copies the example configs (recipes) and the example cluster file into a folder of the user."""

import argparse
import shutil
from pathlib import Path

from nemo_specrollout.config.strict import ConfigError

RECIPES = Path(__file__).parents[1] / "recipes"
"""Folder of this package that has the example configs for NeMo-RL, and `cluster.example.yaml`."""


def copy_examples(parsed: argparse.Namespace) -> int:
    """Copies the example files into `parsed.folder`, prints their paths, and returns 0.

    Raises ConfigError if the folder already has a file with the name of an example file.
    """
    files = sorted(RECIPES.glob("*.yaml"))
    if present := [path for file in files if (path := parsed.folder / file.name).exists()]:
        raise ConfigError(f"{present[0]} exists; name another folder")
    parsed.folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        print(shutil.copyfile(file, parsed.folder / file.name))
    return 0
