# SPDX-License-Identifier: Apache-2.0
"""The flags of `nemo-specrollout explain`."""

import argparse
from pathlib import Path

from nemo_specrollout.cli.plan_options import ACCEPTANCE


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `explain`; what `plan` asks for besides is the config's."""
    command.add_argument("--profile", type=Path, metavar="FILE", help="times that `profile` measured")
    command.add_argument("--ladder", type=Path, metavar="FILE", help="paces that `ladder` measured, or that a run kept")
    command.add_argument("--device", metavar="NAME", help="of a NeMo-RL config: the GPU, e.g. H100")
    command.set_defaults(batch=None, devices=None, acceptance=ACCEPTANCE)
