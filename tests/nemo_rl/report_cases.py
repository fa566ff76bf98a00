# SPDX-License-Identifier: Apache-2.0
"""report_cases.py LOG_DIR: three steps through NeMo-RL's real Logger, TensorBoard on; what came of it as a line of JSON.

The pages are of the first two steps when the program ends: what it leaves then is the test's to look at.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_specrollout.nemo_rl.generation import SpecrolloutLogger
from nemo_specrollout.nemo_rl.logprob_gap import gap_alarms
from nemo_specrollout.nemo_rl.step_log import STEP_LOG, StepLog

BLOCK = {"logprob_gap_alarm": 0.02}
OFF = {f"{name}_enabled": False for name in ("wandb", "swanlab", "mlflow")}


def log_step(logger: Any, log: StepLog, step: int) -> None:
    """Logs a step as NeMo-RL's synchronous GRPO does, in the same order."""
    log.samples = [{"seed": 1, "policy_spans": [[step - 1, 0]], "num_drafted": 9, "num_accepted": 4}]
    log.entries = {"acceptance": {"suffix": {"proposed": [6, 3], "accepted": [3, 1]}}}
    ours = {
        "acceptance_length": 1.5,
        "rollout_s": 4.0,
        "plain_estimate_s": 5.0,
        "speedup_estimate": 1.25,
        "suffix/acceptance": 4 / 9,
    }
    metrics = {"loss": 0.1, "reward": 0.5, "gen_kl_error": 1e-4, "token_mult_prob_error": 1.001}
    logger.log_metrics({**metrics, **{f"specrollout/{k}": v for k, v in ours.items()}}, step, prefix="train")
    seconds = {"generation": 6.0, "policy_training": 3.0, "total_step_time": 10.0}
    logger.log_metrics(seconds, step, prefix="timing/train", step_finished=True)


def main(log_dir: Path) -> None:
    config = {**OFF, "log_dir": str(log_dir), "tensorboard_enabled": True, "tensorboard": {}, "monitor_gpus": False}
    facts = {"block": BLOCK, "versions": {}}
    logger = SpecrolloutLogger(config, gap_alarms=partial(gap_alarms, bound=0.02, causes=[]), facts=facts, last_step=2)
    for step in (1, 2, 3):
        log_step(logger, STEP_LOG, step)
    logger.loggers[0].writer.flush()
    events = EventAccumulator(str(log_dir / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    images = {tag: [(shown.step, shown.width, shown.height) for shown in events.Images(tag)] for tag in tags["images"]}
    page = (log_dir / "specrollout" / "report.html").read_text(encoding="utf-8")
    found = {"images": images, "scalars": tags["scalars"], "is_behind": "steps 1 to 2" in page}
    print("FOUND " + json.dumps(found))


main(Path(sys.argv[1]))
