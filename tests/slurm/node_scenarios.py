# SPDX-License-Identifier: Apache-2.0
"""The runs of NeMo-RL on nodes that test_nemo_rl_on_nodes.py looks at, what happens to them, and their references."""

import shlex
import time
from typing import Any

import yaml
from nemo_rl_scenarios import AHEAD, AT_RANDOM, MANY_STEPS, MOVING, PLAIN, REFRESHED_HEAD, TWO_ENGINES, WILD
from node_runs import Launched, NodeRun
from real_slurm import ENDED

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
    "colocated_long": {"overrides": [*ON_ONE_MACHINE, *TWO_ENGINES, *MANY_STEPS]},
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
    for job in (run.jobs[1], run.jobs[0], *run.jobs[2:]):
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
    """The network of the second node is gone for a while after the first step, and Slurm does not give the node up."""

    def happens(run: Launched) -> None:
        configuration = run.slurm.configuration
        configuration.write_text(configuration.read_text().replace("SlurmdTimeout=15\n", "SlurmdTimeout=300\n"))
        run.scontrol("reconfigure")
        job = run.launch()
        run.wait_for_step(1)
        node = run.hosts(job)[-1]
        run.slurm.cut_off(node)
        time.sleep(seconds)
        run.slurm.join_again(node)
        if run.slurm.wait_for_state(job, "PENDING", *ENDED)["JobState"] == "PENDING":
            run.start_again_now(job)
        run.wait_for_end(job)

    return happens


def disk_fills(run: Launched) -> None:
    """Somebody fills the disk after the second step. When there is space again, the user's line again."""
    job = run.launch()
    run.wait_for_step(2)
    other = f"{run.slurm.small_disk}/of_somebody_else"
    run.slurm.command(["dd", "if=/dev/zero", f"of={other}", "bs=1M"])
    run.wait_for_end(job)
    run.slurm.command(["rm", other])
    run.wait_for_end(run.launch())


def drafter_in_a_job_of_its_own(run: Launched) -> None:
    """A job on the last node serves a drafter, and the run is told its address. The secret is a variable of both shells."""
    node = run.slurm.names[-1]
    settings = yaml.safe_load((run.folder / "cluster.yaml").read_text())
    path = f"{run.run}/addon:{settings['environment']['PYTHONPATH']}"
    serve = [
        "srun", "--no-container-mount-home", f"--container-image={settings['container']}",
        f"--container-workdir={settings['nemo_rl']}", "env", f"PYTHONPATH={path}",
        "uv", "run", "--extra", "vllm", "python", "-m", "nemo_specrollout", "serve-drafter", f"{run.run}/config.yaml",
        "--address=tcp://0.0.0.0:5570",
    ]  # fmt: skip
    own = f"policy.generation.specrollout.drafters=[{{type: remote, model: '{run.host.tiny}/draft', addresses: ['tcp://{node}:5570']}}]"
    run.launch("--dry-run", own)
    submit = ["sbatch", "--parsable", "--account=acc", f"--nodelist={node}", "--exclusive", "--time=0:40:00"]
    log = f"--output={run.folder}/drafter.out"
    done = run.slurm.command([*submit, log, "--wrap", shlex.join(serve)], {**settings["environment"], **run.plan.shell})
    assert done.returncode == 0, done.stderr
    drafter = done.stdout.strip()
    said = ""
    while "drafting with" not in said:
        assert run.slurm.job(drafter)["JobState"] not in ENDED, said
        time.sleep(0.5)
        said = run.slurm.command(["cat", f"{run.folder}/drafter.out"]).stdout
    run.wait_for_end(run.launch(own))
    run.slurm.command(["scancel", drafter])


THREE_DRAFTS = "policy.generation.specrollout.budget={policy: fixed, k: 3}"
DRAFTER_ON_A_GPU = [
    "policy.generation.specrollout.drafters=[{type: remote, model: '${oc.env:TINY}/draft', workers: 1, gpus: 1, "
    "vllm_kwargs: {gpu_memory_utilization: 0.05, kv_cache_memory_bytes: 67108864}}]",
    THREE_DRAFTS,
    *MANY_STEPS,  # a drafter with a GPU starts after the first ones
    "checkpointing.enabled=false",
]
AHEAD_APART = [*ENGINE_ON_ITS_OWN_NODE, *AHEAD, *FOUR_STEPS]
NODE_RUNS = {
    "one": NodeRun(1, "one", [AT_RANDOM]),
    "colocated_head": NodeRun(2, "colocated", [*REFRESHED_HEAD, *FIVE_STEPS]),
    "apart_ahead": NodeRun(2, "apart", AHEAD_APART),
    "async_four": NodeRun(4, "async", [*ASYNC, *ENGINES_ON_TWO_NODES, AT_RANDOM]),
    "moving": NodeRun(2, "colocated", [*MOVING, *FIVE_STEPS], environment=WILD),
    "drafter_on_its_node": NodeRun(2, "colocated_long", DRAFTER_ON_A_GPU, extra_nodes=1),
    "drafter_in_its_job": NodeRun(
        2,
        "colocated",
        [THREE_DRAFTS, *FIVE_STEPS],
        happens=drafter_in_a_job_of_its_own,
        spare_nodes=1,
        shell={"NEMO_SPECROLLOUT_SECRET": "of a test, and long enough for it"},
    ),
    "requeued": NodeRun(2, "apart", AHEAD_APART, happens=requeue),
    "time_is_up": NodeRun(2, "apart", AHEAD_APART, happens=time_is_up),
    "cancelled": NodeRun(2, "apart", AHEAD_APART, happens=cancel),
    # Each of its jobs makes a first step, in which drafts may not pay yet.
    "chained": NodeRun(2, "apart", [*ENGINE_ON_ITS_OWN_NODE, *AHEAD, THREE_DRAFTS], happens=chain),
    "node_dies": NodeRun(2, "apart", AHEAD_APART, happens=node_dies, spare_nodes=1),
    "disk_fills": NodeRun(2, "apart", AHEAD_APART, happens=disk_fills, is_on_a_small_disk=True),
    "cut_for_5_s": NodeRun(2, "apart", AHEAD_APART, happens=network_is_cut(5)),
    "cut_for_60_s": NodeRun(2, "apart", AHEAD_APART, happens=network_is_cut(60)),
}
