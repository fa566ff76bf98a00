# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab report`: the report and the picture of a local run, with the charts that only local runs have."""

import argparse

from nemo_specrollout.cli.report import write_report


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png` of a run, also while it runs. Raises ConfigError."""
    return write_report(parsed.run_dir, "lab.local.run_report")
