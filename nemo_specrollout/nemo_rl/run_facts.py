# SPDX-License-Identifier: Apache-2.0
"""The block and facts of the run, which NeMo-RL's `policy.generation` carries to other processes."""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build

_BLOCK_KEY = "specrollout"
_RUN_KEY = "specrollout_run"


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that NeMo-RL does not tell its generation."""

    seed: int
    """`grpo.seed`, or the seed of another algorithm."""
    first_version: int
    """Training steps behind the weights at the start."""
    last_version: int
    """Training steps behind the weights at the end."""
    heads: str
    """Path of the folder with the run's draft heads."""
    samples_per_prompt: int = 1
    """Responses to each prompt of a step."""
    in_flight: bool = False
    """True if weights change while requests run. The SingleController's always do, and there it is False."""
    recomputes_kv: bool = False
    """True if an asynchronous run wants all KV computed again whenever weights have changed."""

    rows: str = ""
    """Path of the folder in which the engines record rows for an audit; empty if they record none."""

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> "RunFacts":
        """Returns the facts in NeMo-RL's `policy.generation`."""
        return cls(**generation_config[_RUN_KEY])


def put_run(generation_config: MutableMapping[str, Any], block: SpecrolloutConfig, facts: RunFacts) -> None:
    """Puts the complete block and the facts into NeMo-RL's `policy.generation`, as values that YAML and JSON have."""
    generation_config[_BLOCK_KEY] = json.loads(json.dumps(asdict(block)))
    generation_config[_RUN_KEY] = asdict(facts)


def block_of(generation_config: Mapping[str, Any]) -> SpecrolloutConfig:
    """Builds the block from NeMo-RL's `policy.generation`. Each process calls it once, and passes the block on."""
    return build(SpecrolloutConfig, generation_config[_BLOCK_KEY], BLOCK_PATH)
