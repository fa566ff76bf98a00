# SPDX-License-Identifier: Apache-2.0
"""Reads a config and checks it against this machine, without torch or vLLM. Most commands begin with it."""

import errno
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.local.model_folder_check import check_chat_template, check_model_folder, check_trainable
from lab.local.run_config import RunConfig, check_prompt, read_run_config
from lab.local.run_sections import PROCESSED_LOGPROBS
from lab.placement.cost_tables import CostTables
from lab.placement.planner import choose, placed
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    BlockDrafterConfig,
    DraftModelDrafterConfig,
    RemoteDrafterConfig,
    shared_secret,
)
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_rules import runner_findings
from nemo_specrollout.config.nemo_rl_tree import runtime_of
from nemo_specrollout.config.strict import ConfigError, raise_first_mistake
from nemo_specrollout.generation.engine.arguments import with_specrollout
from nemo_specrollout.heads.files.block_heads import misfit_of_block_drafter
from nemo_specrollout.heads.files.head_facts import check_head
from nemo_specrollout.installed.versions import unsupported_version, vllm_version
from nemo_specrollout.storage import model_folder
from nemo_specrollout.stragglers.decisions.speed_table_file import ladder_of

_LONGEST_NAME = 255
"""Largest number of bytes in a file name."""
_LONGEST_PATH = 3800
"""Largest number of bytes in a run directory's path. It leaves room for the names of our files."""
_KEYS_OF_ARGUMENTS = {
    "model": "policy.model_name",
    "dtype": "policy.generation.vllm_cfg.precision",
    "max_model_len": "policy.generation.vllm_cfg.max_model_len",
    "enforce_eager": "policy.generation.vllm_cfg.enforce_eager",
    "seed": "grpo.seed",
}
"""The config's own key for an argument of vLLM, by the argument's name. Only arguments with such a key are listed."""


@dataclass(frozen=True)
class Prepared:
    """A config of the local runner that has been checked."""

    tree: dict[str, Any]
    config: RunConfig
    ignored: list[str]
    """Keys of the config that have no effect."""
    model_config: dict[str, Any]
    """Content of the policy's `config.json`."""
    placement: str = ""
    """A sentence that says where `placement: auto` has put the drafter. Empty if the config does not have `placement:
    auto`."""


def prepare(path: Path, overrides: list[str]) -> Prepared:
    """Reads a config of the local runner and checks it without torch or vLLM. Raises ConfigError for a mistake."""
    prepared = prepare_local(load_config(path, overrides))
    check_chat_template(Path(prepared.config.policy.model_name), prepared.config.data, "data")
    return prepared


def prepare_local(tree: dict[str, Any]) -> Prepared:
    """Checks a config tree of the local runner. Raises ConfigError for a mistake."""
    if runtime_of(tree) != "local":
        raise ConfigError(
            "runtime: 'nemo_rl'; this command works with configs for one machine only, such as "
            "examples/configs/quickstart_cpu.yaml; `nemo-specrollout` runs and checks this one"
        )
    config, ignored = read_run_config(tree)
    _check_installed()
    block = config.policy.generation.specrollout
    policy = Path(config.policy.model_name)
    _check_log_dir(Path(config.logger.log_dir))
    model_config = check_model(policy, config)
    for data in (config.data, *(workload.data for workload in config.bench.workloads)):
        if data.dataset_name == "reasoning_gym":
            from lab.local.tasks import check_tasks

            check_tasks(data.tasks, "data.tasks")
        if data is not config.data or data.dataset_name != "free_text":  # which `run` refuses for want of a reward
            check_chat_template(policy, data, "data")
    _check_drafters(block, policy, model_config, config.policy.generation.vllm_cfg.max_model_len)
    refresh = block.draft_refresh
    if refresh is not None and refresh.trainer_gpus:
        text = f"{refresh.trainer_gpus}; the local runner trains on a CPU: set it to 0"
        raise ConfigError(f"{BLOCK_PATH}.draft_refresh.trainer_gpus: {text}")
    _check_engine(config)
    ladder_of(block)
    if block.enabled and (finding := next(runner_findings(tree), None)) is not None:
        raise ConfigError(str(finding))
    return Prepared(tree, config, ignored, model_config)


def prepare_run(tree: dict[str, Any]) -> Prepared:
    """Checks a config tree for training with the local trainer, and applies `placement: auto`.

    Raises ConfigError for a mistake.
    """
    prepared = prepare_local(tree)
    check_trainer(prepared)
    return place_drafter(prepared)


def check_trainer(prepared: Prepared) -> None:
    """Raises ConfigError for a config that the local trainer cannot train, even if `bench` can measure it."""
    config = prepared.config
    generation = prepared.config.policy.generation
    try:
        check_trainable(Path(config.policy.model_name), prepared.model_config)
    except ValueError as error:
        raise ConfigError(f"policy.model_name: {error}") from error
    _check_prompts(config)
    mode = generation.vllm_kwargs.get("logprobs_mode", PROCESSED_LOGPROBS)
    scores = "the local trainer scores samples of the whole distribution: set it to {}; NeMo-RL's trainer can"
    raise_first_mistake(
        "",
        (
            config.data.dataset_name == "free_text",
            "data.dataset_name",
            "free_text has no reward to train on; use it in bench.workloads",
        ),
        (generation.top_p != 1.0, "policy.generation.top_p", f"{generation.top_p}; {scores.format(1.0)}"),
        (generation.top_k is not None, "policy.generation.top_k", f"{generation.top_k}; {scores.format('null')}"),
        (
            mode != PROCESSED_LOGPROBS,
            "policy.generation.vllm_kwargs.logprobs_mode",
            f"{mode!r}; the trainer scores samples at their temperature: remove it",
        ),
    )


def place_drafter(prepared: Prepared) -> Prepared:
    """Decides for a config with `placement: auto` where the drafter runs, and returns the config with this decision.

    Other configs are returned unchanged. Raises ConfigError if the profile of measured times cannot be used.
    """
    config = prepared.config
    generation = config.policy.generation
    remote = config.policy.generation.specrollout.remote
    if remote is None or remote.placement != "auto":
        return prepared
    tables = CostTables.read(Path(str(remote.profile)), f"{BLOCK_PATH}.drafters.profile")
    num_requests = config.most_in_flight
    threads = int(os.environ.get("OMP_NUM_THREADS", config.cluster.threads))
    option = choose(generation.specrollout, tables, num_requests, threads, os.cpu_count() or 1)
    block = placed(generation.specrollout, option)
    policy = replace(config.policy, generation=replace(generation, specrollout=block))
    words = (
        f"auto: {option.in_words(tables.unit)}; {option.speedup:.2f}x plain expected of {num_requests} requests at "
        f"acceptance {remote.acceptance:g}"
    )
    return replace(prepared, config=replace(config, policy=policy), placement=words)


def _check_log_dir(path: Path) -> None:
    """Raises ConfigError if the folder cannot be made.

    To find this out, it makes a temporary folder in the nearest parent folder that exists.
    """
    try:
        existing = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.lexists(p))
        if not existing.is_dir():
            raise ConfigError(f"logger.log_dir: {path} cannot be a folder: {existing} is a file; choose another")
        to_make = path.absolute().relative_to(existing).parts
        longest = max((len(os.fsencode(name)) for name in to_make), default=0)
        if longest > _LONGEST_NAME or (to_make and len(os.fsencode(path.absolute())) > _LONGEST_PATH):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with tempfile.TemporaryDirectory(prefix=".specrollout-check-", dir=existing):
            pass
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"logger.log_dir: {str(path)[:200]!r} cannot be written to ({reason}); choose another"
        ) from error


def check_model(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Returns the content of the policy's `config.json`. Raises ConfigError for a folder that no engine can start with."""
    is_made = folder.name.startswith("smollm2")
    fix = "run `make smollm2`, which makes it" if is_made else "name a Hugging Face folder"
    is_missing = not os.path.isdir(folder)
    raise_first_mistake("policy", (is_missing, "model_name", f"folder {str(folder)[:200]} does not exist; {fix}"))
    try:
        model = check_model_folder(folder)
    except ValueError as error:
        raise ConfigError(f"policy.model_name: {error}") from error
    longest = model.get("max_position_embeddings")
    asked = config.policy.max_total_sequence_length
    text = f"{asked} is beyond the model's max_position_embeddings {longest}; lower it"
    raise_first_mistake("policy", (longest is not None and asked > longest, "max_total_sequence_length", text))
    return model


def _check_drafters(block: SpecrolloutConfig, policy: Path, model_config: Mapping[str, Any], length: int) -> None:
    """Raises ConfigError if a drafter's files do not fit the policy or the longest text, or if a remote one cannot be used."""
    path = f"{BLOCK_PATH}.drafters"
    has_mtp = model_folder.has_mtp_layers(model_config)
    for drafter in block.drafters:
        is_elsewhere = isinstance(drafter, RemoteDrafterConfig) and drafter.addresses
        model = Path(getattr(drafter, "model", ""))
        raise_first_mistake(
            path,
            (
                drafter.type == "mtp" and not has_mtp,
                "",
                f"type mtp, but {policy}/config.json has no num_nextn_predict_layers; name another type",
            ),
            (
                isinstance(drafter, BlockDrafterConfig) and not model.is_dir(),
                "model",
                f"folder {model} does not exist; name a checkpoint",
            ),
        )
        if isinstance(drafter, DraftModelDrafterConfig | RemoteDrafterConfig) and not is_elsewhere:
            _check_small_model(model, policy, drafter.type)
        elif str(model) != "." and model.is_dir():
            _check_loadable(model, policy, drafter.type)
        if (reason := misfit_of_block_drafter(drafter, policy)) is not None:
            raise ConfigError(reason)
    if block.head is not None:
        try:
            check_head(Path(block.head), policy, length, read_tensors=False)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
    if block.remote is not None:
        text = f"gpus {block.remote.gpus}; the local runner's drafters are on a CPU: set it to 0"
        raise_first_mistake(path, (block.remote.gpus, "", text))
        shared_secret(block.remote.addresses)


def _check_small_model(folder: Path, policy: Path, kind: str) -> None:
    """Raises ConfigError if a draft model is missing or incomplete, or if its vocabulary is not the policy's."""
    path = f"{BLOCK_PATH}.drafters.model"
    text = f"folder {folder} of the draft model does not exist; name a Hugging Face folder"
    raise_first_mistake(path, (not folder.is_dir(), "", text))
    _check_loadable(folder, policy, kind)


def _check_loadable(folder: Path, policy: Path, kind: str) -> None:
    """Raises ConfigError if vLLM cannot load a drafter's model, or cannot use it with the policy."""
    try:
        model_folder.check_model(folder, policy, kind)
    except ValueError as error:
        raise ConfigError(f"{BLOCK_PATH}.drafters.model: {error}") from error


def _check_prompts(config: RunConfig) -> None:
    """Raises ConfigError if a prompt of the demo's first training step leaves no room for a response.

    Prompts of later steps, and of other tasks, are checked when they are sampled.
    """
    if config.data.dataset_name != "step_addition":
        return
    from tokenizers import Tokenizer

    from lab.local.step_addition import make_problems

    tokenizer = Tokenizer.from_file(str(Path(config.policy.model_name) / "tokenizer.json"))
    problems = make_problems(config.grpo.seed, config.grpo.num_prompts_per_step, 0, config.data.max_terms)
    longest = max(len(tokenizer.encode(problem.prompt).ids) for problem in problems)
    check_prompt(longest, config.policy.max_total_sequence_length)


def _check_installed() -> None:
    """Raises ConfigError if vLLM or Megatron-Core is missing, or if the installed vLLM is not supported."""
    version = vllm_version()
    if version is None:
        raise ConfigError("vLLM is not installed; `make setup` installs the CPU build")
    if (message := unsupported_version(version)) is not None:
        raise ConfigError(message)
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("megatron-core is not installed; `make setup` installs it")


def _check_engine(config: RunConfig) -> None:
    generation = config.policy.generation
    for name in _KEYS_OF_ARGUMENTS.keys() & generation.vllm_kwargs.keys():
        raise ConfigError(f"policy.generation.vllm_kwargs.{name}: set {_KEYS_OF_ARGUMENTS[name]} instead")
    try:
        with_specrollout(generation.vllm_kwargs, generation.specrollout, "cpu")
    except ValueError as error:
        raise ConfigError(f"policy.generation.{error}") from error
