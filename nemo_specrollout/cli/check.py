# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout check`: validates a config and explains what it means on this machine.

It starts fast because it imports torch only if it has to load a tokenizer from a local folder.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_specrollout.cli.command_line import EXIT_BAD_INPUT
from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.cli.terminal import complain
from nemo_specrollout.config.block import OFF, SpecrolloutConfig
from nemo_specrollout.config.known_traps import MetTrap, known_traps
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, effective_config, values_of
from nemo_specrollout.config.nemo_rl_rules import unknown_overrides
from nemo_specrollout.config.nemo_rl_tree import GENERATION, VLLM_CFG, VLLM_KWARGS, Finding, Tree, at, runtime_of
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.arguments import with_specrollout
from nemo_specrollout.heads.files.block_heads import drafter_misfits
from nemo_specrollout.reports.advice import advice_of_run, lines_of
from nemo_specrollout.reports.run_folders import latest_run
from nemo_specrollout.stragglers.decisions.speed_table_file import ladder_of


@dataclass(frozen=True)
class Subject:
    """A config, and what the commands `check` and `doctor` print about it."""

    tree: dict[str, Any]
    lines: list[tuple[str, str]]
    """The lines that describe the run, each as a name and a sentence."""
    block: SpecrolloutConfig
    """The config's block `policy.generation.specrollout`, or `OFF` if the block is off or the config has errors."""
    findings: list[Finding]

    @property
    def errors(self) -> list[str]:
        """The reasons why the config cannot run. Empty if it can run."""
        return [str(finding) for finding in self.findings if finding.kind == "error"]

    @property
    def notes(self) -> list[tuple[str, str]]:
        """The warnings and notes about the config, each as its kind and its sentence."""
        return [(finding.kind, str(finding)) for finding in self.findings if finding.kind != "error"]

    @property
    def traps(self) -> list[MetTrap]:
        """The known faults of vLLM and NeMo-RL that can affect a run of the config. Empty if the config cannot run."""
        return [] if self.errors else known_traps(self.tree)


def check(parsed: argparse.Namespace) -> int:
    """Prints what a config means on this machine, and what is wrong with it.

    Returns the exit code, which is 0 if the config can run, and otherwise 2. Raises ConfigError if it cannot be read.
    """
    subject = describe_config(read_nemo_rl_config(parsed.config, parsed.overrides))
    unknown = ((finding.kind, str(finding)) for finding in unknown_overrides(parsed.config, parsed.overrides))
    traps = ((trap.state, str(trap)) for trap in subject.traps)
    for name, text in [*subject.lines, *_advice(subject), *subject.notes, *unknown, *traps]:
        print(f"{name:<12} {text}")
    for error in subject.errors:
        complain(error)
    return EXIT_BAD_INPUT if subject.errors else 0


def _advice(subject: Subject) -> list[tuple[str, str]]:
    """Returns lines with advice that follows from the latest run in the config's log folder. Empty if the block is off."""
    if subject.errors or not subject.block.enabled:
        return []
    log_dir = Path(str(at(subject.tree, "logger.log_dir", "logs")))
    run = latest_run(log_dir)
    if run is None:
        text = (
            f"no run in {log_dir} yet; after one, its report and check say what would pay: moving, run_ahead, drafters"
        )
        return [("advice", text)]
    of_run = advice_of_run(run)
    return [("advice", f"by {run.folder}: {line}") for line in lines_of(of_run)]


def read_nemo_rl_config(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Reads a config for NeMo-RL and returns it as nested dictionaries.

    Raises ConfigError if the config cannot be read, or if it is for a local run of the laboratory (`lab`) without NeMo-RL.
    """
    tree = load_config(path, overrides)
    check_runtime(tree)
    return tree


def check_runtime(tree: Tree) -> None:
    """Raises ConfigError if a config has the runtime `local`, which only the laboratory (`lab`) can run."""
    if runtime_of(tree) == "local":
        raise ConfigError("runtime: 'local'; use `specrollout-lab`, or set runtime=nemo_rl for a run in NeMo-RL")


def describe_config(tree: dict[str, Any]) -> Subject:
    """Checks a config for NeMo-RL, and returns its description together with everything that was found wrong with it."""
    findings = check_nemo_rl(tree)
    block = OFF
    if not any(finding.kind == "error" for finding in findings):
        block = effective_config(tree) or OFF
        policy = str(at(tree, "policy.model_name"))
        length = at(tree, f"{VLLM_CFG}.max_model_len")
        findings += [Finding.error(sentence) for sentence in drafter_misfits(block, policy, length)]
        findings += _refused_arguments(tree, block)
        findings += _tokenizer_faults(tree)
        findings += _ladder_faults(block)
    return Subject(tree, describe_nemo_rl(tree), block, findings)


def _refused_arguments(tree: Tree, block: SpecrolloutConfig) -> Iterator[Finding]:
    """Yields an error if the config's own arguments for vLLM contradict those that the block needs."""
    try:
        with_specrollout(at(tree, VLLM_KWARGS, {}), block, "cuda")
    except ValueError as error:
        yield Finding.error(error, f"{GENERATION}.")


def _ladder_faults(block: SpecrolloutConfig) -> Iterator[Finding]:
    """Yields an error if the block names a file of decode speeds that a run could not read."""
    try:
        ladder_of(block)
    except ConfigError as error:
        yield Finding.error(error)


def _tokenizer_faults(tree: Tree) -> Iterator[Finding]:
    """Yields an error if the tokenizer has no end-of-text token, or its chat template fails for prompts like the run's.

    It checks only a tokenizer in a local folder, and only if transformers is installed, because it has to load the tokenizer.
    """
    folder = Path(str(at(tree, "policy.tokenizer.name", at(tree, "policy.model_name"))))
    if not folder.is_dir() or find_spec("transformers") is None:
        return
    from transformers import AutoTokenizer

    own = at(tree, "policy.tokenizer", {})
    has_system = any(values_of(tree.get("data"), "system_prompt_file"))
    roles = ["system"] * has_system + ["user"]
    kwargs = own.get("chat_template_kwargs") or {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if tokenizer.eos_token is None and at(tree, f"{GENERATION}.stop_token_ids") is None:
            raise ValueError(f"no eos_token ends a response, and {GENERATION}.stop_token_ids is null")
        if at(tree, "data") and own.get("chat_template", "default") == "default":
            chat = [{"role": role, "content": "1"} for role in roles]
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **kwargs)
    except Exception as error:  # transformers and jinja2 have errors of their own
        reason = f"{folder} does not suit prompts of {' and '.join(roles)} ({' '.join(str(error).split())[:120]})"
        if "trust_remote_code" not in reason:  # NeMo-RL trusts the folder's code
            yield Finding("policy.tokenizer", f"{reason}; set what is missing, or name another", "error")
