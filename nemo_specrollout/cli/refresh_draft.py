# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout refresh-draft`: trains a draft head for a policy, or refreshes one."""

import argparse
import os
import sys
from pathlib import Path

from nemo_specrollout.cli.interrupts import Interrupts
from nemo_specrollout.cli.refresh_draft_options import options_of
from nemo_specrollout.cli.refresh_draft_view import TerminalView
from nemo_specrollout.config.strict import ConfigError

EXIT_REFUSED = 3
"""Exit code if the gate refused the new head."""


def refresh_draft(parsed: argparse.Namespace) -> int:
    """Makes the head. Returns 0 if it is at --out, 3 if the gate refused it. Raises ConfigError, and KeyboardInterrupt."""
    options = options_of(parsed)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))  # nothing else competes for the cores
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from nemo_specrollout.local.prompt_rollouts import answer_prompts
        from nemo_specrollout.training.refresh.offline_refresh import OfflineRefresh
        from nemo_specrollout.training.refresh.refresh_state import RefreshState

        state = RefreshState(Path(options.out), options.replace)
        with Interrupts() as interrupts:
            published = OfflineRefresh(options, state, TerminalView(), answer_prompts, interrupts.check).run()
    except KeyboardInterrupt:
        partial = f"{options.out}.partial"
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
