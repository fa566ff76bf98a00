# SPDX-License-Identifier: Apache-2.0
"""The parts that the commands of the benches share: their arguments, and the file of their figures."""

import argparse
import json
from pathlib import Path
from typing import Any

from nemo_specrollout.storage.files import write_atomically


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of CONFIG, overrides of the config, and `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def write_facts(path: Path, facts: Any) -> None:
    """Writes figures as JSON and makes the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(facts, indent=1) + "\n")
