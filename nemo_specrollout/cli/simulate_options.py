# SPDX-License-Identifier: Apache-2.0
"""The flags of `nemo-specrollout simulate`."""

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """CONFIG may also be the name of a scenario, so it is text until it is read."""
    text = (
        "a scenario's name or file, or a run's config; `list` names the scenarios, `papers` is the account against both"
    )
    command.add_argument("config", metavar="SCENARIO|CONFIG", help=text)
    command.add_argument("overrides", nargs="*", metavar="key=value", help="of the scenario, e.g. drafting.k=5")
    command.add_argument("--trace", type=Path, metavar="FILE", help="lengths as they were: a run's samples.jsonl")
    command.add_argument("--out", type=Path, metavar="DIR", help="where simulation.json and simulation.png go")
    command.add_argument("--device", metavar="NAME", help="of a NeMo-RL config: the GPU, e.g. H100")
    command.add_argument(
        "--profile", type=Path, metavar="FILE", help="of a run's config: times that `profile` measured"
    )
