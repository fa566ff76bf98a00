# SPDX-License-Identifier: Apache-2.0
"""The drafter process of a local run, which is started by `python -m lab.local.drafter_process SPEC`."""

import json
import sys
from dataclasses import asdict

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.doctor.diagnosis import end_with_parent
from nemo_specrollout.remote.drafter.drafter_service import DrafterService
from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport, DrafterSpec


def main(text: str) -> int:
    """Runs a drafter until the parent process ends. Returns the exit code.

    `text` is a `DrafterSpec` as JSON. Each report of the drafter is printed on stdout as a line of JSON. If the drafter cannot
    start, the reason is printed on stderr and the exit code is 2.
    """
    end_with_parent()

    def report(status: DrafterReport) -> None:
        print(json.dumps(asdict(status)), flush=True)

    try:
        service = DrafterService(DrafterSpec(**json.loads(text)), report)
    except ConfigError as error:
        print(str(error), file=sys.stderr)
        return 2
    try:
        service.run(report)
    except KeyboardInterrupt:
        return 130
    finally:
        service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
