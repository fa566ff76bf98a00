# SPDX-License-Identifier: Apache-2.0
"""Compares ways to refresh a head on a drifting policy, by replaying a recorded run once for each of them.

    python -m lab.heads.drift RUN --head FOLDER --out DIR

Sampled tokens do not depend on the head, so the course of training does not depend on it either. A run with
`logger.record_for_replay: true` records everything that a head could have learned from. Therefore each way to refresh a head
can be replayed later on exactly the same policies.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file

from lab.local.run_config import RunConfig, read_run_config
from nemo_specrollout.config.block import DraftRefreshConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig
from nemo_specrollout.heads.decisions.refresh_schedule import DecodeCosts, StepFacts
from nemo_specrollout.heads.features.feature_store import FeatureReader, first_tokens
from nemo_specrollout.heads.features.features import SequenceFeatures
from nemo_specrollout.heads.files.head_folder import HeadFolder
from nemo_specrollout.heads.refresh.candidate import RefreshData
from nemo_specrollout.heads.refresh.online_refresh import OnlineRefresh
from nemo_specrollout.heads.training.acceptance import measure_acceptance
from nemo_specrollout.heads.training.trainer import Budget
from nemo_specrollout.reports.panels import STYLE
from nemo_specrollout.reports.records import Record, read_lines
from nemo_specrollout.storage.files import write_atomically

TRAINING_TOKENS = 30_000
"""Largest number of tokens that a refresh trains on."""
HELD_OUT_TOKENS = 5_000
"""Largest number of tokens on which a refresh judges its candidate."""
LONGER_THAN_ANY_RUN = 1_000_000
"""A number of training steps that no run reaches."""
TRIGGERS: dict[str, DraftRefreshConfig] = {
    "frozen": DraftRefreshConfig("interval", interval=LONGER_THAN_ANY_RUN),
    "every step": DraftRefreshConfig("interval", interval=1, max_time_share=1.0),
    "every 8 steps": DraftRefreshConfig("interval", interval=8, max_time_share=1.0),
    "when it pays": DraftRefreshConfig("auto"),
}


@dataclass(frozen=True)
class Recording:
    """A recorded run, with its config, its metrics, and the folder with features and LM heads of its policy versions."""

    config: RunConfig
    steps: list[dict[str, Any]]
    folder: Path

    @classmethod
    def read(cls, run: Path) -> "Recording":
        """Returns the recording in a run directory.

        Raises FileNotFoundError or ValueError if the folder has no recorded run.
        """
        config, _ = read_run_config(yaml.safe_load((run / "config.yaml").read_text()))
        return cls(config, read_lines(run / "metrics.jsonl"), run / "heads")

    def sequences(self, version: int, held_out: bool) -> list[SequenceFeatures]:
        """Returns the recorded features of one policy version, either the held-out ones or those for training."""
        found = FeatureReader(self.folder / "features").sequences(held_out)
        return [features for features in found if features.policy_version == version]

    def newest(self, version: int, held_out: bool, max_tokens: int) -> list[SequenceFeatures]:
        """Returns the newest features of the policy versions up to `version`, in all about `max_tokens` tokens.

        The newest come first. With `held_out` they are features of held-out prompts, otherwise those for training.
        """
        found = FeatureReader(self.folder / "features").sequences(held_out)
        return first_tokens((features for features in found if features.policy_version <= version), max_tokens)

    def data(self, version: int) -> RefreshData:
        """Returns the newest features that exist after training step `version`, for training a head and for judging it."""
        training = self.newest(version, False, TRAINING_TOKENS)
        return RefreshData(training, self.newest(version, True, HELD_OUT_TOKENS))

    def teacher(self, version: int) -> dict[str, torch.Tensor]:
        """Returns the LM head and the embedding of one policy version, by name."""
        return load_file(HeadFolder(self.folder).teacher(version))


def replay(
    recording: Recording, head: Path, config: DraftRefreshConfig, *, num_steps: int, num_drafts: int
) -> list[dict[str, Any]]:
    """Replays a recorded run with one way to refresh the head. Returns a record for each training step of the run.

    A record has the held-out acceptance length of the head in service, and the decision whether to refresh it. `num_steps` is
    the number of optimizer steps of each refresh, and `head` the folder of the first head.
    """
    recorded = recording.config.policy
    unused = HeadFolder(recording.folder / "replay")
    block = SpecrolloutConfig(
        drafters=(Eagle3DrafterConfig(model=str(head)),), num_speculative_tokens=num_drafts, draft_refresh=config
    )
    service = OnlineRefresh(block, Path(recorded.model_name), head, unused, temperature=1.0)
    lines: list[dict[str, Any]] = []
    training_s = 0.0
    for step in recording.steps:
        version = step["step"]
        held_out = recording.sequences(version, held_out=True)
        service.set_policy_weights(recording.teacher(version))
        length = measure_acceptance(service.head, held_out, num_drafts).expected_length if held_out else float("nan")
        line = {"step": version, "acceptance_length": length, "refreshed": False, "published": False}
        if held_out:
            decision = service.decide(_facts(step, length, len(recording.steps)))
            line["decision"] = decision.reason
            if decision.refresh and (data := recording.data(version)).lacking is None:
                training = service.settings()
                line["learning_rate"] = training.learning_rate
                refresh = service.train(data, training, Budget(steps=num_steps))
                training_s += refresh.seconds
                line |= {"refreshed": True, "published": refresh.published, "gate": refresh.reason}
        lines.append({**line, "training_s": training_s})
    return lines


def _facts(step: Record, length: float, num_steps: int) -> StepFacts:
    """Returns what the run would have measured in a training step with a head whose acceptance length is `length`."""
    costs = DecodeCosts.measured(step["rollout_s"], step["plain_estimate_s"], step["num_tokens"], step["request_steps"])
    seconds = sum(step[k] for k in ("rollout_s", "logprob_s", "train_s", "refit_s"))
    return StepFacts(length, step["num_tokens"], seconds, num_steps - step["step"] - 1, costs)


def summary(lines: Sequence[Record]) -> dict[str, Any]:
    """Returns figures of a replay, which are mean acceptance lengths, refreshes, published heads, and seconds of training."""
    lengths = [line["acceptance_length"] for line in lines if np.isfinite(line["acceptance_length"])]
    return {
        "acceptance_length": float(np.mean(lengths)),
        "acceptance_length_last_quarter": float(np.mean(lengths[-len(lengths) // 4 :])),
        "refreshes": sum(line["refreshed"] for line in lines),
        "published": sum(line["published"] for line in lines),
        "training_s": lines[-1]["training_s"],
    }


def draw(curves: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draws acceptance length and seconds of training over the run, for each way to refresh. Dots mark published heads."""
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.0, 3.0), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        for number, (name, lines) in enumerate(curves.items()):
            xs, ys = ([line[k] for line in lines] for k in ("step", "acceptance_length"))
            dashes = (None, None) if number < 3 else (3, 3)  # the fourth may lie on another curve
            smooth = _smooth(ys)
            (curve,) = left.plot(xs, smooth, label=name, linewidth=1.4, dashes=dashes)
            marks = [i for i, line in enumerate(lines) if line["published"]]
            left.plot([xs[i] for i in marks], [smooth[i] for i in marks], ".", color=curve.get_color(), markersize=4)
            right.plot(
                xs, [line["training_s"] for line in lines], color=curve.get_color(), linewidth=1.4, dashes=dashes
            )
        left.set(xlabel="step", ylabel="acceptance length, held out")
        right.set(xlabel="step", ylabel="seconds of training")
        left.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=150)


def _smooth(values: list[float], width: int = 5) -> list[float]:
    """Returns the running mean of the values over up to `width` values."""
    half = width // 2
    return [float(np.nanmean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def main() -> None:
    """Replays a recorded run for each way in `TRIGGERS`. Writes `drift.json` and `drift.png`, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory, recorded with logger.record_for_replay: true")
    parser.add_argument("--head", type=Path, required=True, help="head in service at the start")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each refresh")
    parser.add_argument("--num-drafts", type=int, default=5)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--only", nargs="*", default=list(TRIGGERS), choices=list(TRIGGERS))
    args = parser.parse_args()
    recording = Recording.read(args.run)
    args.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[dict[str, Any]]] = {}
    with Progress() as bar:
        for name in bar.track(args.only, description="triggers"):
            config = replace(TRIGGERS[name], learning_rate=args.learning_rate, ttt_steps=args.num_drafts)
            curves[name] = replay(recording, args.head, config, num_steps=args.steps, num_drafts=args.num_drafts)
            write_atomically(args.out / "drift.json", json.dumps(curves, indent=1))
    draw(curves, args.out / "drift.png")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("refreshed", "acceptance length", "last quarter", "refreshes", "published", "training"):
        table.add_column(column, justify="left" if column == "refreshed" else "right")
    for name, lines in curves.items():
        s = summary(lines)
        table.add_row(
            name,
            f"{s['acceptance_length']:.3f}",
            f"{s['acceptance_length_last_quarter']:.3f}",
            str(s["refreshes"]),
            str(s["published"]),
            f"{s['training_s']:.0f} s",
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
