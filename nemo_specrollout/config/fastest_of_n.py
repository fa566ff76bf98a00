# SPDX-License-Identifier: Apache-2.0
"""The block `fastest_of_n` of `policy.generation.specrollout`: how several engines share the tail of a rollout."""

from dataclasses import dataclass

from nemo_specrollout.config.strict import ConfigError, bounded


@dataclass(frozen=True)
class FastestOfNConfig:
    """`fastest_of_n`: engines that run out of requests take over stragglers of other engines, or race for them."""

    enabled: bool = True
    """False: each engine decodes its own share of the requests, as NeMo-RL distributes them."""
    max_racers: int = bounded(2, low=1, high=8)
    """The most engines that decode one request at a time; 1: requests move, but no race starts."""
    moving: bool = True
    """Whether a request may move to another engine. False: it may be raced, but its first engine keeps decoding it."""
    min_gain: float = bounded(0.1, low=0.0, high=1.0)
    """Relative time that a move or race must be expected to save, of the time until the slower of two engines ends."""
    methods: tuple[tuple[str, ...], ...] = ()
    """Drafter types of each engine, from those in `drafters`. Engine i has entry i, modulo their number. Empty: every engine
    has all drafters."""
    ladder: str | None = None
    """File that `nemo-specrollout ladder` wrote, with initial decode speeds. null: speeds are learned while running."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the options allow neither moves nor races."""
        if self.enabled and not self.moving and self.max_racers == 1:
            raise ConfigError(
                f"{path}: moving false and max_racers 1 leave nothing to do; allow one of them, or set enabled: false"
            )
