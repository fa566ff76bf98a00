# SPDX-License-Identifier: Apache-2.0
"""A child of `doctor`: which holds on NeMo-RL match the NeMo-RL that is here."""

from typing import Any

from nemo_specrollout.doctor.child import Tell, answer, in_one_line
from nemo_specrollout.nemo_rl.patch_points import PatchPoint, found_of, lacking_parameters


def look(order: Any, tell: Tell) -> None:
    """`order`: holds as dicts. Tells of each in turn what is wrong with it, empty if nothing is, under its number."""
    for i, fields in enumerate(order):
        tell(str(i), change_of(PatchPoint(**{**fields, "parameters": tuple(fields["parameters"])})))


def change_of(hold: PatchPoint) -> str:
    """Returns what changed about a hold, or an empty string."""
    try:
        found = found_of(hold)
    except ModuleNotFoundError as error:
        return f"absent: no module {error.name}"
    except AttributeError as error:
        return f"absent ({error})"
    except Exception as error:  # an import may raise anything
        return f"absent: its import fails ({in_one_line(error)})"
    lacking = lacking_parameters(hold, found)
    return f"changed: it no longer takes {', '.join(lacking)}" if lacking else ""


if __name__ == "__main__":
    answer(look)
