# SPDX-License-Identifier: Apache-2.0
"""The block `draft_refresh` of `policy.generation.specrollout`: trains the draft head while the policy is trained."""

from dataclasses import dataclass

from nemo_specrollout.config.strict import bounded, choice

TRIGGERS = ("auto", "interval", "every_step", "never")
MIXED_LOSS = '{"kl_div": 0.5, "tv": 0.5}'
"""Half KL divergence, half total variation, as `speculators` writes it; best for a new head (docs/benchmarks/index.md)."""
LOSSES = ("kl_div", "tv", "nla", "lk_hybrid", "tv+kl_div")


@dataclass(frozen=True)
class DraftRefreshConfig:
    """`draft_refresh`; its presence turns refreshing on."""

    trigger: str = choice(*TRIGGERS, default="auto")
    """`auto`: a refresh when it pays, by measured acceptance and costs. `interval`: every `interval` steps. `every_step`.
    `never`: no training; features are collected for a replay, and in a local run each policy's LM head."""
    interval: int = bounded(10, low=1)
    """RL steps between refreshes under `trigger: interval`."""
    min_gap: int = bounded(2, low=1)
    """Fewest RL steps between refreshes under `trigger: auto`."""
    margin: float = bounded(0.25, low=0.0)
    """Under `trigger: auto`, the share by which the expected gain of time must exceed the time of the refresh."""
    max_time_share: float = bounded(0.2, above=0.0, high=1.0)
    """Largest share of the run's time that refreshes may take, for any trigger. A local run waits for them; in NeMo-RL they
    run in parallel."""
    trainer_gpus: int = bounded(0, low=0, high=1)
    """In NeMo-RL, GPUs of the Ray worker that trains the head, in addition to the GPUs of the cluster; 0 trains on a CPU."""
    max_train_seconds: float | None = bounded(None, above=0.0)
    """Longest training of one refresh; null: 8 s, or in NeMo-RL one RL step if that is longer."""
    loss: str = choice(*LOSSES, default="tv+kl_div")
    """Loss of the head: speculators' loss of that name, or the mean of two (docs/benchmarks/index.md compares them)."""
    learning_rate: float | None = bounded(None, above=0.0, high=1.0)
    """Learning rate of AdamW, which trains the head. It is constant within a refresh. null: 1e-3 up to a hidden size of 256,
    falling to 3e-5 at 4096. Each candidate that is worse than the head in service cuts that default to a third."""
    ttt_steps: int = bounded(5, low=1, high=16)
    """Positions ahead that the head is trained to draft on its own features."""
    tokens_per_batch: int | None = bounded(None, low=8)
    """Tokens of an optimizer step; null: 256 on a CPU, 4096 on a GPU."""
    rollout_capture_share: float = bounded(0.1, above=0.0, high=1.0)
    """Share of requests whose features are stored during generation. The cost of capturing grows with it."""
    store_bytes: int = bounded(4 << 30, low=1 << 20)
    """Disk space for stored features, in bytes; the oldest policy versions make room."""
    held_out_share: float = bounded(0.1, above=0.0, below=1.0)
    """Share of prompts, with all their samples, that judge candidates and are never trained on."""
    confidence: float = bounded(0.95, low=0.5, below=1.0)
    """Confidence that a candidate is not worse than the head in service; at most 1 - confidence of worse candidates pass."""
    tolerance: float = bounded(0.0, low=0.0)
    """Mean accepted tokens a request and step by which a candidate may be worse and still be published."""
    max_age_alarm: int | None = bounded(None, low=1)
    """Age of a head, in policy versions, that raises an alarm; null is never."""
