# SPDX-License-Identifier: Apache-2.0
"""Sections "engine" and "self-test": starts engines in another process, and judges their settings and tokens."""

import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from nemo_specrollout.config.nemo_rl_rules import RUNNER_VARIABLE
from nemo_specrollout.config.versions import vllm_version
from nemo_specrollout.doctor.child import Outcome, run_child
from nemo_specrollout.doctor.device import is_cpu_build
from nemo_specrollout.doctor.diagnosis import Diagnosis, Section

ENGINE = Section("engine")
SELF_TEST = Section("self-test")
TIMEOUT_S = 300.0
"""Seconds for starting two engines and for decoding."""
_CHILD = "nemo_specrollout.doctor.self_test_child"
PLUGIN_GROUP = "vllm.platform_plugins"
"""Group of entry points in which vLLM looks for platforms."""
PLUGIN = "nemo_specrollout_cpu"
"""Our platform, with the V2 model runner on a CPU."""
_SEND = "Send us the file of --json FILE"
CAUSES = {
    "no locator available": "Set NUMBA_CACHE_DIR to a writable folder.",
    "V2 model runner": f"Unset {RUNNER_VARIABLE}, and remove what vLLM's log says that V2 does not support.",
    "Failed to find C compiler": "Install gcc, or set CC: Triton compiles its launchers with it.",
    "undefined symbol": "Install the torch that this vLLM was built for.",
    "no kernel image": "Install a vLLM that is built for this GPU.",
    "driver version is insufficient": "Install a newer NVIDIA driver, or a torch for an older CUDA.",
    "less than desired GPU memory": "End the other process that holds the GPU's memory.",
    "out of memory": "End the other process that holds the memory, and run doctor again.",
    "No space left on device": "Free some disk in the temporary folder, or start the container with --shm-size=16g.",
}
"""Fixes by words of a log; the first match counts."""


def try_engines(child: str = _CHILD, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Runs the self-test, the module `child`, in another process."""
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return run_child(child, None, timeout_s, {k: v for k, v in quiet.items() if k not in os.environ})


def diagnose_environment(environment: Mapping[str, str] = os.environ) -> Iterator[Diagnosis]:
    """Yields diagnoses of the settings that decide which model runner an engine will have."""
    value = environment.get(RUNNER_VARIABLE)
    if value is not None and value.lower() in ("0", "false"):
        text = f"{RUNNER_VARIABLE} is {value}: vLLM would take its V1 model runner"
        yield ENGINE.fail(RUNNER_VARIABLE, text, f"Unset {RUNNER_VARIABLE}.")
    if vllm_version() is not None and is_cpu_build():
        yield platform_plugin(environment.get("VLLM_PLUGINS"))


def platform_plugin(allowed: str | None) -> Diagnosis:
    """Checks that vLLM finds our platform for a CPU. `allowed`: value of VLLM_PLUGINS, the list of allowed plug-ins."""
    if PLUGIN not in {entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP)}:
        text = "the entry point is missing: this package is on the path, but not installed"
        to_do = "Install it, `pip install --no-deps -e .`: vLLM finds the V2 model runner for a CPU by its entry point."
        return ENGINE.fail("platform plug-in", text, to_do)
    if allowed is not None and PLUGIN not in allowed.split(","):
        text = f"VLLM_PLUGINS is {allowed!r}, which leaves {PLUGIN} out"
        return ENGINE.fail("platform plug-in", text, f"Unset VLLM_PLUGINS, or add {PLUGIN} to it.")
    return ENGINE.ok("platform plug-in", f"{PLUGIN}, for the V2 model runner on a CPU")


def left_out(why: str) -> Diagnosis:
    """Returns the diagnosis if no engine is tried."""
    return SELF_TEST.warn("engine", f"not tried: {why}", "Run doctor where vLLM is installed, without --no-self-test.")


def diagnose_engine(outcome: Outcome) -> Iterator[Diagnosis]:
    """Yields diagnoses of the settings in force in the engine of the self-test."""
    facts = outcome.told.get("facts")
    if facts is None:
        yield ENGINE.fail("engine", "it did not start", "See the self-test.")
        return
    runner = f"{facts['model_runner']}, checked by our vLLM worker when it started"
    yield ENGINE.ok("model runner", runner)
    if facts["async_scheduling"]:
        yield ENGINE.ok("scheduling", "asynchronous")
    else:
        to_do = "See vLLM's log for the reason: a GPU waits while the host prepares each step."
        yield ENGINE.warn("scheduling", "synchronous", to_do)
    yield ENGINE.ok("attention backend", ", ".join(facts["attention"]) or "not reported by this vLLM")
    yield ENGINE.ok("platform", f"{facts['platform']}, on {facts['device']}")


def diagnose_self_test(outcome: Outcome) -> Iterator[Diagnosis]:
    """Yields diagnoses of tokens, drafts and time, and of the process if it failed."""
    for name, comparison in outcome.told.items():
        if name.startswith("T="):
            yield _tokens(f"tokens at {name}", comparison)
    if "drafts" in outcome.told:
        yield _drafts(outcome.told["drafts"])
    if outcome.failure:
        yield SELF_TEST.fail("engine", outcome.failure, _cause(outcome), outcome.log)
    else:
        seconds = f"{outcome.seconds:.1f} s, including loading libraries and starting two engines"
        yield SELF_TEST.ok("time", seconds)


def _tokens(name: str, comparison: Mapping[str, Any]) -> Diagnosis:
    text = f"{comparison['equal']} of {comparison['total']} tokens equal"
    if comparison["first"] is None:
        return SELF_TEST.ok(name, text)
    response, position, plain, drafted = comparison["first"]
    text += f"; first difference: response {response}, position {position}, plain {plain}, drafted {drafted}"
    return SELF_TEST.fail(name, text, f"{_SEND}: drafts must never change a token.")


def _drafts(counts: Mapping[str, Any]) -> Diagnosis:
    totals = [(sum(p), sum(a)) for p, a in zip(counts["proposed"], counts["accepted"], strict=True)]
    proposed, accepted = sum(p for p, _ in totals), sum(a for _, a in totals)
    if not proposed:
        to_do = f"{_SEND}: without drafts nothing was compared."
        return SELF_TEST.fail("drafts", "none was verified", to_do)
    each = ", ".join(f"{name} {a} of {p}" for name, (p, a) in zip(counts["drafters"], totals, strict=True))
    text = f"{accepted} of {proposed} verified drafts accepted ({accepted / proposed:.0%}): {each}"
    return SELF_TEST.ok("drafts", text)


def _cause(outcome: Outcome) -> str:
    said = "\n".join([outcome.failure, *outcome.log])
    known = (to_do for sign, to_do in CAUSES.items() if sign in said)
    return next(known, f"{_SEND}, which has the end of the process's log.")
