# SPDX-License-Identifier: Apache-2.0
"""Runs the command line by `python -m nemo_specrollout COMMAND`, for when the script `nemo-specrollout` is not installed."""

import sys

from nemo_specrollout.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
