# SPDX-License-Identifier: Apache-2.0
"""The price of contexts: in the simulator against fixed numbers of drafts, and the bench of a real engine."""

import json
from pathlib import Path

import pytest

from lab.bench.context_bench import main as bench
from lab.simulation.context_price import Learner, best_fixed, in_turns, main
from lab.simulation.costs import Calibration, RooflineCosts
from lab.simulation.data_sheets import DEVICES, MODELS
from lab.simulation.graph_edge import Drafts

pytestmark = pytest.mark.integration
CONTEXTS = (1024, 32_768)


def machine(reads_for_each_row: bool) -> RooflineCosts:
    """Returns the costs of Qwen3-8B on an H200."""
    known = {"reads_for_each_row": reads_for_each_row}
    return RooflineCosts(MODELS["Qwen3-8B"], DEVICES["H200"], "bf16", "bf16", Calibration(), **known)


def test_reading_for_each_row_takes_as_much_longer_as_there_are_rows() -> None:
    once, each = (machine(reads) for reads in (False, True))
    assert once.step_s(4, 4, 32_768) == each.step_s(4, 4, 32_768)
    kv_s = 4 * 32_768 * 2 * 36 * 8 * 128 * 2 / (0.75 * 4.8e12)
    assert each.step_s(4, 12, 32_768) - once.step_s(4, 12, 32_768) == pytest.approx(2 * kv_s, rel=0.05)


@pytest.mark.parametrize("reads_for_each_row", [False, True])
def test_the_policy_is_near_the_best_fixed_number_at_each_context(reads_for_each_row: bool) -> None:
    """Contexts take turns of 150 steps. A model that knows nothing of contexts loses much more at one of them."""
    costs = machine(reads_for_each_row)
    drafts = Drafts(16, 0.8)
    bests = [best_fixed(costs, drafts, [context])[1] for context in CONTEXTS]
    shares = []
    for knows in (True, False):
        rates = in_turns(Learner.of(costs, drafts, knows), CONTEXTS)
        shares.append(min(rate / best for rate, best in zip(rates, bests, strict=True)))
    assert shares[0] > 0.95 and shares[1] < shares[0] - 0.05


def test_the_table_has_a_row_for_each_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCHES": (4,), "RATES": (0.8,), "STEPS_OF_A_TURN": 10}.items():
        monkeypatch.setattr(f"lab.simulation.context_price.{name}", value)
    main(["--contexts", "512,1024"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("     4")]
    assert [row[2] for row in rows] == ["512", "1024", "growing"] * 2


def test_the_bench_has_equal_tokens_and_a_cell_for_each_context(tmp_path: Path) -> None:
    bench(["--out", str(tmp_path), "--contexts", "64,256", "--drafts", "0,2", "--rounds", "1", "--length", "12"])
    found = json.loads((tmp_path / "context.json").read_text(encoding="utf-8"))
    assert found["responses that differ"] == 0
    assert [cell["cell"] for cell in found["cells"]] == ["64 tokens, p 0.8", "256 tokens, p 0.8"]
    assert all(set(cell["over best"]) == {"0", "2", "auto"} for cell in found["cells"])
