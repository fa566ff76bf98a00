# SPDX-License-Identifier: Apache-2.0
"""The arguments of `nemo-specrollout doctor`."""

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """CONFIG may be left out."""
    text = "a NeMo-RL-shaped YAML file, to be checked too"
    command.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=text)
    command.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. grpo.max_num_steps=3")
    command.add_argument("--json", type=Path, metavar="FILE", help="where the same facts go, and logs of what failed")
    command.add_argument("--no-self-test", action="store_true", help="starts no engine")
