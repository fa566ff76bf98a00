# SPDX-License-Identifier: Apache-2.0
"""`reasoning-gym` as the data source of a local run: its problems, its scorers, the worked solutions made of them."""

import json
import random
import re
import subprocess
import sys

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; `make smollm2` installs it")

from conftest import ROOT, STEP_ADDER

from lab.local.run_sections import DataConfig, TaskConfig
from lab.local.step_rollout import load_tokenizer
from lab.local.tasks import PART, TASKS_IN_PARTS, GymProblem, ReasoningGymTask, build_task, check_tasks
from lab.policies.worked_solutions import DIRECT_RATE, worked_solution
from nemo_specrollout.config.strict import ConfigError, build

pytestmark = pytest.mark.unit

TASKS = (
    TaskConfig("chain_sum", 3.0, {"min_terms": 2, "max_terms": 16, "max_digits": 2}),
    TaskConfig("leg_counting", 1.0),
    TaskConfig("number_sorting", 1.0, {"max_decimals": 0}),
)


class Letters:
    """A tokenizer of one character a token, with a chat template that shows its messages."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


EVERY_TASK = """
import json, resource, signal, sys
from pathlib import Path
from reasoning_gym.factory import DATASETS
from lab.local.run_sections import TaskConfig
from lab.local.tasks import ReasoningGymTask, check_tasks

def too_slow(*_): raise TimeoutError("no problem after 20 s")
signal.signal(signal.SIGALRM, too_slow)
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), now + (512 << 20)))
failed, names = {}, sorted(set(DATASETS) - {"composite"})
for name in names:
    signal.alarm(20)
    try:
        check_tasks([TaskConfig(name)], "data.tasks")
        source = ReasoningGymTask(None, [TaskConfig(name)])
        assert all(problem.prompt for start in (0, 10**6) for problem in source.problems(1, 2, start))
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
    signal.alarm(0)
print("\\n" + json.dumps([len(names), failed]))
"""
"""Makes problems of every task but `composite`, whose datasets no config can name, in 512 MiB beside the imports."""


def task(system_prompt: str | None = None) -> ReasoningGymTask:
    return ReasoningGymTask(Letters(), TASKS, system_prompt)  # type: ignore[arg-type]


def one(name: str) -> ReasoningGymTask:
    return ReasoningGymTask(Letters(), [TaskConfig(name)])  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def questions(problems: list[GymProblem]) -> list[str]:
    return [p.prompt for p in problems]


def test_problems_depend_on_seed_and_index_only() -> None:
    assert questions(task().problems(3, 5, 7)) == questions(task().problems(3, 50))[7:12]
    assert set(questions(task().problems(3, 200))).isdisjoint(
        q for q in questions(task().problems(4, 200)) if len(q) > 100
    )


@pytest.mark.slow
def test_every_task_makes_a_problem_in_little_time_and_memory() -> None:
    """Two of the tasks once made a list of 2**31 numbers: `gsm_symbolic` and `list_functions`."""
    done = subprocess.run([sys.executable, "-c", EVERY_TASK], capture_output=True, text=True, check=True, cwd=ROOT)
    num_tasks, failed = json.loads(done.stdout.splitlines()[-1])
    assert failed == {} and num_tasks > 100


def test_the_problems_of_a_seed_are_known() -> None:
    chain_sum, leg_counting = one("chain_sum").problems(3, 1, 7)[0], one("leg_counting").problems(4, 1)[0]
    assert "112 - 306 - 309 =" in chain_sum.prompt
    assert leg_counting.entry["answer"] == "292"


@pytest.mark.parametrize("name", TASKS_IN_PARTS)
def test_a_list_in_parts_depends_on_seed_and_index_only(name: str) -> None:
    across = questions(one(name).problems(3, 6, PART - 3))
    source = one(name)
    assert [questions(source.problems(3, 1, i))[0] for i in range(PART + 2, PART - 4, -1)] == across[::-1]
    firsts = {tuple(questions(source.problems(seed, 3, start))) for seed in (3, 4) for start in (0, PART, 10**6)}
    assert len(firsts) == 6


@pytest.mark.parametrize("name", ["boxnet", "prime_factorization"])
def test_an_answer_at_which_a_scorer_raises_is_worth_nothing(name: str) -> None:
    source = one(name)
    (problem,) = source.problems(0, 1)
    with pytest.raises((AttributeError, ValueError)):
        problem.dataset.score_answer("[1]", problem.entry)
    assert source.reward(problem, ids("<answer>[1]</answer>")) == 0.0


def test_tasks_come_by_their_weights() -> None:
    found = [p.task for p in task().problems(0, 1000)]
    assert 540 < found.count("chain_sum") < 660
    assert set(found) == {t.name for t in TASKS}


def test_prompts_go_through_the_chat_template() -> None:
    problem = task().problems(0, 1)[0]
    assert "".join(map(chr, task().encode(problem))) == f"[user]{problem.prompt}[assistant]"
    own_words = "".join(map(chr, task("Be brief.").encode(problem)))
    assert own_words == f"[system]Be brief.[user]{problem.prompt}[assistant]"
    named = "".join(map(chr, task("simple").encode(problem)))
    assert named.startswith("[system]") and "<answer>" in named and "[system]simple" not in named


def test_the_reward_is_the_task_s_own_score() -> None:
    source = task()
    for problem in source.problems(0, 40):
        answer = problem.entry["answer"]
        assert source.reward(problem, ids(f"<answer>1</answer> no: <answer>{answer}</answer>")) == 1.0
        assert source.reward(problem, ids(f"It is {answer}.")) == 0.0
        assert source.reward(problem, ids("<answer>nothing</answer>")) < 1.0
        assert source.reward(problem, []) == 0.0


def test_worked_solutions_are_right_and_differ() -> None:
    source = task()
    problems = source.problems(5, 300)
    texts = [worked_solution(p.entry, random.Random(i)) for i, p in enumerate(problems)]
    assert [source.reward(p, ids(t)) for p, t in zip(problems, texts, strict=True)] == [1.0] * 300
    again = [worked_solution(p.entry, random.Random(i + 1000)) for i, p in enumerate(problems)]
    assert sum(a != b for a, b in zip(texts, again, strict=True)) > 200
    for text in texts:
        for a, sign, b, result in re.findall(r"(-?\d+) ([+-]) (\d+) = (-?\d+)(?:[,.\n ]|$)", text):
            assert int(a) + int(b) * (1 if sign == "+" else -1) == int(result), text


def test_some_solutions_are_direct_answers() -> None:
    problems = [p for p in task().problems(6, 600) if p.task == "chain_sum"]
    direct = [
        "\n" not in worked_solution(p.entry, random.Random(i)).split("<answer>")[0].strip()
        and len(worked_solution(p.entry, random.Random(i))) < 60
        for i, p in enumerate(problems)
    ]
    assert abs(sum(direct) / len(direct) - DIRECT_RATE["chain_sum"]) < 0.1


def test_the_config_names_the_task() -> None:
    data = build(DataConfig, {"dataset_name": "reasoning_gym", "tasks": [{"name": "chain_sum"}]}, "data")
    assert isinstance(build_task(data, load_tokenizer(STEP_ADDER)), ReasoningGymTask)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset_name": "reasoning_gym"}, "data.tasks: empty"),
        ({"tasks": [{"name": "chain_sum"}]}, "set it to reasoning_gym"),
        ({"dataset_name": "reasoning_gym", "tasks": [{"name": "gcd"}, {"name": "gcd"}]}, "name each task once"),
        ({"dataset_name": "reasoning_gym", "tasks": [{"name": "gcd", "weight": 0}]}, "weight: 0"),
    ],
)
def test_a_bad_data_section_is_a_sentence(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(DataConfig, values, "data")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (TaskConfig("chainsum"), "did you mean 'chain_sum'?"),
        (TaskConfig("chain_sum", options={"max_term": 3}), "does not suit chain_sum"),
        (TaskConfig("chain_sum", options={"min_terms": 0}), "min_terms must be positive"),
    ],
)
def test_a_bad_task_is_a_sentence(bad: TaskConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_tasks([bad], "data.tasks")
