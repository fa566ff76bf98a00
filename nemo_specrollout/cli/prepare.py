# SPDX-License-Identifier: Apache-2.0
"""What every command does first: read the config, check it against the machine, say what is wrong in a sentence."""

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_specrollout.config.addresses import shared_secret
from nemo_specrollout.config.block import BLOCK_DRAFTERS, BLOCK_PATH, DrafterConfig, SpecrolloutConfig
from nemo_specrollout.config.block_drafter import misfit_of_block_drafter
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_engine import runner_findings
from nemo_specrollout.config.run import DataConfig, RunConfig, read_run_config
from nemo_specrollout.config.strict import ConfigError, nearest
from nemo_specrollout.config.versions import unsupported_version, vllm_version
from nemo_specrollout.generation.arguments import with_specrollout
from nemo_specrollout.scheduling.auto_placement import Machine, choose, placed
from nemo_specrollout.scheduling.cost_tables import CostTables
from nemo_specrollout.training.head_facts import check_head

EXIT_BAD_INPUT = 2
RUNTIMES = ("local", "nemo_rl")
# vLLM arguments that have a place of their own in the config.
_PLACES = {
    "model": "policy.model_name",
    "dtype": "policy.generation.vllm_cfg.precision",
    "max_model_len": "policy.generation.vllm_cfg.max_model_len",
    "enforce_eager": "policy.generation.vllm_cfg.enforce_eager",
    "seed": "grpo.seed",
}
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@dataclass(frozen=True)
class Prepared:
    """A config that can run here: as a tree, as a record, and the keys in it that have no effect."""

    tree: dict[str, Any]
    config: RunConfig
    ignored: list[str]
    model_config: dict[str, Any]
    placement: str = ""
    """Where `placement: auto` has put the drafter, in words."""


def use_threads(count: int = 1) -> None:
    """Sets the number of OpenMP threads of this process; to be called before torch is loaded. OpenMP's barriers spin: with two
    threads, anything else on the machine makes a step ten times slower. A number in the environment stays."""
    os.environ.setdefault("OMP_NUM_THREADS", str(count))


def runtime_of(tree: Mapping[str, Any]) -> str:
    """Who runs a config: `local` (also where nothing is said) or `nemo_rl`. Raises ConfigError."""
    runtime = tree.get("runtime", "local")
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime: {runtime!r} is not available{nearest(str(runtime), RUNTIMES)}")
    return str(runtime)


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
    _check_heads(config.policy.generation.specrollout, Path(config.policy.model_name))
    _check_remote(config.policy.generation.specrollout.remote)
    _check_trainer(config)
    _check_engine(config)
    if config.policy.generation.specrollout.enabled and (finding := next(runner_findings(tree), None)) is not None:
        raise ConfigError(str(finding))
    return Prepared(tree, config, ignored, model_config)


def check_out(path: Path) -> None:
    """Before minutes are spent on what cannot be written. Raises ConfigError."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--out: {path} cannot be a file there; name one in a folder that exists")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out: {path} cannot be written to; choose another")


def place_drafter(prepared: Prepared) -> Prepared:
    """What `placement: auto` asks for is done, if it does. Raises ConfigError if its profile cannot be used."""
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
    """The folder, or the nearest one above it that exists, must be one in which a file can be made."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"logger.log_dir: {path} cannot be a folder: {existing} is a file; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"logger.log_dir: {path} cannot be written to; choose another")


def _check_model(folder: Path, config: RunConfig) -> dict[str, Any]:
    if not folder.is_dir():
        fix = (
            "run `make smollm2`, which makes it" if folder.name.startswith("smollm2") else "name a Hugging Face folder"
        )
        raise ConfigError(f"policy.model_name: folder {folder} does not exist; {fix}")
    for name in _MODEL_FILES:
        if not (folder / name).is_file():
            raise ConfigError(f"policy.model_name: {folder} has no {name}")
    try:
        model: dict[str, Any] = json.loads((folder / "config.json").read_text())
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        largest = max([*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer.get("added_tokens", []))])
        sizes = {name: int(model[name]) for name in ("vocab_size", "num_hidden_layers", "hidden_size")}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"policy.model_name: config.json or tokenizer.json of {folder} cannot be read "
            f"({type(error).__name__}: {error}); name a Hugging Face folder of a Qwen3 or a Llama"
        ) from error
    _check_vocabulary(folder, largest, sizes["vocab_size"])
    longest = model.get("max_position_embeddings")
    if longest is not None and config.policy.max_total_sequence_length > longest:
        raise ConfigError(
            f"policy.max_total_sequence_length: {config.policy.max_total_sequence_length} is beyond the model's "
            f"max_position_embeddings {longest}; lower it"
        )
    return model


def check_task(data: DataConfig) -> None:
    """Raises ConfigError for tasks and options that do not exist."""
    if data.dataset_name == "reasoning_gym":
        from nemo_specrollout.local.reasoning_gym_task import check_tasks

        check_tasks(data.tasks, "data.tasks")


def _check_heads(block: SpecrolloutConfig, policy: Path) -> None:
    """They must have been made for the policy. A small model is vLLM's to check."""
    for drafter in block.drafters:
        if drafter.type in BLOCK_DRAFTERS and not Path(str(drafter.model)).is_dir():
            raise ConfigError(
                f"{BLOCK_PATH}.drafters.model: folder {drafter.model} does not exist; name that of a checkpoint"
            )
        if (reason := misfit_of_block_drafter(drafter, policy)) is not None:
            raise ConfigError(reason)
    if block.head is None:
        return
    try:
        check_head(Path(block.head), policy, read_tensors=False)
    except ValueError as error:
        raise ConfigError(f"{BLOCK_PATH}.drafters: {error}") from error


def _check_remote(drafter: DrafterConfig | None) -> None:
    """Its model must be a folder here, if the run starts it, and the secret must be there, if others can reach it."""
    if drafter is None:
        return
    if drafter.workers and not Path(str(drafter.model)).is_dir():
        raise ConfigError(f"{BLOCK_PATH}.drafters: folder {drafter.model} of the draft model does not exist")
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


def _check_vocabulary(folder: Path, largest_id: int, vocab_size: int) -> None:
    """A tokenizer may have fewer ids than the model (padding), never more."""
    if largest_id >= vocab_size:
        raise ConfigError(
            f"policy.model_name: the tokenizer of {folder} has token id {largest_id}, but the model's vocabulary ends "
            f"at {vocab_size - 1}; the two do not belong together"
        )


def _check_engine(config: RunConfig) -> None:
    version = vllm_version()
    if version is None:
        raise ConfigError("vLLM is not installed; `make setup` installs the CPU build")
    if (message := unsupported_version(version)) is not None:
        raise ConfigError(message)
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("megatron-core is not installed; `make setup` installs it")
    generation = config.policy.generation
    for name in _PLACES.keys() & generation.vllm_kwargs.keys():
        raise ConfigError(f"policy.generation.vllm_kwargs.{name}: set {_PLACES[name]} instead")
    try:
        with_specrollout(generation.vllm_kwargs, generation.specrollout, "cpu")
    except ValueError as error:
        raise ConfigError(f"policy.generation.{error}") from error
