# SPDX-License-Identifier: Apache-2.0
"""`install` on NeMo-RL's real modules: on, off, undone, and refused with a sentence."""

from typing import Any

import pytest
from nemo_rl_host import HERE, Host, answer_in

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(host: Host) -> dict[str, Any]:
    """Returns the findings of `install_cases.py`."""
    return answer_in(host.run(HERE / "install_cases.py", HERE / "base.yaml"), "FOUND")


def test_off_touches_nothing(found: dict[str, Any]) -> None:
    assert found["off_returns"] is False
    assert found["off_config_same"] and found["off_names_same"]


def test_on_replaces_every_name(found: dict[str, Any]) -> None:
    assert found["on_returns"] is True
    assert all(found["on_replaced"])
    assert found["on_facts"]["seed"] == 42 and found["on_facts"]["first_version"] == 0


def test_uninstall_puts_everything_back(found: dict[str, Any]) -> None:
    assert found["undone"]


def test_what_cannot_run_is_refused_with_a_sentence(found: dict[str, Any]) -> None:
    assert found["bad_option"].startswith('policy.generation.quant_cfg: "NVFP4"; ModelOpt')
    assert "budjet: unknown key; did you mean 'budget'?" in found["bad_key"]


def test_the_actors_get_the_code_through_pythonpath(found: dict[str, Any]) -> None:
    code, elsewhere = found["pythonpath"]
    assert code.startswith("$LOG_DIR/addon-") and elsewhere == "/elsewhere"
