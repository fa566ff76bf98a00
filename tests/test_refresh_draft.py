# SPDX-License-Identifier: Apache-2.0
"""The command `refresh-draft`: heads made, refreshed and refused, interruptions, and bad input."""

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
import torch
from conftest import QUICKSTART, ROOT, STEP_ADDER
from safetensors.torch import load_file, save_file

from lab.cli.main import main as lab
from nemo_specrollout.cli.main import main
from nemo_specrollout.heads.features.features import is_held_out
from nemo_specrollout.heads.features.rollout_files import held_out_share, read_rollouts
from nemo_specrollout.heads.files.head_facts import check_head
from nemo_specrollout.heads.refresh import offline_refresh
from nemo_specrollout.heads.refresh.refresh_state import RefreshState
from nemo_specrollout.heads.training import head as head_module
from nemo_specrollout.storage.model_folder import tokenizer_fingerprint

pytestmark = pytest.mark.integration

Refused = Callable[..., str]
SMALL = ["--batch-tokens", "128", "--ttt-steps", "2", "--num-drafts", "2", "--max-length", "64"]
"""Flags for a quick training, on texts that are cut."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def examples() -> list[tuple[list[int], int]]:
    """Texts as the shipped policy writes them, as token ids with the length of the prompt."""
    from lab.local.step_rollout import load_tokenizer
    from lab.policies.warm_start_data import _make_examples

    return _make_examples(load_tokenizer(STEP_ADDER), seed=1, start=0, max_terms=4, has_quick=False)[:96]


@pytest.fixture(scope="module")
def rollouts(examples: list[tuple[list[int], int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    write_lines(file, [as_ids(ids, given) for ids, given in examples])
    return file


@pytest.fixture(scope="module")
def head(rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head that the command made from scratch."""
    out = tmp_path_factory.mktemp("heads") / "head"
    assert refresh(out, rollouts, "--steps", "45") == 0
    return out


def as_ids(ids: list[int], prompt_length: int) -> dict[str, Any]:
    return {"prompt_token_ids": ids[:prompt_length], "response_token_ids": ids[prompt_length:]}


def write_lines(file: Path, records: list[Any]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def arguments(out: Path, rollouts: Path, *more: str) -> list[str]:
    return [
        "refresh-draft", "--policy", str(STEP_ADDER), "--out", str(out), "--rollouts", str(rollouts), *SMALL, *more
    ]  # fmt: skip


def refresh(out: Path, rollouts: Path, *more: str) -> int:
    return main(arguments(out, rollouts, *more))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def card_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "head_card.json").read_text())


# Heads that the command makes


def test_a_head_from_scratch_is_published_with_a_card(head: Path) -> None:
    check_head(head, STEP_ADDER)
    card = card_of(head)
    assert card["gate"]["published"] and card["held_out"]["before"] is None
    assert card["held_out"]["after"]["acceptance_length"] > 1.1
    assert card["policy"]["folder"] == str(STEP_ADDER)
    assert card["data"]["held_out_prompts"] >= 8 and card["training"]["steps"] == 45
    assert [p.name for p in head.parent.iterdir()] == ["head"]


def test_a_refresh_in_place_improves_the_head(
    head: Path, rollouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(head, tmp_path / "head"))
    assert refresh(folder, rollouts, "--draft", str(folder), "--replace", "--steps", "25") == 0
    held_out = card_of(folder)["held_out"]
    assert held_out["before"] == card_of(head)["held_out"]["after"]
    assert held_out["after"]["acceptance_length"] > held_out["before"]["acceptance_length"]
    printed = capsys.readouterr().out
    assert "before" in printed and "at confidence 0.95" in printed
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    # A smaller vocabulary has the most frequent tokens.
    small = tmp_path / "small"
    flags = ["--draft-vocab", "40", "--steps", "1", "--dtype", "bfloat16", "--tv-after", "0.5"]
    assert refresh(small, rollouts, *flags) in (0, 3)
    made = small if small.exists() else tmp_path / "small.refused"
    assert check_head(made, STEP_ADDER).draft_vocab_size == 40
    tensors = load_file(made / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
    assert "embed_tokens.weight" not in tensors, "vLLM drafts with the policy's embedding"


def test_a_worse_head_is_refused_and_the_old_one_stays(
    head: Path, rollouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(head, tmp_path / "head"))
    assert refresh(folder, rollouts, "--draft", str(folder), "--replace", "--lr", "0.9", "--steps", "4") == 3
    assert contents(folder) == contents(head)
    card = card_of(tmp_path / "head.refused")
    assert not card["gate"]["published"]
    assert card["gate"]["reason"].startswith("refused: ")
    assert "".join(card["gate"]["reason"].split()) in "".join(capsys.readouterr().out.split())
    assert {p.name for p in tmp_path.iterdir()} == {"head", "head.refused"}


# Interruptions

KILLED = """
import os, signal, sys
from nemo_specrollout.cli.main import main
from nemo_specrollout.storage.model_folder import tokenizer_fingerprint
from nemo_specrollout.heads.training.trainer import HeadTrainer
from nemo_specrollout.heads.refresh import offline_refresh

offline_refresh.SAVE_EVERY_S, offline_refresh.FLUSH_EVERY_S, offline_refresh.CHUNK_TEXTS = 0.0, 0.0, 16
step = HeadTrainer._step

def killed(trainer, *args):
    if trainer.num_steps == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, *args)

HeadTrainer._step = killed
sys.exit(main(sys.argv[1:]))
"""


def test_an_interrupted_and_killed_refresh_ends_like_a_whole_one(
    rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline_refresh, "CHUNK_TEXTS", 16)
    monkeypatch.setattr(offline_refresh, "FLUSH_EVERY_S", 0.0)
    monkeypatch.setattr(offline_refresh, "SAVE_EVERY_S", 0.0)
    command = arguments(tmp_path / "killed", rollouts, "--steps", "6")
    # Ctrl-C during the computation of features
    with monkeypatch.context() as patched:
        chunks = iter([offline_refresh.hf_features, offline_refresh.hf_features])

        def interrupted(*given: Any) -> Any:
            compute = next(chunks, None)
            return compute(*given) if compute else signal.raise_signal(signal.SIGINT)

        patched.setattr(offline_refresh, "hf_features", interrupted)
        assert main(command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["killed.partial"]
    assert len(list((tmp_path / "killed.partial" / "features").glob("shard-*"))) == 2
    # SIGKILL during the training
    code = [sys.executable, "-c", KILLED, *command]
    killed = subprocess.run(
        code, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "killed.partial" / "trainer.pt").is_file()
    assert main([*command, "--seed", "5"]) == 2
    assert "unfinished refresh with --seed 0; repeat the same command" in capsys.readouterr().err
    codes = main(command), refresh(tmp_path / "whole", rollouts, "--steps", "6")
    assert codes[0] == codes[1]
    assert f"going on with {tmp_path / 'killed.partial'}" in capsys.readouterr().out
    ours, theirs = (next(tmp_path.glob(f"{name}*/model.safetensors")).parent for name in ("killed", "whole"))
    tensors = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0] | tensors[1])
    assert card_of(ours)["held_out"] == card_of(theirs)["held_out"]


def test_a_full_disk_is_reported_and_the_command_can_be_repeated(
    rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0: file write failed")

    out, save = tmp_path / "head", head_module.save_file
    monkeypatch.setattr(head_module, "save_file", full)
    assert refresh(out, rollouts, "--steps", "1") == 2
    error = capsys.readouterr().err
    assert "No space left on device; free some and repeat the command" in error and error.count("\n") == 1
    assert not out.exists()
    monkeypatch.setattr(head_module, "save_file", save)
    assert refresh(out, rollouts, "--steps", "1") in (0, 3)


def test_a_kill_after_publication_leaves_only_the_clean_up(
    head: Path, rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(tmp_path / "head", rollouts, "--draft", str(head), "--steps", "12", "--tolerance", "9")
    with monkeypatch.context() as patched:
        patched.setattr(RefreshState, "discard", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        assert main(command) == 130
    made = contents(tmp_path / "head")
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("published: held-out acceptance length")
    assert contents(tmp_path / "head") == made
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_a_replaced_head_comes_back_after_a_crash(head: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(head, folder)
    state = RefreshState(folder, replace=True)
    state.open({}, [folder])
    folder.rename(state.replaced)
    again = RefreshState(folder, replace=True)
    with pytest.raises(BlockingIOError, match="another process works in"):
        again.recover()
    state.release()
    again.recover()
    assert contents(folder) == contents(head)
    assert again.open({}, [folder])
    again.discard()


# Bad input


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command, which must fail without writing anything, and returns its error message."""

    def refused(*given: str) -> str:
        before = contents(tmp_path)
        assert main(["refresh-draft", "--policy", str(STEP_ADDER), "--out", str(tmp_path / "head"), *given]) == 2
        error = capsys.readouterr().err
        assert error.startswith("nemo-specrollout: ") and error.count("\n") == 1 and "Traceback" not in error
        assert contents(tmp_path) == before, "the command wrote something"
        return error

    return refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--rollouts: nothing to learn from"),
        (["--rollouts", "no/such.jsonl"], "--rollouts no/such.jsonl: no such file or folder"),
        (["--rollouts", "{rollouts}", "--policy", "no/policy"], "--policy no/policy is not a folder"),
        (["--rollouts", "{rollouts}", "--draft", "no/head"], "--draft no/head is not a folder"),
        (["--rollouts", "{rollouts}", "--steps", "0"], "--steps: 0 is out of range; it must be at least 1"),
        (["--rollouts", "{rollouts}", "--steps", "many"], "--steps: expected int, got 'many'"),
        (["--rollouts", "{rollouts}", "--steps", "5", "--minutes", "1"], "--steps and --minutes are both given"),
        (["--rollouts", "{rollouts}", "--lr", "nan"], "--lr: nan is out of range"),
        (["--rollouts", "{rollouts}", "--confidence", "1"], "--confidence: 1.0 is out of range"),
        (["--rollouts", "{rollouts}", "--layer-ids", "1,2,9"], "name distinct layers of the policy, 0 to 3"),
        (["--rollouts", "{rollouts}", "--layer-ids", "1,x"], "--layer-ids[1]: expected int, got 'x'"),
        (["--rollouts", "{rollouts}", "--draft-vocab", "97"], "--draft-vocab 97: the policy has 96 tokens"),
        (["--rollouts", "{rollouts}", "--loss", "nlla"], "nlla"),
        (["--rollouts", "{rollouts}", "--out", "{rollouts}"], "exists and is not a draft head"),
        (["--rollouts", "{rollouts}", "--out", "{rollouts}/x"], "cannot be written to"),
        (["--rollouts", "{rollouts}", "--out", "{head}"], "give --replace"),
        (["--rollouts", "{rollouts}", "--device", "tpu"], "--device: 'tpu' is not available; did you mean 'cpu'?"),
        (["--rollouts", "{rollouts}", "--dtype", "int8"], "--dtype: 'int8' is not available; known: bfloat16, float32"),
        (["--rollouts", "{rollouts}", "--tv-after", "2"], "--tv-after: 2.0 is out of range"),
        (["--rollouts", "{rollouts}", "--max-length", "8"], "prompts fill the context of 8 tokens"),
        (["--rollouts", "{rollouts}", "--store-gb", "0.0001"], "are too few to train and judge a head"),
    ],
)
def test_impossible_options_are_refused(
    refused: Refused, rollouts: Path, head: Path, flags: list[str], words: str
) -> None:
    assert words in refused(*(flag.format(rollouts=rollouts, head=head) for flag in flags))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "nothing to learn from"),
        ("{", "line 1: not JSON"),
        ("[1, 2]", "line 1: list, not an object"),
        ('{"question": "a", "answer": "b"}', "line 1: keys answer, question; a rollout has prompt_token_ids"),
        (
            '{"prompt_token_ids": [1], "response_token_ids": [2, 96]}',
            "token id 96 is not of the policy's vocabulary of 96",
        ),
        (
            '{"prompt_token_ids": [1], "response_token_ids": [2, 0.5]}',
            "line 1: response_token_ids must be a list of whole numbers, and has 0.5",
        ),
        (
            '{"prompt_token_ids": [1], "response_token_ids": [true]}',
            "response_token_ids must be a list of whole numbers",
        ),
        ('{"prompt_token_ids": 1, "response_token_ids": [2]}', "prompt_token_ids must be a list of whole numbers"),
        (f'{{"prompt_token_ids": [1], "response_token_ids": [{10**400}]}}', "is not of the policy's vocabulary of 96"),
        ('{"prompt_token_ids": [], "response_token_ids": [1]}', "line 1: the prompt is empty"),
        ('{"prompt_token_ids": [1], "response_token_ids": []}', "1 responses are empty"),
        ('{"prompt": "add 1 + 2", "response": "3"}', "1 different prompts are too few"),
        ('{"token_ids": [[1, 2]], "token_loss_mask": [[0]], "input_lengths": [2]}', "differ in length"),
        ('{"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]], "input_lengths": [2.5]}', "input_lengths has 2.5"),
        ('{"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]], "input_lengths": [-1]}', "input_lengths has -1"),
        ('{"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]], "input_lengths": [3]}', "input_lengths has 3"),
        ('{"token_ids": [[1, 2]], "token_loss_mask": [["0", "1"]]}', "token_loss_mask must be a list of 0 and 1"),
        ('{"token_ids": "12", "token_loss_mask": [[0, 1]]}', "line 1: token_ids must be a list, and is '12'"),
        ('{"token_ids": [[1, 2]], "token_loss_mask": null}', "keys token_ids (null: token_loss_mask); a rollout has"),
        ('{"prompt": null, "response": null}', "line 1: keys none (null: prompt, response); a rollout has"),
        (
            '{"prompt": [{"role": "user", "content": "1"}], "response": "2"}',
            "line 1: prompt must be a text, and is [{'content': '1', 'role': 'user'}]; messages and their parts need",
        ),
        ('{"prompt": "1", "response": [{"type": "text", "text": "2"}]}', "line 1: response must be a text, and is"),
        (
            '{"prompt": "\\ud800 1 +", "response": "2"}',
            "prompt has half of a surrogate pair at character 1, which is no",
        ),
        ('{"prompt": "1 +", "response": "2\\udc00"}', "response has half of a surrogate pair at character 2"),
        ('{"x":' + "[" * 3000 + "]" * 3000 + "}", "line 1: not JSON (it is nested too deeply)"),
        ('{"x":' + "[" * 900 + "]" * 900 + "}", "line 1: keys x; a rollout has"),
    ],
)
def test_invalid_lines_of_rollouts_are_refused(refused: Refused, tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "rollouts.jsonl").write_text(lines + "\n")
    assert words in refused("--rollouts", str(tmp_path))


LACKING = {  # a template that names a token which the file lacks, so that tokenizers panics
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<nowhere>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config.json", {"hidden_act": "x"}, "no head of this shape can be made for it"),
        ("config.json", {"num_attention_heads": 0}, "its config.json describes no layer of a head"),
        ("config.json", {"tie_word_embeddings": []}, "its config.json describes no layer of a head"),
        ("tokenizer.json", {"post_processor": LACKING}, "its tokenizer cannot"),
        ("tokenizer.json", {"model": {"type": "none"}}, "its tokenizer cannot be loaded"),
        ("model.safetensors", None, "model.safetensors: it is no whole file of tensors"),
    ],
)
def test_damaged_policies_are_refused(
    refused: Refused, rollouts: Path, tmp_path: Path, name: str, changes: dict[str, Any] | None, words: str
) -> None:
    policy = Path(shutil.copytree(STEP_ADDER, tmp_path / "policy"))
    file = policy / name
    if changes is None:
        file.write_bytes(file.read_bytes()[:1000])
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    if name == "tokenizer.json":
        rollouts = write_lines(tmp_path / "text.jsonl", [{"prompt": "1 + 2", "response": "3"}])
    assert words in refused("--rollouts", str(rollouts), "--policy", str(policy), "--max-length", "64")


def test_binary_files_and_empty_folders_are_refused(refused: Refused, tmp_path: Path) -> None:
    assert "holds no *.jsonl file" in refused("--rollouts", str(tmp_path))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "binary.jsonl: it is UTF-16 text; save it as UTF-8" in refused("--rollouts", str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    pipe = refused("--rollouts", str(tmp_path / "pipe"))
    assert "neither a regular file nor a folder" in pipe


def test_rollouts_of_another_policy_are_refused(
    refused: Refused, examples: list[tuple[list[int], int]], tmp_path: Path
) -> None:
    ids_of = torch.randperm(96, generator=torch.Generator().manual_seed(0)).tolist()
    other = [as_ids([ids_of[i] for i in ids], given) for ids, given in examples]
    message = refused("--rollouts", str(write_lines(tmp_path / "other.jsonl", other)))
    assert "worse than -4.56 of guessing: the rollouts are of another tokenizer or policy" in message


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: edit_tensor(f, "fc.weight", lambda t: t.fill_(torch.nan)), "has NaN or infinite values"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]), "not a whole"),
        (lambda f: edit_layer(f, hidden_size=128), "hidden_size 128, the policy's is 256"),
        (lambda f: edit_layer(f, vocab_size=128), "vocab_size 128, the policy's is 96"),
        (lambda f: edit_config(f, eagle_aux_hidden_state_layer_ids=[1, 2, 7]), "distinct layers of the policy, 0 to 3"),
        (lambda f: (f / "config.json").unlink(), "no head folder"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    refused: Refused, rollouts: Path, head: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = Path(shutil.copytree(head, tmp_path / "draft"))
    damage(folder)
    assert words in refused("--rollouts", str(rollouts), "--draft", str(folder))


def edit_tensor(folder: Path, name: str, edit: Callable[[torch.Tensor], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_layer(folder: Path, **changes: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


# Files


def test_all_forms_of_rollouts_are_read_alike(examples: list[tuple[list[int], int]], tmp_path: Path) -> None:
    from lab.local.step_rollout import load_tokenizer

    ids, given = examples[0]
    tokenizer = load_tokenizer(STEP_ADDER)
    texts = {"prompt": tokenizer.decode(ids[1:given]), "response": tokenizer.decode(ids[given:])}
    padded = {
        "token_ids": [[*ids, 0, 0]],
        "token_loss_mask": [[0.0] * given + [1.0] * (len(ids) - given) + [0.0, 0.0]],
        "input_lengths": [len(ids)],
        "rewards": [1.0],
    }
    (tmp_path / "exp_001").mkdir()
    write_lines(tmp_path / "exp_001" / "train_data_step10.jsonl", [padded])
    write_lines(tmp_path / "exp_001" / "train_data_step9.jsonl", [as_ids(ids, given)])
    (tmp_path / "exp_001" / "val_data_step9.jsonl").write_text('{"content": []}\n')
    file = write_lines(tmp_path / "texts.jsonl", [texts])
    read, sentences = read_rollouts([tmp_path / "exp_001", file], STEP_ADDER, 96, 1024)
    assert sentences == [f"rollouts: 3 texts of {3 * len(ids)} tokens in 3 files"]
    assert all((t.token_ids, t.prompt_length) == (ids, given) for t in read)


ODD_ROWS: dict[str, tuple[str, tuple[list[int], int]]] = {
    "pandas: numbers with a decimal point": (
        '{"token_ids": [[1.0, 2.0, 3.0, 4.0]], "token_loss_mask": [[0.0, 0.0, 1.0, 1.0]], "input_lengths": [4.0]}',
        ([1, 2, 3, 4], 2),
    ),
    "a length, not a list of one": (
        '{"token_ids": [1, 2, 3], "token_loss_mask": [0, 1, 1], "input_lengths": 2}',
        ([1, 2], 1),
    ),
    "no length": ('{"token_ids": [1, 2], "token_loss_mask": [false, true], "input_lengths": null}', ([1, 2], 1)),
    "columns of other forms": (
        '{"prompt_token_ids": [1, 6], "response_token_ids": [8], "prompt": "x", "response": "y", "token_ids": null, '
        '"token_loss_mask": NaN, "input_lengths": NaN}',
        ([1, 6, 8], 2),
    ),
    "ids of another form": (
        '{"prompt_token_ids": null, "response_token_ids": null, "token_ids": [1, 2], "token_loss_mask": [0, 1]}',
        ([1, 2], 1),
    ),
}


@pytest.mark.parametrize("what", ODD_ROWS)
def test_rows_that_other_programs_wrote_are_read(tmp_path: Path, what: str) -> None:
    line, (token_ids, prompt_length) = ODD_ROWS[what]
    (tmp_path / "odd.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n")
    (text,), sentences = read_rollouts([tmp_path], STEP_ADDER, 96, 64)
    assert text.text == (token_ids, prompt_length) and all(type(i) is int for i in text.token_ids)
    assert sentences == [f"rollouts: 1 texts of {len(token_ids)} tokens in 1 files"]


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "1 + 2", "response": null, "tool_calls": [{"name": "add"}]}',
        '{"prompt": "1 + 2", "response": ""}',
        '{"prompt_token_ids": [1], "response_token_ids": null, "prompt": null, "response": null}',
        '{"token_ids": [[1, 2]], "token_loss_mask": [[0, 0]], "input_lengths": [2]}',
        '{"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]], "input_lengths": [0]}',
        '{"token_ids": [1, 2], "token_loss_mask": [0, 1], "input_lengths": 0}',
    ],
)
def test_turns_without_text_are_counted_and_left_out(tmp_path: Path, row: str) -> None:
    (tmp_path / "r.jsonl").write_text(f"{json.dumps(as_ids([1, 5, 8], 2))}\n{row}\n")
    texts, sentences = read_rollouts([tmp_path], STEP_ADDER, 96, 64)
    assert len(texts) == 1 and sentences[1:] == ["1 rollouts without a response were skipped"]


def test_a_conversation_is_a_text_for_each_turn(tmp_path: Path) -> None:
    line = {"token_ids": [[1, 5, 6, 7, 8, 9, 10]], "token_loss_mask": [[0, 1, 1, 0, 1, 1, 0]], "input_lengths": [7]}
    read, _ = read_rollouts([write_lines(tmp_path / "train_data_step1.jsonl", [line])], STEP_ADDER, 96, 6)
    assert [(t.token_ids, t.prompt_length) for t in read] == [([1, 5, 6], 1), ([1, 5, 6, 7, 8, 9], 4)]
    assert [t.is_first_turn for t in read] == [True, False]
    assert {tuple(t.first_prompt) for t in read} == {(1,)}


def test_long_texts_are_cut_and_long_prompts_skipped(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "r.jsonl", [as_ids([1] * 10, given) for given in (2, 6, 8)])
    read, sentences = read_rollouts([file], STEP_ADDER, 96, 6)
    assert [len(t.token_ids) for t in read] == [6]
    assert sentences[1:] == ["2 prompts fill the context of 6 tokens and were skipped", "1 texts were cut at 6 tokens"]


def test_enough_prompts_are_held_out(examples: list[tuple[list[int], int]]) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    share = held_out_share(prompts, 0.1)
    assert 8 <= sum(is_held_out(p, share) for p in prompts) < 16
    assert held_out_share([[i] for i in range(500)], 0.1) == 0.1
    with pytest.raises(ValueError, match="15 different prompts are too few"):
        held_out_share(prompts[:15] * 9, 0.1)


def test_the_tokenizer_hash_depends_on_the_vocabulary_alone(tmp_path: Path) -> None:
    shutil.copy(STEP_ADDER / "tokenizer.json", tmp_path)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree | {"padding": None}, indent=7))
    assert tokenizer_fingerprint(tmp_path) == tokenizer_fingerprint(STEP_ADDER)
    tree["model"]["vocab"]["quite new"] = 95
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert tokenizer_fingerprint(tmp_path) != tokenizer_fingerprint(STEP_ADDER)
    (tmp_path / "tokenizer.json").unlink()
    assert tokenizer_fingerprint(tmp_path) == ""


# In the engine


@pytest.mark.slow
def test_an_engine_accepts_drafts_of_a_head_of_its_rollouts(
    start_engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_equality import requests

    from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
    from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig

    monkeypatch.chdir(ROOT)
    made = tmp_path / "rollouts.jsonl"
    short = ["policy.generation.max_new_tokens=200", "data.max_terms=5"]
    assert lab(["rollouts", str(QUICKSTART), "--out", str(made), "--num", "64", *short]) == 0
    command = ["refresh-draft", "--policy", str(STEP_ADDER), "--out", str(tmp_path / "head"), "--steps", "150"]
    assert main([*command, "--rollouts", str(made)]) == 0
    drafter = Eagle3DrafterConfig(model=str(tmp_path / "head"))
    block = SpecrolloutConfig(drafters=(drafter,), budget=BudgetConfig("fixed", k=3))
    engine = start_engine(STEP_ADDER, block, max_new_tokens=200)
    engine.generate(requests(8, 4, first=500))
    stats = engine.stats()
    proposed, accepted = (getattr(stats, name)[0][0] for name in ("proposed", "accepted"))
    expected = card_of(tmp_path / "head")["held_out"]["after"]["acceptance_by_position"][0]
    assert proposed > 100
    assert accepted / proposed > 0.6 * expected
