# SPDX-License-Identifier: Apache-2.0
"""The records that a drafter process gets when it starts, and sends while it runs."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DrafterSpec:
    """All that a drafter process is told when it starts."""

    model: str
    address: str = "tcp://127.0.0.1:0"
    precision: str = "float32"
    max_model_len: int = 2048
    max_requests: int = 256
    most_ahead: int = 24
    allowed_hosts: tuple[str, ...] = ()
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)

    def wire(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_wire(cls, text: str) -> "DrafterSpec":
        """The inverse of `wire`."""
        return cls(**json.loads(text))


@dataclass
class Status:
    """What a drafter process did since its start, and what it does now."""

    address: str
    is_up: bool = False
    num_steps: int = 0
    num_drafted: int = 0
    num_corrections: int = 0
    num_refused_frames: int = 0
    num_open: int = 0
    draft_version: int = 0
    busy_s: float = 0.0
    up_s: float = 0.0
