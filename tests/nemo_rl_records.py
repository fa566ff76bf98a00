# SPDX-License-Identifier: Apache-2.0
"""Records of a run in NeMo-RL as its logger writes them, and that logger on a stand-in for NeMo-RL's own."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_specrollout.nemo_rl.logger import StepLog, WatchingLogger

BLOCK = {"enabled": True, "drafters": [{"type": "suffix"}, {"type": "ngram"}], "logprob_gap_alarm": 0.02}
VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0"}


def metrics(step: int, rng: random.Random, **changes: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl` of synchronous GRPO; keys of ours in `changes` come without their prefix."""
    proposed = [int(4000 * 0.7**k) + rng.randrange(40) for k in range(5)]
    ours = {
        "engine_steps": 2200.0, "seeds_made_up": 0.0, "decode_s": rng.uniform(55, 70), "draft_host_s": 0.9,
        "steps_with_drafts": 0.83, "draft_tokens_per_request_step": rng.uniform(0.9, 1.3),
        "tokens_per_request_step": 1.6 + 0.01 * step, "speedup_estimate": rng.uniform(1.3, 1.5), "weight_updates": 1.0,
        "suffix/draft_tokens": float(sum(proposed)), "suffix/share_of_drafts": 0.8,
        "suffix/acceptance": rng.uniform(0.55, 0.65), "ngram/draft_tokens": 900.0, "ngram/share_of_drafts": 0.2,
        "ngram/acceptance": rng.uniform(0.3, 0.4), "logprob_gap": rng.uniform(0.004, 0.008), "logprob_gap_alarm": 0.0,
        "policy_lag_mean": 0.0, "policy_lag_max": 0.0, "samples_updated_amid": 0.0,
        "acceptance": {
            "suffix": {"proposed": proposed, "accepted": [int(p * 0.7 * 0.95**k) for k, p in enumerate(proposed)]},
            "ngram": {"proposed": [210, 90, 31], "accepted": [80, 30, 9]},
        },
    }  # fmt: skip
    native = {
        "loss": 0.02 * math.exp(-step / 9) + rng.uniform(-0.004, 0.004), "reward": 0.4 + 0.015 * step,
        "gen_kl_error": rng.uniform(1e-4, 2e-4), "token_mult_prob_error": 1.006, "mean_gen_tokens_per_sample": 812.0,
    }  # fmt: skip
    return {"step": step, **native, **{f"specrollout/{k}": v for k, v in (ours | changes).items()}}


def timing(step: int, rng: random.Random) -> dict[str, Any]:
    """A line of `timing.jsonl` of synchronous GRPO."""
    generation, training = rng.uniform(60, 75), rng.uniform(38, 42)
    return {
        "step": step, "data_processing": 0.4, "prepare_for_generation/total": 5.1,
        "prepare_for_generation/transfer_and_update_weights": 4.2, "generation": generation, "reward_calculation": 0.1,
        "logprob_inference_prep": 1.1, "policy_and_reference_logprobs": 14.2, "training_prep": 2.1,
        "policy_training": training, "total_step_time": generation + training + 24.5, "valid_tokens_per_sec_per_gpu": 311.0,
    }  # fmt: skip


def with_everything(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same steps with a head that is refreshed, several engines, remote drafters, asynchronous GRPO and an alarm."""
    for step in steps:
        at = step["step"]
        step |= {f"specrollout/{k}": v for k, v in {
            "eagle3/draft_tokens": 900.0, "eagle3/share_of_drafts": 0.5, "eagle3/acceptance": 0.6 - 0.02 * (at % 6),
            "head_age": float(at % 6), "tail/moves": float(at % 4), "tail/races": 5.0, "tail/won_by_racer": 2.0,
            "tail/saved_s": 1.5 - 0.3 * (at % 7), "draft_occupancy": 0.8, "draft_waste": 0.3, "draft_run_ahead": 2.5,
            "drafters": 2.0, "drafters_ready": 1.0, "policy_lag_mean": 0.5, "policy_lag_max": 1.0, "seeds_made_up": 3.0,
            "draft_supply": {"bottleneck": "the drafters", "problem": "<b>gone</b>"}}.items()}  # fmt: skip
        step["specrollout/acceptance"]["eagle3"] = {"proposed": [600, 300], "accepted": [420 - 9 * (at % 6), 90]}
        step["avg_trajectory_age"] = 0.9
        if at % 6 == 0:
            published = at % 12 == 0
            step["specrollout/draft_refresh"] = {"decision": f"refreshed: {at}", "gate": "better & so",
                                                 "published": published, "refresh_s": 30.0}  # fmt: skip
            step |= {"specrollout/heads_published": float(published), "specrollout/heads_refused": float(not published)}
        if at == 9:
            step |= {"specrollout/logprob_gap": 0.05, "specrollout/logprob_gap_alarm": 1.0,
                     "specrollout/alarms": ["drafts of the <script>head</script> & more"]}  # fmt: skip
    return steps


def write_run(log_dir: Path, steps: Sequence[dict[str, Any]], timings: Sequence[dict[str, Any]] = ()) -> Path:
    """A run's `<log_dir>/specrollout`; its path."""
    folder = log_dir / "specrollout"
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics.jsonl", steps), ("timing.jsonl", timings)):
        if lines:
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"block": BLOCK, "versions": VERSIONS, "num_steps": len(steps)}))
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


def watching_logger(log_dir: Path, log: StepLog | None = None, **settings: Any) -> Any:
    """Returns our logger of a run in `log_dir` with a step log and these `settings`."""
    known = {"gap_alarm": BLOCK["logprob_gap_alarm"], "causes": [], "facts": {}, "last_step": 1 << 60}
    logger = StandIn({"log_dir": str(log_dir)}, **{**known, **settings})
    logger.step_log = log or StepLog()
    return logger
