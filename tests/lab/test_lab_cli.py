# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab`: a mistake is one sentence and exit code 2; nothing is written, no heavy package is loaded."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import QUICKSTART, ROOT, STEP_ADDER

from lab.cli.main import main
from lab.cli.prepare import prepare
from lab.cli.run import RunInterrupts
from lab.local.run_directory import RunDirectory
from lab.local.run_report import results_are_of
from lab.local.sealed_folder import seal_folder
from nemo_specrollout.cli.command_line import use_threads
from nemo_specrollout.config.block import BUDGET_POLICIES
from nemo_specrollout.config.load import load_config
from nemo_specrollout.reports.records import FORMAT

pytestmark = pytest.mark.unit

Refused = Callable[..., str]
DRAFTERS = "policy.generation.specrollout.drafters"
HEAD = STEP_ADDER.parent / "step_adder_eagle3"


@pytest.fixture
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a run directory that does not exist yet, and works in the repository, as the quickstart's paths need it."""
    monkeypatch.chdir(ROOT)
    return tmp_path / "run"


@pytest.fixture
def refused(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Returns a function that runs a command which must fail, checks that it did nothing else, and returns its sentence."""

    def refused(command: str, *overrides: str, config: Path = QUICKSTART) -> str:
        before = snapshot(log_dir.parent)
        assert main([command, str(config), f"logger.log_dir={log_dir}", *overrides]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and "Traceback" not in printed.err
        assert printed.err.startswith("specrollout-lab: ") and printed.err.count("\n") == 1
        assert snapshot(log_dir.parent) == before, "something was written"
        return printed.err

    return refused


def snapshot(folder: Path) -> dict[Path, bytes | None]:
    """Returns every path below `folder`, with the content of files."""
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def copied_model(folder: Path, name: str, **changes: Any) -> str:
    """Returns an override that names a copy of the shipped model with `changes` to its JSON file `name`."""
    shutil.copytree(STEP_ADDER, folder / "model")
    file = folder / "model" / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return f"policy.model_name={folder / 'model'}"


def write_run(folder: Path, num_steps: int, *overrides: str) -> None:
    """Writes a run directory as `run` leaves it after `num_steps` steps."""
    (folder / "checkpoints").mkdir(parents=True)
    tree = load_config(QUICKSTART, [f"logger.log_dir={folder}", *overrides])
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    about = {"records": FORMAT, "command": "run", "versions": {}, "started": "today"}
    (folder / "run.json").write_text(json.dumps(about))
    for step in range(num_steps):
        checkpoint = folder / "checkpoints" / f"step_{step}"
        checkpoint.mkdir()
        (checkpoint / "weights").write_text("some")
        seal_folder(checkpoint)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(num_steps)))


@pytest.mark.parametrize("command", ["run", "bench", "explain"])
def test_every_command_refuses_an_unknown_key(refused: Refused, command: str) -> None:
    assert "unknown key; did you mean 'drafters'?" in refused(command, "policy.generation.specrollout.drafter=[]")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.model_name=no/such/folder", "no/such/folder does not exist"),
        ("policy.model_name=examples/configs", "has no config.json"),
        ("policy.max_total_sequence_length=4096", "beyond the model's max_position_embeddings"),
        ("grpo.max_num_steps", "expected key=value"),
        ("policy.generation.vllm_kwargs.max_model_len=99", "set policy.generation.vllm_cfg.max_model_len instead"),
        ("policy.generation.vllm_kwargs.worker_cls=mine.Worker", "specrollout names the worker itself; remove it"),
        ("policy.generation.vllm_kwargs.speculative_config={method: ngram}", "remove one of them"),
        (f"{DRAFTERS}=[{{type: dflash}}]", "drafters[0].model: missing; name the folder of its weights"),
        (
            f"{DRAFTERS}=[{{type: dspark, model: no/such}}]",
            "drafters.model: folder no/such does not exist; name a checkpoint",
        ),
        (f"{DRAFTERS}=[{{type: dflash, model: {HEAD}}}]", "it is eagle3; name the checkpoint of a dflash"),
        (f"{DRAFTERS}=[{{type: dspark, model: {STEP_ADDER}}}]", "it is Qwen3ForCausalLM; name the checkpoint"),
    ],
)
def test_a_config_that_cannot_run_is_refused(refused: Refused, override: str, words: str) -> None:
    assert words in refused("run", override)


@pytest.mark.parametrize("command", ["run", "explain"])
@pytest.mark.parametrize(
    ("native", "words"),
    [
        (
            "method: suffix",
            'method: "suffix"; vLLM\'s V2 model runner does not have it: remove the block, and name drafters',
        ),
        (
            "method: mtp, disable_padded_drafter_batch: true",
            "disable_padded_drafter_batch: true; vLLM's V2 model runner",
        ),
        (
            "method: eagle3, model: a/b, parallel_drafting: true",
            "parallel_drafting: true; vLLM's V2 model runner does not",
        ),
    ],
)
def test_speculation_that_the_model_runner_lacks_is_refused(
    refused: Refused, command: str, native: str, words: str
) -> None:
    given = f"policy.generation.vllm_kwargs.speculative_config={{{native}, num_speculative_tokens: 3}}"
    assert words in refused(command, f"{DRAFTERS}=[]", given)


@pytest.mark.parametrize("command", ["run", "explain"])
def test_an_environment_with_the_v1_model_runner_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    words = (
        'VLLM_USE_V2_MODEL_RUNNER: "0" in the environment; specrollout works only on vLLM\'s V2 model runner: remove it'
    )
    assert words in refused(command)


def test_a_missing_config_file_is_refused(refused: Refused) -> None:
    assert "nowhere.yaml does not exist" in refused("run", config=Path("nowhere.yaml"))


def test_a_tokenizer_of_another_model_is_refused(refused: Refused, tmp_path: Path) -> None:
    message = refused("run", copied_model(tmp_path, "config.json", vocab_size=32))
    assert "the model's vocabulary ends at 31; the two do not belong together" in message


def test_invalid_model_files_are_refused(refused: Refused, tmp_path: Path) -> None:
    model = copied_model(tmp_path, "tokenizer.json", model={"type": "Unigram", "vocab": [["a", 0.0]]})
    assert "tokenizer.json: no tokenizer" in refused("run", model)
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}], "pair": []}
    without_token = copied_model(tmp_path / "b", "tokenizer.json", post_processor={**template, "special_tokens": {}})
    assert "tokenizer.json: no tokenizer (no entry found for key)" in refused("run", without_token), (
        "the library panics"
    )
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json: not JSON" in refused("run", model)


@pytest.mark.parametrize(
    ("version", "words"), [("0.34.1", "vLLM 0.34.1 is not supported"), (None, "vLLM is not installed")]
)
def test_a_missing_or_unsupported_vllm_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    monkeypatch.setattr("lab.cli.prepare.vllm_version", lambda: version)
    assert words in refused("run")


def test_a_folder_that_is_no_run_is_refused(refused: Refused, log_dir: Path) -> None:
    log_dir.mkdir()
    (log_dir / "thesis.txt").write_text("years of work")
    assert "exists and is not a run directory" in refused("run")


@pytest.mark.parametrize("command", ["run", "bench", "explain"])
def test_a_log_dir_that_cannot_be_a_folder_is_refused(refused: Refused, log_dir: Path, command: str) -> None:
    log_dir.write_text("a file")
    assert "is a file" in refused(command)
    assert "is a file" in refused(command, f"logger.log_dir={log_dir}/deeper/down")


def test_a_run_of_another_config_is_refused(refused: Refused, log_dir: Path) -> None:
    write_run(log_dir, 1, "grpo.seed=1")
    assert "holds a run of another config (it differs in grpo.seed)" in refused("run")


def test_a_run_of_another_version_is_refused(refused: Refused, log_dir: Path) -> None:
    write_run(log_dir, 1)
    (log_dir / "run.json").write_text('{"command": "run", "versions": {}, "started": "today"}')
    assert "holds a run of another version; choose another folder" in refused("run")


def test_a_run_without_a_finished_step_may_change_its_config(log_dir: Path) -> None:
    write_run(log_dir, 0, "grpo.seed=1")
    tree = load_config(QUICKSTART, [])
    assert RunDirectory(log_dir, tree, 2).next_step == 0


def test_a_complete_run_is_refused(refused: Refused, log_dir: Path) -> None:
    write_run(log_dir, 3)
    (log_dir / "summary.json").write_text('{"steps": 3, "completed": true}')
    for name in ("report.html", "picture.png"):
        (log_dir / name).touch()
    assert "complete (3 steps)" in refused("run", "grpo.max_num_steps=3")


def test_results_of_fewer_steps_do_not_count_as_complete(log_dir: Path) -> None:
    """A run may be given more steps, and be killed before it has written their results."""
    write_run(log_dir, 3)
    for name in ("report.html", "picture.png"):
        (log_dir / name).touch()
    for text, whole in (('{"steps": 2, "completed": true}', False), ('{"steps": 3, "completed": false}', False),
                        ('{"steps": 3, "completed": true}', True), ("{", False), ("[]", False)):  # fmt: skip
        (log_dir / "summary.json").write_text(text)
        assert results_are_of(log_dir, 3) is whole
    (log_dir / "picture.png").unlink()
    (log_dir / "summary.json").write_text('{"steps": 3, "completed": true}')
    assert not results_are_of(log_dir, 3)


def test_a_run_without_checkpoints_is_never_restarted(refused: Refused, log_dir: Path) -> None:
    write_run(log_dir, 2, "checkpointing.enabled=false")
    shutil.rmtree(log_dir / "checkpoints")
    assert "checkpointing.enabled is false" in refused("run", "checkpointing.enabled=false")


def test_explain_prints_what_a_run_would_do(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(QUICKSTART), f"logger.log_dir={log_dir}", "grpo.val_period=5"]) == 0
    said = capsys.readouterr().out.split("\n\n")[0].splitlines()
    lines = dict(line.split(maxsplit=1) for line in said[2:])
    assert lines["drafters"].startswith("suffix") and "ngram" in lines["drafters"]
    assert "8 prompts x 8 samples = 64 requests" in lines["step"]
    assert lines["budget"].startswith("auto") and lines["output"] == str(log_dir)
    assert lines["ignored"].endswith("grpo.val_period")
    assert not log_dir.exists()


@pytest.mark.parametrize(
    ("block", "words"),
    [("enabled=false", "off: exactly vLLM's own"), ("drafters=[]", "the drafter-invariant sampler alone")],
)
def test_explain_tells_that_speculation_is_off(
    log_dir: Path, capsys: pytest.CaptureFixture[str], block: str, words: str
) -> None:
    assert main(["explain", str(QUICKSTART), f"policy.generation.specrollout.{block}"]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("policy", BUDGET_POLICIES)
def test_explain_describes_every_budget_policy(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(QUICKSTART), f"policy.generation.specrollout.budget.policy={policy}"]) == 0
    assert f"{policy}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "V2 model runner, asynchronous scheduling, CUDA graphs NONE (a CPU has none)"),
        (("policy.generation.vllm_kwargs.async_scheduling=false",),
         "synchronous scheduling (async_scheduling is false: a GPU waits while the host prepares each step)"),
        ((f"{DRAFTERS}=[]", "policy.generation.vllm_kwargs.speculative_config={method: ngram, num_speculative_tokens: 2}"),
         "synchronous scheduling (vLLM's own n-gram drafts on the host)"),
    ],
)  # fmt: skip
def test_explain_prints_what_is_in_force_in_the_engine(
    log_dir: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], words: str
) -> None:
    assert main(["explain", str(QUICKSTART), *overrides]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("engine ")]
    assert words in line


def test_explain_and_a_refused_run_load_no_heavy_package(log_dir: Path) -> None:
    code = (
        "import sys; from lab.cli.main import main\n"
        f"codes = main(['explain', {str(QUICKSTART)!r}]), main(['run', {str(QUICKSTART)!r}, 'grpo.seed=x'])\n"
        "assert codes == (0, 2), codes\n"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'ray', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_disturbs_the_writing_of_results(number: signal.Signals) -> None:
    with RunInterrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        interrupts.shield()
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


@pytest.mark.parametrize(("known", "expected"), [(None, "2"), ("5", "5")])
def test_the_environment_overrides_the_config_s_threads(
    known: str | None, expected: str, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", known or "")
    if known is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    use_threads(prepare(QUICKSTART, ["cluster.threads=2", f"logger.log_dir={log_dir}"]).config.cluster.threads)
    assert os.environ["OMP_NUM_THREADS"] == expected
