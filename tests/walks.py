# SPDX-License-Identifier: Apache-2.0
"""Prints the files of the package whose code runs on two of the four walks of docs/walks.md.

`PYTHONPATH=.:tests/lab .venv/bin/python tests/walks.py`, about a minute. The walks of `budget.margin` and of an
early text were followed by reading.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from conftest import QUICKSTART, STEP_ADDER
from test_equality import requests
from test_online_refresh import with_head
from test_run import TINY

import nemo_specrollout
from lab.cli.main import main
from lab.local.engine import RolloutEngine
from lab.local.head_refresh_step import LocalRefresher
from lab.local.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig
from nemo_specrollout.heads.training.head import create_head, save_head

PACKAGE = Path(nemo_specrollout.__file__).parent


class Trace:
    """Collects the files of the package whose functions are called while it is on, in the order of their first call."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def on(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Returns the result of `function`, which is traced in all threads that it starts."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            return function(*arguments, **options)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files.setdefault(str(path.relative_to(PACKAGE)))

    def print(self, walk: str) -> None:
        print(f"{walk}: {len(self.files)} files", *self.files, sep="\n  ", flush=True)


def a_token_with_a_draft() -> Trace:
    """From a prompt to its tokens, in an engine whose only drafter is an EAGLE-3 head."""
    head = Eagle3DrafterConfig(model=str(STEP_ADDER.parent / "step_adder_eagle3"))
    generation = GenerationConfig(VllmConfig(max_model_len=512), 64, specrollout=SpecrolloutConfig(drafters=(head,)))
    engine = RolloutEngine(STEP_ADDER, generation, seed=7, kv_cache_memory_bytes=1 << 28)
    trace = Trace()
    trace.on(engine.generate, requests(4, 4), temperature=1.0)
    engine.close()
    return trace


def a_refreshed_head(folder: Path) -> Trace:
    """From captured features to a head that serves, in a local run of five steps."""
    save_head(create_head(STEP_ADDER), folder / "head")
    trace, after_step = Trace(), LocalRefresher.after_step
    LocalRefresher.after_step = lambda *arguments: trace.on(after_step, *arguments)  # type: ignore[method-assign]
    options = {**TINY, **with_head(folder / "head"), "grpo.max_num_steps": 5, "logger.log_dir": folder / "run"}
    main(["run", str(QUICKSTART), *(f"{key}={value}" for key, value in options.items())])
    return trace


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        a_token_with_a_draft().print("a prompt to a token with an EAGLE-3 draft")
        a_refreshed_head(Path(scratch)).print("a refreshed head from training to serving")
