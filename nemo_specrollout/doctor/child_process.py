# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the process that started them."""

import os
import threading
import time

PARENT = "SPECROLLOUT_PARENT"
"""Environment variable with the process id of a child's parent."""
_PERIOD_S = 0.5


def end_with_parent() -> None:
    """Makes this process exit soon after its parent has ended, whatever it is doing then."""
    parent = os.environ.get(PARENT)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(_PERIOD_S)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()
