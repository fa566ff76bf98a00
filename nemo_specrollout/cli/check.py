# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout check`: validates a config and prints what it means on this machine; without torch."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.cli.prepare import EXIT_BAD_INPUT, place_drafter, prepare_local, prepare_run
from lab.local.run_sections import OFF
from nemo_specrollout.cli.describe import describe_local, describe_nemo_rl
from nemo_specrollout.cli.terminal import complain
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.model_folder import misfit_of_block_drafter
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, effective_config
from nemo_specrollout.config.nemo_rl_tree import Finding, at, runtime_of
from nemo_specrollout.config.nemo_rl_values import unknown_overrides
from nemo_specrollout.training.head.head_facts import misfit


@dataclass(frozen=True)
class Subject:
    """A config, and all that is known of it without a prediction."""

    tree: dict[str, Any]
    lines: list[tuple[str, str]]
    """Names and sentences that describe the run."""
    block: SpecrolloutConfig
    findings: list[Finding]
    """Errors in a NeMo-RL config, and warnings and notes on it."""

    @property
    def errors(self) -> list[str]:
        """The errors of a NeMo-RL config."""
        return [str(finding) for finding in self.findings if finding.kind == "error"]

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Kind and sentence of each warning and note."""
        return [(finding.kind, str(finding)) for finding in self.findings if finding.kind != "error"]


def check(parsed: argparse.Namespace) -> int:
    """Prints what the config means on this machine; returns 0 if it can run. Raises ConfigError if a local run cannot.

    All errors of a NeMo-RL config are printed, one a line.
    """
    subject = subject_of(load_config(parsed.config, parsed.overrides))
    unknown = unknown_overrides(parsed.config, parsed.overrides) if runtime_of(subject.tree) == "nemo_rl" else ()
    for name, text in [*subject.lines, *subject.notes, *((finding.kind, str(finding)) for finding in unknown)]:
        print(f"{name:<12} {text}")
    for error in subject.errors:
        complain(error)
    return EXIT_BAD_INPUT if subject.errors else 0


def subject_of(tree: dict[str, Any], *, trains: bool = True) -> Subject:
    """Returns what is known of a config. Raises ConfigError if it is of a local run that cannot run.

    With `trains`, a config that the local trainer cannot train is an error.
    """
    if runtime_of(tree) == "local":
        prepared = prepare_run(tree) if trains else place_drafter(prepare_local(tree))
        return Subject(tree, describe_local(prepared), prepared.config.policy.generation.specrollout, [])
    findings, block = check_nemo_rl(tree), OFF
    if not any(finding.kind == "error" for finding in findings):
        block = effective_config(tree) or OFF
        findings += _misfits(block, str(at(tree, "policy.model_name")))
    return Subject(tree, describe_nemo_rl(tree), block, findings)


def _misfits(block: SpecrolloutConfig, policy: str) -> list[Finding]:
    """Returns errors about EAGLE-3 heads that the run refreshes, and drafters of whole blocks, as far as they are here."""
    reasons = list[str | None]()
    if block.head is not None and block.draft_refresh is not None and (why := misfit(block.head, policy)):
        reasons.append(f"{BLOCK_PATH}.drafters: {why}")
    if Path(policy).is_dir():
        reasons += [misfit_of_block_drafter(drafter, Path(policy)) for drafter in block.drafters]
    unfit = (reason.partition(": ") for reason in reasons if reason)
    return [Finding(subject, text, "error") for subject, _, text in unfit]
