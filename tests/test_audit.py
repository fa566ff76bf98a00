# SPDX-License-Identifier: Apache-2.0
"""The audit against a real engine: it finds that rows are the policy's own, and it names each kind of tampering."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, STEP_ADDER
from safetensors.torch import load_file, save_file

from lab.local.engine import Generation, RolloutEngine
from lab.local.step_addition import encode_prompt, make_problems
from lab.local.step_rollout import load_tokenizer
from nemo_specrollout.audit.noise import MURMUR, PHILOX, scheme_of
from nemo_specrollout.audit.recorder import RowRecorder
from nemo_specrollout.audit.replay import Piece, RowReplay, pieces, replay
from nemo_specrollout.audit.rows import EngineFacts, FinishedRow, RecordedRow, RowFile, RowParams, write_rows
from nemo_specrollout.audit.verdict import Rounding, RowVerdict, judge
from nemo_specrollout.cli.main import main
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.generation.engine.recorded_requests import row_params
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.installed.versions import vllm_version
from nemo_specrollout.reports.records import FORMAT
from nemo_specrollout.sampling.seeds import request_seed

pytestmark = pytest.mark.integration

DRAFTED = SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), budget=BudgetConfig("fixed", k=4))
ENGINE_SEED = 7
FACTS = EngineFacts(0, str(vllm_version()), "float32")
NOISE = scheme_of(FACTS.vllm)
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.05, "temperature": 1.3},
    "top-k and top-p": {"top_k": 8, "top_p": 0.8, "temperature": 0.9},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {10: 1.5, 11: -1.0}},
    "allowed": {"allowed_token_ids": list(range(2, 60))},
    "minimum": {"min_tokens": 40},
    "bad words": {"_bad_words_token_ids": [[12], [10, 11]]},
}


def prompts(count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(STEP_ADDER)
    return [encode_prompt(problem, tokenizer) for problem in make_problems(5, count)]


def decode(engine: RolloutEngine) -> dict[str, list[RecordedRow]]:
    """Decodes four requests of each kind, all in one batch."""
    requests = [(kind, i, RolloutRequest(ids, i, 0)) for kind in KINDS for i, ids in enumerate(prompts(4))]
    inputs = [engine._text_and_params(request, dict(KINDS[kind])) for kind, _, request in requests]
    found = engine._llm.generate(
        [{"prompt_token_ids": text} for text, _ in inputs], [params for _, params in inputs], use_tqdm=False
    )
    rows: dict[str, list[RecordedRow]] = {kind: [] for kind in KINDS}
    for (kind, i, _), (text, params), output in zip(requests, inputs, found, strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)]
        of_row = row_params(params)
        if kind == "minimum":  # only the engine knows which tokens end a text, so the parameters alone say "unknown"
            assert of_row.unknown == ("min_tokens",)
            stop = tuple(sorted(params.all_stop_token_ids))
            of_row = replace(of_row, unknown=(), min_tokens=params.min_tokens, stop_token_ids=stop)
        seed = request_seed(ENGINE_SEED, i, 0, 0)
        spans = ((0, len(text)),)
        rows[kind].append(RecordedRow(0, i, seed, np.array(text), np.array(tokens), np.array(logprobs), spans, of_row))
    return rows


@pytest.fixture(scope="module")
def rows(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[RecordedRow]]:
    return decode(start_engine(STEP_ADDER, DRAFTED))


def load(folder: Path = STEP_ADDER) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return load()


def replayed(row: RecordedRow, model: Any) -> RowReplay:
    fine = copy.deepcopy(model).double()
    return replay(row, lambda version: fine, lambda version: model, NOISE)


def judged(row: RecordedRow, model: Any) -> RowVerdict:
    found = replayed(row, model)
    return judge(found, Rounding.of([found]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_each_kind_is_the_policys_own(rows: dict[str, list[RecordedRow]], model: Any, kind: str) -> None:
    for row in rows[kind]:
        verdict = judged(row, model)
        assert verdict.is_policys and not verdict.differences, verdict


def test_a_changed_token_is_named(rows: dict[str, list[RecordedRow]], model: Any) -> None:
    row = rows["free"][0]
    changed = row.token_ids.copy()
    changed[5] = (changed[5] + 1) % 50
    verdict = judged(replace(row, token_ids=changed), model)
    assert verdict.first_foreign == 5
    assert f"the policy samples token {row.token_ids[5]} instead of {changed[5]}" in verdict.why


def test_another_seed_is_named_as_such(rows: dict[str, list[RecordedRow]], model: Any) -> None:
    row = rows["free"][0]
    verdict = judged(replace(row, seed=row.seed + 1), model)
    assert not verdict.is_policys and "not those of the row's seed" in verdict.why


def test_a_matrix_changed_by_a_thousandth_is_named(rows: dict[str, list[RecordedRow]]) -> None:
    changed = load()
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight *= 1.001
    verdicts = [judged(row, changed) for row in rows["free"]]
    assert not any(verdict.is_policys for verdict in verdicts)
    assert all("as after other weights" in verdict.why for verdict in verdicts)


def test_the_two_schemes_of_noise_differ_and_begin_at_their_versions() -> None:
    places = (np.arange(5), np.arange(5))
    assert not np.allclose(MURMUR.noise(3, *places), PHILOX.noise(3, *places))
    names = [scheme_of(version).name for version in ("0.25.1", "0.30.0", "0.31.0", "0.32.0+cpu")]
    assert names == ["philox", "philox", "murmur", "murmur"]


def test_pieces_follow_the_kv_that_the_run_had() -> None:
    text = np.arange(30, dtype=np.int32)
    row = RecordedRow(1, 0, 0, text[:10], text[10:], np.zeros(20), ((0, 10), (1, 15), (2, 20)), read_again=(20,))
    assert pieces(row) == [Piece(0, 9, 14, True), Piece(1, 14, 19, False), Piece(2, 19, 29, True)]
    came_before_a_token = replace(row, policy_spans=((0, 10), (1, 4)), read_again=())
    assert pieces(came_before_a_token) == [Piece(0, 9, 3, True), Piece(1, 3, 29, False)]


def test_files_of_rows_give_back_what_they_got(tmp_path: Path) -> None:
    params = RowParams(0.7, 5, logit_bias={3: 0.5}, bad_words=((1, 2),), unknown=("a watermark",))
    written = [
        FinishedRow(2**63 - 1, [1, 2, 3], [4, 5], [-0.5, -1.5], params),
        FinishedRow(7, [1, 2, 3], [6], None, RowParams()),
        FinishedRow(8, [9], [7, 8, 9], [0.0, 0.0, 0.0], RowParams()),
    ]
    write_rows(tmp_path / "a.npz", FACTS, written)
    file = RowFile(tmp_path / "a.npz")
    assert file.facts == FACTS and file.seeds == [2**63 - 1, 7, 8]
    for i, row in enumerate(written):
        found = file.finished(i)
        assert (found.seed, list(found.prompt_token_ids), list(found.token_ids), found.params) == (
            row.seed,
            row.prompt_token_ids,
            row.token_ids,
            row.params,
        )
        assert np.array_equal(
            found.logprobs, [np.nan] if row.logprobs is None else np.float32(row.logprobs), equal_nan=True
        )
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"b\.npz is damaged"):
        RowFile(tmp_path / "b.npz")


def test_a_disk_that_fails_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("a file where the folder should be")
    recorder = RowRecorder(tmp_path / "rows", FACTS)
    for _ in range(2):
        recorder.add(FinishedRow(1, [1], [2], None, RowParams()))
    recorder.settle()
    assert "engine 0 has not recorded 2 rows for an audit: " in recorder.take_problem()
    assert recorder.take_problem() == ""


# A run of three steps: policy 0, requests that get policy 1 while they run, and policy 1.


@pytest.fixture(scope="module")
def run(start_engine: Callable[..., RolloutEngine], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    newer = folder / "checkpoints" / "step_1"
    newer.mkdir(parents=True)
    weights = {name: tensor * 1.02 for name, tensor in load_file(STEP_ADDER / "model.safetensors").items()}
    save_file(weights, newer / "model.safetensors")
    (newer / "config.json").write_bytes((STEP_ADDER / "config.json").read_bytes())
    engine = start_engine(STEP_ADDER, DRAFTED)
    recorder = RowRecorder(folder / "rows", FACTS)
    lines = []
    for step in (1, 2, 3):
        requests = [RolloutRequest(ids, i, 0, policy_version=step) for i, ids in enumerate(prompts(4))]
        generation = Generation(engine, requests)
        if step == 2:
            while generation.num_tokens < 30:
                generation.advance(0.0)
            engine.load_weights(weights.items())
        generation.advance()
        samples = []
        stats = engine.take_sample_stats(requests)
        for request, rollout, of_row in zip(requests, generation.rollouts, stats, strict=True):
            seed = engine._seed_of(request)
            recorder.add(FinishedRow(seed, request.prompt_token_ids, rollout.token_ids, rollout.logprobs, RowParams()))
            samples.append({"seed": seed, **of_row})
        recorder.settle()
        lines.append({"step": step, "samples": samples})
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    facts = {"model": str(STEP_ADDER), "checkpoints": str(folder / "checkpoints")}
    (folder / "run.json").write_text(json.dumps({"records": FORMAT, "audit": facts}))
    return folder


def spans(run: Path, step: int) -> list[Any]:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [sample["policy_spans"] for sample in lines[step - 1]["samples"]]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_row_of_every_step_is_the_policys_own(
    run: Path, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {1: [[0]], 2: [[0, 1]], 3: [[1]]}[step]
    assert [[version for version, _ in of_row] for of_row in spans(run, step)] == expected * 4
    assert main(["audit", str(run), "--steps", str(step), "--json", str(tmp_path / "a.json"), "--device", "cpu"]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["verdict"] == "all 4 rows are the policy's own samples"
    assert result["tokens"] > 40 and 0 < result["logprob_difference"]["largest"] < 1e-4
    assert json.loads((run / "audit.json").read_text())["audits"][-1]["steps"] == [step]
    out = capsys.readouterr().out
    assert "steps whose weights are at hand: 1-3" in out and "log-probs differ by at most" in out
    assert main(["report", str(run)]) == 0
    assert f"<li>step {step}: all 4 rows are the policy&#x27;s own samples (" in (run / "report.html").read_text()


def tampered(run: Path, folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """Returns a copy of the run whose sample lines `change` has changed."""
    for file in ("run.json", "metrics.jsonl"):
        (folder / file).write_bytes((run / file).read_bytes())
    (folder / "rows").symlink_to(run / "rows")
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    change(lines)
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_changed_version_stamp_is_found_and_the_true_policy_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[2]["samples"][1]["policy_spans"][0][0] = 0

    assert main(["audit", str(tampered(run, tmp_path, change)), "--steps", "3", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "row 1 of step 3 is not this policy's" in out and "it is a sample of policy 1" in out


def test_the_weights_of_the_step_before_are_found(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tampered(run, tmp_path, lambda lines: None)
    older = ["--steps", "3", "--weights", str(STEP_ADDER), "--device", "cpu"]
    assert main(["audit", str(folder), *older]) == 1
    out = capsys.readouterr().out
    assert "rows 0, 1, 2 and 3 of step 3 are not this policy's" in " ".join(out.split())


def test_what_cannot_be_audited_is_said_and_the_rest_is_audited(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[0]["samples"][2]["seed"] += 1  # as if no engine had recorded it

    folder = tampered(run, tmp_path, change)
    assert main(["audit", str(folder), "--steps", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "all 3 rows are the policy's own samples" in out
    assert "1 row was not audited: no engine has recorded it" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "9"], "--steps: the run has no finished step 9; it has 1-3"),
        (["--steps", "one"], "--steps: 'one' is not the number of a step"),
        (["--rows", "0"], "--rows: 0; it must be a whole number"),
        (["--weights", "nowhere"], "--weights: nowhere is of one policy, and name the step by --steps, too"),
        (["--steps", "1", "--weights", "nowhere"], "--weights: nowhere is not a folder"),
        (["--steps", "2", "--weights", "."], "the rows are of policies [0, 1]; write VERSION=FOLDER"),
    ],
)
def test_bad_arguments_are_one_sentence(
    run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in " ".join(said.split()) and "Traceback" not in said


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"audit": False}, "this run has recorded no rows, because its block has audit: false"),
        ({}, "its version of this package records none"),
        ({"audit": {"model": "nowhere/at-all", "checkpoints": None}}, "the run keeps no checkpoints"),
    ],
)
def test_runs_that_cannot_be_audited_are_one_sentence(
    run: Path, tmp_path: Path, facts: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tampered(run, tmp_path, lambda lines: lines.pop(0))
    (folder / "run.json").write_text(json.dumps({"records": FORMAT, **facts}))
    assert main(["audit", str(folder), "--steps", "3"] if "checkpoints" in words else ["audit", str(folder)]) == 2
    captured = capsys.readouterr()
    assert words in " ".join((captured.err + captured.out).split())


def test_weights_of_another_model_are_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(STEP_ADDER)
    config.vocab_size = 20
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert main(["audit", str(run), "--steps", "1", "--weights", str(tmp_path), "--device", "cpu"]) == 2
    out = capsys.readouterr().out
    assert "no row could be audited" in out and "these weights are of another model" in out


def test_a_row_says_what_an_audit_cannot_compute() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    assert row_params(SamplingParams(temperature=0.5, top_k=-1)) == RowParams(temperature=0.5)
    with_grammar = SamplingParams(structured_outputs=StructuredOutputsParams(json={}))
    assert row_params(with_grammar, {"prompt_token_ids": [1]}).unknown == ("structured_outputs",)
    with_image = {"prompt_token_ids": [1], "multi_modal_data": {}}
    assert row_params(SamplingParams(), with_image, ("a watermark",)).unknown == (
        "a watermark",
        "a prompt with more than text",
    )


def test_params_survive_json() -> None:
    params = RowParams(0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, 4, (2,), (1, 2), {5: 0.5}, ((1, 2), (3,)), ("x",))
    assert RowParams.from_json(json.loads(json.dumps(asdict(params)))) == params


@pytest.mark.unit
def test_the_audit_has_nothing_of_what_made_the_rows() -> None:
    """Neither vLLM nor the package's own sampling, also through other modules."""
    code = (
        "import sys, pkgutil, nemo_specrollout.audit as a\n"
        "for m in pkgutil.iter_modules(a.__path__): __import__(f'{a.__name__}.{m.name}')\n"
        "bad = [m for m in sys.modules if m == 'vllm' or m.startswith(('vllm.', 'nemo_specrollout.sampling'))]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
