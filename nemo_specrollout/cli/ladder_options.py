# SPDX-License-Identifier: Apache-2.0
"""The flags of `nemo-specrollout ladder`."""

import argparse
from pathlib import Path

NUM_ROUNDS, SLICE_S = 4, 1.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `ladder`."""
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the ladder goes, JSON")
    command.add_argument("--task", metavar="NAME", help="the task that is measured; else the config's")
    command.add_argument(
        "--rounds", type=int, default=NUM_ROUNDS, metavar="N", help=f"rounds over all methods; {NUM_ROUNDS}"
    )
    text = f"decoding of each method at each batch size in a round; {SLICE_S:g}"
    command.add_argument("--seconds", type=float, default=SLICE_S, metavar="S", help=text)
