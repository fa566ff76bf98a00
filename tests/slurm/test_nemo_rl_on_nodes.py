# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL itself on the nodes of a real Slurm: each run gives the rows of the same run on one machine without Slurm.

`NEMO_RL_RUNS=DIR .venv/bin/python -m pytest -m nemo_rl tests/slurm/test_nemo_rl_on_nodes.py -k NAME` makes one run, two to
six minutes on two cores, and keeps it.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from kept_weights import audit_of
from nemo_rl_host import ROUNDING, Host, Run, count_equal, num_drafts, run_all
from node_runs import CONFIG, RunOnNodes, reason_against_pmix, run_on_nodes
from node_scenarios import NODE_RUNS, REFERENCES
from real_slurm import reason_against

from nemo_specrollout.cli.main import main

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(7200)]

UNDISTURBED = (
    "one", "colocated_head", "apart_ahead", "async_four", "moving", "drafter_on_its_node", "drafter_in_its_job",
)  # fmt: skip
SOUND = 1e-4  # nats: float32, two implementations of one model
STEPS = {"one": 3, "colocated": 5, "colocated_long": 24, "apart": 4, "async": 3}
"""Steps of each reference."""


@pytest.fixture(scope="module")
def made(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunOnNodes]:
    """Returns a run by its name, and makes it if it is not kept."""
    if reason := reason_against() or reason_against_pmix():
        pytest.skip(reason)
    kept = os.environ.get("NEMO_RL_RUNS")
    out = Path(kept, "nodes").resolve() if kept else tmp_path_factory.mktemp("nodes")

    def run(name: str) -> RunOnNodes:
        found = RunOnNodes(out / name)
        if not found.is_over:
            run_on_nodes(host, out / name, NODE_RUNS[name])
        return found

    return run


@pytest.fixture(scope="module")
def reference(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Returns the reference of a run by the run's name."""

    def run(name: str) -> Run:
        wanted = NODE_RUNS[name].reference
        scenarios = {wanted: REFERENCES[wanted]}
        return run_all(host, f"nodes_{wanted}", str(CONFIG), scenarios, tmp_path_factory.mktemp(wanted))[wanted]

    return run


@pytest.mark.parametrize("name", NODE_RUNS)
def test_rows_are_those_of_one_machine(
    made: Callable[[str], RunOnNodes], reference: Callable[[str], Run], name: str
) -> None:
    run, other = made(name), reference(name)
    assert other.result["error"] is None
    num_steps = STEPS[NODE_RUNS[name].reference]
    for step in range(1, num_steps if name == "chained" else num_steps + 1):
        equal, total = count_equal(other, run, step)
        assert equal == total == 16, f"step {step}"
    # The movement is that of one engine, and each job of the chain makes a step with engines of its own.
    assert (other if name == "chained" else run).weights_moved_by > ROUNDING
    assert sum(sample["num_drafted"] for line in run.lines("samples.jsonl") for sample in line["samples"]) > 0


@pytest.mark.parametrize("name", UNDISTURBED)
def test_every_row_is_what_its_policies_sample(
    made: Callable[[str], RunOnNodes], host: Host, name: str, tmp_path: Path
) -> None:
    """Computes every row again with the weights of each update, by the audit, which has no code of the engine's."""
    found, num_rows = audit_of(made(name), host.tiny / "policy", tmp_path)
    assert not found.skipped
    assert not found.foreign, found.sentence
    assert not found.differences, found.sentence
    assert len(found.rows) == num_rows > 30
    assert found.logprob_quantiles["largest"] < SOUND


@pytest.mark.parametrize("name", NODE_RUNS)
def test_no_process_stays_on_a_node(made: Callable[[str], RunOnNodes], name: str) -> None:
    assert made(name).result["left"] == {}


@pytest.mark.parametrize("name", UNDISTURBED)
def test_an_undisturbed_run_is_one_job(made: Callable[[str], RunOnNodes], name: str) -> None:
    assert [(state, restarts) for _, state, restarts in made(name).result["jobs"]] == [("COMPLETED", "0")]


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("requeued", [("COMPLETED", "1")]),
        ("time_is_up", [("TIMEOUT", "0"), ("COMPLETED", "0")]),
        ("cancelled", [("CANCELLED", "0"), ("COMPLETED", "0")]),
        ("chained", [("COMPLETED", "0"), ("CANCELLED", "0"), ("COMPLETED", "0"), ("COMPLETED", "0")]),
        ("node_dies", [("COMPLETED", "1")]),
        ("disk_fills", [("FAILED", "0"), ("COMPLETED", "0")]),
        ("cut_for_5_s", [("COMPLETED", "0")]),
        ("cut_for_60_s", [("COMPLETED", "1")]),
    ],
)
def test_a_disturbed_run_goes_on(made: Callable[[str], RunOnNodes], name: str, states: list[tuple[str, str]]) -> None:
    assert [(state, restarts) for _, state, restarts in made(name).result["jobs"]] == states


def test_a_head_learns_from_engines_on_two_nodes(made: Callable[[str], RunOnNodes]) -> None:
    metrics = made("colocated_head").metrics
    assert sum(num_drafts(step, "eagle3") for step in metrics) > 0
    assert any(step.get("heads_published") for step in metrics)


def test_texts_are_made_ahead_on_the_engines_node(made: Callable[[str], RunOnNodes]) -> None:
    assert any(step["ahead_tokens"] for step in made("apart_ahead").metrics)


def test_requests_move_between_nodes(made: Callable[[str], RunOnNodes]) -> None:
    assert sum(step["tail"]["moves"] for step in made("moving").metrics) > 0


@pytest.mark.parametrize("name", ["drafter_on_its_node", "drafter_in_its_job"])
def test_a_drafter_on_a_node_of_its_own_drafts_for_engines_on_others(
    made: Callable[[str], RunOnNodes], name: str
) -> None:
    run = made(name)
    assert sum(num_drafts(step, "remote") for step in run.metrics) > 0
    listens_at = re.findall(r"drafters listen at tcp://([0-9.]+):", run.driver_log)
    named_at = re.findall(r"tcp://(n\d):5570", (run.folder / "run" / "config.yaml").read_text())
    policy_on = re.findall(r"\|\s+([0-9.]+)\s+\|\s+\('worker", run.driver_log)
    (address,) = [*listens_at, *(f"10.77.0.1{name[1:]}" for name in named_at)]
    assert len(policy_on) == 2 and address not in policy_on


def test_the_report_names_the_jobs_that_made_the_steps(
    made: Callable[[str], RunOnNodes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = made("chained")
    first, _, third, fourth = (job for job, *_ in run.result["jobs"])
    assert main(["report", str(run.folder / "run")]) == 0
    said = capsys.readouterr().out
    assert "3 finished steps: steps 1 to 3; 3 starts" in said
    for folder, job, step in (("exp_001", first, 1), ("exp_002", third, 2), ("exp_003", fourth, 3)):
        (line,) = [line for line in said.splitlines() if folder in line]
        assert f"job {job}" in line and f"step {step}" in line
