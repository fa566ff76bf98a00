# SPDX-License-Identifier: Apache-2.0
"""The demo's task: made from a seed, rewarded by rule, and its shipped policy."""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUICKSTART, ROOT
from hypothesis import given
from hypothesis import strategies as st

from lab.cli.main import main
from lab.local.step_addition import (
    EOS,
    MAX_TERM,
    MAX_TERMS,
    MIN_TERMS,
    Problem,
    build_tokenizer,
    demonstration,
    encode_prompt,
    make_problems,
    reward,
    reward_of_ids,
    vocabulary,
)

pytestmark = pytest.mark.unit

CHECKPOINT = ROOT / "examples" / "models" / "step_adder"
GOLDEN_TERMS = (11, 27, 18, 7)
SUM = Problem((39, 5, 2))
MAX_BYTES = 8_000_000


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_problems_do_not_depend_on_their_number_or_start():
    assert make_problems(3, 5) == make_problems(3, 50)[:5]
    assert make_problems(3, 5, start=7) == make_problems(3, 50)[7:12]
    assert make_problems(3, 20) != make_problems(4, 20)


def test_problems_and_import_in_another_process():
    code = (
        "import sys; from lab.local.step_addition import make_problems;"
        "print([p.terms for p in make_problems(3, 9)]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([problem.terms for problem in make_problems(3, 9)])


def test_golden_problem():
    first = make_problems(0, 1)[0]
    assert first.terms == GOLDEN_TERMS
    assert first.answer == sum(GOLDEN_TERMS)
    assert SUM.prompt == "please add 39 + 5 + 2 . work step by step ."


def test_number_of_terms_is_long_tailed():
    problems = make_problems(1, 4000)
    nums = sorted(len(problem.terms) for problem in problems)
    assert (nums[0], nums[-1]) == (MIN_TERMS, MAX_TERMS)
    assert statistics.median(nums) == 5
    assert 2.2 * 5 <= nums[int(0.95 * len(nums))] <= 3.5 * 5
    assert {term for problem in problems for term in problem.terms} == set(range(1, MAX_TERM + 1))


def test_max_terms_is_held():
    assert max(len(problem.terms) for problem in make_problems(1, 200, max_terms=3)) == 3


@pytest.mark.parametrize(
    "response",
    [
        "answer : 46", "39 + 5 = 44 . 44 + 2 = 46 . answer : 46", "answer : 4 6", "answer:46", "answer : 46 . well",
        "x\nanswer : 046",
    ],
)  # fmt: skip
def test_right_answers(response):
    assert reward(SUM, response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "", "46", "answer", "answer :", "answer : forty", "answer : 47", "answer : 460", "answer : 46 answer : 47",
        "answer : -46", "answer : 4 . 6", "answer : ٤٦", "answer : " + "9" * 9000, "the answer is 46",
        "\x00 answer : : 46",
    ],
)  # fmt: skip
def test_wrong_answers_and_junk(response):
    assert reward(SUM, response) == 0.0


@given(st.text())
def test_any_text_has_a_reward(response):
    assert reward(SUM, response) in (0.0, 1.0)


@given(seed=st.integers(), index=st.integers(0, 10**6), is_quick=st.booleans())
def test_demonstrations_survive_the_tokenizer_and_are_right(tokenizer, seed, index, is_quick):
    problem = make_problems(seed, 1, start=index)[0]
    text = demonstration(problem, random.Random(seed), is_quick)
    assert is_quick or reward(problem, text) == 1.0
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert reward_of_ids(problem, ids, tokenizer) == reward(problem, text)


def test_quick_writers_slip():
    problems = make_problems(1, 400)
    rights = [reward(p, demonstration(p, random.Random(i), is_quick=True)) for i, p in enumerate(problems)]
    assert 0.3 < statistics.mean(rights) < 0.5


def test_neighbouring_problems_are_spread_over_the_difficulties():
    """The mean number of terms of 8 problems in a row varies much less than the mean of 8 drawn at random."""
    nums = [len(problem.terms) for problem in make_problems(1, 800)]
    in_a_row = [statistics.mean(nums[i : i + 8]) for i in range(0, 800, 8)]
    shuffled = random.Random(0).sample(nums, 800)
    at_random = [statistics.mean(shuffled[i : i + 8]) for i in range(0, 800, 8)]
    assert statistics.stdev(in_a_row) < 0.7 * statistics.stdev(at_random)


def test_demonstrations_of_one_problem_differ():
    texts = {demonstration(SUM, random.Random(i)) for i in range(100)}
    assert len(texts) >= 98
    assert demonstration(SUM, random.Random(1)) == demonstration(SUM, random.Random(1))


def test_prompt_ids(tokenizer):
    ids = encode_prompt(SUM, tokenizer)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == SUM.prompt
    assert tokenizer.convert_ids_to_tokens(ids[3:7]) == ["3", "9", "+", "5"]


def test_vocabulary_is_padded_and_unique(tokenizer):
    assert len(tokenizer) == len(vocabulary()) == len(set(vocabulary())) == 96
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == list(vocabulary())
    assert tokenizer.eos_token == EOS


def test_shipped_checkpoint_fits_the_task():
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= MAX_BYTES
    config = json.loads((CHECKPOINT / "config.json").read_text())
    shipped = json.loads((CHECKPOINT / "tokenizer.json").read_text())["model"]["vocab"]
    assert shipped == {word: i for i, word in enumerate(vocabulary())}
    assert config["vocab_size"] == len(shipped)


def test_shipped_checkpoint_answers():
    import torch

    from lab.policies.warm_start import load
    from lab.policies.warm_start_evaluation import sample

    model, tokenizer = load(CHECKPOINT)
    problems = [Problem((12, 5)), Problem((40, 31, 8))] * 16
    torch.manual_seed(0)
    ids_BT, entropy_BT = sample(model, tokenizer, [encode_prompt(problem, tokenizer) for problem in problems])
    rewards = [reward_of_ids(p, ids, tokenizer) for p, ids in zip(problems, ids_BT.tolist(), strict=True)]
    assert 0.3 < statistics.mean(rewards) <= 1.0
    assert bool((entropy_BT >= 0).all())


def test_warm_start_depends_on_its_seed_and_keeps_other_folders(tmp_path):
    from lab.policies.warm_start import PolicyShape, load, run
    from lab.policies.warm_start_data import WarmStart

    for name in ("one", "two"):
        run(WarmStart(steps=2), tmp_path / name, num_samples=2)
    one, two = (load(tmp_path / name)[0].state_dict() for name in ("one", "two"))
    assert all(bool((one[key] == two[key]).all()) for key in one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    run(WarmStart(steps=1), tmp_path / "two", num_samples=1, shape=PolicyShape(hidden=64, layers=2))
    small, card = load(tmp_path / "two")[0].config, json.loads((tmp_path / "two" / "card.json").read_text())
    assert (small.hidden_size, small.num_hidden_layers) == (64, 2) and "--hidden 64 --layers 2" in card["command"]
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="holds something else"):
        run(WarmStart(steps=1), tmp_path / "other", num_samples=1)


# Free text


def test_free_text_is_a_list_of_prompts_without_a_reward() -> None:
    from lab.local.tasks import FreeText

    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    source = FreeText(tokenizer)
    assert source.problems(3, 5, 7) == source.problems(3, 50)[7:12] != source.problems(4, 50)[7:12]
    prompts = source.problems(0, 300)
    assert len(set(prompts)) > 120 and not any("<" in p or "{" in p for p in prompts)
    assert source.encode(source.problems(0, 1)[0])
    with pytest.raises(NotImplementedError, match="no reward"):
        source.reward(source.problems(0, 1)[0], [1])


def test_a_run_needs_a_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["run", str(QUICKSTART), "data.dataset_name=free_text", f"logger.log_dir={tmp_path / 'run'}"]) == 2
    assert "free_text has no reward to train on" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
