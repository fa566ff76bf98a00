# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout check`: validates a config and prints what it means on this machine; without torch."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.cli.command_line import EXIT_BAD_INPUT
from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.cli.terminal import complain
from nemo_specrollout.config.block import OFF, SpecrolloutConfig
from nemo_specrollout.config.known_traps import known_traps
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, effective_config
from nemo_specrollout.config.nemo_rl_tree import Finding, at, runtime_of
from nemo_specrollout.config.nemo_rl_values import unknown_overrides
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.training.head.block_heads import drafter_misfits


@dataclass(frozen=True)
class Subject:
    """A config, and all that is known of it without a prediction."""

    tree: dict[str, Any]
    lines: list[tuple[str, str]]
    block: SpecrolloutConfig
    findings: list[Finding]

    @property
    def errors(self) -> list[str]:
        """Reasons why the config cannot run."""
        return [str(finding) for finding in self.findings if finding.kind == "error"]

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Kind and sentence of each warning and note."""
        return [(finding.kind, str(finding)) for finding in self.findings if finding.kind != "error"]


def check(parsed: argparse.Namespace) -> int:
    """Prints what the config means on this machine, and its errors, one a line; returns 0 if it can run."""
    subject = describe_config(read_nemo_rl_config(parsed.config, parsed.overrides))
    unknown = ((finding.kind, str(finding)) for finding in unknown_overrides(parsed.config, parsed.overrides))
    traps = () if subject.errors else known_traps(subject.tree)
    for name, text in [*subject.lines, *subject.notes, *unknown, *traps]:
        print(f"{name:<12} {text}")
    for error in subject.errors:
        complain(error)
    return EXIT_BAD_INPUT if subject.errors else 0


def read_nemo_rl_config(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Returns the tree of a config for NeMo-RL. Raises ConfigError, also for a config of the laboratory."""
    tree = load_config(path, overrides)
    if runtime_of(tree) == "local":
        raise ConfigError("runtime: 'local'; use `specrollout-lab`, or set runtime=nemo_rl for a run in NeMo-RL")
    return tree


def describe_config(tree: dict[str, Any]) -> Subject:
    """Returns what is known of a config for NeMo-RL, whether it can run or not."""
    findings, block = check_nemo_rl(tree), OFF
    if not any(finding.kind == "error" for finding in findings):
        block = effective_config(tree) or OFF
        unfit = (reason.partition(": ") for reason in drafter_misfits(block, str(at(tree, "policy.model_name"))))
        findings += [Finding(subject, text, "error") for subject, _, text in unfit]
    return Subject(tree, describe_nemo_rl(tree), block, findings)
