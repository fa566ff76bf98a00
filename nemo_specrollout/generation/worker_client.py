# SPDX-License-Identifier: Apache-2.0
"""Typed calls of the `specrollout_*` methods of vLLM workers, whatever the transport."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_specrollout.telemetry.engine_stats import EngineStats, StepEnd

CallEngines = Callable[[str, Sequence[Sequence[Any] | None]], list[Any]]
"""Calls a method of the engines' workers, with a list of arguments for each engine. An engine with None is left out.

Returns a reply of each engine that was called, from the rank whose outputs vLLM uses."""


class WorkerClient:
    """Calls the workers of one or several engines. Methods return a list with the reply of each engine."""

    def __init__(self, call: CallEngines, num_engines: int = 1) -> None:
        self._call_engines, self._num_engines = call, num_engines

    def stats(self, first_step: int = 0) -> list[EngineStats]:
        """Returns counters, and the steps from `first_step` on. Only for engines in this process."""
        return self._call("stats", first_step)

    def end_step(self, seeds: Sequence[int] | None) -> list[StepEnd]:
        """Returns alarms, versions, and the sample stats of the requests of `seeds`; None: of all that ended."""
        return [StepEnd.from_wire(reply) for reply in self._call("end_step", seeds)]

    def take_sample_stats(self, seeds: Sequence[int]) -> list[list[dict[str, Any] | None]]:
        """Returns `SampleStats` as a dict for each seed; None for a request that no drafter saw."""
        return self._call("take_sample_stats", seeds)

    def take_alarms(self) -> list[list[dict[str, Any]]]:
        """Returns the alarms of the head's canary since the last call."""
        return self._call("take_alarms")

    def stood_still(self, seconds: float) -> None:
        """Leaves `seconds`, in which the engines waited for their caller, out of the next step's time."""
        self._call("stood_still", seconds)

    def reload(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replaces the model's weights by Hugging Face names. Only for engines in this process."""
        self._call("reload", tensors)

    def policy_is(self, version: int) -> None:
        """Sets the version of the engines' weights."""
        self._call("policy_is", version)

    def load_head(
        self, folder: Path, head_version: int | None, expected_length: float | None, num_positions: int,
        has_head: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        """Loads a published head into the engines, or into those that have a head (`has_head`).

        See `VllmWorkerMixin.specrollout_load_head`. Raises ValueError for a head that does not fit.
        """
        arguments = [str(folder), head_version, expected_length, num_positions]
        asked = has_head or [True] * self._num_engines
        self._call_engines("specrollout_load_head", [arguments if has else None for has in asked])

    def take_features(self) -> list[list[Any]]:
        """Returns the `SequenceFeatures` captured since the last call. Only for engines in this process."""
        return self._call("take_features")

    def capture_seconds(self) -> list[float]:
        """Returns the seconds of engine time that the capture of features has taken."""
        return self._call("capture_seconds")

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        return self._call_engines(f"specrollout_{name}", [list(arguments)] * self._num_engines)
