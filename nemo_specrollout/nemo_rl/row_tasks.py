# SPDX-License-Identifier: Apache-2.0
"""Tasks of the rows that NeMo-RL's rollouts request, for `tasks_without_drafts`. NeMo-RL passes its generation no task."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger(__name__)
current_tasks: ContextVar[Sequence[str]] = ContextVar("specrollout_current_tasks", default=())
"""Task of each row that this context's rollout requests. Empty: not known, as in a call from outside a rollout."""


def with_tasks(generate: Callable[..., Any], policy: Any, data: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
    """Generates the responses of `rows` by NeMo-RL's function `generate`, with the rows' tasks known."""
    token = current_tasks.set(rows.get("task_name") or ())
    try:
        return generate(policy, data, rows, *args, **kwargs)
    finally:
        current_tasks.reset(token)


async def with_task(
    roll_out: Callable[..., Awaitable[Any]], sample_idx: int, initial_sample_state: Any, *args: Any, **kwargs: Any
) -> Any:
    """Rolls out one sample by NeMo-RL's function `roll_out`, with its task known. NeMo-RL runs it as a task of asyncio's."""
    current_tasks.set([initial_sample_state["task_name"]])
    return await roll_out(sample_idx, initial_sample_state, *args, **kwargs)


class TaskOptOut:
    """Decides which rows may have drafts. Logs every task once, so that a name which fits no task is seen."""

    def __init__(self, draftless: Sequence[str]) -> None:
        self._draftless = draftless
        self._seen = set[str | None]()

    def of_rows(self, number: int) -> list[bool]:
        """Returns whether each of `number` rows may have drafts."""
        tasks = current_tasks.get()
        return self.of_tasks(tasks) if len(tasks) == number else [True] * number

    def of_tasks(self, tasks: Sequence[str | None]) -> list[bool]:
        """Returns whether rows of these tasks may have drafts. A row whose task is not known, which is None, may."""
        if not self._draftless:
            return [True] * len(tasks)
        for task in set(tasks) - self._seen:
            how = "without" if task in self._draftless else "with"
            logger.warning("specrollout: rows of task %s are decoded %s drafts (tasks_without_drafts)", task, how)
        self._seen.update(tasks)
        return [task not in self._draftless for task in tasks]
