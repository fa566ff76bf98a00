# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout report`: the report and the picture of a run directory."""

import argparse
from importlib import import_module
from pathlib import Path


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png` of a run, also while it runs; prints their paths.

    Raises ConfigError if the folder is no run directory, or its files are damaged.
    """
    return write_report(parsed.run_dir, "nemo_specrollout.reports.report")


def write_report(run_dir: Path, module: str) -> int:
    """Writes the pages of a run by `write_pages` of a module, and returns the exit code. Raises ConfigError."""
    # The folder is looked at before the charts' packages, which may be missing, are imported.
    from nemo_specrollout.reports.records import find_run

    folder = find_run(run_dir)
    page, picture = import_module(module).write_pages(folder)
    print(f"report  {page}\npicture {picture}")
    return 0
