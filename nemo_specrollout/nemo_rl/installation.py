# SPDX-License-Identifier: Apache-2.0
"""Puts the block into effect in NeMo-RL by replacing attributes of its modules, before one of its scripts runs."""

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from lab.vllm_on_cpu.plugin import V2_ON_CPU
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.code_folder import PYTHONPATH, code_folder, is_on_pythonpath, pythonpath_with
from nemo_specrollout.config.drafter_configs import secret_of_run
from nemo_specrollout.config.model_folder import misfit_of_block_drafter
from nemo_specrollout.config.nemo_rl_config import ALGORITHMS, effective_block, prepare_nemo_rl, script_of
from nemo_specrollout.config.nemo_rl_rules import PROMPT_FILES
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
from nemo_specrollout.scheduling.racing.draft_ladder import LadderFile
from nemo_specrollout.training.head.head_facts import misfit
from nemo_specrollout.training.head.head_folder import HeadFolder

_NATIVE, _OURS = "nemo_rl.models.generation.vllm", "nemo_specrollout.nemo_rl.ray_workers"
ACTORS = {
    f"{_NATIVE}.vllm_worker.VllmGenerationWorker": f"{_OURS}.SpecrolloutVllmWorker",
    f"{_NATIVE}.vllm_worker_async.VllmAsyncGenerationWorker": f"{_OURS}.SpecrolloutVllmAsyncWorker",
}
"""NeMo-RL's Ray actors around engines, and our actors that replace them."""
_RUN_KEY = "specrollout_run"
"""Key of NeMo-RL's `policy.generation` under which `install` puts the `RunFacts`."""
_SETUPS = ("setup", "setup_single_controller")
"""Names under which NeMo-RL's scripts call its set-up."""
_replaced: list[tuple[Any, str, Any]] = []
"""Replaced attributes: module, name, original."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that NeMo-RL does not tell its generation."""

    seed: int
    """`grpo.seed`, or the seed of another algorithm."""
    first_version: int
    """Training steps behind the weights at the start."""
    last_version: int
    """Training steps behind the weights at the end."""
    heads: str
    """Path of the folder with the run's draft heads."""

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> "RunFacts":
        """Returns the facts that `install` put into NeMo-RL's `policy.generation`."""
        return cls(**generation_config[_RUN_KEY])


def run(tree: Mapping[str, Any], script_path: Path | None = None) -> None:
    """Runs the resolved config `tree` with the script of NeMo-RL that it belongs to, or with the script `script_path`.

    The script runs unedited; `install` is called before its set-up. Raises ConfigError if the run cannot start.
    """
    import nemo_rl

    checkout = Path(str(nemo_rl.__file__)).parent.parent
    script = _script(checkout / (script_path or script_of(tree)))
    for name in _SETUPS:
        if hasattr(script, name):
            setattr(script, name, partial(_install_and_set_up, getattr(script, name)))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(yaml.safe_dump(_with_prompt_files(tree, checkout)), encoding="utf-8")
        sys.argv = [str(script.__file__), "--config", str(config)]
        script.main()


def _script(path: Path) -> ModuleType:
    """Loads the script at `path` as a module. Raises ConfigError if it never calls a set-up of NeMo-RL."""
    if not path.is_file():
        raise ConfigError(
            f"NeMo-RL's script {path} does not exist; run from a NeMo-RL checkout (its container has one in /opt/nemo-rl)"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--script: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not any(hasattr(module, name) for name in _SETUPS):
        raise ConfigError(
            f"--script: {path} has no function {' or '.join(_SETUPS)}, so specrollout could not take effect; name a script "
            "that calls NeMo-RL's set-up"
        )
    return module


def _install_and_set_up(native: Any, master_config: Any, *args: Any, **kwargs: Any) -> Any:
    install(master_config)
    return native(master_config, *args, **kwargs)


def _with_prompt_files(node: Any, checkout: Path, key: str = "") -> Any:
    """Returns a config with absolute paths for prompt files that are found in NeMo-RL's checkout only."""
    if isinstance(node, Mapping):
        return {name: _with_prompt_files(value, checkout, name) for name, value in node.items()}
    is_found = key in PROMPT_FILES and isinstance(node, str) and not Path(node).is_file()
    return str(checkout / node) if is_found and (checkout / node).is_file() else node


def install(config: Any) -> bool:
    """Puts `policy.generation.specrollout` of NeMo-RL's `MasterConfig` into effect. Call it before NeMo-RL's `setup`.

    Returns whether the block is enabled. Without a block, or with `enabled: false`, nothing is touched, and no worker
    imports this package. Otherwise `policy.generation` gets the complete block, facts of the run, and an environment
    variable for the engines. NeMo-RL passes PYTHONPATH on to its actors. If this package is not on it, a
    copy goes into the log folder and on PYTHONPATH. Raises ConfigError if the block, the config or the installed NeMo-RL
    does not allow it.
    """
    uninstall()
    plain_block = effective_block({"policy": config.policy})
    if plain_block is None:
        return False
    tree = config.model_dump()
    prepare_nemo_rl(tree)
    check_patch_points((*PATCH_POINTS, *_patch_points_of(config)))
    generation = config.policy["generation"]
    block = _checked_block(plain_block, config.policy)
    facts = _run_facts(config)
    generation["specrollout"], generation[_RUN_KEY] = plain_block, asdict(facts)
    # It lets vLLM's V2 model runner run on a CPU, and has no effect on a GPU.
    generation["vllm_cfg"]["env_vars"] = {**(generation["vllm_cfg"].get("env_vars") or {}), V2_ON_CPU: "1"}
    if not is_on_pythonpath():
        os.environ[PYTHONPATH] = pythonpath_with(code_folder(Path(config.logger["log_dir"]).absolute()))
    _replace_names(config, _logger_class(block, plain_block, tree, facts))
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


def _is_controlled(config: Any) -> bool:
    """Returns whether NeMo-RL's SingleController runs `config`."""
    return getattr(config, "async_rl", None) is not None


def _trainers(config: Any) -> list[str]:
    """Returns the modules of NeMo-RL whose names are replaced for `config`. They import each other's functions by name."""
    has_data_plane = (getattr(config, "data_plane", None) or {}).get("enabled")
    own = next((name for name in ("distillation", "ppo") if getattr(config, name, None) is not None), None)
    own = own or ("grpo_sync" if has_data_plane else "grpo")
    return [f"nemo_rl.algorithms.{name}" for name in dict.fromkeys(("grpo", own))]


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
    _check_drafters(block, policy)
    if has_ladder:
        LadderFile.read(Path(racing["ladder"]), f"{BLOCK_PATH}.fastest_of_n.ladder")
    vllm_kwargs = policy["generation"].get("vllm_kwargs") or {}
    try:  # a step of vLLM may have no room for drafts
        with_specrollout({k: v for k, v in vllm_kwargs.items() if k != "speculative_config"}, block, "cuda")
    except ValueError as error:
        raise ConfigError(f"policy.generation.{error}") from error
    return block


def _check_drafters(block: SpecrolloutConfig, policy: Any) -> None:
    """Raises ConfigError if a head does not fit the policy, or if Ray cannot start the remote drafters."""
    if block.draft_refresh is not None and block.head is not None:
        reason = misfit(block.head, policy["model_name"])
        if reason is not None:
            raise ConfigError(f"{BLOCK_PATH}.drafters: {reason}")
    for drafter in block.drafters if Path(policy["model_name"]).is_dir() else ():
        reason = misfit_of_block_drafter(drafter, Path(policy["model_name"]))
        if reason is not None:
            raise ConfigError(reason)
    if block.remote is not None and block.remote.workers:
        from nemo_specrollout.remote.verifier.drafter_pool import drafter_spec, shared_vllm_config

        drafter_spec(block.remote, shared_vllm_config(policy["generation"]["vllm_cfg"]))
        secret_of_run()


def _run_facts(config: Any) -> RunFacts:
    """Returns the facts of a run that starts, or resumes from a checkpoint.

    The folder of heads is beside the checkpoints, where a resumed run finds it: NeMo-RL gives every start a log folder of
    its own. A run that starts from the configured policy starts from the configured head.
    """
    from nemo_rl.utils.checkpoint import CheckpointManager

    checkpoint = CheckpointManager(config.checkpointing).get_latest_checkpoint_path()
    first = 0 if checkpoint is None else int(Path(checkpoint).name.removeprefix("step_"))
    place = config.checkpointing["checkpoint_dir"] if config.checkpointing["enabled"] else config.logger["log_dir"]
    heads = HeadFolder(Path(place).absolute() / "specrollout_heads")
    if first == 0:
        heads.withdraw()
    algorithm = next(block for name in ALGORITHMS if (block := getattr(config, name, None)) is not None)
    return RunFacts(algorithm.seed, first, algorithm.max_num_steps, str(heads.path))


def _logger_class(block: SpecrolloutConfig, plain_block: dict[str, Any], tree: Any, facts: RunFacts) -> Any:
    """Returns what replaces NeMo-RL's class `Logger`."""
    from nemo_specrollout.nemo_rl.generation import SpecrolloutLogger
    from nemo_specrollout.nemo_rl.logger import STEP_LOG, gap_causes

    STEP_LOG.take()  # what an earlier run of this process has left
    summary = {"versions": installed_versions(), "block": plain_block}
    return partial(
        SpecrolloutLogger,
        gap_alarm=block.logprob_gap_alarm,
        causes=gap_causes(tree),
        facts=summary,
        last_step=facts.last_version,
    )


def _replace_names(config: Any, logger: Any) -> None:
    from nemo_rl.algorithms import async_utils
    from nemo_rl.experience import rollouts
    from nemo_rl.models.generation.vllm import vllm_generation

    from nemo_specrollout.nemo_rl import generation as ours

    resolve = vllm_generation.resolve_generation_worker_cls
    _replace(vllm_generation, "resolve_generation_worker_cls", partial(_our_actor, resolve))
    if _is_controlled(config):
        _replace_for_controller(config, logger)
        return
    _replace(async_utils, "AsyncTrajectoryCollector", ours.SpecrolloutTrajectoryCollector)
    _replace(rollouts, "_prepare_nemo_gym_rows", partial(ours.prepare_with_seeds, rollouts._prepare_nemo_gym_rows))
    for point in ALL_PATCH_POINTS:
        if point.module in _trainers(config):
            trainer = importlib.import_module(point.module)
            native = getattr(trainer, point.name)
            replacements = {
                "VllmGeneration": ours.SpecrolloutGeneration,
                "refit_policy_generation": partial(_refit_and_tell, native),
                "validate": partial(_validate_apart, native),
                "Logger": logger,
                "SyncRolloutActor": ours.SpecrolloutRolloutActor,
            }
            _replace(trainer, point.name, replacements[point.name])


def _replace_for_controller(config: Any, logger: Any) -> None:
    """Replaces the classes of the objects that NeMo-RL's set-up sends to the SingleController's actor."""
    from nemo_rl.algorithms import single_controller
    from nemo_rl.algorithms.single_controller_utils import setup
    from nemo_rl.experience import rollout_manager
    from nemo_rl.utils.checkpoint import CheckpointManager

    from nemo_specrollout.nemo_rl import single_controller as ours

    checkpoints = CheckpointManager(config.checkpointing)
    state = checkpoints.load_training_info(checkpoints.get_latest_checkpoint_path()) or {}
    _replace(rollout_manager, "AsyncRolloutImpl", ours.SeededRollouts)
    _replace(rollout_manager, "AsyncNemoGymRolloutImpl", ours.SeededGymRollouts)
    _replace(setup, "StatefulDataLoader", partial(ours.EpochDataLoader, int(state.get("current_epoch") or 0)))
    _replace(setup, "VllmGeneration", ours.ControlledGeneration)
    synchronizer = partial(ours.make_synchronizer, setup.create_weight_synchronizer)
    _replace(setup, "create_weight_synchronizer", synchronizer)
    _replace(single_controller, "Logger", logger)


def _our_actor(resolve: Any, *args: Any, **kwargs: Any) -> str:
    """Returns the name of our actor for the engine's actor that NeMo-RL's function `resolve` names.

    Our actor gets the environment of that actor. Otherwise NeMo-RL would make another one with vLLM on every node, because
    it names an environment after the actor's class.
    """
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    from nemo_specrollout.nemo_rl.ray_calls import python_of

    native: str = resolve(*args, **kwargs)
    if native not in ACTORS:
        return native
    ACTOR_ENVIRONMENT_REGISTRY[ACTORS[native]] = python_of(native)
    return ACTORS[native]


def _refit_and_tell(refit: Any, policy: Any, policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
    """Refits by NeMo-RL's `refit`, and begins a policy version."""
    with policy_generation.new_weights():
        metrics = refit(policy, policy_generation, *args, **kwargs)
    policy_generation.weights_updated()
    return metrics


def _validate_apart(validate: Any, policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
    """Validates by NeMo-RL's `validate`, with seeds of their own kind."""
    with policy_generation.validation():
        return validate(policy_generation, *args, **kwargs)
