# SPDX-License-Identifier: Apache-2.0
"""Typed calls of the `specrollout_*` methods of vLLM workers, whatever the transport."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.telemetry.engine_stats import EngineStats, StepEnd
from nemo_specrollout.telemetry.engine_totals import EngineTotals

CallEngines = Callable[[str, Sequence[Sequence[Any] | None]], list[Any]]
"""Calls a method of the engines' workers, with a list of arguments for each engine. An engine with None, or none, is left out.

Returns a reply of each engine that was called, from the rank whose outputs vLLM uses."""


@dataclass(frozen=True)
class HeadInService:
    """A published head for engines to load, and what its publication measured."""

    folder: Path
    policy_version: int | None
    """Version of the policy that the head was trained for; None: the engine's own."""
    expected_length: float | None = None
    """Tokens a step that the head made on held-out texts; None if unknown."""
    num_positions: int = 3
    """Draft positions of that measurement."""


class WorkerClient:
    """Calls the workers of one or several engines. Methods return a list with the reply of each engine."""

    def __init__(self, call: CallEngines, num_engines: int = 1) -> None:
        self._call_engines, self.num_engines = call, num_engines

    def stats(self, first_step: int = 0) -> list[EngineStats]:
        """Returns counters, and the steps from `first_step` on. Only for engines in this process."""
        return self._call("stats", first_step)

    def engine_totals(self) -> list[EngineTotals]:
        """Returns sums over the steps since the engine's start."""
        return [EngineTotals.from_wire(reply) for reply in self._call("totals")]

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

    def set_policy_version(self, version: int) -> None:
        """Sets the version of the engines' weights."""
        self._call("policy_is", version)

    def set_drafter_addresses(self, addresses: Sequence[str], secret: str) -> None:
        """Sets the addresses of the remote drafters ("" for one that is down), and the secret that they share."""
        self._call("drafters_at", list(addresses), secret)

    def drafter_stats(self) -> list[DrafterStats]:
        """Returns the drafter stats of the engines that have remote drafters."""
        return [DrafterStats(**reply) for reply in self._call("drafter_stats") if reply is not None]

    def load_head(self, head: HeadInService, has_head: Sequence[bool] | None = None) -> list[None]:
        """Loads a published head into the engines, or only into those that have a head (`has_head`).

        Raises ValueError for a head that does not fit.
        """
        arguments = [str(head.folder), head.policy_version, head.expected_length, head.num_positions]
        asked = [True] * self.num_engines if has_head is None else has_head
        return self._call_engines("specrollout_load_head", [arguments if has else None for has in asked])

    def take_features(self) -> list[list[Any]]:
        """Returns the `SequenceFeatures` captured since the last call. Only for engines in this process."""
        return self._call("take_features")

    def store_features(self, places: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Writes captured features to the store of each engine, see `FeatureCapture.store`. Returns errors."""
        return self._call_engines("specrollout_store_features", [[dict(place)] for place in places])

    def save_teacher(self, file: Path) -> list[str | None]:
        """Lets the first engine write the policy's LM head and embedding to `file`. Returns its error."""
        return self._call_engines("specrollout_save_teacher", [[str(file)]])

    def capture_seconds(self) -> list[float]:
        """Returns the seconds of engine time that the capture of features has taken."""
        return self._call("capture_seconds")

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        return self._call_engines(f"specrollout_{name}", [list(arguments)] * self.num_engines)
