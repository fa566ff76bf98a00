# SPDX-License-Identifier: Apache-2.0
"""Job of an offline refresh: the inputs that all of its parts share, and its output for the user."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from nemo_specrollout.training.head.head_facts import PolicyFacts
from nemo_specrollout.training.refresh.candidate import Judgement
from nemo_specrollout.training.refresh.refresh_options import RefreshOptions
from nemo_specrollout.training.refresh.refresh_state import RefreshState


class RefreshView(Protocol):
    """Output for the user."""

    def say(self, text: str) -> None:
        """Shows a line."""
        ...

    def warn(self, text: str) -> None:
        """Shows a warning."""
        ...

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Shows `text` while the block runs."""
        ...

    def bar(self, text: str, total: int | None = None) -> AbstractContextManager[Callable[..., None]]:
        """Shows a progress bar. Yields `move(done)`, which also takes `total` and `description`."""
        ...

    def judged(self, judgement: Judgement) -> None:
        """Shows the held-out acceptance before and after."""
        ...


@dataclass(frozen=True)
class RefreshJob:
    """Inputs of an offline refresh that all of its parts share."""

    options: RefreshOptions
    """Options of the user."""
    state: RefreshState
    """Folder of what is done so far."""
    view: RefreshView
    """Output for the user."""
    check: Callable[[], None]
    """Raises KeyboardInterrupt if the user asked to stop. Called between steps."""
    policy: Path
    """Hugging Face folder of the policy."""
    facts: PolicyFacts
    """Properties of the policy."""
    device: torch.device
    """Device of policy and head."""

    @property
    def max_length(self) -> int:
        """Longest text, tokens."""
        context = self.facts.max_position_embeddings
        return min(self.options.max_length or context, context)

    @property
    def feature_dtype(self) -> torch.dtype:
        """Type of the policy's forward pass and of the features."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32
