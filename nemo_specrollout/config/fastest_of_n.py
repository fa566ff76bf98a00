# SPDX-License-Identifier: Apache-2.0
"""The block `policy.generation.specrollout.fastest_of_n`: what may be done with the tail of a rollout over several workers."""

from dataclasses import dataclass

from nemo_specrollout.config.strict import ConfigError, bounded


@dataclass(frozen=True)
class FastestOfNConfig:
    """Of several rollout workers, those that run dry take over stragglers of the others, or race for them."""

    enabled: bool = True
    """False: each worker does its own share of the requests, as NeMo-RL deals them out."""

    max_racers: int = bounded(2, low=1, high=8)
    """Workers that decode one request at a time, at most; 1: requests move, none is raced."""

    moving: bool = True
    """Whether a request may go on elsewhere. False: it may be raced, but stays where it is."""

    min_gain: float = bounded(0.1, low=0.0, high=1.0)
    """Share by which a change must bring the end of the slower of two workers forward, by what is expected."""

    methods: tuple[tuple[str, ...], ...] = ()
    """The types of drafters of each worker, of those in `drafters`; worker i has entry i, and begins again after the last.
    Empty: every worker has all drafters."""

    ladder: str | None = None
    """The file that `nemo-specrollout ladder` wrote: paces to start from. Without one they are learned while running."""

    def check(self, path: str) -> None:
        """Raises ConfigError where nothing is left to be done."""
        if self.enabled and not self.moving and self.max_racers == 1:
            raise ConfigError(
                f"{path}: moving false and max_racers 1 leave nothing to do; allow one of them, or set enabled: false"
            )
