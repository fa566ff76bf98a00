# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout report`: writes the report and the picture of a run from its directory, also while it runs."""

import argparse
from pathlib import Path

from nemo_specrollout.config.strict import ConfigError


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png` of a local run or a run in NeMo-RL, and prints their paths.

    Raises ConfigError if the folder is no run directory.
    """
    try:
        page, picture = _write_pages(parsed.run_dir)
    except ModuleNotFoundError as error:
        raise ConfigError(f"a report needs {error.name}, which is not installed: pip install {error.name}") from error
    print(f"report  {page}\npicture {picture}")
    return 0


def _write_pages(run_dir: Path) -> tuple[Path, Path]:
    from nemo_specrollout.reports.records import find_folder

    if (run_dir / "config.yaml").is_file() and not (run_dir / "specrollout").is_dir():
        from nemo_specrollout.local.results import write_pages as write_local_pages

        return write_local_pages(run_dir)
    folder = find_folder(run_dir)
    from nemo_specrollout.reports.nemo_rl_page import write_pages

    return write_pages(folder)
