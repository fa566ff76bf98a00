# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout report`: the report and the picture of a run directory."""

import argparse

from nemo_specrollout.reports.records import find_run


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png` of a run, also while it runs; prints their paths.

    Raises ConfigError if the folder is no run directory, or its files are damaged.
    """
    folder = find_run(parsed.run_dir)
    # The charts' packages, which may be missing, are imported after the folder was looked at.
    from nemo_specrollout.reports.report import write_pages

    page, picture = write_pages(folder)
    print(f"report  {page}\npicture {picture}")
    return 0
