# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab explain`: its sections for local and NeMo-RL configs, with and without measured costs."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER
from test_ladder_cli import measured
from test_plan_cli import tables
from test_simulate_cli import NEMO_RL, written

from lab.cli.main import main
from lab.cli.simulated_config import of_local
from lab.local.run_config import read_run_config
from lab.simulation.compare import RACING, as_configured, compare, drafted, onset
from lab.simulation.scenario import read_scenario
from nemo_specrollout.cli.main import main as product
from nemo_specrollout.config.block import BudgetConfig, FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.load import load_config

pytestmark = pytest.mark.unit

TWO_WORKERS = ROOT / "examples" / "configs" / "quickstart_two_workers_cpu.yaml"
BLOCK = "policy.generation.specrollout"
SECTIONS = ("What will run", "Expected benefit", "Placement and window", "Racing", "Known traps")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    (tmp_path / "profile.json").write_text(tables().to_json())
    return tmp_path / "profile.json"


def sections(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, str]:
    """Returns the output for a config that can run, by section."""
    assert main(["explain", *map(str, arguments)]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    found = {title.strip(): text for title, _, text in (part.lstrip("\n").partition("\n") for part in parts)}
    assert tuple(found) == SECTIONS
    return found


def test_figures_without_a_source_are_called_unknown(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sections(capsys, QUICKSTART)
    assert "suffix (contexts to 6 tokens)" in said["What will run"]
    assert said["Expected benefit"].startswith("unknown without --profile")
    assert "by suffix, ngram in the policy's engine" in said["Placement and window"]
    assert "unknown without --profile" in said["Placement and window"]
    assert said["Racing"].startswith("off: no request moves")


def test_a_local_config_is_explained_by_profile_and_ladder(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ladder.json").write_text(measured().to_json())
    methods = f"{BLOCK}.fastest_of_n.methods=[[suffix],[ngram]]"
    said = sections(capsys, TWO_WORKERS, "--profile", profile, "--ladder", tmp_path / "ladder.json", methods)
    benefit = said["Expected benefit"]
    assert "as configured: rollout 1." in benefit and f"rests on: times in {profile}" in benefit
    assert [line.split()[0] for line in benefit.splitlines()[3:6]] == ["plain", "auto", "fastest_of_n"]
    assert "suffix: 1: 1.50x, 8: 0.83x" in benefit and "ngram: not measured beside plain" in benefit
    assert "note: that is another policy" in benefit
    assert "best: a verifier on 1 thread beside a drafter on 1 thread" in said["Placement and window"]
    assert "at most 8 draft tokens" in said["Placement and window"]
    assert "more than 10% of it (min_gain)" in said["Racing"] and "(suffix, ngram)" in said["Racing"]
    assert "when it begins: " in said["Racing"]


def test_a_nemo_rl_config_is_explained_on_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path / "run.yaml", NEMO_RL)
    assert sections(capsys, config)["Expected benefit"].startswith("unknown without --device")
    methods = f"{BLOCK}.fastest_of_n.methods=[[eagle3],[suffix]]"
    draft = ["policy.draft.enabled=true", "policy.megatron_cfg.enabled=true"]
    said = sections(capsys, config, "--device", "H100", *draft, methods)
    assert "rests on: data sheet of H100, a roofline" in said["Expected benefit"]
    assert "a request moves if another engine has room" in said["Racing"]
    assert " moves and " in said["Racing"] and "% of its requests finished" in said["Racing"]
    assert "overwrites it in the engine" in said["Known traps"] and "avoided      nemo-rl" in said["Known traps"]
    off = sections(capsys, config, "--device", "H100", *draft, f"{BLOCK}.enabled=false")
    assert "1.00x plain" in off["Expected benefit"] and "as written: no drafts" in off["Placement and window"]
    assert "not avoided  nemo-rl" in off["Known traps"] and "the block is off" in off["Known traps"]


def test_a_remote_drafter_is_placed_by_the_data_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path / "run.yaml", NEMO_RL)
    remote = f"{BLOCK}.drafters=[{{type: remote, model: Qwen3-1.7B, workers: 8, gpus: 1}}]"
    said = sections(capsys, config, "--device", "H100", remote, "policy.model_name=Qwen3-32B")["Placement and window"]
    assert "by a model on other workers" in said and "by the data sheet: " in said and "x plain (estimate)" in said


def test_a_config_that_cannot_run_is_explained_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path / "run.yaml", NEMO_RL)
    assert main(["explain", str(config), "--device", "H100", "policy.generation.quant_cfg=NVFP4"]) == 2
    printed = capsys.readouterr()
    assert "What will run" in printed.out and "Known traps" in printed.out and "Expected benefit" not in printed.out
    assert printed.err.startswith('specrollout-lab: policy.generation.quant_cfg: "NVFP4";')
    assert main(["explain", str(config), "--device", "H10"]) == 2
    assert "--device: 'H10' is not known" in capsys.readouterr().err


def test_only_the_simulation_is_missing_if_it_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path / "run.yaml", NEMO_RL)
    assert main(["explain", str(config), "policy.model_name=some/body", "--device", "H100"]) == 2
    said = capsys.readouterr()
    assert all(section in said.out for section in SECTIONS) and "unknown: the config cannot be simulated" in said.out
    assert "simulation.model: 'some/body' is neither known nor a folder" in said.err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("policy.generation.vllm_cfg.tensor_parallel_size=0", "must be a whole number, at least 1"),
        ("grpo.num_prompts_per_step=abc", "grpo.num_prompts_per_step: 'abc' is out of range"),
        ("cluster=5", "cluster: expected a block of keys, got 5"),
    ],
)
@pytest.mark.parametrize("command", ["check", "explain"])
def test_an_error_names_the_wrong_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, override: str, says: str
) -> None:
    config = written(tmp_path / "run.yaml", NEMO_RL)
    program, flags = (product, []) if command == "check" else (main, ["--device", "H100"])
    assert program([command, str(config), override, *flags]) == 2
    assert says in capsys.readouterr().err


def test_explain_loads_neither_torch_nor_vllm(profile: Path) -> None:
    code = (
        "import sys; from lab.cli.main import main; "
        f"assert main(['explain', {str(TWO_WORKERS)!r}, '--profile', {str(profile)!r}]) == 0; "
        "sys.exit(bool({'torch', 'vllm', 'ray', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True).returncode == 0


# Simulation of a block


def test_fastest_of_n_as_configured_equals_the_comparison() -> None:
    scenario = read_scenario("specactor-dapo-32b", ["drafting.drafter_gpus=[]", "batch.num_prompts=64"])
    block = SpecrolloutConfig(fastest_of_n=FastestOfNConfig())
    found, every = as_configured(scenario, block), compare(scenario)
    assert [step.variant for step in found.steps] == ["plain", "auto", "fastest_of_n"]
    racing = next(step for step in every.steps if step.variant == RACING)
    assert found.steps[-1].rollout_s == racing.rollout_s
    assert found.steps[-1].rollout.num_races == racing.rollout.num_races > 0
    first = onset(found.steps[-1])
    assert first is not None and 0.0 < first[0] < racing.rollout_s and 0.1 < first[1] < 1.0
    assert onset(found.steps[1]) is None


def test_disabled_features_are_not_simulated() -> None:
    scenario = read_scenario("nvidia-8b-zero", [])
    fixed = SpecrolloutConfig(budget=BudgetConfig("fixed", k=3))
    assert [s.variant for s in as_configured(scenario, fixed).steps] == ["plain", "fixed"]
    for block in (SpecrolloutConfig(enabled=False), SpecrolloutConfig(drafters=())):
        assert [s.variant for s in as_configured(scenario, block).steps] == ["plain"] and not drafted(scenario, block)
    rows = drafted(scenario, fixed)
    assert rows[0].num_requests == 1 and all(row.drafts == pytest.approx(3) for row in rows)


@pytest.mark.parametrize("methods", ["[[suffix],[ngram]]", "[[suffix,ngram],[]]"])
def test_racing_is_compared_with_as_many_engines(profile: Path, methods: str) -> None:
    tree = load_config(TWO_WORKERS, [f"{BLOCK}.fastest_of_n.methods={methods}"])
    config = read_run_config(tree)[0]
    found = as_configured(of_local(config, tree, profile), config.policy.generation.specrollout)
    drafting, racing = found.steps[1:]
    assert drafting.variant == "auto" and racing.rollout.changes
    assert racing.rollout_s < drafting.rollout_s <= found.plain.rollout_s


def test_a_local_run_has_as_many_engines_as_workers(profile: Path) -> None:
    for path, num_workers in ((QUICKSTART, 1), (TWO_WORKERS, 2)):
        tree = load_config(path, [f"policy.model_name={STEP_ADDER}"])
        cluster = of_local(read_run_config(tree)[0], tree, profile).cluster
        assert cluster.generating_gpus // cluster.gpus_per_engine == num_workers
