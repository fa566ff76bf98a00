# SPDX-License-Identifier: Apache-2.0
"""First part of the commands: reads a config and checks it against this machine, without torch or vllm."""

import errno
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    BlockDrafterConfig,
    DraftModelDrafterConfig,
    RemoteDrafterConfig,
    shared_secret,
)
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.model_folder import misfit_of_block_drafter, read_object, tensor_shapes
from nemo_specrollout.config.nemo_rl_rules import runner_findings
from nemo_specrollout.config.nemo_rl_tree import runtime_of
from nemo_specrollout.config.run_config import RunConfig, check_prompt, read_run_config
from nemo_specrollout.config.run_sections import PROCESSED_LOGPROBS, DataConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import unsupported_version, vllm_version
from nemo_specrollout.generation.arguments import with_specrollout
from nemo_specrollout.scheduling.placement.cost_tables import CostTables
from nemo_specrollout.scheduling.placement.planner import Machine, choose, placed
from nemo_specrollout.scheduling.racing.draft_ladder import LadderFile
from nemo_specrollout.training.checkpoints.policy_folder import check_model_folder, check_trainable, has_mtp_layers
from nemo_specrollout.training.head.head_checks import check_head

EXIT_FAILED = 1
"""Exit code of a command that failed."""
EXIT_BAD_INPUT = 2
"""Exit code after a user's mistake."""
_LONGEST_NAME = 255
"""Longest file name, in bytes."""
_LONGEST_PATH = 3800
"""Longest path of a run directory, in bytes, so that the names of our files fit behind it."""
_KEYS_OF_ARGUMENTS = {
    "model": "policy.model_name",
    "dtype": "policy.generation.vllm_cfg.precision",
    "max_model_len": "policy.generation.vllm_cfg.max_model_len",
    "enforce_eager": "policy.generation.vllm_cfg.enforce_eager",
    "seed": "grpo.seed",
}
"""vLLM arguments that have their own key in the config."""


@dataclass(frozen=True)
class Prepared:
    """A checked config of the local runner."""

    tree: dict[str, Any]
    config: RunConfig
    ignored: list[str]
    """Keys without effect."""
    model_config: dict[str, Any]
    """`config.json` of the policy."""
    placement: str = ""
    """Sentence on the place that `placement: auto` chose for the drafter; empty without it."""


def use_threads(count: int = 1) -> None:
    """Sets the number of OpenMP threads, unless the environment does. Call it before torch is loaded.

    OpenMP's barriers spin: with two threads, any other load on the machine makes a step ten times slower.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(count))


def prepare(path: Path, overrides: list[str]) -> Prepared:
    """Reads and checks a config of the local runner without torch or vllm. Raises ConfigError."""
    return prepare_local(load_config(path, overrides))


def prepare_local(tree: dict[str, Any]) -> Prepared:
    """Checks a config tree of the local runner. Raises ConfigError."""
    if runtime_of(tree) != "local":
        raise ConfigError(
            "runtime: 'nemo_rl'; `bench`, `ladder`, `profile` and the local runner need a config with runtime: local"
        )
    config, ignored = read_run_config(tree)
    _check_log_dir(Path(config.logger.log_dir))
    model_config = _check_model(Path(config.policy.model_name), config)
    for data in (config.data, *(workload.data for workload in config.bench.workloads)):
        check_task(data)
    _check_drafters(config.policy.generation.specrollout, Path(config.policy.model_name), model_config)
    _check_remote(config.policy.generation.specrollout.remote)
    _check_trainer(config)
    _check_engine(config)
    _check_ladder(config)
    if config.policy.generation.specrollout.enabled and (finding := next(runner_findings(tree), None)) is not None:
        raise ConfigError(str(finding))
    return Prepared(tree, config, ignored, model_config)


def check_trains(prepared: Prepared) -> None:
    """Raises ConfigError for a config that `bench` can measure, but that the local trainer cannot train."""
    config, folder = prepared.config, Path(prepared.config.policy.model_name)
    try:
        check_trainable(folder, prepared.model_config)
    except ValueError as error:
        raise ConfigError(f"policy.model_name: {error}") from error
    _check_prompts(config)
    if config.data.dataset_name == "free_text":
        raise ConfigError("data.dataset_name: free_text has no reward to train on; use it in bench.workloads")
    generation = config.policy.generation
    for name, value, off in (("top_p", generation.top_p, 1.0), ("top_k", generation.top_k, None)):
        if value != off:
            raise ConfigError(
                f"policy.generation.{name}: {value}; the local trainer scores samples of the whole distribution: "
                f"set it to {'null' if off is None else off}; NeMo-RL's trainer can"
            )
    mode = generation.vllm_kwargs.get("logprobs_mode", PROCESSED_LOGPROBS)
    if mode != PROCESSED_LOGPROBS:
        raise ConfigError(
            f"policy.generation.vllm_kwargs.logprobs_mode: {mode!r}; the trainer scores samples at their temperature: "
            "remove it"
        )


def check_out(path: Path, flag: str = "--out") -> None:
    """Raises ConfigError, which names `flag`, if `path` cannot be written as a file."""
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag}: {path} cannot be a file there; name one in a folder that exists")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {path} cannot be written to; choose another")


def place_drafter(prepared: Prepared) -> Prepared:
    """Applies `placement: auto`, if the config has it. Raises ConfigError if its profile cannot be used."""
    config = prepared.config
    generation, remote = config.policy.generation, config.policy.generation.specrollout.remote
    if remote is None or remote.placement != "auto":
        return prepared
    tables = CostTables.read(Path(str(remote.profile)), f"{BLOCK_PATH}.drafters.profile")
    cores = os.cpu_count() or 1
    machine = Machine(config.most_in_flight, int(os.environ.get("OMP_NUM_THREADS", cores)), cores)
    option = choose(generation.specrollout, tables, machine)
    block = placed(generation.specrollout, option)
    policy = replace(config.policy, generation=replace(generation, specrollout=block))
    words = (
        f"auto: {option.in_words(tables.unit)}; {option.speedup:.2f}x plain expected of {machine.num_requests} requests at "
        f"acceptance {remote.acceptance:g}"
    )
    return replace(prepared, config=replace(config, policy=policy), placement=words)


def _check_log_dir(path: Path) -> None:
    """Raises ConfigError if the folder cannot be made: makes and removes a folder in the nearest parent that exists."""
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


def _check_model(folder: Path, config: RunConfig) -> dict[str, Any]:
    if not os.path.isdir(folder):
        fix = (
            "run `make smollm2`, which makes it" if folder.name.startswith("smollm2") else "name a Hugging Face folder"
        )
        raise ConfigError(f"policy.model_name: folder {str(folder)[:200]} does not exist; {fix}")
    try:
        model = check_model_folder(folder)
    except ValueError as error:
        raise ConfigError(f"policy.model_name: {error}") from error
    longest = model.get("max_position_embeddings")
    if longest is not None and config.policy.max_total_sequence_length > longest:
        raise ConfigError(
            f"policy.max_total_sequence_length: {config.policy.max_total_sequence_length} is beyond the model's "
            f"max_position_embeddings {longest}; lower it"
        )
    return model


def check_task(data: DataConfig) -> None:
    """Raises ConfigError for tasks or options that do not exist."""
    if data.dataset_name == "reasoning_gym":
        from nemo_specrollout.local.tasks import check_tasks

        check_tasks(data.tasks, "data.tasks")


def _check_drafters(block: SpecrolloutConfig, policy: Path, model_config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a drafter with weights that do not fit the policy."""
    for drafter in block.drafters:
        if drafter.type == "mtp" and not has_mtp_layers(model_config):
            raise ConfigError(
                f"{BLOCK_PATH}.drafters: type mtp, but {policy}/config.json has no num_nextn_predict_layers; name another type"
            )
        is_elsewhere = isinstance(drafter, RemoteDrafterConfig) and drafter.addresses
        if isinstance(drafter, DraftModelDrafterConfig | RemoteDrafterConfig) and not is_elsewhere:
            _check_small_model(Path(drafter.model), model_config)
        if isinstance(drafter, BlockDrafterConfig) and not Path(drafter.model).is_dir():
            raise ConfigError(f"{BLOCK_PATH}.drafters.model: folder {drafter.model} does not exist; name a checkpoint")
        if (reason := misfit_of_block_drafter(drafter, policy)) is not None:
            raise ConfigError(reason)
    if block.head is None:
        return
    try:
        check_head(Path(block.head), policy, read_tensors=False)
    except ValueError as error:
        raise ConfigError(f"{BLOCK_PATH}.drafters: {error}") from error


def _check_small_model(folder: Path, model_config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a draft model that is missing, incomplete, or of another vocabulary."""
    if not folder.is_dir():
        raise ConfigError(
            f"{BLOCK_PATH}.drafters.model: folder {folder} of the draft model does not exist; name a Hugging Face folder"
        )
    try:
        config = read_object(folder / "config.json")
        tensor_shapes(sorted(folder.glob("*.safetensors")))
    except ValueError as error:
        raise ConfigError(f"{BLOCK_PATH}.drafters.model: {error}") from error
    if config.get("vocab_size") != model_config["vocab_size"]:
        raise ConfigError(
            f"{BLOCK_PATH}.drafters.model: {folder} knows {config.get('vocab_size')} tokens, the policy "
            f"{model_config['vocab_size']}; name a model of the policy's family"
        )


def _check_remote(drafter: RemoteDrafterConfig | None) -> None:
    """Raises ConfigError for GPUs, and for addresses beyond this machine without a secret."""
    if drafter is None:
        return
    if drafter.gpus:
        raise ConfigError(
            f"{BLOCK_PATH}.drafters: gpus {drafter.gpus}; the local runner's drafters are on a CPU: set it to 0"
        )
    shared_secret(drafter.addresses)


def _check_trainer(config: RunConfig) -> None:
    refresh = config.policy.generation.specrollout.draft_refresh
    if refresh is not None and refresh.trainer_gpus:
        raise ConfigError(
            f"{BLOCK_PATH}.draft_refresh.trainer_gpus: {refresh.trainer_gpus}; the local runner trains on a CPU: set it to 0"
        )


def _check_ladder(config: RunConfig) -> None:
    """Raises ConfigError if the file that races start from is no ladder."""
    racing = config.policy.generation.specrollout.fastest_of_n
    if racing is not None and racing.enabled and racing.ladder is not None:
        LadderFile.read(Path(racing.ladder), f"{BLOCK_PATH}.fastest_of_n.ladder")


def _check_prompts(config: RunConfig) -> None:
    """Raises ConfigError if a prompt of the demo's first step leaves no room for a response.

    Prompts of later steps, and of other tasks, are checked when they are sampled.
    """
    if config.data.dataset_name != "step_addition":
        return
    from tokenizers import Tokenizer

    from nemo_specrollout.local.step_addition import make_problems

    tokenizer = Tokenizer.from_file(str(Path(config.policy.model_name) / "tokenizer.json"))
    problems = make_problems(config.grpo.seed, config.grpo.num_prompts_per_step, 0, config.data.max_terms)
    longest = max(len(tokenizer.encode(problem.prompt).ids) for problem in problems)
    check_prompt(longest, config.policy.max_total_sequence_length)


def _check_engine(config: RunConfig) -> None:
    version = vllm_version()
    if version is None:
        raise ConfigError("vLLM is not installed; `make setup` installs the CPU build")
    if (message := unsupported_version(version)) is not None:
        raise ConfigError(message)
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("megatron-core is not installed; `make setup` installs it")
    generation = config.policy.generation
    for name in _KEYS_OF_ARGUMENTS.keys() & generation.vllm_kwargs.keys():
        raise ConfigError(f"policy.generation.vllm_kwargs.{name}: set {_KEYS_OF_ARGUMENTS[name]} instead")
    try:
        with_specrollout(generation.vllm_kwargs, generation.specrollout, "cpu")
    except ValueError as error:
        raise ConfigError(f"policy.generation.{error}") from error
