# SPDX-License-Identifier: Apache-2.0
"""loop_times.py OUT_DIR [LOOP ...]: seconds of a step of NeMo-RL's loops, without the block and with it, as a table.

Each run is a process of its own. cProfile measures our own seconds in the driver: seeds, figures, records and report.
Under the SingleController they are spent in its actor and are not seen here. Nothing else should run on the machine.
"""

import json
import pstats
import re
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nemo_rl_host import HERE, Run, make_host
from nemo_rl_scenarios import OFF, PLAIN, RENAMED

NUM_STEPS, WARM_UP = 12, 2
LOOPS = {"grpo": "base.yaml", "controller": "single_controller.yaml", "turns": "multi_turn.yaml", "ppo": "ppo.yaml"}
VARIANTS = {
    "without the block": OFF,
    "block, no drafters": PLAIN,
    "block": ["policy.generation.specrollout.enabled=true"],
}
# Functions of ours that the driver calls in a step, none of which calls another of them.
OURS = {"supervisor.py": ("begin_step", "end_step", "policy_updated"), "generation.py": ("_with_seeds",),
        "logger.py": ("_with_ours", "_step_done")}  # fmt: skip


def step_seconds(log: str) -> list[float]:
    """Seconds of each step after the first ones, as NeMo-RL prints them."""
    return [float(found) for found in re.findall(r"Total step time: ([0-9.]+)s", log)][WARM_UP:]


def our_seconds(profile: Path) -> dict[str, float]:
    """Seconds of a step in each of our functions, by name."""
    stats = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    found: dict[str, float] = {}
    for (file, _, function), (*_, cumulative, _) in stats.items():
        if "/nemo_specrollout/nemo_rl/" in file and function in OURS.get(Path(file).name, ()):
            found[function] = cumulative / NUM_STEPS
    return found


def main(out: Path, names: list[str]) -> None:
    host = make_host(out / "tiny")
    print("| loop | variant | s a step: median (low-high) | of which ours on the driver, ms |\n|---|---|---|---|")
    for name in names:
        algorithm = "ppo" if name == "ppo" else "grpo"
        for variant, overrides in VARIANTS.items():
            folder = out / name / variant.replace(" ", "_").replace(",", "")
            folder.mkdir(parents=True)
            scenario = {"run": {"overrides": [*overrides, f"{algorithm}.max_num_steps={NUM_STEPS}"]}}
            (folder / "scenarios.json").write_text(json.dumps(scenario))
            more = {"NEMO_RL_CPU_PROFILE": "1", **(RENAMED if overrides is OFF else {})}
            log = host.run(HERE / "run_scenarios.py", HERE / LOOPS[name], folder / "scenarios.json", folder, more=more)
            error = Run(folder / "run").result["error"]
            assert error is None, f"{name}, {variant}: {error}\n{log[-3000:]}"
            found = step_seconds(log)
            ours = our_seconds(folder / "run" / "profile.pstats").items()
            each = ", ".join(f"{function} {1e3 * seconds:.1f}" for function, seconds in ours)
            low, high = min(found), max(found)
            print(f"| {name} | {variant} | {median(found):.2f} ({low:.2f}-{high:.2f}) | {each} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(LOOPS))
