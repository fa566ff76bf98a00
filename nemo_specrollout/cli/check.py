# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout check`: validates a config and prints what it means on this machine; without torch."""

import argparse
from pathlib import Path

from nemo_specrollout.cli.describe import describe_local, describe_nemo_rl
from nemo_specrollout.cli.prepare import EXIT_BAD_INPUT, check_trains, place_drafter, prepare_local, use_threads
from nemo_specrollout.cli.terminal import complain
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.model_folder import misfit_of_block_drafter
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, effective_config
from nemo_specrollout.config.nemo_rl_tree import Finding, Tree, at, runtime_of
from nemo_specrollout.training.head.head_facts import misfit


def check(parsed: argparse.Namespace) -> int:
    """Prints what the config means on this machine; returns 0 if it can run. Raises ConfigError if a local run cannot.

    All errors of a NeMo-RL config are printed, one a line.
    """
    tree = load_config(parsed.config, parsed.overrides)
    findings = list[Finding]()
    if runtime_of(tree) == "nemo_rl":
        findings, lines = nemo_rl_findings(tree), describe_nemo_rl(tree)
    else:
        prepared = prepare_local(tree)
        check_trains(prepared)
        use_threads(prepared.config.cluster.threads)
        lines = describe_local(place_drafter(prepared))
    notes = [(finding.kind, str(finding)) for finding in findings if finding.kind != "error"]
    for name, text in lines + notes:
        print(f"{name:<12} {text}")
    errors = [str(finding) for finding in findings if finding.kind == "error"]
    for error in errors:
        complain(error)
    return EXIT_BAD_INPUT if errors else 0


def nemo_rl_findings(tree: Tree) -> list[Finding]:
    """Returns all findings on a NeMo-RL config, including drafters that do not fit the policy, as far as they are here.

    Those are EAGLE-3 heads that the run refreshes, and drafters of whole blocks.
    """
    findings = check_nemo_rl(tree)
    config = None if any(finding.kind == "error" for finding in findings) else effective_config(tree)
    if config is None:
        return findings
    policy, reasons = str(at(tree, "policy.model_name")), list[str | None]()
    if config.head is not None and config.draft_refresh is not None and (why := misfit(config.head, policy)):
        reasons.append(f"{BLOCK_PATH}.drafters: {why}")
    if Path(policy).is_dir():
        reasons += [misfit_of_block_drafter(drafter, Path(policy)) for drafter in config.drafters]
    unfit = (reason.partition(": ") for reason in reasons if reason)
    return findings + [Finding(subject, text, "error") for subject, _, text in unfit]
