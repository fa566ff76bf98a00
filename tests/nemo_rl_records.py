# SPDX-License-Identifier: Apache-2.0
"""Records of a run in NeMo-RL as its logger writes them, and that logger on a stand-in for NeMo-RL's own."""

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_specrollout.nemo_rl.logger import WatchingLogger
from nemo_specrollout.nemo_rl.logprob_gap import gap_alarms
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.reports.records import FORMAT

BLOCK = {"enabled": True, "drafters": [{"type": "suffix"}, {"type": "ngram"}], "logprob_gap_alarm": 0.02}
VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0"}


def metrics(step: int, rng: random.Random, **changes: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl` of synchronous GRPO."""
    proposed = [int(4000 * 0.7**k) + rng.randrange(40) for k in range(5)]
    rollout_s, generation_s, speedup = rng.uniform(55, 70), rng.uniform(70, 75), rng.uniform(1.3, 1.5)
    line = {
        "step": step, "loss": 0.02, "reward": 0.4 + 0.015 * step, "gen_kl_error": rng.uniform(1e-4, 2e-4),
        "token_mult_prob_error": 1.006, "mean_gen_tokens_per_sample": 812.0, "engine_steps": 2200.0,
        "request_steps": 90000.0, "num_tokens": 144000.0, "acceptance_length": 1.6, "seeds_derived": 0.0,
        "rollout_s": rollout_s, "plain_estimate_s": rollout_s * speedup, "speedup_estimate": speedup, "host_share": 0.01,
        "steps_with_drafts": 0.83, "draft_tokens_per_request_step": rng.uniform(0.9, 1.3), "weight_updates": 1.0,
        "logprob_gap": rng.uniform(0.004, 0.008), "logprob_gap_alarm": 0.0, "policy_lag_mean": 0.0, "policy_lag_max": 0.0,
        "samples_updated_amid": 0.0, "generation_s": generation_s, "logprob_s": 15.3, "train_s": 42.1, "refit_s": 5.1,
        "step_s": generation_s + 64.0,
        "acceptance": {
            "suffix": {"proposed": proposed, "accepted": [int(p * 0.7 * 0.95**k) for k, p in enumerate(proposed)]},
            "ngram": {"proposed": [210, 90, 31], "accepted": [80, 30, 9]},
        },
    }  # fmt: skip
    return line | changes


def with_everything(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same steps with a head that is refreshed, several engines, remote drafters, asynchronous GRPO and an alarm."""
    for step in steps:
        at = step["step"]
        step |= {
            "ahead_tokens": 900.0, "ahead_tokens_2": 400.0, "ahead_s": 20.0, "ahead_kept": 0.9 - 0.02 * at,
            "ahead_right": 0.99 - 0.01 * at, "ahead_parted": 4.0, "ahead_followed": 3.0, "ahead_saved_s": 12.0,
            "head_age": float(at % 6), "policy_lag_mean": 0.5, "policy_lag_max": 1.0, "seeds_derived": 3.0,
            "tail": {"moves": at % 4, "races": 5, "won_by_racer": 2, "saved_s": 1.5 - 0.3 * (at % 7)},
            "draft_supply": {"occupancy": 0.8, "waste": 0.3, "run_ahead": 2.5, "num_drafters": 2, "num_ready": 1,
                             "bottleneck": "the drafters", "problem": "<b>gone</b>"},
        }  # fmt: skip
        step["acceptance"]["eagle3"] = {"proposed": [600, 300], "accepted": [420 - 9 * (at % 6), 90]}
        step["avg_trajectory_age"] = 0.9
        if at % 6 == 0:
            step["draft_refresh"] = {"decision": f"refreshed: {at}", "gate": "better & so", "published": at % 12 == 0,
                                     "refresh_s": 30.0}  # fmt: skip
        if at == 9:
            step |= {"logprob_gap": 0.05, "logprob_gap_alarm": 1.0, "alarms": [
                "engine and trainer differ by 0.0500 nats a token", "drafts of the <script>head</script> & more"]}  # fmt: skip
    return steps


def write_run(log_dir: Path, steps: Sequence[dict[str, Any]]) -> Path:
    """A run's `<log_dir>/specrollout`; its path."""
    folder = log_dir / "specrollout"
    folder.mkdir(parents=True, exist_ok=True)
    if steps:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (folder / "run.json").write_text(json.dumps({"records": FORMAT, "block": BLOCK, "versions": VERSIONS}))
    return folder


class NativeLogger:
    """The part of NeMo-RL's Logger that ours extends; tests/nemo_rl has the real one."""

    def __init__(self, cfg: dict[str, str]) -> None:
        self.loggers = ["tensorboard"]
        self.logged: list[tuple[dict[str, Any], str]] = []
        self.events: list[str] = []

    def log_metrics(self, metrics, step, prefix="", step_metric=None, step_finished=False) -> None:  # type: ignore[no-untyped-def]
        self.logged.append((metrics, prefix))
        self.events.append(f"{prefix} {step}")

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        self.events.append(f"{name} {step}")

    def finish(self) -> None:
        self.events.append("finish")


class StandIn(WatchingLogger, NativeLogger):
    """Our logger on that stand-in."""


def watching_logger(
    log_dir: Path, log: StepLog | None = None, causes: Sequence[str] = (), last_step: int = 1 << 60
) -> Any:
    """Returns our logger of a run in `log_dir`."""
    alarms = partial(gap_alarms, bound=0.02, causes=causes)
    logger = StandIn({"log_dir": str(log_dir)}, gap_alarms=alarms, facts={"versions": VERSIONS}, last_step=last_step)
    logger.step_log = log or StepLog()
    return logger
