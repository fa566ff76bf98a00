# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL is written for Python 3.13; these are the names of it that it uses."""

import sys
import typing


def install() -> None:
    """Adds them to `typing` where Python is older."""
    if sys.version_info >= (3, 13):
        return
    import typing_extensions as newer

    names = ["override"] if sys.version_info >= (3, 12) else ["override", "TypedDict", "NotRequired", "Required"]
    for name in names:  # pydantic refuses the TypedDict of `typing` before 3.12
        setattr(typing, name, getattr(newer, name))
