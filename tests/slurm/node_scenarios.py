# SPDX-License-Identifier: Apache-2.0
"""The runs of NeMo-RL on nodes that test_nemo_rl_on_nodes.py looks at, what happens to them, and their references."""

import time
from typing import Any

from nemo_rl_scenarios import AHEAD, AT_RANDOM, MOVING, PLAIN, REFRESHED_HEAD, TWO_ENGINES, WILD
from node_runs import Launched, NodeRun

FOUR_STEPS, FIVE_STEPS = ["grpo.max_num_steps=4"], ["grpo.max_num_steps=5"]
APART = "policy.generation.colocated.enabled=false"
ENGINE_ON_ITS_OWN_NODE = [
    APART,
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=1",
]
ASYNC = [
    APART,
    "policy.generation.vllm_cfg.async_engine=true",
    "grpo.async_grpo.enabled=true",
    "loss_fn.use_importance_sampling_correction=true",
]
ENGINES_ON_TWO_NODES = [
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=2",
]
ON_ONE_MACHINE = ["checkpointing.enabled=false", *PLAIN]
REFERENCES: dict[str, dict[str, Any]] = {
    "one": {"overrides": ON_ONE_MACHINE},
    "colocated": {"overrides": [*ON_ONE_MACHINE, *TWO_ENGINES, *FIVE_STEPS]},
    "apart": {
        "overrides": [
            *ON_ONE_MACHINE, *TWO_ENGINES, *FOUR_STEPS, APART, "policy.generation.colocated.resources.gpus_per_node=1",
        ],
    },
    "async": {
        "overrides": [
            *ON_ONE_MACHINE, *ASYNC, "cluster.gpus_per_node=4", "policy.generation.colocated.resources.gpus_per_node=2",
        ],
        "environment": {"NEMO_RL_CPU_LOGICAL_GPUS": "4"},
    },
}  # fmt: skip
"""The same settings on this machine, without Slurm and without drafts."""


def requeue(run: Launched) -> None:
    """`scontrol requeue` after the second step."""
    job = run.launch()
    run.wait_for_step(2)
    run.scontrol("requeue", job)
    run.start_again_now(job)
    run.wait_for_end(job)


def time_is_up(run: Launched) -> None:
    """The time limit, in the third step. Then the user's line again."""
    job = run.launch()
    run.wait_for_step(2)
    run.scontrol("update", f"JobId={job}", "TimeLimit=1")
    run.wait_for_end(job)
    run.wait_for_end(run.launch())


def cancel(run: Launched) -> None:
    """`scancel` in the third step. Then the user's line again."""
    job = run.launch()
    run.wait_for_step(2)
    run.slurm.command(["scancel", job])
    run.wait_for_end(job)
    run.wait_for_end(run.launch())


def chain(run: Launched) -> None:
    """Four jobs that save after a step, because the time for saving has come. The second is cancelled before it begins."""
    run.launch("--jobs=4", "checkpointing.checkpoint_must_save_by=00:00:00:01")
    run.slurm.command(["scancel", run.jobs[1]])
    for job in run.jobs:
        run.wait_for_end(job)


def node_dies(run: Launched) -> None:
    """The second node of the job dies in the third step. Slurm starts the job again on other nodes."""
    job = run.launch()
    run.wait_for_step(2)
    dead = run.hosts(job)[-1]
    run.slurm.kill_node(dead)
    run.start_again_now(job)
    run.wait_for_end(job)
    assert dead not in run.hosts(job)
    run.slurm.start_node(dead)


def network_is_cut(seconds: float) -> Any:
    """The network of the second node is gone for a while after the first step."""

    def happens(run: Launched) -> None:
        job = run.launch()
        run.wait_for_step(1)
        node = run.hosts(job)[-1]
        run.slurm.cut_off(node)
        time.sleep(seconds)
        run.slurm.join_again(node)
        run.notes.append(run.wait_for_end(job))
        if run.notes[-1] != "COMPLETED":
            run.wait_for_end(run.launch())

    return happens


AHEAD_APART = [*ENGINE_ON_ITS_OWN_NODE, *AHEAD, *FOUR_STEPS]
NODE_RUNS = {
    "one": NodeRun(1, "one"),
    "colocated_head": NodeRun(2, "colocated", [*REFRESHED_HEAD, *FIVE_STEPS]),
    "apart_ahead": NodeRun(2, "apart", AHEAD_APART),
    "async_four": NodeRun(4, "async", [*ASYNC, *ENGINES_ON_TWO_NODES, AT_RANDOM]),
    "moving": NodeRun(2, "colocated", [*MOVING, *FIVE_STEPS], environment=WILD),
    "requeued": NodeRun(2, "apart", AHEAD_APART, happens=requeue),
    "time_is_up": NodeRun(2, "apart", AHEAD_APART, happens=time_is_up),
    "cancelled": NodeRun(2, "apart", AHEAD_APART, happens=cancel),
    "chained": NodeRun(2, "apart", AHEAD_APART[:-1], happens=chain),
    "node_dies": NodeRun(2, "apart", AHEAD_APART, happens=node_dies, spare_nodes=1),
    "cut_for_5_s": NodeRun(2, "apart", AHEAD_APART, happens=network_is_cut(5)),
    "cut_for_60_s": NodeRun(2, "apart", AHEAD_APART, happens=network_is_cut(60)),
}
