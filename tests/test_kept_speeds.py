# SPDX-License-Identifier: Apache-2.0
"""Decode speeds that a fleet of engines keeps for its next start. No engine."""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from conftest import STEP_ADDER

from nemo_specrollout.config.block import FastestOfNConfig, LearnedConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedRow, SpeedTableFile, started_table, table_file
from nemo_specrollout.stragglers.kept_speeds import KeptSpeeds, with_kept

pytestmark = pytest.mark.unit

ABOUT = {"vllm": "0.32.0", "device": "H200", "vllm_cfg": {"precision": "float32", "async_engine": False}}
MEASURED = SpeedTableFile(
    "H200",
    "a policy",
    1e-4,
    (
        SpeedRow("maths", "ngram", (1,), (90.0,), (10.0,)),
        SpeedRow(ANY_TASK, "suffix", (1, 16), (200.0, 60.0), (20.0, 300.0)),
        SpeedRow(ANY_TASK, "ngram", (1, 16), (90.0, 50.0), (0.5, 300.0)),
    ),
)


def block_in(folder: Path, *, warm_start: bool = True, **racing: Any) -> SpecrolloutConfig:
    """Returns a block whose two engines draft in different ways."""
    methods = (("suffix",), ("ngram",))
    return SpecrolloutConfig(
        drafters=(SuffixDrafterConfig(), NgramDrafterConfig()),
        fastest_of_n=FastestOfNConfig(**{"methods": methods, **racing}),
        learned=LearnedConfig(folder=str(folder), warm_start=warm_start),
    )


def kept_in(folder: Path, about: Mapping[str, Any] = ABOUT, **changes: Any) -> KeptSpeeds:
    return KeptSpeeds(block_in(folder, **changes), str(STEP_ADDER), 2, about)


def written(folder: Path, table: SpeedTableFile = MEASURED) -> Path:
    """Returns the file that a start leaves behind."""
    kept = kept_in(folder)
    kept.begin()
    kept.keep(table)
    kept.settle()
    (file,) = folder.glob("speeds-*.json")
    return file


def changed(file: Path, state: Any) -> None:
    """Replaces what a file says, with the checksum that belongs to it."""
    head = json.loads(file.read_bytes().partition(b"\n")[0])
    body = json.dumps(state).encode()
    file.write_bytes(json.dumps({**head, "sha256": sha256(body).hexdigest()}).encode() + b"\n" + body)


def test_a_start_begins_with_the_speeds_of_the_one_before_it(tmp_path: Path) -> None:
    written(tmp_path)
    kept = kept_in(tmp_path)
    speeds = kept.begin()
    assert speeds is not None and kept.take_alarms() == []
    methods = ["ngram", "plain", "suffix"]
    then, now = started_table(methods, MEASURED), started_table(methods, speeds)
    assert all(now.tokens_per_s(m, b) == pytest.approx(then.tokens_per_s(m, b)) for m in (0, 2) for b in (1, 4, 16))
    assert now.prefill_s(1000) == pytest.approx(0.1) and now.task_speed("maths", 0) == pytest.approx(1.0)
    assert (kept.take_sentence() or "").startswith("began with the decode speeds of 2") and not kept.take_sentence()


def test_what_was_read_gives_way_to_what_is_seen(tmp_path: Path) -> None:
    """A named file counts for as much as what the run remembers, and a kept one for an eighth of it at most."""
    written(tmp_path)
    speeds = kept_in(tmp_path).begin()
    assert speeds is not None and max(r.weights_s[0] for r in speeds.rungs) == 2.5 == speeds.prefill_weight_s
    assert speeds.rungs[1].weights_s[1] == 16 * 2.5 and speeds.rungs[2].weights_s[0] == 0.5, (
        "a rare one counts for itself"
    )
    table, named = started_table(["suffix"], speeds), started_table(["suffix"], MEASURED)
    for each in (table, named):
        each.observe(ANY_TASK, 0, 1, 500, 5.0)  # half as fast as before
        each.observe_prefill(10_000, 5.0)
    assert 130 < table.tokens_per_s(0, 1) < 135 and 170 < named.tokens_per_s(0, 1) < 185
    assert named.prefill_s(1000) < table.prefill_s(1000) < 0.5


def test_starts_in_a_row_count_their_steps_and_keep_no_faded_speeds(tmp_path: Path) -> None:
    written(tmp_path)
    kept = kept_in(tmp_path)
    table = started_table(["ngram", "suffix"], kept.begin())
    table.observe(ANY_TASK, 1, 1, 2000, 10.0)
    kept.keep(table_file(table, "H200", "a policy", (0.0, 0.0)))
    kept.settle()
    third = kept_in(tmp_path)
    speeds = third.begin()
    assert speeds is not None and (third.sentence or "").endswith("after 2 steps")
    assert started_table(["suffix"], speeds).tokens_per_s(0, 1) == pytest.approx(200)


@pytest.mark.parametrize(
    "about",
    [{"vllm": "0.29.0"}, {"device": "H100"}, {"vllm_cfg": {"precision": "float32", "async_engine": True}}],
    ids=str,
)
def test_other_engines_begin_without_it_and_say_so(tmp_path: Path, about: dict[str, Any]) -> None:
    written(tmp_path)
    other = kept_in(tmp_path, {**ABOUT, **about})
    assert other.begin() is None and other.take_alarms() == []
    assert other.sentence == "began without earlier decode speeds, because what was kept is of others"


def test_other_drafters_or_another_policy_are_another_kind(tmp_path: Path) -> None:
    written(tmp_path)
    block = block_in(tmp_path)
    others = [
        KeptSpeeds(replace(block, num_speculative_tokens=3), str(STEP_ADDER), 2, ABOUT),
        KeptSpeeds(block, "a/name", 2, ABOUT),
        kept_in(tmp_path, methods=(("suffix",), ())),
    ]
    assert [other.begin() for other in others] == [None] * 3
    resumed_on_more_engines = KeptSpeeds(block, str(STEP_ADDER), 6, ABOUT)
    assert resumed_on_more_engines.begin() is not None


def test_a_named_file_wins_and_what_is_measured_is_kept_all_the_same(tmp_path: Path) -> None:
    file = written(tmp_path)
    before = file.read_bytes()
    kept = kept_in(tmp_path, ladder="ladder.json")
    named = replace(MEASURED, prefill_s_per_token=1.0)
    assert with_kept(named, kept) == named and kept.begin() is None and kept.sentence is None
    kept.keep(named)
    kept.settle()
    assert file.read_bytes() != before


@pytest.mark.parametrize("changes", [{"warm_start": False}, {"enabled": False}], ids=str)
def test_a_run_may_keep_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    written(tmp_path)
    kept = kept_in(tmp_path, **changes)
    assert kept.begin() is None and kept.sentence is None
    kept.keep(MEASURED)
    kept.settle()
    assert len(list(tmp_path.iterdir())) == 1


def state(**changes: Any) -> dict[str, Any]:
    """Returns the state of a file whose only row is changed."""
    row = {"task": "any", "method": "suffix", "batches": [1], "tokens_per_s": [9.0], "weights_s": [2.0], **changes}
    return {"device": "d", "policy": "p", "prefill_s_per_token": 1e-4, "rungs": [row]}


@pytest.mark.parametrize(
    "damage",
    [
        None, [], {}, {"rungs": 3}, state(tokens_per_s=[-1.0]), state(tokens_per_s=[1e300]), state(weights_s=[1e13]),
        state(weights_s=[]), state(batches=[10**15]), state(task=3), {**state(), "prefill_s_per_token": 1e-300},
        {**state(), "format": 2}, {**state(), "more": 1}, state(tokens_per_s=[1e-300]),
    ],
    ids=lambda damage: json.dumps(damage)[-60:],
)  # fmt: skip
def test_nonsense_costs_a_sentence_and_is_written_anew(tmp_path: Path, damage: Any) -> None:
    file = written(tmp_path)
    changed(file, damage)
    kept = kept_in(tmp_path)
    assert kept.begin() is None
    (sentence,) = kept.take_alarms()
    assert sentence.startswith(str(file)) and "so it is not used, and is written anew" in sentence
    assert "\n" not in sentence and (kept.sentence or "").startswith(
        "began without earlier decode speeds, because speeds-"
    )
    kept.keep(MEASURED)
    kept.settle()
    assert kept_in(tmp_path).begin() is not None


def test_a_file_that_is_cut_short_costs_a_sentence(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_bytes(file.read_bytes()[:-20])
    kept = kept_in(tmp_path)
    assert kept.begin() is None and len(kept.take_alarms()) == 1 and "is damaged" in (kept.sentence or "")
