# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab profile` and `explain --profile`: times of steps on this CPU, and the placement that follows from them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER

from lab.cli.main import main
from lab.placement.cost_tables import CostCurve, CostTables

POLICY = "examples/models/step_adder"
REMOTE = f"policy.generation.specrollout.drafters=[{{type: remote, model: {POLICY}, workers: 1}}]"


def line(size: int, fixed_s: float, row_s: float) -> CostCurve:
    return CostCurve(size, (1, 64), (fixed_s + row_s, fixed_s + 64 * row_s))


def tables(row_s: float = 1e-6) -> CostTables:
    """Writes tables of a drafter ten times as fast as its verifier, with little gain from a second thread."""
    return CostTables(
        "a machine", POLICY, "a draft model", (line(1, 0.01, row_s), line(2, 0.009, row_s)), "thread",
        (line(1, 0.001, 1e-6),), (line(1, 0.004, 1e-6), line(2, 0.004, 1e-6)),
    )  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    (tmp_path / "profile.json").write_text(tables().to_json())
    return tmp_path / "profile.json"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Returns the error message of a command that must fail."""
    assert main([str(a) for a in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("specrollout-lab: ") and printed.err.count("\n") == 1
    return printed.err


def plan_of(printed: str) -> list[str]:
    """Returns the lines of the plan, which begin with the best placement."""
    section = printed.split("Placement and window\n")[1].partition("\n\n")[0]
    lines = section.partition("\nwindow: ")[0].splitlines()
    return lines[1:]


@pytest.mark.unit
def test_the_best_placement_and_the_others_are_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["explain", str(QUICKSTART), "--profile", str(file), "--devices", "2", f"policy.model_name={POLICY}"]) == 0
    )
    best, keys, basis, note, header, *rows = plan_of(capsys.readouterr().out)
    assert best.startswith("best: a verifier on 1 thread beside a drafter on 1 thread, up to 8 drafts per engine step")
    assert best.endswith("x plain (estimate)")
    assert "num_speculative_tokens=8, most_ahead=" in keys
    assert basis.startswith("for 64 requests on 2 threads, acceptance 0.8; times of a machine")
    assert note.endswith("rows per engine step, of which 64 were measured; the rest is extrapolated")
    assert header.split()[:3] == ["mode", "groups", "threads"]
    assert [row.split()[0] for row in rows] == ["decoupled", "coupled", "coupled", "plain", "plain"]
    assert max(map(len, rows)) <= 120


@pytest.mark.unit
def test_flags_and_overrides_change_the_plan(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(replace(tables(row_s=0.001), policy="another").to_json())
    arguments = [
        "--batch",
        "64",
        "--acceptance",
        "0.5",
        "--devices",
        "1",
        "policy.generation.vllm_kwargs.max_num_seqs=9",
    ]
    assert main(["explain", str(QUICKSTART), "--profile", str(file), *arguments]) == 0
    printed = "\n".join(plan_of(capsys.readouterr().out))
    assert printed.startswith("best: no drafts, a verifier on 1 thread") and "decoupled" not in printed
    assert "for 64 requests on 1 thread, acceptance 0.5" in printed
    assert "note: the times are of another policy than the config's, examples/models/step_adder" in printed
    assert main(["explain", str(QUICKSTART), "--profile", str(file), arguments[-1]]) == 0
    assert "for 9 requests on" in capsys.readouterr().out


NEMO_RL = {
    "runtime": "nemo_rl",
    "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16},
    "cluster": {"num_nodes": 2, "gpus_per_node": 8},
    "policy": {
        "model_name": POLICY,
        "max_total_sequence_length": 512,
        "megatron_cfg": {"enabled": True},
        "generation": {
            "backend": "vllm",
            "vllm_cfg": {"max_model_len": 512, "precision": "float32"},
            "colocated": {"enabled": True},
            "specrollout": {},
        },
    },
}


@pytest.mark.unit
def test_plan_of_a_nemo_rl_config(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(replace(tables(), verify_s=(line(1, 0.01, 1e-6),), unit="GPU").to_json())
    config = file.with_name("nemo_rl.yaml")
    config.write_text(json.dumps(NEMO_RL))
    colocated = "policy.generation.colocated"
    apart = [f"{colocated}.enabled=false", f"{colocated}.resources={{num_nodes: 1, gpus_per_node: 8}}"]
    for overrides, gpus, groups in (([], 16, 8), (apart, 8, 4)):
        assert main(["explain", str(config), "--profile", str(file), *overrides]) == 0
        printed = capsys.readouterr().out
        assert f"best: {groups} groups, each a verifier on 1 GPU beside a drafter on 1 GPU" in printed
        assert f"for 512 requests on {gpus} GPUs" in printed


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "--batch: 0 is out of range; it must be at least 1"),
        (["--devices", "-1"], "--devices: -1 is out of range"),
        (["--acceptance", "1.2"], "--acceptance: 1.2 is out of range; it must be at least 0.0 and at most 1.0"),
        (["grpo.seed=x"], "grpo.seed: expected int"),
    ],
)
def test_invalid_plans_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in refused(capsys, "explain", QUICKSTART, "--profile", file, *arguments)


@pytest.mark.unit
def test_bad_profiles_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.json is not a profile (No such file" in refused(
        capsys, "explain", QUICKSTART, "--profile", "nowhere.json"
    )
    file.write_text(file.read_text().replace("verify_s", "verify"))
    assert "profile.json is not a profile (verify: unknown key; did you mean" in refused(
        capsys, "explain", QUICKSTART, "--profile", file
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "drafters: ['suffix', 'ngram']; add one of type remote or draft_model"),
        (["--steps", "0", REMOTE], "--steps: 0; time at least one"),
        (["--threads", "0", REMOTE], "--threads: '0'; write numbers from 1 to"),
        (["--out", "examples", REMOTE], "--out: examples cannot be a file there"),
        (["--out", "no/such/folder/x.json", REMOTE], "cannot be a file there"),
    ],
)
def test_invalid_profile_arguments_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in refused(capsys, "profile", QUICKSTART, "--out", file, *arguments)


@pytest.mark.integration
@pytest.mark.slow
def test_plan_reads_the_file_that_profile_writes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["policy.generation.vllm_kwargs.max_num_seqs=4", "policy.max_total_sequence_length=128",
             "policy.generation.max_new_tokens=64", REMOTE]  # fmt: skip
    arguments = ["--out", str(file), "--threads", "1", "--steps", "4", *small]
    assert main(["profile", str(QUICKSTART), *arguments]) == 0
    assert f"written to {file}" in capsys.readouterr().out
    measured = CostTables.read(file, "--profile")
    assert measured.policy == measured.draft_model == POLICY and (ROOT / POLICY).samefile(STEP_ADDER)
    for curves in (measured.verify_s, measured.draft_s, measured.coupled_draft_s):
        (curve,) = curves
        assert curve.size == 1 and curve.counts == (1, 2, 4) and max(curve.seconds) < 1.0
    assert main(["explain", str(QUICKSTART), "--profile", str(file), "--devices", "2", *small]) == 0
    assert "for 4 requests on 2 threads" in capsys.readouterr().out
