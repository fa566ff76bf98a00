# SPDX-License-Identifier: Apache-2.0
"""Known faults of the installed packages that a config meets."""

import pytest
from test_nemo_rl_config import EAGLE3, tree

from lab.cli import known_traps
from lab.cli.known_traps import TRAPS
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.installed.versions import VLLM_RANGE

pytestmark = pytest.mark.unit

TRAINED = (EAGLE3, "policy.draft.enabled=true")


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def of(*overrides: str, vllm: str | None = None, nemo_rl: str | None = None) -> list[tuple[str, str]]:
        """Returns the traps of the clean config with `overrides` if exactly these packages are installed."""
        monkeypatch.setattr(known_traps, "vllm_version", lambda: vllm)
        monkeypatch.setattr(known_traps, "nemo_rl_version", lambda: nemo_rl)
        return list(known_traps.known_traps(tree(*overrides)))

    return of


def test_a_config_with_text_drafters_meets_none(met) -> None:  # type: ignore[no-untyped-def]
    assert met() == met(vllm="0.25.1", nemo_rl="0.6.0") == []


def test_traps_depend_on_versions_and_config(met) -> None:  # type: ignore[no-untyped-def]
    old, new = (" ".join(text for _, text in met(EAGLE3, vllm=version)) for version in ("0.25.1", "0.29.0"))
    assert "vllm, here 0.25.1: the V2 model runner draws" in old and "from the same noise" not in new
    assert "names no layers" in old and "names no layers" in new
    assert "from the same noise" not in str(met(EAGLE3, f"{known_traps.GENERATION}.temperature=0", vllm="0.25.1"))


def test_a_trained_head_meets_the_faults_of_refits(met) -> None:  # type: ignore[no-untyped-def]
    texts = " ".join(text for _, text in met(*TRAINED, nemo_rl="0.6.0"))
    assert "lm_head" in texts and "leaves the draft head as it was" in texts and "nemo-rl, here 0.6.0" in texts
    without = " ".join(text for _, text in met(EAGLE3.replace("tokens: 3", "tokens: 0"), TRAINED[1]))
    assert "leaves the draft head as it was" not in without and "nemo-rl, not installed here" in without


def test_without_the_block_no_trap_is_avoided(met) -> None:  # type: ignore[no-untyped-def]
    assert {state for state, _ in met(*TRAINED)} == {"avoided"}
    off = met(*TRAINED, f"{BLOCK_PATH}.enabled=false")
    assert {state for state, _ in off} == {"not avoided"} and "because the block is off" in off[0][1]


def test_every_trap_has_a_text_and_a_remedy() -> None:
    for trap in TRAPS:
        assert trap.text and trap.remedy and (trap.before is None or trap.before > VLLM_RANGE[0]), trap
