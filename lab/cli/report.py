# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab report`: the report and the picture of a local run, with the charts that only local runs have."""

import argparse

from nemo_specrollout.reports.records import find_run


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png` of a run, also while it runs. Raises ConfigError."""
    folder = find_run(parsed.run_dir)
    # The charts' packages, which may be missing, are imported after the folder was looked at.
    from lab.local.run_report import write_pages

    page, picture = write_pages(folder)
    print(f"report  {page}\npicture {picture}")
    return 0
