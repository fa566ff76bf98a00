# SPDX-License-Identifier: Apache-2.0
"""Item `training` of the GPU check, which runs GRPO by the local runner with the engine and the trainer on one GPU.

Each arm is a run in a process of its own. `plain` has the block with `drafters: []`, `ours` has its drafters, and `ahead` also
has `run_ahead`, with the engine and the trainer in separate processes. In float32 every row and every loss of `ours` and
`ahead` must equal those of `plain`. In bfloat16 the seconds of the arms are compared step by step.
"""

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.gpu.gpu_stage import HEAD, MODELS, POLICY, QUICK_GRAPHS, SEED, Findings
from lab.gpu.items import smollm2
from lab.gpu.training_arm import MEMORY, ROWS
from nemo_specrollout.reports.records import METRICS, read_lines

KINDS = ("plain", "ours", "ahead")
ARM_SECONDS = 60.0
"""Expected seconds of an arm on an H100, which are an estimate."""
PHASES = {
    "step": "step_s",
    "rollout": "generation_s",
    "log-probs": "logprob_s",
    "training": "train_s",
    "refit": "refit_s",
}
"""Phases of a training step, with the names of the metrics that have their seconds."""
WARM_UP_STEPS = 2
"""Number of first training steps that the medians leave out. Kernels are compiled in them, and the first one has no texts made
ahead."""
_REFUSED_HANDLES = ("cudaIpc", "invalid resource handle", "peer access", "pidfd", "died")
"""Words in an arm's log that say that the machine does not let processes share GPU memory."""


@dataclass(frozen=True)
class Arm:
    """What the run of an arm wrote before it ended or failed."""

    kind: str
    metrics: Sequence[Mapping[str, Any]]
    """Lines of `metrics.jsonl`. Each finished step has one."""
    rows: Mapping[int, Sequence[Sequence[int]]]
    """Tokens of each row (sample) of a training step, by step."""
    memory: Mapping[str, float]
    """GiB of GPU memory after the last step, or empty without a GPU."""


def training(findings: Findings) -> None:
    """Compares the rows of the arms in float32 over a few steps, and then their seconds in bfloat16 over ten steps."""
    if importlib.util.find_spec("megatron") is None:
        findings.check(False, "megatron-core is not installed: no arm can train")
        return
    findings.note("policy", _policy(findings)["facts"], "policy")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        exact = _arms(findings, work, "float32", findings.size(5, 2))
        _compare_rows(findings, exact)
        if not findings.is_rehearsal or findings.seconds_left > ARM_SECONDS:
            _compare_seconds(findings, _arms(findings, work, "bfloat16", findings.size(10, 3)))


def _arms(findings: Findings, work: Path, precision: str, num_steps: int) -> dict[str, Arm]:
    """Runs the arms one after another. Returns those that have finished at least one step.

    A failed arm does not affect the others.
    """
    arms = {}
    for kind in KINDS:
        if findings.seconds_left < 0.6 * ARM_SECONDS:
            findings.note(f"{kind}, {precision}", {"outcome": "no time left"}, "arms")
            continue
        arm = _run(findings, work, kind, precision, num_steps)
        if arm is not None:
            arms[kind] = arm
    return arms


def _run(findings: Findings, work: Path, kind: str, precision: str, num_steps: int) -> Arm | None:
    """Runs an arm. Returns what it has written, or None if it has finished no step.

    If the machine refuses handles to the GPU's memory, the arm runs again and moves weights through the host's memory.
    """
    for by_handle in (True, False):
        name = f"{kind}, {precision}" + ("" if by_handle else ", weights through the host")
        run = work / name.replace(", ", "_").replace(" ", "_")
        tree = config_of(findings, kind, precision, num_steps, run, by_handle)
        started = time.monotonic()
        code, log = _start(tree, run, min(4 * ARM_SECONDS, findings.seconds_left - 5.0))
        arm = _arm(kind, run)
        outcome = "done" if code == 0 else "stopped" if code is None else f"failed, exit {code}"
        facts = {"outcome": outcome, "steps": len(arm.metrics), "seconds": time.monotonic() - started, **arm.memory}
        findings.note(name, facts, "arms")
        if code == 0:
            return arm
        print(f"{name}: {outcome}\n" + "\n".join(log[-25:]), flush=True)
        told = "\n".join(log)
        if kind != "ahead" or not by_handle or not any(words in told for words in _REFUSED_HANDLES):
            break
    last = next((line for line in reversed(log) if line.strip()), "")
    findings.check(False, f"{name}: {outcome}: {last[:200]}")
    return arm if arm.metrics else None


def _start(tree: Mapping[str, Any], run: Path, seconds: float) -> tuple[int | None, list[str]]:
    """Starts an arm's process and waits for its end. Returns its exit status and the lines that it printed.

    The status is None if the process was killed after `seconds`.
    """
    config, log = run.with_suffix(".json"), run.with_suffix(".log")
    config.write_text(json.dumps(tree), encoding="utf-8")
    command = [sys.executable, "-m", "lab.gpu.training_arm", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace").splitlines()


def _arm(kind: str, run: Path) -> Arm:
    """Reads what an arm wrote into its run directory `run`."""
    metrics, rows, memory = (
        list(read_lines(file)) if (file := run / name).is_file() else [] for name in (METRICS, ROWS, MEMORY)
    )
    last = {name: value for name, value in memory[-1].items() if name != "step"} if memory else {}
    return Arm(kind, metrics, {line["step"]: line["rows"] for line in rows}, last)


# What an arm runs


def _policy(findings: Findings) -> dict[str, Any]:
    """Returns the policy to train, with its head, its tasks, and facts about it.

    It is SmolLM2 if the model and the tasks are on this machine, else the shipped adder.
    """
    if (
        not findings.is_rehearsal
        and (smollm2() / "config.json").is_file()
        and importlib.util.find_spec("reasoning_gym")
    ):
        tasks = [
            {"name": "chain_sum", "weight": 1.0, "options": {"min_terms": 2, "max_terms": 12, "max_digits": 2}},
            {"name": "leg_counting", "weight": 1.0, "options": {"max_animals": 12}},
        ]
        data = {"dataset_name": "reasoning_gym", "system_prompt": "simple", "tasks": tasks}
        facts = {"policy": "SmolLM2-135M", "task": "reasoning_gym", "context": 640}
        return {"model": smollm2(), "head": MODELS / "smollm2_eagle3", "data": data, "facts": facts, "lr": 2e-5}
    context, max_terms = findings.size((512, 8), (160, 3))
    added = {"dataset_name": "step_addition", "max_terms": max_terms}
    facts = {"policy": "step_adder", "task": "step_addition", "context": context}
    return {"model": POLICY, "head": HEAD, "data": added, "facts": facts, "lr": 2e-4}


def config_of(
    findings: Findings, kind: str, precision: str, num_steps: int, run: Path, by_handle: bool = True
) -> dict[str, Any]:
    """Returns the local runner's config of the arm `kind`, which is `plain`, `ours` or `ahead`.

    Arms differ in their block. In the arm `ahead`, the engine also runs in a process of its own. `by_handle` says whether
    the engine then gets new weights by a handle to GPU memory. Otherwise the weights go through the host's memory.
    """
    policy = _policy(findings)
    context = policy["facts"]["context"]
    prompts, samples = findings.size((8, 8), (2, 2))
    drafters = [{"type": "suffix"}, {"type": "ngram"}, {"type": "eagle3", "model": str(policy["head"])}]
    block: dict[str, Any] = {"enabled": True, "drafters": [] if kind == "plain" else drafters}
    if kind == "ahead":
        block["run_ahead"] = {}
    has_gpu = torch.cuda.is_available()
    kwargs: dict[str, Any] = {"max_num_seqs": prompts * samples}
    kwargs |= {"compilation_config": QUICK_GRAPHS} if has_gpu else {"kv_cache_memory_bytes": 1 << 28}
    return {
        "runtime": "local",
        "grpo": {
            "num_prompts_per_step": prompts,
            "num_generations_per_prompt": samples,
            "max_num_steps": num_steps,
            "seed": SEED,
        },
        "data": policy["data"],
        "policy": {
            "model_name": str(policy["model"]),
            "precision": precision,
            "max_total_sequence_length": context,
            "train_global_batch_size": prompts * samples,
            "train_micro_batch_size": findings.size(16, 2),
            "logprob_batch_size": findings.size(32, 2),
            "megatron_cfg": {"enabled": True, "optimizer": {"lr": policy["lr"]}},
            "generation": {
                "max_new_tokens": findings.size(384, 48),
                "temperature": 1.0,
                "vllm_cfg": {"max_model_len": context, "precision": precision, "enforce_eager": not has_gpu},
                "vllm_kwargs": kwargs,
                "colocated": {"enabled": kind != "ahead"},
                "specrollout": block,
            },
        },
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(run)},
        "cluster": {"gpus_per_node": int(has_gpu), "weights_by_handle": by_handle},
    }


# What is compared


def _compare_rows(findings: Findings, arms: Mapping[str, Arm]) -> None:
    plain = arms.get("plain")
    for arm in (arms[kind] for kind in KINDS[1:] if kind in arms and plain is not None):
        assert plain is not None
        figures = compared_rows(plain, arm)
        findings.note(f"{arm.kind} against plain", figures, "float32")
        is_equal = figures["rows equal"] == figures["rows"] and figures["losses equal"] == figures["steps"]
        findings.check(is_equal, f"{arm.kind}, float32: {figures}")


def compared_rows(plain: Arm, arm: Arm) -> dict[str, Any]:
    """Returns how many rows and losses of an arm equal the plain arm's, over the steps that both arms have finished."""
    steps = range(min(len(plain.metrics), len(arm.metrics)))
    pairs = [pair for step in steps for pair in zip(plain.rows[step], arm.rows[step], strict=True)]
    losses = [(plain.metrics[step]["loss"], arm.metrics[step]["loss"]) for step in steps]
    return {
        "steps": len(steps),
        "rows": len(pairs),
        "rows equal": sum(one == other for one, other in pairs),
        "losses equal": sum(one == other for one, other in losses),
        "largest difference of losses": max((abs(one - other) for one, other in losses), default=0.0),
        "largest log-prob gap": max((arm.metrics[step]["logprob_gap_max"] for step in steps), default=0.0),
    }


def _compare_seconds(findings: Findings, arms: Mapping[str, Arm]) -> None:
    for arm in arms.values():
        findings.note(arm.kind, seconds_of(arm), "bfloat16, median seconds of a step")
    for kind in KINDS[1:]:
        if kind in arms and "plain" in arms:
            findings.note(f"plain over {kind}", ratios(arms["plain"], arms[kind]), "bfloat16, medians of ratios")


def seconds_of(arm: Arm) -> dict[str, float]:
    """Returns an arm's median seconds of each phase of a training step, and its median tokens per second in rollouts."""
    steps = arm.metrics[WARM_UP_STEPS:] or arm.metrics
    medians = {phase: statistics.median(step[name] for step in steps) for phase, name in PHASES.items()}
    return {**medians, "tokens a second": statistics.median(map(_tokens_a_second, steps))}


def ratios(plain: Arm, arm: Arm) -> dict[str, float]:
    """Returns the plain arm's seconds divided by another arm's, as medians over steps, for phases of a training step.

    In bfloat16 rows may part, and then a step of one arm has more tokens. So the rollouts are also compared by tokens per
    second.
    """
    pairs = list(zip(plain.metrics, arm.metrics, strict=False))
    pairs = pairs[WARM_UP_STEPS:] or pairs
    phases = {p: PHASES[p] for p in ("step", "rollout", "training", "refit")}
    medians = {
        phase: statistics.median(one[name] / other[name] for one, other in pairs) for phase, name in phases.items()
    }
    speed = statistics.median(_tokens_a_second(other) / _tokens_a_second(one) for one, other in pairs)
    return {**medians, "tokens a second, over plain": speed}


def _tokens_a_second(step: Mapping[str, Any]) -> float:
    return float(step["mean_gen_tokens_per_sample"] * step["num_samples"] / step["generation_s"])
