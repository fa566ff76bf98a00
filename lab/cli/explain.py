# SPDX-License-Identifier: Apache-2.0
"""The command `specrollout-lab explain`, which says what a config runs, what to expect of it, and its known traps.

Needs no torch.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.cli.describe import describe_local
from lab.cli.placement import Plan
from lab.cli.prepare import check_trainer, place_drafter, prepare_local
from lab.cli.simulate import comparison_table, of_run
from lab.cli.tables import new_table
from lab.simulation.compare import TAIL, Comparison, as_configured, drafted, onset
from lab.simulation.data_sheets import device_named
from lab.simulation.scenario import Scenario
from lab.simulation.setting import Fleet
from nemo_specrollout.cli.check import Subject, describe_config
from nemo_specrollout.cli.command_line import EXIT_BAD_INPUT
from nemo_specrollout.cli.terminal import complain, log_console
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import REMOTE_DRAFTER
from nemo_specrollout.config.known_traps import known_traps
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_tree import Finding, Tree, at, runtime_of
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, PLAIN, draft_method
from nemo_specrollout.stragglers.decisions.speed_table_file import FIELD, SpeedTableFile
from nemo_specrollout.stragglers.decisions.straggler_policy import LEAST_CHANCE, RACE_PREMIUM

PLAN_FLAGS = ("batch", "devices", "acceptance")
"""Flags whose values replace what a config says about its requests and devices."""


def explain(parsed: argparse.Namespace) -> int:
    """Prints all sections of the explanation.

    Returns 0 if `run` can run the config. Raises ConfigError if no command can run it.
    """
    tree = load_config(parsed.config, parsed.overrides)
    if parsed.device is not None:
        device_named(parsed.device, "--device")
        if runtime_of(tree) == "local":
            raise ConfigError(
                f"--device: {parsed.device!r}; a local run is on this machine's CPU: remove it, or give --profile"
            )
    flags = {name: getattr(parsed, name) for name in PLAN_FLAGS}
    plan = None if parsed.profile is None else Plan.of(tree, parsed.profile, flags)
    subject = _subject_of(tree)
    console = log_console()
    _section(console, "What will run", (f"{name:<12} {text}" for name, text in subject.lines))
    errors = subject.errors
    if not errors or runtime_of(tree) == "local":  # `bench` can run what the trainer cannot train
        errors += _show_predictions(subject, plan, parsed, console)
    _section(console, "Known traps", _trap_lines(subject))
    for error in errors:
        complain(error, "specrollout-lab")
    return EXIT_BAD_INPUT if errors else 0


def _subject_of(tree: dict[str, Any]) -> Subject:
    """Returns a config with its block, the lines that describe it, and findings about it.

    If `run` cannot train a local config, an error is among the findings. Raises ConfigError if not even `bench` can run it.
    """
    if runtime_of(tree) == "nemo_rl":
        return describe_config(tree)
    prepared = prepare_local(tree)
    findings = []
    try:
        check_trainer(prepared)
    except ConfigError as error:
        findings = [Finding.error(error)]
    prepared = place_drafter(prepared)
    return Subject(tree, describe_local(prepared), prepared.config.policy.generation.specrollout, findings)


def _section(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print(f"\n{title}", style="bold")
    for line in lines:
        console.print(line)


def _trap_lines(subject: Subject) -> Iterator[str]:
    """Yields the notes on a config, and then the known traps of the installed versions that it meets."""
    traps = known_traps(subject.tree)
    for kind, text in [*subject.notes, *((trap.state, str(trap)) for trap in traps)]:
        yield f"{kind:<12} {text}"
    if not traps:
        yield "none that is known meets this config"


def _show_predictions(subject: Subject, plan: Plan | None, parsed: argparse.Namespace, console: Console) -> list[str]:
    """Prints the sections that need measurements or a simulation.

    Returns reasons why the config cannot be simulated, if any.
    """
    is_local = runtime_of(subject.tree) == "local"
    expected = None
    errors = []
    if (parsed.profile if is_local else parsed.device) is not None:
        try:
            expected = as_configured(of_run(subject.tree, parsed), subject.block)
        except ConfigError as error:
            errors = [str(error)]
    if errors:
        benefit = ["unknown: the config cannot be simulated, see below"]
    elif expected is not None:
        benefit = _benefit_lines(expected, parsed)
    elif is_local:
        benefit = ["unknown without --profile, a file that `specrollout-lab profile` wrote on this machine"]
    else:
        benefit = ["unknown without --device, the GPU's name, e.g. H100"]
    _section(console, "Expected benefit", benefit)
    if expected is not None:
        console.print(comparison_table(expected, boxed=console.is_terminal))
    for line in _ladder_lines(subject.tree, subject.block, parsed.ladder):
        console.print(line)
    _section(console, "Placement and window", [_drafters_line(subject.block)])
    if plan is not None:
        plan.show(console)
    else:
        console.print("what would be best: unknown without --profile")
    if expected is not None:
        _show_window(expected.scenario, subject.block, console)
    _section(console, "Racing", _racing_lines(subject.block, expected))
    return errors


def _benefit_lines(expected: Comparison, parsed: argparse.Namespace) -> list[str]:
    last = expected.steps[-1]
    scenario = expected.scenario
    measured = f"times in {parsed.profile}"
    roofline = f"data sheet of {parsed.device}, a roofline"
    return [
        f"as configured: rollout {expected.rollout_speedup(last):.2f}x plain, {last.rollout_s:.1f} s instead of "
        f"{expected.plain.rollout_s:.1f}; step {expected.speedup(last):.2f}x (a prediction)",
        f"rests on: {measured if scenario.costs.kind == 'tables' else roofline}; {scenario.source}",
    ]


def _ladder_lines(tree: Tree, block: SpecrolloutConfig, path: Path | None) -> Iterator[str]:
    """Yields lines with the measured decode speeds of the draft methods that a block's engines use.

    The speeds are from the file `path`, or else from the decode-speed table that the config names.
    """
    field = "--ladder"
    racing = block.fastest_of_n
    if path is None and racing is not None and racing.ladder is not None:
        field = FIELD
        path = Path(racing.ladder)
    if path is None:
        return
    file = SpeedTableFile.read(path, field)
    yield f"measured, {path}: {file.device}, policy {file.policy}; each request's decode speed over plain"
    if file.policy != at(tree, "policy.model_name"):
        yield "note: that is another policy than the config's"
    rungs = {
        rung.method: dict(zip(rung.batches, rung.tokens_per_s, strict=True))
        for rung in file.rungs
        if rung.task == ANY_TASK
    }
    plain = rungs.get(PLAIN, {})
    for method in _methods_of(block):
        shared = [batch for batch in rungs.get(method, {}) if batch in plain]
        speeds = ", ".join(f"{batch}: {rungs[method][batch] / plain[batch]:.2f}x" for batch in shared)
        yield f"{method}: {speeds or 'not measured beside plain'}"


def _methods_of(block: SpecrolloutConfig) -> list[str]:
    """Returns the names of the draft methods that a block's engines use, each once."""
    kinds = range(len(block.drafters_of_engines))
    return list(dict.fromkeys(draft_method(block.of_engine(kind)) for kind in kinds))


def _drafters_line(block: SpecrolloutConfig) -> str:
    types = [d.type for d in block.drafters] if block.enabled else []
    own = ", ".join(name for name in types if name != REMOTE_DRAFTER)
    where = [f"by {own} in the policy's engine"] if own else []
    where += ["by a model on other workers"] if REMOTE_DRAFTER in types else []
    return f"as written: drafts are made {' and '.join(where)}" if where else "as written: no drafts of ours"


def _show_window(scenario: Scenario, block: SpecrolloutConfig, console: Console) -> None:
    """Prints on which devices remote drafters are predicted to pay, and how many draft tokens a request is predicted to get.

    The draft tokens are a table by number of running requests.
    """
    rows = drafted(scenario, block)
    placed = Fleet(scenario).placement
    if placed is not None:
        console.print(f"by the data sheet: {placed.in_words('GPU')}: {placed.speedup:.2f}x plain (estimate)")
    if rows:
        console.print(f"window: at most {block.num_speculative_tokens} draft tokens; predicted of typical requests:")
        names = ("requests in an engine", "drafts of each", "tokens per engine step", "over plain")
        cells = ((str(r.num_requests), f"{r.drafts:.1f}", f"{r.tokens:.2f}", f"{r.speedup:.2f}x") for r in rows)
        console.print(new_table(names, boxed=console.is_terminal, rows=cells))


def _racing_lines(block: SpecrolloutConfig, expected: Comparison | None) -> Iterator[str]:
    """Yields lines about when requests move or race, and what this is predicted to gain.

    `expected` is None without a prediction.
    """
    racing = block.fastest_of_n
    if racing is None or not racing.enabled:
        yield "off: no request moves or races; the block fastest_of_n turns it on"
        return
    yield from _race_conditions(racing, _methods_of(block))
    if expected is None:
        yield "when it begins: unknown without a prediction, see above"
        return
    with_racing = expected.steps[-1]
    if with_racing.variant != TAIL:
        yield "when it begins: never, there is one engine"
        return
    first = onset(with_racing)
    if first is None:
        yield "when it begins: never in the simulated rollout; no move or race is worth it"
        return
    without = expected.steps[-2]
    counts = with_racing.rollout
    steps = expected.scenario.training.num_steps if expected.scenario.training.mode == "async" else 1
    over = f" of {steps} steps" if steps > 1 else ""
    yield (
        f"when it begins: {first[0]:.1f} s into a simulated rollout{over}, with {first[1]:.0%} of its requests "
        f"finished; {counts.num_moves} moves and {counts.num_races} races in all"
    )
    seconds = with_racing.rollout_s
    before = without.rollout_s
    yield f"what it brings: a rollout of {seconds:.1f} s instead of {before:.1f}, {before / seconds:.2f}x (a prediction)"


def _race_conditions(racing: FastestOfNConfig, methods: list[str]) -> Iterator[str]:
    if racing.moving:
        yield (
            "a request moves if another engine has room, and if the later end of the two engines comes forward by more than "
            f"{racing.min_gain:.0%} of it (min_gain), and by more than a turn takes"
        )
    if racing.max_racers > 1 and len(methods) > 1:
        yield (
            f"a request is raced, by at most {racing.max_racers} engines (max_racers), under three conditions: it is the last "
            f"of its engine, the other engine drafts in another way ({', '.join(methods)}), and the first racer to end gains "
            f"as much, and {RACE_PREMIUM:.0%} more than a move; a racer with a chance below {LEAST_CHANCE:.0%} gives up"
        )
    elif racing.max_racers > 1:
        yield "no engine races: all draft alike; fastest_of_n.methods gives each its own"
    yield (
        "the gain takes into account that the other engine reads the text so far again, while its own requests wait, and "
        "that these are slower beside one more; so it begins when an engine has little or nothing left"
    )
    yield (
        f"decode speeds start from {racing.ladder}"
        if racing.ladder
        else "decode speeds are learned while running, or begin as an earlier start has kept them (no ladder is named)"
    )
