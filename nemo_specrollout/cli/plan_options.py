# SPDX-License-Identifier: Apache-2.0
"""The flags of `nemo-specrollout plan` and `profile`."""

import argparse
from pathlib import Path

ACCEPTANCE = 0.8
NUM_STEPS = 32


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `plan`."""
    command.add_argument("--profile", type=Path, required=True, metavar="FILE", help="times that `profile` measured")
    command.add_argument("--batch", type=int, metavar="N", help="requests that run at a time; else those of a step")
    command.add_argument("--devices", type=int, metavar="N", help="threads, or GPUs, that generate; else the config's")
    text = f"how often a draft token is right, where those before it were; {ACCEPTANCE}"
    command.add_argument("--acceptance", type=float, default=ACCEPTANCE, metavar="P", help=text)


def add_profile_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `profile`."""
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the measured times go, JSON")
    command.add_argument(
        "--threads", default="", metavar="N,N", help="threads of an engine; 1,2 if there are two cores"
    )
    command.add_argument("--steps", type=int, default=NUM_STEPS, metavar="N", help=f"steps timed; {NUM_STEPS}")
