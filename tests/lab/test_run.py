# SPDX-License-Identifier: Apache-2.0
"""Whole runs of a small quickstart: their files, how they are resumed after every kind of end, refit."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import QUICKSTART, ROOT, TINY_ROLLOUTS
from run_files import undefined
from safetensors.torch import save_file

from lab.cli.main import main
from lab.local.engine import RolloutEngine
from lab.local.run_directory import DirectoryLock
from lab.local.run_sections import LossConfig, OptimizerConfig
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.reports import metric_table
from nemo_specrollout.reports.metric_table import LAB

pytestmark = pytest.mark.integration

# Short additions and a full learning rate from the first step: rewards differ within a group, and weights move at once.
TINY = {
    **TINY_ROLLOUTS,
    "policy.megatron_cfg.optimizer.lr": 1e-3,
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
}
NUM_STEPS = 6
METRICS = {
    "step", "reward", "num_samples", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "num_tokens",
    "rollout_s", "plain_estimate_s", "speedup_estimate", "generation_s", "logprob_s", "train_s", "refit_s", "verify_s",
    "step_s", "engine_steps", "request_steps", "acceptance_length", "acceptance", "draft_tokens_per_request_step",
    "steps_with_drafts", "host_share", "draft_s", "logprob_gap", "logprob_gap_max", "policy_lag_mean", "policy_lag_max",
    "samples_updated_amid", "tokens_checked", "tokens_equal", "loss", "kl_penalty", "probs_ratio", "probs_ratio_clamped",
    "clip_fraction", "approx_kl", "approx_entropy", "gen_kl_error", "token_mult_prob_error",
    "sampling_importance_ratio", "grad_norm", "lr", "num_valid_tokens", "alarms", "deaths",
}  # fmt: skip
SUMMARY = {
    "steps", "wall_s", "completed", "speedup_estimate", "tokens_checked", "tokens_equal",
    "reward_first", "reward_last", "acceptance_length", "alarms", "deaths",
}  # fmt: skip
# Metrics of a step that do not depend on interruptions before it.
REPEATABLE = ("step", "reward", "num_tokens", "mean_gen_tokens_per_sample", "loss", "grad_norm")


def overrides(log_dir: Path, **more: Any) -> list[str]:
    return [f"{key}={value}" for key, value in {**TINY, "logger.log_dir": log_dir, **more}.items()]


def start(
    log_dir: Path, num_steps: int = NUM_STEPS, command: str = "run", largest_file: int | None = None, **more: Any
) -> subprocess.Popen[str]:
    """Starts a run. `largest_file` is the size in bytes beyond which no file grows, as on a full disk."""
    arguments = overrides(log_dir, **{"grpo.max_num_steps": num_steps}, **more)
    limit = [] if largest_file is None else ["prlimit", f"--fsize={largest_file}"]
    return subprocess.Popen(
        [*limit, sys.executable, "-m", "lab.cli.main", command, str(QUICKSTART), *arguments],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate()
    assert process.returncode == code, output[-3000:]
    return output


def metrics(log_dir: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of `metrics.jsonl`; the run may still be going on."""
    file = log_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def repeatable(log_dir: Path) -> list[dict[str, Any]]:
    return [{key: record[key] for key in REPEATABLE} for record in metrics(log_dir)]


def signal_after(process: subprocess.Popen[str], log_dir: Path, num_lines: int, number: signal.Signals) -> None:
    """Sends a signal as soon as `num_lines` steps are recorded."""
    while len(metrics(log_dir)) < num_lines:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.01)
    process.send_signal(number)


def assert_nothing_half_written(log_dir: Path) -> None:
    for name in ("run.json", "summary.json"):
        if (log_dir / name).is_file():
            json.loads((log_dir / name).read_text())
    assert yaml.safe_load((log_dir / "config.yaml").read_text())["grpo"]["max_num_steps"] == NUM_STEPS
    assert [record["step"] for record in metrics(log_dir)] == list(range(len(metrics(log_dir))))
    for checkpoint in (log_dir / "checkpoints").glob("step_*"):
        assert (checkpoint / "rank_0_of_1.pt").stat().st_size > 1_000_000


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of an uninterrupted run."""
    log_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(start(log_dir))
    return log_dir


def in_this_process(log_dir: Path, num_steps: int, **more: Any) -> None:
    """Makes a run in this process, which is faster than a process of its own."""
    with contextlib.chdir(ROOT):
        arguments = overrides(log_dir, **{"grpo.max_num_steps": num_steps}, **more)
        assert main(["run", str(QUICKSTART), *arguments]) == 0


@pytest.mark.slow
def test_a_forced_on_policy_ratio_only_saves_a_pass(whole_run: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "run"
    in_this_process(log_dir, 1, **{"loss_fn.force_on_policy_ratio": True})
    (ours,), ordinary = metrics(log_dir), metrics(whole_run)[0]
    assert ours["logprob_s"] == 0 < ordinary["logprob_s"]
    assert ours["logprob_gap_max"] == pytest.approx(ordinary["logprob_gap_max"], abs=1e-5)
    assert ours["reward"] == ordinary["reward"] and ours["grad_norm"] == pytest.approx(ordinary["grad_norm"], rel=1e-4)


def test_a_run_leaves_what_is_documented(whole_run: Path) -> None:
    records = metrics(whole_run)
    assert len(records) == NUM_STEPS and all(set(record) == METRICS for record in records)
    assert [undefined(record, LAB) for record in records] == [[]] * NUM_STEPS
    traces = [json.loads(line) for line in (whole_run / "trace.jsonl").read_text().splitlines()]
    assert [len(t["rows"]) for t in traces] == [r["engine_steps"] for r in records]
    summary = json.loads((whole_run / "summary.json").read_text())
    assert set(summary) >= SUMMARY and summary["steps"] == NUM_STEPS and summary["completed"] is True
    assert set(summary) <= {metric.name for metric in metric_table.SUMMARY if metric.runs != metric_table.NEMO_RL}
    lines = [json.loads(line) for line in (whole_run / "samples.jsonl").read_text().splitlines()]
    keys = {key for line in lines for sample in line["samples"] for key in sample}
    assert keys <= {metric.name for metric in metric_table.SAMPLE}
    run = json.loads((whole_run / "run.json").read_text())
    assert {"command", "versions", "commit", "started"} <= set(run) and str(QUICKSTART) in run["command"]
    assert yaml.safe_load((whole_run / "config.yaml").read_text())["policy"]["generation"]["max_new_tokens"] == 48
    assert "<html" in (whole_run / "report.html").read_text() and "http" not in links(whole_run / "report.html")
    assert (whole_run / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (whole_run / "checkpoints").iterdir()) == [f"step_{NUM_STEPS - i}" for i in (2, 1)]


def links(page: Path) -> str:
    """Returns the tags of a page that load something."""
    text = page.read_text()
    return " ".join(piece.split(">")[0] for tag in ("<script", "<link", "<img") for piece in text.split(tag)[1:])


def test_a_run_proves_its_tokens_and_trains(whole_run: Path) -> None:
    records, summary = metrics(whole_run), json.loads((whole_run / "summary.json").read_text())
    assert summary["tokens_equal"] == summary["tokens_checked"] == sum(r["tokens_checked"] for r in records) > 0
    assert summary["alarms"] == 0 and not any(r["alarms"] for r in records)
    assert all(r["logprob_gap"] <= r["logprob_gap_max"] < 1e-4 for r in records)
    assert all(r["num_tokens"] == r["num_valid_tokens"] for r in records)
    assert max(r["grad_norm"] for r in records) > 0, "no step moved the weights, so nothing below is shown"
    assert len({r["num_tokens"] for r in records}) > 1


def test_counts_of_a_run_add_up(whole_run: Path) -> None:
    for record in metrics(whole_run):
        proposed = sum(sum(d["proposed"]) for d in record["acceptance"].values())
        accepted = sum(sum(d["accepted"]) for d in record["acceptance"].values())
        assert accepted <= proposed <= record["draft_tokens_per_request_step"] * record["request_steps"] + 0.5
        assert record["num_tokens"] <= record["request_steps"] + accepted
        assert record["acceptance_length"] == record["num_tokens"] / record["request_steps"]


def test_a_run_goes_on_after_every_kind_of_end(whole_run: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "run"
    interrupt(log_dir, signal.SIGTERM, 143)
    interrupt(log_dir, signal.SIGINT, 130)
    interrupted = repeatable(log_dir)
    assert interrupted == repeatable(whole_run)[: len(interrupted)]
    kill(log_dir)
    assert repeatable(log_dir)[: len(interrupted)] == interrupted, "a finished step was lost"
    assert "resuming" in finish(start(log_dir))
    assert repeatable(log_dir) == repeatable(whole_run)
    assert json.loads((log_dir / "summary.json").read_text())["completed"] is True


def interrupt(log_dir: Path, number: signal.Signals, code: int) -> None:
    """Resumes a run for at least one step, then sends a signal: Ctrl-C, or Slurm's."""
    process, before = start(log_dir), len(metrics(log_dir))
    signal_after(process, log_dir, before + 1, number)
    output = finish(process, code)
    assert "Traceback" not in output and "finished steps are kept" in output
    assert_nothing_half_written(log_dir)
    summary = json.loads((log_dir / "summary.json").read_text())
    assert summary["completed"] is False and summary["steps"] == len(metrics(log_dir)) > before
    assert (log_dir / "report.html").is_file() and (log_dir / "picture.png").is_file()


@pytest.mark.slow
def test_a_run_goes_on_when_a_full_disk_has_room_again(whole_run: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "run"
    output = finish(start(log_dir, num_steps=1, largest_file=20_000_000), 1)  # a checkpoint has 36 million bytes
    assert "Traceback" not in output and "what was finished is kept" in output
    assert list((log_dir / "checkpoints").iterdir()) == []
    finish(start(log_dir, num_steps=1))
    assert repeatable(log_dir) == repeatable(whole_run)[:1]


def test_a_damaged_checkpoint_costs_only_one_step(whole_run: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "run"
    shutil.copytree(whole_run, log_dir)
    weights = log_dir / "checkpoints" / f"step_{NUM_STEPS - 1}" / "rank_0_of_1.pt"
    os.truncate(weights, weights.stat().st_size - 1000)
    output = finish(start(log_dir))
    assert f"step_{NUM_STEPS - 1} is damaged" in output and f"at step {NUM_STEPS - 1}" in output
    assert repeatable(log_dir) == repeatable(whole_run)
    (log_dir / "report.html").unlink()  # as of a run that was killed while it was written
    output = finish(start(log_dir), 2)
    assert "report of this run was missing" in output and "complete" in output and "Traceback" not in output
    assert "<html" in (log_dir / "report.html").read_text()


def test_the_second_run_in_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    first = DirectoryLock(tmp_path / "run")
    assert main(["run", str(QUICKSTART), *overrides(tmp_path / "run")]) == 2
    assert f"in use by process {os.getpid()} on " in capsys.readouterr().err
    first.release()


def test_a_report_is_made_again_from_the_files_of_a_run(
    whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.yaml", "metrics.jsonl", "trace.jsonl", "run.json"):  # no summary: the run is going on
        shutil.copy(whole_run / name, tmp_path / name)
    assert main(["report", str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert "<html" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "picture.png").read_bytes() == (whole_run / "picture.png").read_bytes()
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_engine_and_trainer_agree_at_any_temperature(whole_run: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "run"
    in_this_process(log_dir, 1, **{"policy.generation.temperature": 0.7})
    for record in metrics(log_dir):
        assert record["logprob_gap_max"] < 1e-4 and not record["alarms"]
        assert record["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert record["tokens_equal"] == record["tokens_checked"] > 0
    assert metrics(log_dir)[0]["num_tokens"] != metrics(whole_run)[0]["num_tokens"], "the temperature did nothing"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("temperature=3", "temperature: 3.0 is out of range; it must be at least 0.0 and at most 2.0"),
        ("temperature=0.001", "vLLM samples at 0.01"),
        ("top_p=0.9", "top_p: 0.9; the local trainer scores samples of the whole distribution"),
        ("top_k=5", "top_k: 5; the local trainer"),
        ("vllm_kwargs.logprobs_mode=raw_logprobs", "logprobs_mode: 'raw_logprobs'; the trainer scores"),
    ],
)
def test_a_run_refuses_sampling_that_its_trainer_cannot_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["run", str(QUICKSTART), *overrides(tmp_path / "run"), f"policy.generation.{override}"]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "run").exists()


def kill(log_dir: Path) -> None:
    """Resumes a run for at least one step, then kills it."""
    process = start(log_dir)
    signal_after(process, log_dir, len(metrics(log_dir)) + 1, signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert_nothing_half_written(log_dir)


# Several engines.

TWO_WORKERS = {
    "cluster.rollout_workers": 2,
    "policy.generation.specrollout.fastest_of_n": "{methods: [[suffix], [ngram]], min_gain: 0.0}",
}
SEVERAL = {"tail", "num_engines", "engine_idle_share"}
"""Metrics of a step that only a run of several engines has."""
TAIL = {"moves", "races", "won_by_racer", "idle_share", "saved_s", "deaths", "diverged"}


def samples(log_dir: Path, num_steps: int) -> list[list[tuple[Any, ...]]]:
    """Returns the facts on each sample of the first steps that do not depend on engines and time."""
    keys = ("prompt", "sample", "reward", "tokens", "finish")
    lines = [json.loads(line) for line in (log_dir / "samples.jsonl").read_text().splitlines()][:num_steps]
    return [[tuple(s[k] for k in keys) for s in line["samples"]] for line in lines]


@pytest.mark.slow
def test_two_workers_make_the_samples_of_one(whole_run: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "run"
    finish(start(log_dir, num_steps=1, **TWO_WORKERS))
    for name in ("metrics.jsonl", "timeline.jsonl"):
        with (log_dir / name).open("a") as file:
            file.write('{"step": 1, "of": "a step that was never finished"}\n')
    output = finish(start(log_dir, num_steps=2, **TWO_WORKERS))
    assert "resuming" in output and "ALARM" not in output
    assert samples(log_dir, 2) == samples(whole_run, 2)
    assert_tails_are_recorded(log_dir)


def assert_tails_are_recorded(log_dir: Path) -> None:
    records = metrics(log_dir)
    assert [set(r) for r in records] == [METRICS | SEVERAL, METRICS | SEVERAL | {"began"}], (
        "the second step resumed the run"
    )
    assert all(set(r["tail"]) == TAIL for r in records)
    assert [undefined(record, LAB) for record in records] == [[], []]
    timelines = [json.loads(line) for line in (log_dir / "timeline.jsonl").read_text().splitlines()]
    assert [t["step"] for t in timelines] == [0, 1]
    for line, record in zip(timelines, records, strict=True):
        won = [s for s in line["spans"] if s["outcome"] == "won"]
        assert line["methods"] == ["suffix", "ngram"] and sorted(s["request"] for s in won) == list(range(8))
        assert sum(s["last_token"] for s in won) == record["num_tokens"]
        assert (record["tail"]["saved_s"] is None) == (record["tail"]["moves"] + record["tail"]["races"] == 0)
    summary = json.loads((log_dir / "summary.json").read_text())
    assert summary["tail_moves"] == sum(r["tail"]["moves"] for r in records) and summary["tail_deaths"] == 0
    page = (log_dir / "report.html").read_text()
    assert "<h2>The tail</h2>" in page and "worker 1: ngram" in page


# In this process: refusals of vLLM, refit, alarms.


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.generation.vllm_kwargs.max_num_seqz=8", "max_num_seqz"),
        ("policy.generation.vllm_kwargs.max_num_seqs=0", "max_num_seqs"),
    ],
)
def test_what_vllm_refuses_is_a_sentence(
    override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["run", str(QUICKSTART), *overrides(tmp_path / "run"), override]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("specrollout-lab: ") and words in message
    assert not (tmp_path / "run").exists()


def requests() -> list[RolloutRequest]:
    """Returns prompts longer than two blocks of the prefix cache (128 tokens on a CPU): a stale block would be used."""
    prompts = [[(7 * i + j) % 90 + 5 for j in range(300)] for i in range(4)]
    return [RolloutRequest(ids, i, s) for i, ids in enumerate(prompts) for s in range(2)]


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    gaps = [
        abs(x - y) for a, b in zip(found, expected, strict=True) for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    assert max(gaps) < 1e-5  # a batch of another shape may round the last bit another way


@pytest.mark.parametrize("name", ["tiny_model", "tiny_llama"])
def test_refit_arrives_bit_exactly(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, start_engine: Callable[..., RolloutEngine]
) -> None:
    import torch

    from lab.local.grpo import LossInputs
    from lab.local.megatron_model import TokenBatch
    from lab.local.policy import MegatronPolicy

    model: Path = request.getfixturevalue(name)
    engine = start_engine(model, SpecrolloutConfig())
    before = engine.generate(requests())
    policy = MegatronPolicy.from_pretrained(model, optimizer=OptimizerConfig(lr=3e-3))
    batch = TokenBatch.from_sequences(
        [list(r.prompt_token_ids) for r in requests()], [r.token_ids for r in before], pad_id=0
    )
    prev_BT = policy.logprobs(batch)
    advantages_B = torch.linspace(-1, 1, len(before))
    inputs = LossInputs(batch.response_mask_BT, advantages_B, prev_BT, prev_BT)
    assert policy.train_step(batch, inputs, LossConfig())[0]["grad_norm"] > 0
    engine.load_weights(policy.hf_tensors())
    shutil.copytree(model, tmp_path / "trained")
    save_file(dict(policy.hf_tensors()), tmp_path / "trained" / "model.safetensors", metadata={"format": "pt"})
    after = engine.generate(requests())
    assert_same(after, start_engine(tmp_path / "trained", SpecrolloutConfig()).generate(requests()))
    assert [r.token_ids for r in after] != [r.token_ids for r in before], "the step changed nothing"


def test_alarms() -> None:
    from lab.local.runner import alarms

    sound = {"logprob_gap": 0.01, "tokens_checked": 90, "tokens_equal": 90}
    assert alarms(sound, 0.02) == []
    (gap,) = alarms(sound, 0.005)
    assert gap.startswith("log-prob gap 0.0100 is above 0.005")
    (tokens,) = alarms({**sound, "tokens_equal": 88}, 0.02)
    assert tokens == "2 tokens differ from plain decoding"
    assert len(alarms({**sound, "tokens_equal": 0, "logprob_gap": math.inf}, 0.02)) == 2
    assert len(alarms({**sound, "logprob_gap": math.nan}, 0.02)) == 1, "a gap that is not a number is no gap"
