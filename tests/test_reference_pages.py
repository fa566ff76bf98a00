# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/reference are what the code says, and the table of metrics has what runs record."""

import dataclasses
import random

import nemo_rl_records
import pytest
import run_files
from reference_pages import PAGES, REFERENCE, metric_table, rewritten, texts_below_fields
from run_files import undefined

from nemo_specrollout.heads.files.head_folder import RefreshRecord
from nemo_specrollout.history.service import HistoryFacts
from nemo_specrollout.nemo_rl.run_record import _NATIVE_KEYS, _PHASE_TIMERS
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.reports.ahead_records import flight_figures, kept_figures, saved_figures
from nemo_specrollout.reports.metric_table import LAB, LOGGER, METRICS, NEMO_RL, SAMPLE, SUMMARY, Metric
from nemo_specrollout.reports.records import PHASES, ahead_figures, summary_of
from nemo_specrollout.run_ahead.early_requests import EarlyFigures
from nemo_specrollout.run_ahead.texts import KeptCounts
from nemo_specrollout.stragglers.attempts import tail_counts
from nemo_specrollout.stragglers.estimates import IdleLooks
from nemo_specrollout.telemetry.sample_stats import SampleStats

pytestmark = pytest.mark.unit

ALL_STEPS = [nemo_rl_records.metrics(step, random.Random(step)) for step in range(1, 13)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    text = (REFERENCE / name).read_text()
    assert rewritten(text, PAGES[name]()) == text, "run make reference"


def test_only_generated_parts_are_rewritten() -> None:
    page = "Before.\n<!-- generated: a -->\nold\n<!-- end of a -->\nAfter.\n"
    assert rewritten(page, {"a": "new"}) == page.replace("old", "\nnew\n")
    assert rewritten(rewritten(page, {"a": "new"}), {"a": "new"}) == rewritten(page, {"a": "new"})


@pytest.mark.parametrize("page", ["no part", "<!-- generated: a --> without an end", "<!-- generated: a -->" * 2])
def test_a_page_must_have_each_part_once(page: str) -> None:
    with pytest.raises(ValueError, match="a"):
        rewritten(page, {"a": "new"})


def test_a_table_escapes_what_would_end_a_cell_and_links_pages() -> None:
    meaning = "|x| (docs/concepts/budget.md#a-warm-start), docs/reference/block.md"
    row = metric_table([Metric("a", "", meaning)]).splitlines()[-1]
    link = r"\|x\| ([concepts/budget](../concepts/budget.md#a-warm-start)), [reference/block](block.md)"
    assert row == f"| `a` | | both | {link} |"


def test_a_text_below_a_field_is_found_in_a_base_too() -> None:
    @dataclasses.dataclass
    class Base:
        first: int = 0
        """Of the
        base."""

    @dataclasses.dataclass
    class Derived(Base):
        second: int = 0
        """Its own."""

    assert texts_below_fields(Derived) == {"first": "Of the base.", "second": "Its own."}


def test_no_name_stands_twice_in_a_table_of_metrics() -> None:
    for table in ([m for metrics in METRICS.values() for m in metrics], SAMPLE, SUMMARY):
        names = [metric.name for metric in table]
        assert sorted(set(names)) == sorted(names)
        assert all(metric.meaning.endswith(".") for metric in table)


def test_records_of_a_step_have_what_the_table_defines() -> None:
    assert undefined(run_files.metrics(0, random.Random(0)), LAB) == []
    for step in nemo_rl_records.with_everything(ALL_STEPS):
        assert undefined(step, NEMO_RL) == []
    assert undefined({"step": 1, "weight_updates": 1.0, "tail": {"moves": 1, "jumps": 2}}, LAB) == [
        "weight_updates", "tail.jumps",
    ]  # fmt: skip


def test_all_that_writes_a_record_is_in_the_table() -> None:
    kept = KeptCounts()._replace(num_texts=1, num_flips=1, num_tokens=1)._asdict()
    saved = saved_figures({"plain_estimate_s": 2.0, "rollout_s": 1.0}, {"ahead": {"accepted": [1]}})
    step = {
        **dict.fromkeys(_NATIVE_KEYS), **dict.fromkeys(_PHASE_TIMERS),
        "draft_refresh": dict.fromkeys(f.name for f in dataclasses.fields(RefreshRecord)),
        "draft_supply": DrafterStats().figures(),
        "history": dict.fromkeys(f.name for f in dataclasses.fields(HistoryFacts)),
        "tail": tail_counts([]) | IdleLooks(num_looks=1).figures(),
        **ahead_figures(1, 1, 1, 1.0), **flight_figures([1, 1, 1, 1]), **kept_figures(kept), **saved,
        **EarlyFigures().metrics(1),
    }  # fmt: skip
    assert undefined(step, NEMO_RL) == []
    for phase in PHASES:
        assert undefined({f"{phase}_s": 0.0}, LAB) == [] or undefined({f"{phase}_s": 0.0}, NEMO_RL) == []
    assert {field.name for field in dataclasses.fields(SampleStats)} <= {metric.name for metric in SAMPLE}
    summary = summary_of(nemo_rl_records.with_everything(ALL_STEPS))
    assert set(summary) <= {metric.name for metric in SUMMARY if metric.runs != LAB}
    assert undefined({"suffix/acceptance": 0.5, "tail/moves": 1.0, "ngram/acceptance_pos_3": 0.1}, LOGGER) == []
