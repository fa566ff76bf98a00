# SPDX-License-Identifier: Apache-2.0
"""Runs the program `nemo-specrollout` by `python -m nemo_specrollout COMMAND`, even if its script is not installed."""

import sys

from nemo_specrollout.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
