# SPDX-License-Identifier: Apache-2.0
"""The command `specrollout-lab report`, which writes the report and the picture of a local run.

They also have the charts that only local runs have.
"""

import argparse

from nemo_specrollout.reports.run_folders import find_folders, read_run


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png` of a run, which may still be going on. Returns 0.

    Raises ConfigError if the folder has no run.
    """
    run = read_run(find_folders(parsed.run_dir))
    # The charts' packages, which may be missing, are imported after the folder was looked at.
    from lab.local.run_report import extras_of
    from nemo_specrollout.reports.report import write_pages_of

    page, picture = write_pages_of(run, extras_of)
    print(f"report  {page}\npicture {picture}")
    return 0
