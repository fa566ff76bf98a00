# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout doctor`: checks whether this package can work on this machine, and collects facts for a bug report.

An error in one of its checks becomes a line of the output instead of a stack trace.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import cache
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_specrollout.cli.check import describe_config, read_nemo_rl_config
from nemo_specrollout.cli.command_line import EXIT_FAILED, check_out
from nemo_specrollout.cli.nemo_rl_environment import entry
from nemo_specrollout.cli.terminal import log_console, scratch_folder
from nemo_specrollout.config.engine_vllm import engine_vllm
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.doctor import actors, environment, patch_point_check, self_test
from nemo_specrollout.doctor.diagnosis import Diagnosis, Section, State, in_one_line
from nemo_specrollout.doctor.model_cache import missing_models
from nemo_specrollout.installed.versions import vllm_version
from nemo_specrollout.storage.files import write_atomically

CONFIG = Section("config")
_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}
_CHANGE_IT = "Change the config or the command line as this says."
Source = Callable[[], Iterable[Diagnosis]]


def doctor(parsed: argparse.Namespace) -> int:
    """Runs all checks, prints each section of results as soon as it is known, and writes all of them to the file of `--json`.

    Returns the exit code, which is 1 if a check failed, and otherwise 0. Raises ConfigError or OSError if the file of `--json`
    cannot be written.
    """
    if parsed.json is not None:
        check_out(parsed.json, "--json")
    if parsed.in_nemo_rl:
        return _in_nemo_rl(parsed)
    console = log_console()
    found = list[Diagnosis]()
    # The limits must be checked before the temporary folder is replaced.
    limits = list(_guarded(environment.MACHINE, environment.diagnose_machine))
    with ExitStack() as stack:
        with suppress(OSError):  # the section `machine` reports it
            stack.enter_context(scratch_folder())
        for section, source in _sections(parsed, limits, console):
            diagnoses = list(_guarded(section, source))
            found += diagnoses
            _show(console, section.title, diagnoses)
    counts = {state.value: sum(d.state is state for d in found) for state in State}
    console.print("\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))
    if parsed.json is not None:
        facts = {"states": counts, "diagnoses": [asdict(d) for d in found]}
        write_atomically(parsed.json, json.dumps(facts, indent=1))
        console.print(f"written to {parsed.json}")
    elif counts[State.FAIL]:
        console.print("for a bug report: give --json FILE, and attach the file")
    return EXIT_FAILED if counts[State.FAIL] else 0


def _in_nemo_rl(parsed: argparse.Namespace) -> int:
    """Runs `doctor` with the same arguments in the Python environment of NeMo-RL's driver, and returns its exit code.

    Raises ConfigError if NeMo-RL's checkout or `uv` is missing.
    """
    arguments = [text for text in parsed.given if text != "--in-nemo-rl"]
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        command, variables = entry(arguments, Path(folder))
        return subprocess.run(command, env=variables, check=False).returncode


def _sections(
    parsed: argparse.Namespace, limits: list[Diagnosis], console: Console
) -> Iterator[tuple[Section, Source]]:
    yield environment.VERSIONS, _versions
    yield environment.DEVICE, environment.diagnose_device
    yield environment.MACHINE, lambda: limits
    yield actors.ACTORS, actors.diagnose_actors
    yield patch_point_check.PATCH_POINTS, patch_point_check.diagnose_patch_points
    if parsed.config is not None:
        yield CONFIG, lambda: diagnose_config(parsed.config, parsed.overrides)
    if parsed.no_self_test or vllm_version() is None:
        why = "--no-self-test" if parsed.no_self_test else "vLLM is not installed"
        to_do = "Run doctor where vLLM is installed, without --no-self-test."
        yield self_test.SELF_TEST, lambda: [self_test.SELF_TEST.warn("engine", f"not tried: {why}", to_do)]
        return
    console.print(f"\nstarting two engines with a random model, {self_test.TIMEOUT_S:.0f} s at most", style="dim")
    tried = cache(self_test.try_engines)
    yield self_test.ENGINE, lambda: self_test.diagnose_engine(tried())
    yield self_test.SELF_TEST, lambda: self_test.diagnose_self_test(tried())


def _versions() -> Iterator[Diagnosis]:
    yield from environment.diagnose_versions(environment.found_versions())
    yield from environment.diagnose_engine_vllm(engine_vllm({"runtime": "nemo_rl"}))


def _guarded(section: Section, source: Source) -> Iterator[Diagnosis]:
    """Yields the diagnoses of a section. If a check of `source` raises an error, yields a diagnosis about the error."""
    try:
        yield from source()
    except Exception as error:
        to_do = "Send us this line: it is a fault of doctor's own, or of what it looked at."
        yield section.fail("doctor", in_one_line(error), to_do)


def diagnose_config(path: Path, overrides: list[str], variables: Mapping[str, str] = os.environ) -> Iterator[Diagnosis]:
    """Yields a diagnosis for each line that the command `check` would print about a config, and for each missing model.

    `variables` are the environment variables of the run, which may forbid that it downloads a missing model.
    """
    try:
        subject = describe_config(read_nemo_rl_config(path, overrides))
    except ConfigError as error:
        yield CONFIG.fail("error", str(error), _CHANGE_IT)
        return
    except OSError as error:
        yield CONFIG.fail("error", f"{path}: {error.strerror}", "Name a file that can be read.")
        return
    for name, text in subject.lines:
        yield CONFIG.ok(name, text)
    for kind, text in subject.notes:
        yield Diagnosis(CONFIG.title, kind, State.WARN if kind == "warning" else State.OK, text)
    for trap in subject.traps:
        state = State.OK if trap.is_avoided else State.WARN
        yield Diagnosis(CONFIG.title, trap.state, state, str(trap))
    for text in subject.errors:
        yield CONFIG.fail("error", text, _CHANGE_IT)
    if not subject.errors:
        yield from missing_models(CONFIG, subject.tree, variables)


def _show(console: Console, section: str, diagnoses: list[Diagnosis]) -> None:
    """Prints a section as a table. Successive diagnoses that differ only in their names share a row."""
    console.print(f"\n{section}", style="bold")
    boxed = console.is_terminal
    table = Table(box=box.ROUNDED if boxed else None, pad_edge=boxed, show_header=False)
    for ratio in (None, 3, 5):
        table.add_column(ratio=ratio, overflow="fold")
    for (state, found, to_do), same in groupby(diagnoses, key=lambda d: (d.state, d.found, d.to_do)):
        group = list(same)
        text = f"{found}\n-> {to_do}" if to_do else found
        table.add_row(Text(state, _STYLES[state]), Text("\n".join(d.name for d in group)), Text(text))
        for line in (line for d in group for line in d.last_words):
            table.add_row("", Text("| log", "dim", justify="right"), Text(line, "dim"))
    console.print(table)
