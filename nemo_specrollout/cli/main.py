# SPDX-License-Identifier: Apache-2.0
"""Entry point `nemo-specrollout COMMAND CONFIG [key=value ...]`."""

import sys

from nemo_specrollout.cli.commands import PROGRAM


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    return PROGRAM.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
