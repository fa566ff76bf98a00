# SPDX-License-Identifier: Apache-2.0
"""What NeMo-RL does not tell its generation."""

from dataclasses import dataclass

RUN_SEED = "NEMO_SPECROLLOUT_RUN_SEED"
"""Environment variable of an engine's actor: the seed of the run."""


@dataclass(frozen=True)
class RunFacts:
    """`grpo.seed`, the training steps behind the weights at start and at the end, and the folder of the run's draft heads."""

    seed: int
    first_version: int = 0
    last_version: int = 0
    heads: str = ""
