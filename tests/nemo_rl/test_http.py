# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's HTTP server around an engine of ours, asked by the `openai` client as agents do."""

from typing import Any

import pytest
from nemo_rl_host import HERE, Host, answer_in

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(1800)]

CASES = ("unseeded", "seeded", "header", "streamed", "samples", "samples_streamed", "filtered", "concurrent")


def asked(host: Host, which: str) -> dict[str, Any]:
    found: dict[str, Any] = answer_in(host.run(HERE / "http_cases.py", which, HERE / "base.yaml"), "ANSWERS")
    return found


@pytest.fixture(scope="module")
def plain(host: Host) -> dict[str, Any]:
    return asked(host, "plain")


@pytest.fixture(scope="module")
def drafted(host: Host) -> dict[str, Any]:
    return asked(host, "drafted")


def tokens(answers: Any) -> Any:
    """Returns the tokens of a choice, or of nested lists of choices."""
    return answers["tokens"] if isinstance(answers, dict) else [tokens(answer) for answer in answers]


@pytest.mark.parametrize("case", CASES)
def test_answers_do_not_depend_on_the_drafter(plain: dict[str, Any], drafted: dict[str, Any], case: str) -> None:
    assert tokens(plain[case]) == tokens(drafted[case])
    assert drafted["totals"]["proposed"] > 0


def test_log_probs_are_those_of_plain_decoding(plain: dict[str, Any], drafted: dict[str, Any]) -> None:
    for one, other in zip(plain["samples"], drafted["samples"], strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


def test_a_seed_decides_and_may_come_in_the_body_or_in_a_header(drafted: dict[str, Any]) -> None:
    first, again, other = tokens(drafted["seeded"])
    assert first == again != other
    assert tokens(drafted["header"]) == [first, other]


def test_a_stream_brings_the_same_tokens(drafted: dict[str, Any]) -> None:
    assert tokens(drafted["streamed"]) == tokens(drafted["seeded"][0])
    assert tokens(drafted["samples_streamed"]) == tokens(drafted["samples"])


def test_the_samples_of_one_request_differ(drafted: dict[str, Any]) -> None:
    assert len({tuple(sample) for sample in tokens(drafted["samples"])}) == 4


def test_unseeded_requests_differ_but_are_reproducible(plain: dict[str, Any], drafted: dict[str, Any]) -> None:
    first, second = tokens(drafted["unseeded"])
    assert first != second
    assert drafted["totals"]["derived"] == plain["totals"]["derived"] == 2


def test_concurrent_agents_get_what_they_get_one_by_one(drafted: dict[str, Any]) -> None:
    assert tokens(drafted["concurrent"]) == tokens(drafted["one_by_one"])


@pytest.fixture(scope="module")
def ahead(host: Host) -> dict[str, Any]:
    return asked(host, "ahead")


@pytest.mark.parametrize("temperature", ["1.0", "0.0"])
def test_first_requests_of_coming_rows_bring_their_texts_and_get_the_same_tokens(
    ahead: dict[str, Any], temperature: str
) -> None:
    """As NeMo-Gym's agents send them. Another prompt brings no text, and a prompt that is refused is not known early."""
    found = ahead[temperature]
    assert found["unknown"] == [None, None] and all(found["made"])
    assert tokens(found["ahead"]) == tokens(found["plain"])
    num_tokens = sum(len(choice["tokens"]) for (choice,) in found["plain"])
    assert found["kept"] == {"brought": 4, "texts": 4, "right": num_tokens}
    assert tokens(found["other_prompt"]) == tokens(found["other_prompt_plain"]) != tokens(found["plain"][0])
    assert found["brought_by_other_prompt"] == 0


def test_bad_headers_and_missing_seeds_are_refused(host: Host, drafted: dict[str, Any]) -> None:
    assert drafted["bad_header"].startswith("400") and "2^63" in drafted["bad_header"]
    strict = asked(host, "strict")
    assert all(answer.startswith("400") and "http_seeds: required" in answer for answer in strict["unseeded"])
    assert tokens(strict["seeded"]) == tokens(drafted["seeded"])


@pytest.fixture(scope="module")
def rows_of_gym(gym_host: Host) -> dict[str, Any]:
    found: dict[str, Any] = answer_in(gym_host.run(HERE / "gym_cases.py", HERE / "gym.yaml"), "FOUND")
    return found


def test_agents_of_nemo_gym_begin_with_the_prompts_that_were_known_early(rows_of_gym: dict[str, Any]) -> None:
    known = [prompt for prompt in rows_of_gym["prompts"] for _ in range(2)]
    assert not rows_of_gym["alarms"] and all(known)
    assert [messages[0] for messages in rows_of_gym["plain"]] == known


def test_first_turns_of_nemo_gym_that_were_made_early_are_the_same(rows_of_gym: dict[str, Any]) -> None:
    """Every text is right, because the weights have not changed, and later turns bring none."""
    assert rows_of_gym["ahead"] == rows_of_gym["plain"]
    assert max(map(len, rows_of_gym["plain"])) == 6, "three turns"
    num_tokens = sum(len(messages[1]) for messages in rows_of_gym["plain"])
    assert rows_of_gym["kept"] == {"brought": 4, "texts": 4, "right": num_tokens}
