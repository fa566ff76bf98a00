# SPDX-License-Identifier: Apache-2.0
"""The block and facts about a run, which travel to other processes inside NeMo-RL's `policy.generation`."""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.nemo_rl_tree import at
from nemo_specrollout.config.strict import build

_BLOCK_KEY = "specrollout"
_RUN_KEY = "specrollout_run"


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that NeMo-RL does not pass to its generation."""

    seed: int
    """`grpo.seed`, or the seed of another algorithm."""
    first_version: int
    """Policy version at the start of the run, which is the number of training steps behind the weights."""
    last_version: int
    """Policy version at the end of the run."""
    heads: str
    """Path of the folder with the run's draft heads."""
    samples_per_prompt: int = 1
    """Number of responses to each prompt of a step."""
    in_flight: bool = False
    """Whether weights change while requests run. Under the SingleController they always do, but there this stays False."""
    recomputes_kv: bool = False
    """Whether an asynchronous run wants all KV recomputed whenever the weights have changed."""
    filters_by_reward: bool = False
    """Whether rewards decide how many batches a step takes. If so, the step of a batch is not known in advance."""
    rows: str = ""
    """Path of the folder in which the engines record rows (samples) for an audit, or empty if they record none."""

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> "RunFacts":
        """Returns the facts in NeMo-RL's `policy.generation`."""
        return cls(**generation_config[_RUN_KEY])


def changed_seed(checkpoint_config: Path, algorithm: str, seed: int) -> str | None:
    """Returns a sentence for the user if the run that wrote a checkpoint had another seed, and otherwise None.

    `checkpoint_config` is the config that NeMo-RL has written into the checkpoint. If it cannot be read, None is returned.
    """
    try:
        before = at(yaml.safe_load(checkpoint_config.read_text(encoding="utf-8")), f"{algorithm}.seed")
    except (OSError, UnicodeError, yaml.YAMLError):
        return None
    if before in (None, seed):
        return None
    return (
        f"{algorithm}.seed is {seed}, but the run that wrote the checkpoint had {before}: rows have other noise from here on, "
        f"so the run samples other texts than without the interruption; set it to {before} to go on as before"
    )


def put_run(generation_config: MutableMapping[str, Any], block: SpecrolloutConfig, facts: RunFacts) -> None:
    """Puts the complete block and the facts into NeMo-RL's `policy.generation`, as types that YAML and JSON support."""
    generation_config[_BLOCK_KEY] = json.loads(json.dumps(asdict(block)))
    generation_config[_RUN_KEY] = asdict(facts)


def block_of(generation_config: Mapping[str, Any]) -> SpecrolloutConfig:
    """Builds the block from NeMo-RL's `policy.generation`. Each process calls it once, and passes the block on."""
    return build(SpecrolloutConfig, generation_config[_BLOCK_KEY], BLOCK_PATH)
