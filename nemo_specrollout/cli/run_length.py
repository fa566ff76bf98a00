# SPDX-License-Identifier: Apache-2.0
"""Reads from a config how long its run is and when NeMo-RL saves and stops, and finds out whether a run is complete."""

import re
from dataclasses import dataclass
from pathlib import Path

from nemo_specrollout.config.nemo_rl_config import ALGORITHMS
from nemo_specrollout.config.nemo_rl_tree import Tree, at
from nemo_specrollout.config.strict import ConfigError

MUST_SAVE_BY = "checkpointing.checkpoint_must_save_by"
LENGTH_KEYS = {f"{name}.{key}" for name in ALGORITHMS for key in ("max_num_steps", "max_num_epochs")}
MAY_CHANGE = LENGTH_KEYS | {MUST_SAVE_BY}
"""Keys of a config whose values may change when its run is resumed. They set the run's length and the end of each job."""


@dataclass(frozen=True)
class RunLength:
    """The number of steps and the number of epochs after which a run ends, whichever comes first. None means no limit."""

    steps: int | None
    epochs: int | None

    @property
    def name(self) -> str:
        """Words for a file name, such as "100-steps-2-epochs". Different lengths have different words."""
        return f"{self.steps}-steps-{self.epochs}-epochs"


def length_of(tree: Tree) -> RunLength:
    """Returns the length of a run of the config. The config's section of the algorithm, such as `grpo`, has it."""
    # Of several blocks the last one counts, as for the script that runs.
    block = next((name for name in reversed(ALGORITHMS) if at(tree, name)), "grpo")
    steps, epochs = (at(tree, f"{block}.{key}") for key in ("max_num_steps", "max_num_epochs"))
    return RunLength(steps if isinstance(steps, int) else None, epochs if isinstance(epochs, int) else None)


def values_of_a_job(tree: Tree) -> list[str]:
    """Returns the config's values of the keys in `MAY_CHANGE`, as overrides `key=value` for the command line of a job."""
    blocks = {key: at(tree, key.rpartition(".")[0]) for key in sorted(MAY_CHANGE)}
    names = [key for key, block in blocks.items() if isinstance(block, dict) and key.rpartition(".")[2] in block]
    return [f"{key}={'null' if at(tree, key) is None else at(tree, key)}" for key in names]


def save_by_s(tree: Tree) -> int | None:
    """Returns the seconds of training after which NeMo-RL saves and stops, or None if the config sets no such limit.

    Raises ConfigError if the config's value is not of the form DD:HH:MM:SS.
    """
    own = at(tree, MUST_SAVE_BY)
    if own is None:
        return None
    parts = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(own))
    if parts is None:
        raise ConfigError(f"{MUST_SAVE_BY}: {own!r} is not DD:HH:MM:SS; remove it to have it set")
    days, hours, minutes, seconds = map(int, parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def newest_step(tree: Tree) -> int:
    """Returns the step of the newest checkpoint in the config's checkpoint folder, or 0 if there is none."""
    folder = Path(str(at(tree, "checkpointing.checkpoint_dir", "")))
    numbers = (path.name.removeprefix("step_") for path in folder.glob("step_*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def is_complete(tree: Tree, made_steps: int, elapsed_s: float) -> bool:
    """Tells whether NeMo-RL has certainly completed the run, if its script has ended without an error.

    NeMo-RL also ends without an error when the time `checkpoint_must_save_by` is up. It then stops after the first step at
    which the time of its training loop so far, plus the mean time of a step, reaches that limit. This sum is at most
    `elapsed_s` plus `elapsed_s / made_steps`. So if even this upper bound is below the limit, NeMo-RL was not stopped by time.
    If no step was made, the result is False, because NeMo-RL's asynchronous loop ends without an error if it cannot start.

    Args:
        tree: the config of the run.
        made_steps: number of steps that the script has made.
        elapsed_s: seconds that the script has run, which include the start before the training loop.
    """
    limit_s = save_by_s(tree)
    return made_steps > 0 and (limit_s is None or elapsed_s * (1 + 1 / made_steps) < limit_s)
