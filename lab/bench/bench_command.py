# SPDX-License-Identifier: Apache-2.0
"""What the commands of the benches share, which is how they parse their arguments and write their figures."""

import argparse
import json
from pathlib import Path
from typing import Any

from nemo_specrollout.storage.files import write_atomically


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments CONFIG, overrides of the config (`key=value`), and `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def write_facts(path: Path, facts: Any) -> None:
    """Writes figures to a JSON file. Makes its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(facts, indent=1) + "\n")
