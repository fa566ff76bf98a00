# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout report`: writes the report and the picture of a run, which may consist of several jobs."""

import argparse

from nemo_specrollout.reports.advice import advice_of_run
from nemo_specrollout.reports.advice import lines_of as advice_lines
from nemo_specrollout.reports.run_folders import find_folders, read_run
from nemo_specrollout.reports.start_table import lines_of
from nemo_specrollout.reports.starts import RunOfStarts


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png` of a run, which may still be going on. Returns 0.

    Prints the paths of both files, the status of the run, its starts if there are several, and advice on settings that would
    make it faster. Raises ConfigError if the folder is no run directory, or if its files are damaged.
    """
    run = read_run(find_folders(parsed.run_dir))
    # The charts' packages, which may be missing, are imported after the folder was checked.
    from nemo_specrollout.reports.report import status_of, write_pages_of

    page, picture = write_pages_of(run)
    print(f"report  {page}\npicture {picture}\n{status_of(run)}")
    if isinstance(run, RunOfStarts):
        print("\n".join(f"  {line}" for line in lines_of(run)))
    if advice := list(advice_lines(advice_of_run(run))):
        print("\n".join(["what would pay in this run:", *(f"  {line}" for line in advice)]))
    return 0
