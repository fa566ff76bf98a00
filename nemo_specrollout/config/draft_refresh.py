# SPDX-License-Identifier: Apache-2.0
"""The block `draft_refresh` of `policy.generation.specrollout`: how a draft head learns while the policy does. Its
presence turns refreshing on. Strict, frozen, torch-free."""

from dataclasses import dataclass

from nemo_specrollout.config.strict import bounded, choice

TRIGGERS = ("auto", "interval", "every_step", "never")
MIXED_LOSS = '{"kl_div": 0.5, "tv": 0.5}'
"""Half KL, half TV, as `speculators` wants it: what a new head learns best by (docs/benchmarks/index.md)."""
LOSSES = ("kl_div", "tv", "nla", "lk_hybrid", "tv+kl_div")


@dataclass(frozen=True)
class DraftRefreshConfig:
    """`policy.generation.specrollout.draft_refresh`."""

    trigger: str = choice(*TRIGGERS, default="auto")
    """`auto`: when it pays, by measured acceptance and costs. `interval`: every `interval` steps. `every_step`. `never`:
    nothing is trained; features are collected, and in a local run each policy's LM head, for a replay."""

    interval: int = bounded(10, low=1)
    """RL steps between refreshes under `trigger: interval`."""

    min_gap: int = bounded(2, low=1)
    """Fewest RL steps between refreshes under `trigger: auto`."""

    margin: float = bounded(0.25, low=0.0)
    """Under `trigger: auto`, the share by which the time to be gained must exceed the time that a refresh takes."""

    max_time_share: float = bounded(0.2, above=0.0, high=1.0)
    """The most of the run's time that refreshes may take, whatever the trigger: a local run waits for them, in NeMo-RL they
    run beside it."""

    trainer_gpus: int = bounded(0, low=0, high=1)
    """In NeMo-RL, GPUs that Ray gives to the worker that trains the head, beyond those of the cluster; 0 trains on a CPU."""

    max_train_seconds: float | None = bounded(None, above=0.0)
    """The longest that one refresh may train; null: 8 s, or in NeMo-RL an RL step if that is longer."""

    loss: str = choice(*LOSSES, default="tv+kl_div")
    """What the head minimizes: speculators' loss of that name, or the mean of two (docs/benchmarks/index.md compares them)."""

    learning_rate: float | None = bounded(None, above=0.0, high=1.0)
    """Learning rate of AdamW, which trains the head. It is constant within a refresh. null: 1e-3 up to a hidden size of 256,
    falling to 3e-5 at 4096. Each candidate that is worse than the head in service cuts that default to a third."""

    ttt_steps: int = bounded(5, low=1, high=16)
    """Positions ahead that the head is trained to draft on its own features."""

    tokens_per_batch: int | None = bounded(None, low=8)
    """Tokens of an optimizer step; null: 256 on a CPU, 4096 on a GPU."""

    rollout_capture_share: float = bounded(0.1, above=0.0, high=1.0)
    """Share of requests whose features are kept as they are generated. What capturing costs grows with it."""

    store_bytes: int = bounded(4 << 30, low=1 << 20)
    """Most disk space of the features kept; the oldest policy versions make room."""

    held_out_share: float = bounded(0.1, above=0.0, below=1.0)
    """Share of prompts, with all their samples, that no head is trained on: candidates are judged by them."""

    confidence: float = bounded(0.95, low=0.5, below=1.0)
    """Of the judgment that a candidate is not worse than the head in service; at most 1 - confidence of worse ones pass."""

    tolerance: float = bounded(0.0, low=0.0)
    """Mean accepted tokens a request and step by which a candidate may be worse and still be published."""

    max_age_alarm: int | None = bounded(None, low=1)
    """Policy versions after which a head that was not replaced raises an alarm; null is never."""
