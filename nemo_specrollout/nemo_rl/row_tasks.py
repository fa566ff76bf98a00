# SPDX-License-Identifier: Apache-2.0
"""Finds out the task of each row (sample) that NeMo-RL's rollouts request.

`tasks_without_drafts` needs the tasks, but NeMo-RL does not pass them to its generation.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger(__name__)
current_tasks: ContextVar[Sequence[str]] = ContextVar("specrollout_current_tasks", default=())
"""Task of each row that the current rollout requests. It is empty if the tasks are not known, as in a call from outside a
rollout."""


def with_tasks(generate: Callable[..., Any], policy: Any, data: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls NeMo-RL's function `generate` for `rows`, with `current_tasks` set to their tasks."""
    token = current_tasks.set(rows.get("task_name") or ())
    try:
        return generate(policy, data, rows, *args, **kwargs)
    finally:
        current_tasks.reset(token)


async def with_task(
    roll_out: Callable[..., Awaitable[Any]], sample_idx: int, initial_sample_state: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls NeMo-RL's function `roll_out` for one sample, with `current_tasks` set to the sample's task.

    NeMo-RL runs this call in an asyncio task of its own, so other samples do not see the value.
    """
    current_tasks.set([initial_sample_state["task_name"]])
    return await roll_out(sample_idx, initial_sample_state, *args, **kwargs)


class TaskOptOut:
    """Decides which rows (samples) may have drafts. Logs every task once, so that a user notices a name that fits no task."""

    def __init__(self, draftless: Sequence[str]) -> None:
        self._draftless = draftless
        self._seen = set[str | None]()

    def of_rows(self, number: int) -> list[bool]:
        """Returns for each of the `number` rows that the current rollout requests whether it may have drafts.

        If the tasks of the rollout are not known, all rows may have drafts.
        """
        tasks = current_tasks.get()
        return self.of_tasks(tasks) if len(tasks) == number else [True] * number

    def of_tasks(self, tasks: Sequence[str | None]) -> list[bool]:
        """Returns for each row, given its task, whether it may have drafts. A row of an unknown task (None) may have them."""
        if not self._draftless:
            return [True] * len(tasks)
        for task in set(tasks) - self._seen:
            how = "without" if task in self._draftless else "with"
            logger.warning("specrollout: rows of task %s are decoded %s drafts (tasks_without_drafts)", task, how)
        self._seen.update(tasks)
        return [task not in self._draftless for task in tasks]
