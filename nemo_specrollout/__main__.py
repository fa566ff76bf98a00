# SPDX-License-Identifier: Apache-2.0
"""`python -m nemo_specrollout COMMAND`, where the command `nemo-specrollout` is not installed."""

import sys

from nemo_specrollout.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
