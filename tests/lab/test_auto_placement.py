# SPDX-License-Identifier: Apache-2.0
"""`placement: auto`: a run places its remote drafter by measured times."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import QUICKSTART, ROOT

from lab.cli.main import main
from lab.local.drafter_pool import with_addresses
from lab.placement.cost_tables import CostCurve, CostTables
from lab.placement.planner import choose, placed
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DRAFTERS,
    MtpDrafterConfig,
    NgramDrafterConfig,
    RemoteDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.config.strict import ConfigError, build, build_tagged

pytestmark = pytest.mark.unit

POLICY = "examples/models/step_adder"
REMOTE = RemoteDrafterConfig(model="draft", workers=1, placement="auto", profile="profile.json", acceptance=0.9)
BLOCK = SpecrolloutConfig(drafters=(SuffixDrafterConfig(), REMOTE))
MACHINE = {"num_requests": 4, "threads": 1, "cores": 2}


def curve(size: int, seconds: float, row_s: float = 0.0) -> tuple[CostCurve, ...]:
    return (CostCurve(size, (1, 64), (seconds + row_s, seconds + 64 * row_s)),)


def tables(draft_s: float, coupled_s: float, row_s: float = 0.0) -> CostTables:
    coupled = curve(1, coupled_s)
    return CostTables("a machine", POLICY, "draft", curve(1, 0.01, row_s), "thread", curve(1, draft_s), coupled)


def types(block: SpecrolloutConfig) -> list[str]:
    return [d.type for d in block.drafters]


def test_a_fast_drafter_stays_separate_with_the_planned_window() -> None:
    option = choose(BLOCK, tables(draft_s=0.001, coupled_s=0.001), **MACHINE)
    block = placed(BLOCK, option)
    assert types(block) == ["suffix", "remote"] and block.remote is not None
    assert block.remote.workers == 1 and block.remote.most_ahead == option.window > BLOCK.num_speculative_tokens


def test_a_placed_block_with_addresses_is_valid() -> None:
    block = placed(BLOCK, choose(BLOCK, tables(draft_s=0.001, coupled_s=0.001), **MACHINE))
    told = with_addresses(block, ["tcp://127.0.0.1:9"])
    assert build(SpecrolloutConfig, asdict(told), BLOCK_PATH) == told


def test_a_drafter_fast_only_in_the_policys_engine_moves_there() -> None:
    block = placed(BLOCK, choose(BLOCK, tables(draft_s=0.02, coupled_s=0.0005), **MACHINE))
    assert types(block) == ["suffix", "draft_model"] and block.drafters[1].model == "draft"


def test_on_one_core_the_drafter_moves_into_the_engine() -> None:
    block = placed(BLOCK, choose(BLOCK, tables(0.001, 0.001), 4, threads=1, cores=1))
    assert types(block) == ["suffix", "draft_model"]


def test_a_drafter_that_does_not_pay_is_removed() -> None:
    poor = replace(BLOCK, drafters=(SuffixDrafterConfig(), replace(REMOTE, acceptance=0.3)))
    assert types(placed(poor, choose(poor, tables(0.02, 0.02, row_s=0.01), **MACHINE))) == ["suffix"]


def test_an_engine_has_at_most_one_draft_model() -> None:
    both = SpecrolloutConfig(drafters=(REMOTE, MtpDrafterConfig()))
    assert types(placed(both, choose(both, tables(draft_s=0.02, coupled_s=0.0001), **MACHINE))) == ["mtp"]


def test_unmeasured_thread_counts_use_the_measured_ones() -> None:
    assert choose(BLOCK, tables(0.001, 0.001), 4, threads=2, cores=4).mode == "decoupled"


@pytest.mark.parametrize("change", [{"workers": 0, "addresses": ("tcp://127.0.0.1:9",)}, {"profile": None}])
def test_auto_placement_needs_a_profile_and_own_drafters(change: dict[str, object]) -> None:
    values = {"type": "remote", "model": "x", "workers": 1, "placement": "auto", "profile": "p", **change}
    with pytest.raises(ConfigError, match=r"drafters\.placement: 'auto'.*specrollout-lab profile"):
        build_tagged(DRAFTERS, {k: v for k, v in values.items() if v is not None}, "drafters")


def test_options_of_another_type_may_have_their_default() -> None:
    values = {"type": "ngram", "most_ahead": 24, "addresses": [], "vllm_kwargs": {}, "sampling": "shared_noise"}
    assert build_tagged(DRAFTERS, values, "drafters[0]") == NgramDrafterConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"type": "ngram", "most_ahead": 8},
            "most_ahead: 8; type ngram does not have it: remove it, or use type remote",
        ),
        ({"type": "random", "max_order": 3}, "max_order: 3; .* use type suffix or ngram or history"),
        ({"type": "mtp", "model": "x"}, "model: 'x'; .* use type eagle3 or draft_model or dflash or dspark or remote"),
    ],
)
def test_an_option_of_another_drafter_type_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^drafters\[0\]\.{message}"):
        build_tagged(DRAFTERS, values, "drafters[0]")


def test_check_prints_the_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    profile = tmp_path / "profile.json"
    remote = f"{{type: remote, model: {POLICY}, workers: 1, placement: auto, profile: {profile}}}"
    arguments = ["explain", str(QUICKSTART), f"policy.generation.specrollout.drafters=[{remote}]"]
    assert main(arguments) == 2
    assert "drafters.profile: " in capsys.readouterr().err
    profile.write_text(tables(0.001, 0.001).to_json())
    assert main(arguments) == 0
    assert "placement    auto: a verifier on 1 thread beside a drafter on 1 thread, up to" in capsys.readouterr().out
    profile.write_text(tables(0.02, 0.02, row_s=0.01).to_json())
    assert main(arguments) == 0
    assert "placement    auto: no drafts, a verifier on 1 thread; 1.00x plain" in capsys.readouterr().out
