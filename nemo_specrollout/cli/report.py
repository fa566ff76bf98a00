# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout report`: report and picture of a run, from what its directory holds by now."""

import argparse
from pathlib import Path

from nemo_specrollout.config.strict import ConfigError


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png`, and prints where. Raises ConfigError if that is no run directory."""
    run_dir: Path = parsed.run_dir
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"RUN_DIR: {run_dir} is no run directory, it has no config.yaml; name the logger.log_dir of a run"
        )
    from nemo_specrollout.local.results import write_pages

    page, picture = write_pages(run_dir)
    print(f"report  {page}\npicture {picture}")
    return 0
