# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout explain`: what a config would do, what is to be expected, what to look out for; without torch."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from nemo_specrollout.cli.check import explain as local_lines
from nemo_specrollout.cli.check import explain_nemo_rl, unfit_heads
from nemo_specrollout.cli.consoles import complain, log_console
from nemo_specrollout.cli.explain_benefit import show_benefit, show_ladder, show_window
from nemo_specrollout.cli.explain_tail import tail_lines
from nemo_specrollout.cli.plan import show_plan
from nemo_specrollout.cli.prepare import EXIT_BAD_INPUT, place_drafter, prepare_local
from nemo_specrollout.cli.simulate import of_run
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import REMOTE_DRAFTER
from nemo_specrollout.config.known_traps import known_traps
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, effective_block
from nemo_specrollout.config.nemo_rl_traps import Finding
from nemo_specrollout.config.runtime import runtime_of
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.simulation.compare import Comparison
from nemo_specrollout.simulation.configured import as_configured
from nemo_specrollout.simulation.devices import device_named

OFF = SpecrolloutConfig(enabled=False)


@dataclass(frozen=True)
class Subject:
    """What is explained."""

    tree: dict[str, Any]
    lines: list[tuple[str, str]]
    """What will run, as `check` says it."""
    block: SpecrolloutConfig
    findings: list[Finding]
    """What does not go together in it, or should be known."""

    @property
    def errors(self) -> list[str]:
        return [str(finding) for finding in self.findings if finding.kind == "error"]


def explain(parsed: argparse.Namespace) -> int:
    """Prints all sections; the exit code says whether the config can run. Raises ConfigError."""
    tree = load_config(parsed.config, parsed.overrides)
    _check_device(tree, parsed.device)
    subject = _subject(tree)
    console = log_console()
    _section(console, "What will run", (f"{name:<12} {text}" for name, text in subject.lines))
    errors = subject.errors or _show_predictions(subject, parsed, console)
    _section(console, "Known traps", _trap_lines(subject))
    for error in errors:
        complain(error)
    return EXIT_BAD_INPUT if errors else 0


def _check_device(tree: dict[str, Any], name: str | None) -> None:
    """Raises ConfigError for a device that is not known, or that the config has no use for."""
    if name is None:
        return
    device_named(name, "--device")
    if runtime_of(tree) == "local":
        raise ConfigError(f"--device: {name!r}; a local run is on this machine's CPU: remove it, or give --profile")


def _subject(tree: dict[str, Any]) -> Subject:
    if runtime_of(tree) == "local":
        prepared = place_drafter(prepare_local(tree))
        return Subject(tree, local_lines(prepared), prepared.config.policy.generation.specrollout, [])
    findings = check_nemo_rl(tree)
    if not any(finding.kind == "error" for finding in findings):
        unfit = (reason.partition(": ") for reason in unfit_heads(tree))
        findings += [Finding(subject, text, "error") for subject, _, text in unfit]
    is_sound = not any(finding.kind == "error" for finding in findings)
    found = effective_block(tree) if is_sound else None
    block = OFF if found is None else build(SpecrolloutConfig, found, BLOCK_PATH)
    return Subject(tree, explain_nemo_rl(tree), block, findings)


def _show_predictions(subject: Subject, parsed: argparse.Namespace, console: Console) -> list[str]:
    """What is to be expected, as far as there are figures to tell by. Returns why nothing can be simulated, if so."""
    expected, errors = None, []
    try:
        expected = _expected(subject, parsed)
    except ConfigError as error:
        errors = [str(error)]
    unknown = "unknown: the config cannot be simulated, see below" if errors else _unknown(subject)
    _section(console, "Expected benefit", [] if expected else [unknown])
    if expected is not None:
        show_benefit(expected, parsed, console)
    show_ladder(subject.tree, subject.block, parsed.ladder, console)
    _section(console, "Placement and window", [_as_written(subject.block)])
    if parsed.profile is not None:
        show_plan(subject.tree, parsed, console)
    else:
        console.print("what would be best: unknown without --profile", markup=False)
    if expected is not None:
        show_window(expected.scenario, subject.block, console)
    _section(console, "Racing", tail_lines(subject.block, expected))
    return errors


def _expected(subject: Subject, parsed: argparse.Namespace) -> Comparison | None:
    source = parsed.profile if runtime_of(subject.tree) == "local" else parsed.device
    return None if source is None else as_configured(of_run(subject.tree, parsed), subject.block)


def _as_written(block: SpecrolloutConfig) -> str:
    types = [d.type for d in block.drafters] if block.enabled else []
    own = ", ".join(name for name in types if name != REMOTE_DRAFTER)
    where = [f"by {own} in the policy's engine"] if own else []
    where += ["by a model on other workers"] if REMOTE_DRAFTER in types else []
    return f"as written: drafts are made {' and '.join(where)}" if where else "as written: no drafts of ours"


def _unknown(subject: Subject) -> str:
    if runtime_of(subject.tree) == "local":
        return "unknown without --profile, a file that `nemo-specrollout profile` wrote on this machine"
    return "unknown without --device, the GPU's name, e.g. H100"


def _trap_lines(subject: Subject) -> Iterator[str]:
    """First what this config itself does, then what the versions do."""
    for finding in subject.findings:
        if finding.kind != "error":
            yield f"{finding.kind:<12} {finding}"
    met = known_traps(subject.tree)
    for trap in met:
        yield f"{'avoided' if trap.is_avoided else 'not avoided':<12} {trap}"
    if not met:
        yield "none that is known meets this config"


def _section(console: Console, title: str, lines: Any) -> None:
    console.print(f"\n{title}", style="bold", markup=False)
    for line in lines:
        console.print(line, markup=False)
