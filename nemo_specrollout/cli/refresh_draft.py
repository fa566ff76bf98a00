# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout refresh-draft`: trains a draft head for a policy, or refreshes one. Torch is loaded by the work only."""

import argparse
import os
import sys

from nemo_specrollout.cli.interrupts import Interrupts
from nemo_specrollout.cli.refresh_draft_options import options_of
from nemo_specrollout.config.strict import ConfigError

EXIT_REFUSED = 3


def refresh_draft(parsed: argparse.Namespace) -> int:
    """Makes the head; 0 if it is at --out, 3 if the gate refused it. Raises ConfigError, and KeyboardInterrupt."""
    options = options_of(parsed)
    # An offline command has the machine to itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from nemo_specrollout.cli.refresh_draft_run import DraftRefresh
        from nemo_specrollout.training.refresh.refresh_state import RefreshState

        state = RefreshState(options.out_path, options.replace)
        with Interrupts() as interrupts:
            published = DraftRefresh(options, state, interrupts.check).run()
    except KeyboardInterrupt:
        partial = f"{options.out_path}.partial"
        print(f"nemo-specrollout: the same command goes on from what is in {partial}", file=sys.stderr)
        raise
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(_sentence(error)) from error
    return 0 if published else EXIT_REFUSED


def _sentence(error: ValueError | OSError) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    return " ".join(f"{where}{text}".split())
