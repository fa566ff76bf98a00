# SPDX-License-Identifier: Apache-2.0
"""Drafters that an engine of the laboratory starts for itself."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import STEP_ADDER
from test_equality import assert_equal, requests

from lab.local.engine import RolloutEngine
from lab.local.step_rollout import MeasuredRollout
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.config.strict import ConfigError

pytestmark = pytest.mark.integration


def test_an_engine_starts_and_ends_its_own_drafters(
    start_engine: Callable[..., RolloutEngine],
) -> None:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=())).generate(requests(8, 4))
    remote = RemoteDrafterConfig(model=str(STEP_ADDER), workers=1)
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(remote, SuffixDrafterConfig())))
    measured = MeasuredRollout(engine, requests(8, 4))
    measured.advance()
    rollouts, stats = measured.result()
    assert_equal(rollouts, plain)
    assert stats.drafter_stats is not None and stats.drafter_stats["num_request_steps"] > 0, (
        "metrics.jsonl has it as draft_supply"
    )
    assert engine.drafters is not None
    process = engine.drafters.processes[0]
    assert process.pid is not None and engine.take_deaths() == []
    os.kill(killed := process.pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # the pool's own thread has seen it first
        os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    (sentence,) = engine.take_deaths()  # at once: the step that is over must not miss it
    assert sentence.startswith("drafter process 0 died (killed by signal 9)") and engine.take_deaths() == []
    while (pid := process.pid) is None:
        time.sleep(0.1)
    engine.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_missing_draft_model_raises_config_error(tmp_path: Path, start_engine: Callable[..., RolloutEngine]) -> None:
    remote = RemoteDrafterConfig(model=str(tmp_path / "nothing"), workers=1)
    with pytest.raises(ConfigError, match="nothing does not exist"):
        start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(remote,)))
