# SPDX-License-Identifier: Apache-2.0
"""Puts the block into effect in NeMo-RL by replacing attributes of its modules. `uninstall` puts them back."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import secret_of_run
from nemo_specrollout.config.model_folder import misfit_of_block_drafter
from nemo_specrollout.config.nemo_rl_config import ALGORITHMS, effective_block, prepare_nemo_rl
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.config.versions import installed_versions
from nemo_specrollout.generation.arguments import with_specrollout
from nemo_specrollout.nemo_rl.patch_points import (
    ALL_PATCH_POINTS,
    CONTROLLER_PATCH_POINTS,
    GYM_PATCH_POINTS,
    PATCH_POINTS,
    TRAINER_PATCH_POINTS,
    PatchPoint,
    check_patch_points,
)
from nemo_specrollout.nemo_rl.row_seeds import RUN_SEED
from nemo_specrollout.scheduling.racing.draft_ladder import LadderFile
from nemo_specrollout.training.head.head_checks import misfit
from nemo_specrollout.training.head.head_folder import HeadFolder
from vllm_v2_cpu.plugin import V2_ON_CPU

if TYPE_CHECKING:
    from nemo_specrollout.nemo_rl.logger import Watch

_NATIVE, _OURS = "nemo_rl.models.generation.vllm", "nemo_specrollout.nemo_rl.ray_workers"
ACTORS = {
    f"{_NATIVE}.vllm_worker.VllmGenerationWorker": f"{_OURS}.SpecrolloutVllmWorker",
    f"{_NATIVE}.vllm_worker_async.VllmAsyncGenerationWorker": f"{_OURS}.SpecrolloutVllmAsyncWorker",
}
"""NeMo-RL's Ray actors around engines, and our actors that replace them."""
ENGINE_ENVIRONMENT = {V2_ON_CPU: "1"}
"""Environment of every engine. It has no effect on a GPU."""
_replaced: list[tuple[Any, str, Any]] = []
"""Replaced attributes: module, name, original."""


def install(config: Any) -> bool:
    """Puts `policy.generation.specrollout` of NeMo-RL's `MasterConfig` into effect. Call it before NeMo-RL's `setup`.

    Returns whether the block is enabled. Without a block, or with `enabled: false`, nothing is touched, and no worker
    imports this package. Otherwise `config` gets the complete block and environment variables for the engines.
    Raises ConfigError if the block, the config or the installed NeMo-RL does not allow it.
    """
    uninstall()
    plain_block = effective_block({"policy": config.policy})
    if plain_block is None:
        return False
    prepare_nemo_rl(config.model_dump())
    check_patch_points((*PATCH_POINTS, *_patch_points_of(config)))
    block = _checked_block(plain_block, config.policy)
    config.policy["generation"]["specrollout"] = plain_block
    vllm_cfg = config.policy["generation"]["vllm_cfg"]
    vllm_cfg["env_vars"] = {
        **(vllm_cfg.get("env_vars") or {}),
        **ENGINE_ENVIRONMENT,
        RUN_SEED: str(algorithm_of(config).seed),
    }
    _replace_names(config, block)
    drafters = ", ".join(drafter.type for drafter in block.drafters) or "vLLM's own, or none"
    print(f"specrollout is on: drafters {drafters}; on vLLM's V2 model runner", flush=True)
    return True


def uninstall() -> None:
    """Puts NeMo-RL's modules back as they were."""
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)


def _replace(module: Any, name: str, new: Any) -> None:
    _replaced.append((module, name, getattr(module, name)))
    setattr(module, name, new)


def algorithm_of(config: Any) -> Any:
    """Returns the block of a NeMo-RL `MasterConfig` that has the seed and the number of steps."""
    found = (getattr(config, name, None) for name in ALGORITHMS)
    return next(block for block in found if block is not None)


def _is_controlled(config: Any) -> bool:
    """Returns whether NeMo-RL's SingleController runs `config`."""
    return getattr(config, "async_rl", None) is not None


def _has_data_plane(config: Any) -> bool:
    return bool((getattr(config, "data_plane", None) or {}).get("enabled"))


def _patch_points_of(config: Any) -> tuple[PatchPoint, ...]:
    """Returns the patch points that only some kinds of run use."""
    if _is_controlled(config):
        return CONTROLLER_PATCH_POINTS
    return (*(p for p in TRAINER_PATCH_POINTS if p.module in _trainers(config)), *GYM_PATCH_POINTS)


def _checked_block(plain_block: dict[str, Any], policy: Any) -> SpecrolloutConfig:
    """Makes the paths in `plain_block` absolute, because actors may run in other folders, and returns the block.

    Raises ConfigError for errors that an engine or an actor would find minutes later.
    """
    racing = plain_block["fastest_of_n"]
    has_ladder = bool(racing) and racing["enabled"] and racing["ladder"] is not None
    if has_ladder:
        racing["ladder"] = str(Path(racing["ladder"]).absolute())
    for drafter in plain_block["drafters"]:
        if drafter.get("model") and Path(drafter["model"]).is_dir():
            drafter["model"] = str(Path(drafter["model"]).absolute())
    block = build(SpecrolloutConfig, plain_block, BLOCK_PATH)
    _check_heads(block, policy["model_name"])
    _check_remote(block, policy["generation"]["vllm_cfg"])
    if has_ladder:
        LadderFile.read(Path(racing["ladder"]), f"{BLOCK_PATH}.fastest_of_n.ladder")
    _check_arguments(block, policy["generation"].get("vllm_kwargs") or {})
    return block


def _check_heads(block: SpecrolloutConfig, policy: str) -> None:
    """Raises ConfigError if a head that is refreshed, or a head that drafts blocks, does not fit the policy."""
    if block.draft_refresh is not None and block.head is not None:
        reason = misfit(block.head, policy)
        if reason is not None:
            raise ConfigError(f"{BLOCK_PATH}.drafters: {reason}")
    for drafter in block.drafters if Path(policy).is_dir() else ():
        reason = misfit_of_block_drafter(drafter, Path(policy))
        if reason is not None:
            raise ConfigError(reason)


def _check_remote(block: SpecrolloutConfig, vllm_cfg: dict[str, Any]) -> None:
    """Raises ConfigError if Ray cannot start the remote drafters, as far as this process can see."""
    from nemo_specrollout.remote.verifier.drafter_pool import drafter_spec, shared_vllm_config

    if block.remote is not None and block.remote.workers:
        drafter_spec(block.remote, shared_vllm_config(vllm_cfg))
        secret_of_run()


def _check_arguments(block: SpecrolloutConfig, vllm_kwargs: dict[str, Any]) -> None:
    """Raises ConfigError if a step of vLLM has no room for drafts."""
    given = {name: value for name, value in vllm_kwargs.items() if name != "speculative_config"}
    try:
        with_specrollout(given, block, "cuda")
    except ValueError as error:
        raise ConfigError(f"policy.generation.{error}") from error


def _replace_names(config: Any, block: SpecrolloutConfig) -> None:
    from nemo_rl.algorithms import async_utils
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.experience import rollouts
    from nemo_rl.models.generation.vllm import vllm_generation

    from nemo_specrollout.nemo_rl.generation import SpecrolloutGeneration, seed_gym_rows
    from nemo_specrollout.nemo_rl.logger import Watch, gap_causes
    from nemo_specrollout.nemo_rl.rollout_actors import SpecrolloutTrajectoryCollector
    from nemo_specrollout.nemo_rl.step_log import StepLog
    from nemo_specrollout.nemo_rl.supervisor import RunFacts

    algorithm, first, log = algorithm_of(config), _newest_step(config.checkpointing), StepLog()
    heads = str(_head_folder(config, first).path)
    SpecrolloutGeneration.facts = RunFacts(block, algorithm.seed, first, algorithm.max_num_steps, heads)
    SpecrolloutGeneration.step_log = log
    facts = {"versions": installed_versions(), "block": config.policy["generation"]["specrollout"]}
    causes = gap_causes(config.model_dump())
    watch = Watch(block.logprob_gap_alarm, causes, facts, log, algorithm.max_num_steps)
    for native, ours in ACTORS.items():
        ACTOR_ENVIRONMENT_REGISTRY[ours] = ACTOR_ENVIRONMENT_REGISTRY[native]
    _replace(
        vllm_generation, "resolve_generation_worker_cls", _naming_ours(vllm_generation.resolve_generation_worker_cls)
    )
    if _is_controlled(config):
        _replace_for_controller(config, watch)
        return
    _replace(async_utils, "AsyncTrajectoryCollector", SpecrolloutTrajectoryCollector)
    _replace(rollouts, "_prepare_nemo_gym_rows", seed_gym_rows(rollouts._prepare_nemo_gym_rows))
    for trainer in _trainers(config):
        _replace_for_trainer(importlib.import_module(trainer), watch)


def _trainers(config: Any) -> list[str]:
    """Returns the modules of NeMo-RL whose names are replaced for `config`. They import each other's functions by name."""
    if getattr(config, "distillation", None) is not None:
        own = "distillation"
    elif getattr(config, "ppo", None) is not None:
        own = "ppo"
    else:
        own = "grpo_sync" if _has_data_plane(config) else "grpo"
    return [f"nemo_rl.algorithms.{name}" for name in dict.fromkeys(("grpo", own))]


def _replace_for_trainer(trainer: ModuleType, watch: "Watch") -> None:
    from nemo_specrollout.nemo_rl.generation import SpecrolloutGeneration
    from nemo_specrollout.nemo_rl.rollout_actors import SpecrolloutRolloutActor

    replacements: dict[str, Callable[[Any], Any]] = {
        "VllmGeneration": lambda native: SpecrolloutGeneration,
        "refit_policy_generation": _telling_versions,
        "validate": _in_validation_stream,
        "Logger": watch.logger_class,
        "SyncRolloutActor": lambda native: SpecrolloutRolloutActor,
    }
    for point in ALL_PATCH_POINTS:
        if point.module == trainer.__name__:
            _replace(trainer, point.name, replacements[point.name](getattr(trainer, point.name)))


def _replace_for_controller(config: Any, watch: "Watch") -> None:
    """Replaces the classes of the objects that NeMo-RL's set-up sends to the SingleController's actor."""
    from nemo_rl.algorithms import single_controller
    from nemo_rl.algorithms.single_controller_utils import setup
    from nemo_rl.experience import rollout_manager

    from nemo_specrollout.nemo_rl import single_controller as ours

    ours.EpochDataLoader.first_epoch = _epoch(config.checkpointing)
    _replace(rollout_manager, "AsyncRolloutImpl", ours.SeededRollouts)
    _replace(rollout_manager, "AsyncNemoGymRolloutImpl", ours.SeededGymRollouts)
    _replace(setup, "StatefulDataLoader", ours.EpochDataLoader)
    _replace(setup, "VllmGeneration", ours.ControlledGeneration)
    native = setup.create_weight_synchronizer

    @functools.wraps(native)
    def create_weight_synchronizer(*args: Any, generation: Any, **kwargs: Any) -> Any:
        synchronizer = native(*args, generation=generation, **kwargs)
        return ours.SupervisingSynchronizer(synchronizer, generation, watch)

    _replace(setup, "create_weight_synchronizer", create_weight_synchronizer)
    _replace(single_controller, "Logger", ours.make_logger)


def _naming_ours(resolve: Any) -> Any:
    """Wraps NeMo-RL's function that names an engine's actor: the name is the name of our actor."""

    @functools.wraps(resolve)
    def resolve_ours(default_cls: str, config: dict[str, Any]) -> str:
        native = resolve(default_cls, config)
        return ACTORS.get(native, native)

    return resolve_ours


def _telling_versions(refit: Any) -> Any:
    """Wraps NeMo-RL's refit: a refit begins a policy version."""

    @functools.wraps(refit)
    def refit_and_tell(policy: Any, policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
        with policy_generation.new_weights():
            metrics = refit(policy, policy_generation, *args, **kwargs)
        policy_generation.weights_updated()
        return metrics

    return refit_and_tell


def _in_validation_stream(validate: Any) -> Any:
    """Wraps NeMo-RL's validation: its rows have a stream of seeds of their own."""

    @functools.wraps(validate)
    def validate_apart(policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
        with policy_generation.validation():
            return validate(policy_generation, *args, **kwargs)

    return validate_apart


def _newest_step(checkpointing: Any) -> int:
    """Returns the training steps behind the checkpoint that NeMo-RL resumes from, or 0 if there is none."""
    from nemo_rl.utils.checkpoint import CheckpointManager

    path = CheckpointManager(checkpointing).get_latest_checkpoint_path()
    return 0 if path is None else int(Path(path).name.removeprefix("step_"))


def _epoch(checkpointing: Any) -> int:
    """Returns the epoch of the checkpoint that NeMo-RL resumes from, or 0 if there is none."""
    from nemo_rl.utils.checkpoint import CheckpointManager

    manager = CheckpointManager(checkpointing)
    state = manager.load_training_info(manager.get_latest_checkpoint_path())
    return int((state or {}).get("current_epoch") or 0)


def _head_folder(config: Any, first_version: int) -> HeadFolder:
    """Returns the run's folder of draft heads. A run that starts from the configured policy starts from the configured head.

    The folder is beside the checkpoints, where a resumed run finds it: NeMo-RL gives every start a log folder of its own.
    """
    place = config.checkpointing["checkpoint_dir"] if config.checkpointing["enabled"] else config.logger["log_dir"]
    heads = HeadFolder(Path(place).absolute() / "specrollout_heads")
    if first_version == 0:
        heads.withdraw()
    return heads
