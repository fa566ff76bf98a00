# SPDX-License-Identifier: Apache-2.0
"""The records that a drafter process gets when it starts, and sends while it runs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DrafterSpec:
    """Settings of a drafter process."""

    model: str
    """Hugging Face folder of the draft model."""
    address: str = "tcp://127.0.0.1:0"
    """ZeroMQ address to bind; port 0 takes any free one."""
    precision: str = "float32"
    max_model_len: int = 2048
    """Longest text of a request, in tokens."""
    max_requests: int = 256
    """Requests to draft for at a time, of all verifiers."""
    most_ahead: int = 24
    """Draft tokens that a shadow sequence may be ahead of the committed text."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that may ask for drafts; empty allows all."""
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vllm.LLM."""


@dataclass
class DrafterStatus:
    """Counters and state that a drafter process reports."""

    address: str
    """Address at which it listens."""
    is_up: bool = False
    """Whether the engine has started."""
    num_steps: int = 0
    """Steps of the engine."""
    num_drafted: int = 0
    """Draft tokens."""
    num_corrections: int = 0
    """Corrections of shadow sequences."""
    num_refused_frames: int = 0
    """Frames that were dropped."""
    num_open: int = 0
    """Shadow sequences in use."""
    draft_version: int = 0
    """Version of the draft weights."""
    busy_s: float = 0.0
    """Time that the engine spent drafting, in seconds."""
    up_s: float = 0.0
    """Time since the engine started, in seconds."""
