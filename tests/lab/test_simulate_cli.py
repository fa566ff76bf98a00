# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab simulate`: scenarios, configs, traces, what it writes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import QUICKSTART, ROOT
from test_plan_cli import refused, tables

from lab.cli.main import main
from lab.cli.simulated_config import ASSUMED_ACCEPTANCE
from lab.simulation.scenario import FOLDER, shipped
from nemo_specrollout.config.drafter_configs import BLOCK_DRAFTERS, DRAFTERS

pytestmark = pytest.mark.unit

SCENARIO = "nvidia-8b-zero"
NEMO_RL = {
    "runtime": "nemo_rl",
    "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 8},
    "policy": {
        "model_name": "Qwen/Qwen3-8B", "max_total_sequence_length": 4096,
        "generation": {
            "backend": "vllm", "max_new_tokens": 4096, "vllm_cfg": {"tensor_parallel_size": 2, "precision": "bfloat16"},
            "specrollout": {"drafters": [{"type": "suffix"}, {"type": "eagle3", "model": "heads/qwen3-8b"}]},
        },
    },
    "cluster": {"num_nodes": 2, "gpus_per_node": 8},
}  # fmt: skip


def test_every_drafter_has_an_assumed_acceptance() -> None:
    assert set(ASSUMED_ACCEPTANCE) == set(DRAFTERS) - set(BLOCK_DRAFTERS)


def written(path: Path, tree: object) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def scenario_file(path: Path, **changes: object) -> Path:
    tree = yaml.safe_load((FOLDER / "nvidia-235b-512.yaml").read_text())
    return written(path / "scenario.yaml", {**tree, **changes})


def rows(printed: str) -> list[list[str]]:
    """Returns the cells of the printed table, by line."""
    lines = printed.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("variant"))
    return [line.split() for line in lines[header + 1 :]]


def test_a_shipped_scenario_is_found_by_name_and_overridden(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", SCENARIO, "drafting.k=5"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Qwen3-8B, RL-Zero, on 32 GB200: ") and "(a prediction)" in printed
    assert "calibrated: plain_step_s so that" in printed
    assert max(len(line) for line in printed.splitlines() if not line.startswith(("source", "calibrated"))) <= 120
    fixed = next(row for row in rows(printed) if row[0] == "fixed")
    assert fixed[4] == "1.47x"


def test_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "list"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == shipped()


def test_numbers_and_a_picture_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["simulate", SCENARIO, "--out", str(out)]) == 0
    record = json.loads((out / "simulation.json").read_text())
    assert [v["variant"] for v in record["variants"]][:3] == ["plain", "fixed", "auto"]
    for variant in record["variants"]:
        assert sum(variant["parts_s"].values()) == pytest.approx(variant["step_s"])
    assert (out / "simulation.png").read_bytes().startswith(b"\x89PNG")


def test_a_nemo_rl_config_is_simulated_on_a_named_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path / "run.yaml", NEMO_RL)
    arguments = ["simulate", str(config), "--device", "H100", "simulation.lengths.median=300"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Qwen/Qwen3-8B on 16 H100: ") and "256 requests" in printed
    assert [row[0] for row in rows(printed)] == ["plain", "fixed", "auto", "moving"]
    block = "policy.generation.specrollout.fastest_of_n"
    assert main([*arguments, f"{block}.methods=[[eagle3],[suffix]]"]) == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["plain", "fixed", "auto", "moving", "racing"]


def test_a_local_config_is_simulated_by_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.json").write_text(tables().to_json())
    assert main(["simulate", str(QUICKSTART), "--profile", str(tmp_path / "profile.json")]) == 0
    printed = capsys.readouterr().out
    assert "64 requests" in printed and "costs of kind tables" in printed


def test_a_trace_sets_the_response_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [
        {"prompt": p, "sample": s, "tokens": 100 * (1 + p) + s, "reward": 1.0} for p in range(4) for s in range(2)
    ]
    trace = tmp_path / "samples.jsonl"
    trace.write_text("\n".join(json.dumps({"step": step, "samples": samples}) for step in range(2)))
    assert main(["simulate", SCENARIO, "--trace", str(trace)]) == 0
    assert "8 requests, 2,004 tokens" in capsys.readouterr().out
    trace.write_text("\n".join(json.dumps({k: s[k] for k in ("prompt", "sample", "tokens")}) for s in samples))
    assert main(["simulate", SCENARIO, "--trace", str(trace)]) == 0
    assert "8 requests, 2,004 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            [{"prompt": 0, "sample": 0, "tokens": 5}, {"prompt": 1, "sample": 1, "tokens": 5}],
            "prompt 0 has no sample 1",
        ),
        ([{"prompt": 0, "sample": 1, "tokens": 5}], "prompt 0 has no sample 0"),
        ([{"prompt": 0, "sample": 0, "tokens": 5}] * 2, "line 2: prompt 0, sample 0 occurs twice"),
        ([{"prompt": 0, "sample": 0}], "line 1.tokens: missing"),
        ([{"prompt": 0, "sample": 0, "tokens": 0}], "tokens: 0 is out of range"),
        ([7], "line 1: 7; each line is an object with prompt, sample and tokens"),
        ([], "has no samples"),
    ],
)
def test_an_incomplete_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[object], says: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    assert says in refused(capsys, "simulate", SCENARIO, "--trace", trace)


def test_an_unreadable_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torn.jsonl").write_text('{"prompt": 0,')
    assert "line 1: not JSON" in refused(capsys, "simulate", SCENARIO, "--trace", tmp_path / "torn.jsonl")
    assert "cannot be read (No such file or directory)" in refused(
        capsys, "simulate", SCENARIO, "--trace", tmp_path / "nothing"
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["training.lag=2"], "training.lag: 2, max_age None; a synchronous step has no lag"),
        (["training.mode=async", "cluster.train_gpus=256"], "training.lag: 0; asynchronous steps without a lag"),
        (["training.mode=async", "training.lag=2", "training.max_age=1"], "training.max_age: 1 discards"),
        (["training.mode=async", "training.lag=3", "training.buffer_batches=2"], "training.buffer_batches: 2 cannot hold"),
        (["training.mode=async", "training.lag=3", "training.num_steps=7"], "training.num_steps: 7 steps do not reach"),
        (["batch.num_prompts=100000000"], "requests to simulate; 2000000 at most"),
        (["batch.prompt_tokens=1000000000"], "batch.prompt_tokens: 1000000000; a request of 10000"),
        (["training.mode=async", "training.lag=1"], "cluster.train_gpus: 0; asynchronous training needs"),
        (["cluster.train_gpus=8"], "cluster.train_gpus: 8; in synchronous training all GPUs take turns"),
        (["cluster.train_gpus=508"], "cluster.num_gpus: 512, of which 508 train, leave 4 to generate; an engine needs 8"),
        (["cluster.gpus_per_engine=7"], "cluster.gpus_per_engine: 7 does not divide the 512 GPUs"),
        (["cluster.gpus_per_engine=1"], "the weights of Qwen3-235B-A22B take 235 GB in fp8, a GB200 has 186: at least 2"),
        (["cluster.device=GB20"], "cluster.device: 'GB20' is not known; did you mean 'GB200'?"),
        (["cluster.device=A100"], "precision: 'fp8'; A100 has no such tensor cores"),
        (["model=Qwen3-235B"], "model: 'Qwen3-235B' is neither known nor a folder with a config.json; did you mean"),
        (["lengths.median=30000"], "lengths.median: 30000 is above max_tokens 20000"),
        (["drafting.methods=[]"], "drafting.methods: []; name at least one"),
        (["drafting.methods=[{name: a, acceptance_length: 5.0}]"], "acceptance_length: 5.0; 3 drafts emit 4 tokens at most"),
        (["drafting.drafter_gpus=[1]"], "drafting.drafter_gpus: [1]; drafts of 'eagle3' are not made elsewhere"),
        (["costs.kind=tables"], "costs.profile: missing with kind 'tables'; give it"),
        (["drafting.kk=3"], "drafting.kk: unknown key; did you mean 'k'?"),
    ],
)  # fmt: skip
def test_contradictory_scenarios_are_refused(
    capsys: pytest.CaptureFixture[str], overrides: list[str], says: str
) -> None:
    assert says in refused(capsys, "simulate", "nvidia-235b-512", *overrides)


def test_missing_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path / "run.yaml", NEMO_RL)
    assert "--device: missing" in refused(capsys, "simulate", config)
    assert "--device: 'H10' is not known" in refused(capsys, "simulate", config, "--device", "H10")
    assert "--profile: missing" in refused(capsys, "simulate", QUICKSTART)
    assert "did you mean 'nvidia-8b-zero'?" in refused(capsys, "simulate", "nvidia-8b-zer")
    short = {"title": "x", "model": "Qwen3-8B", "cluster": {"device": "H100", "num_gpus": 8}}
    assert "batch: missing" in refused(capsys, "simulate", written(tmp_path / "short.yaml", short))
    file = tmp_path / "file"
    file.write_text("")
    assert main(["simulate", SCENARIO, "--out", str(file / "below")]) == 2
    assert "--out: " in capsys.readouterr().err


def test_a_scenario_is_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", str(scenario_file(tmp_path, title="mine", batch={"num_prompts": 8, "num_samples": 8}))]) == 0
    )
    assert capsys.readouterr().out.startswith("mine: ")


def test_simulate_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from lab.cli.main import main; "
        f"main(['simulate', {SCENARIO!r}]); sys.exit(bool({{'torch', 'vllm', 'ray', 'matplotlib'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True).returncode == 0
