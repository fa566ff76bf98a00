# SPDX-License-Identifier: Apache-2.0
"""The driver's part of the tail: starts the actor in which engines meet, says when rollouts begin and weights change."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.nemo_rl.actor_environment import engine_environment
from nemo_specrollout.nemo_rl.step_log import StepNotes
from nemo_specrollout.nemo_rl.tail_link import THREADS_OF_ENGINE, SpecrolloutTail, answer_of
from nemo_specrollout.racing.engine_blocks import blocks_of_engines, method_name
from nemo_specrollout.racing.turns import ExchangeFailed
from nemo_specrollout.scheduling.racing.draft_ladder import LadderFile


class TailDriver:
    """Owns the actor. If it is lost, that is noted once, and the run goes on with nothing moving."""

    def __init__(self, block: SpecrolloutConfig, num_engines: int, max_new_tokens: int, notes: StepNotes) -> None:
        """Raises ConfigError for a ladder that is none."""
        config = block.fastest_of_n
        assert config is not None
        field = f"{BLOCK_PATH}.fastest_of_n.ladder"
        ladder = None if config.ladder is None else LadderFile.read(Path(config.ladder), field)
        methods = [method_name(of_worker) for of_worker in blocks_of_engines(block, num_engines)]
        actor: Any = SpecrolloutTail
        options = {"max_concurrency": THREADS_OF_ENGINE * (num_engines + 1), "runtime_env": engine_environment()}
        self.actor = actor.options(**options).remote(methods, config, max_new_tokens, ladder)
        self._notes, self._is_lost = notes, False

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """All engines are called within, each with its shard."""
        self._call("begin")
        try:
            yield
        finally:
            self._call("end")

    @contextmanager
    def new_weights(self) -> Iterator[None]:
        """They reach the engines within: no race is under way by then, and nothing begins."""
        self._call("pause")
        try:
            yield
        finally:
            self._call("resume")

    def figures(self) -> Mapping[str, float]:
        """Since last asked, by name; none if the actor is lost."""
        return self._call("take_figures") or {}

    def close(self) -> None:
        """The run is over."""
        ray.kill(self.actor)

    def _call(self, method: str) -> Any:
        if self._is_lost:
            return None
        call: Callable[[], Any] = getattr(self.actor, method).remote
        try:
            return answer_of(call())
        except ExchangeFailed as error:
            self._is_lost = True
            self._notes.alarms.append(f"no request moves to another engine any more, the rollouts go on: {error}")
            return None
