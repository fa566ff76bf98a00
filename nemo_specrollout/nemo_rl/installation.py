# SPDX-License-Identifier: Apache-2.0
"""Puts the block into effect in NeMo-RL, by replacing attributes of its modules before one of its scripts runs."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_specrollout.audit.rows import FOLDER as ROWS
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.block_place import place_findings
from nemo_specrollout.config.drafter_configs import secret_of_run
from nemo_specrollout.config.engine_vllm import engine_vllm
from nemo_specrollout.config.nemo_rl_config import ALGORITHMS, prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_tree import VLLM_KWARGS, at, block_is_on, model_config
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.arguments import abilities_of, host_choice, with_specrollout
from nemo_specrollout.heads.files.block_heads import drafter_misfits
from nemo_specrollout.heads.files.head_folder import HeadFolder
from nemo_specrollout.installed.versions import installed_versions
from nemo_specrollout.nemo_rl.code_folder import PYTHONPATH, code_folder, is_on_pythonpath, pythonpath_with
from nemo_specrollout.nemo_rl.patch_point_table import (
    POINTS_OF_ALL_RUNS,
    POINTS_OF_CONTROLLER,
    POINTS_OF_GYM,
    POINTS_OF_LOADERS,
    POINTS_OF_ROLLOUTS,
    POINTS_OF_RUN_AHEAD,
    POINTS_OF_TRAINERS,
)
from nemo_specrollout.nemo_rl.patch_points import PatchPoint, check_patch_points
from nemo_specrollout.nemo_rl.run_facts import RunFacts, changed_seed, put_run
from nemo_specrollout.nemo_rl.step_log import STEP_LOG
from nemo_specrollout.remote.drafter.drafter_spec import drafter_spec
from nemo_specrollout.reports.records import FOLDER as RECORDS
from nemo_specrollout.reports.start_facts import start_facts
from nemo_specrollout.reports.starts import START
from nemo_specrollout.stragglers.decisions.speed_table_file import ladder_of

_NATIVE, _OURS = "nemo_rl.models.generation.vllm", "nemo_specrollout.nemo_rl.engine_actors"
LEARNED = "specrollout_learned"
"""Name of the folder beside the checkpoints in which a run keeps what its engines learn."""
ACTORS = {
    f"{_NATIVE}.vllm_worker.VllmGenerationWorker": f"{_OURS}.SpecrolloutEngineActor",
    f"{_NATIVE}.vllm_worker_async.VllmAsyncGenerationWorker": f"{_OURS}.SpecrolloutAsyncEngineActor",
}
"""Names of NeMo-RL's engine actors, and for each the name of this package's actor that replaces it."""
_replaced: list[tuple[Any, str, Any]] = []  # module, name, original


def install(config: Any) -> bool:
    """Puts `policy.generation.specrollout` of NeMo-RL's `MasterConfig` into effect. Call it before NeMo-RL's `setup`.

    Returns whether the block is enabled. If it is not, nothing is changed. NeMo-RL's actors must find this package through
    PYTHONPATH. If PYTHONPATH does not name the package's folder, a copy of the package is written into the log folder and
    added. Raises ConfigError if the block, the config or the installed NeMo-RL does not allow the run.
    """
    uninstall()
    tree = config.model_dump()
    if not block_is_on(tree):
        for finding in place_findings(tree):
            print(f"{finding.kind}: {finding}", flush=True)
        return False
    block, _ = prepare_nemo_rl(tree)
    assert block is not None
    points = _patch_points_of(config, runs_ahead=block.runs_ahead)
    check_patch_points(points)
    generation = config.policy["generation"]
    block = with_absolute_paths(block, _place_of(config))
    _check_block(block, config.policy)
    facts = _run_facts(config, block)
    put_run(generation, block, facts)
    if not is_on_pythonpath():
        os.environ[PYTHONPATH] = pythonpath_with(code_folder(Path(config.logger["log_dir"]).absolute()))
    _replace_names(config, _logger_class(block, generation["specrollout"], tree, facts), points)
    if (sentence := _changed_seed(config)) is not None:
        STEP_LOG.alarms.append(sentence)
        print(f"warning: {sentence}", flush=True)
    drafters = ", ".join(drafter.type for drafter in block.drafters) or "vLLM's own, or none"
    print(f"specrollout is on: drafters {drafters}; on vLLM's V2 model runner", flush=True)
    return True


def uninstall() -> None:
    """Restores everything that `install` has replaced in NeMo-RL's modules."""
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
    """Returns the modules of NeMo-RL in which names are replaced.

    They are the modules of the run's trainer and of GRPO, because other trainers import functions of GRPO's module.
    """
    has_data_plane = (getattr(config, "data_plane", None) or {}).get("enabled")
    own = next((name for name in ("distillation", "ppo") if getattr(config, name, None) is not None), None)
    own = own or ("grpo_sync" if has_data_plane else "grpo")
    return [f"nemo_rl.algorithms.{name}" for name in dict.fromkeys(("grpo", own))]


def _patch_points_of(config: Any, *, runs_ahead: bool) -> tuple[PatchPoint, ...]:
    """Returns the patch points of a run, which are the names of NeMo-RL that this package replaces, overrides or calls."""
    if _is_controlled(config):
        return (*POINTS_OF_ALL_RUNS, *POINTS_OF_CONTROLLER, *(POINTS_OF_RUN_AHEAD if runs_ahead else ()))
    trainers = _trainers(config)
    own = (point for point in POINTS_OF_TRAINERS if point.module in trainers)
    loaders = (point for point in POINTS_OF_LOADERS if point.module in trainers)
    gym = POINTS_OF_GYM if (getattr(config, "env", None) or {}).get("should_use_nemo_gym") else ()
    ahead = (*loaders, *gym, *POINTS_OF_RUN_AHEAD) if runs_ahead else ()
    return (*POINTS_OF_ALL_RUNS, *own, *POINTS_OF_ROLLOUTS, *ahead)


def with_absolute_paths(block: SpecrolloutConfig, place: Path) -> SpecrolloutConfig:
    """Returns the block with absolute paths, because actors may run in other working directories.

    What engines learn is kept in a folder inside `place`, unless the block names another one.
    """
    drafters = []
    for drafter in block.drafters:
        model = str(getattr(drafter, "model", None) or "")
        paths = {"model": str(Path(model).absolute())} if model and Path(model).is_dir() else {}
        if published := getattr(drafter, "weights_from", None):
            paths["weights_from"] = str(Path(published).absolute())
        drafters.append(replace(drafter, **paths))
    racing = block.fastest_of_n
    if racing is not None and racing.ladder is not None:
        racing = replace(racing, ladder=str(Path(racing.ladder).absolute()))
    folder = Path(block.learned.folder or place / LEARNED).absolute()
    return replace(
        block, drafters=tuple(drafters), fastest_of_n=racing, learned=replace(block.learned, folder=str(folder))
    )


def _check_block(block: SpecrolloutConfig, policy: Any) -> None:
    """Raises ConfigError for errors that an engine or an actor would otherwise find minutes later."""
    for reason in drafter_misfits(block, policy["model_name"], policy["generation"]["vllm_cfg"].get("max_model_len")):
        raise ConfigError(reason)
    ladder_of(block)
    if block.remote is not None and block.remote.workers:
        drafter_spec(block.remote, policy["generation"]["vllm_cfg"])
        secret_of_run()
    vllm_kwargs = policy["generation"].get("vllm_kwargs") or {}
    try:  # an engine step may have no room for drafts
        with_specrollout({k: v for k, v in vllm_kwargs.items() if k != "speculative_config"}, block, "cuda")
    except ValueError as error:
        raise ConfigError(f"policy.generation.{error}") from error


def _run_facts(config: Any, block: SpecrolloutConfig) -> RunFacts:
    """Returns the facts of a run that starts or resumes from a checkpoint.

    The folder of draft heads is beside the checkpoints, so that a resumed run finds it. It could not be in the log folder,
    because NeMo-RL makes a new one at every start. A run that starts from the configured policy also starts from the
    configured head. So in such a run, a head that an earlier run has published is withdrawn.
    """
    from nemo_rl.utils.checkpoint import CheckpointManager

    checkpoint = CheckpointManager(config.checkpointing).get_latest_checkpoint_path()
    first = 0 if checkpoint is None else int(Path(checkpoint).name.removeprefix("step_"))
    heads = HeadFolder(_place_of(config) / "specrollout_heads")
    if first == 0:
        heads.withdraw()
    _, algorithm = _algorithm(config)
    samples = getattr(algorithm, "num_generations_per_prompt", 1)
    asynchronous = getattr(algorithm, "async_grpo", None) or getattr(algorithm, "async_ppo", None)
    if asynchronous is not None and not asynchronous.enabled:
        asynchronous = None
    in_flight = asynchronous is not None and asynchronous.in_flight_weight_updates
    may_recompute = (asynchronous, getattr(config, "async_rl", None))
    recomputes = any(getattr(each, "recompute_kv_cache_after_weight_updates", False) for each in may_recompute)
    rows = Path(config.logger["log_dir"]).absolute() / RECORDS / ROWS if block.records_rows else ""
    return RunFacts(
        algorithm.seed,
        first,
        algorithm.max_num_steps,
        str(heads.path),
        samples,
        bool(in_flight),
        recomputes,
        bool(getattr(algorithm, "use_dynamic_sampling", False)),
        str(rows),
    )


def _place_of(config: Any) -> Path:
    """Returns the folder in which a resumed run finds its files.

    It is the folder of the checkpoints, or else the log folder.
    """
    return Path(
        config.checkpointing["checkpoint_dir"] if config.checkpointing["enabled"] else config.logger["log_dir"]
    ).absolute()


def _changed_seed(config: Any) -> str | None:
    """Returns a sentence if the run resumes from a checkpoint whose config has another seed, and otherwise None."""
    from nemo_rl.utils.checkpoint import CheckpointManager

    checkpoint = CheckpointManager(config.checkpointing).get_latest_checkpoint_path()
    name, algorithm = _algorithm(config)
    return None if checkpoint is None else changed_seed(Path(checkpoint) / "config.yaml", name, algorithm.seed)


def _algorithm(config: Any) -> tuple[str, Any]:
    """Returns the name of the run's algorithm, such as `grpo`, and its part of the config."""
    return next((name, found) for name in ALGORITHMS if (found := getattr(config, name, None)) is not None)


def _logger_class(block: SpecrolloutConfig, plain_block: dict[str, Any], tree: Any, facts: RunFacts) -> Any:
    from nemo_specrollout.nemo_rl.generation import SpecrolloutLogger
    from nemo_specrollout.nemo_rl.logprob_gap import gap_alarms, gap_causes

    STEP_LOG.take()  # drops what an earlier run of this process has left
    abilities = abilities_of(engine_vllm(tree).version, model_config(tree) or {})
    host_chooses = host_choice(at(tree, VLLM_KWARGS, {}), abilities)
    summary = {
        "versions": installed_versions(),
        "block": plain_block,
        "host_chooses_drafts": host_chooses or False,
        "audit": _audit_facts(tree, facts) if facts.rows else False,
        START: start_facts(os.environ, facts.first_version),
    }
    return partial(
        SpecrolloutLogger,
        gap_alarms=partial(gap_alarms, bound=block.logprob_gap_alarm, causes=gap_causes(tree)),
        facts=summary,
        last_step=facts.last_version,
    )


def _audit_facts(tree: Any, facts: RunFacts) -> dict[str, Any]:
    """Returns what an audit needs to find the weights of each policy version, as entries for `run.json`.

    These are the model's folder or name, the folder of the checkpoints, and the first policy version.
    """
    checkpointing = tree["checkpointing"]
    folder = str(Path(checkpointing["checkpoint_dir"]).absolute()) if checkpointing["enabled"] else None
    model = tree["policy"]["model_name"]
    model = str(Path(model).absolute()) if Path(model).is_dir() else model
    return {"model": model, "checkpoints": folder, "first_version": facts.first_version}


def _replace_names(config: Any, logger: Any, points: Sequence[PatchPoint]) -> None:
    from nemo_rl.algorithms import async_utils
    from nemo_rl.experience import rollouts
    from nemo_rl.models.generation.vllm import vllm_generation

    from nemo_specrollout.nemo_rl import generation as ours
    from nemo_specrollout.nemo_rl.gym_prompts import GymPrompts, with_new_gym
    from nemo_specrollout.nemo_rl.next_prompts import PeekingLoader

    GymPrompts.gym = None  # an earlier run of this process may have had one
    resolve = vllm_generation.resolve_generation_worker_cls
    _replace(vllm_generation, "resolve_generation_worker_cls", partial(_our_engine_actor, resolve))
    if _is_controlled(config):
        _replace_for_controller(config, logger)
        return
    _replace(async_utils, "AsyncTrajectoryCollector", ours.SpecrolloutTrajectoryCollector)
    for name, extended in ours.extended_rollouts().items():
        _replace(rollouts, name, extended)
    # Trainer modules import names from each other, so all must be imported before any name is replaced.
    trainers = {name: importlib.import_module(name) for name in _trainers(config)}
    for point in points:
        if point.module in trainers:
            trainer = trainers[point.module]
            native = getattr(trainer, point.name)
            replacements = {
                "VllmGeneration": ours.SpecrolloutGeneration,
                "refit_policy_generation": partial(_refit_and_tell, native),
                "validate": partial(_validate_apart, native),
                "Logger": logger,
                "SyncRolloutActor": ours.SpecrolloutRolloutActor,
                "StatefulDataLoader": PeekingLoader,
                "spinup_nemo_gym_actor": partial(with_new_gym, native),
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


def _our_engine_actor(resolve: Any, *args: Any, **kwargs: Any) -> str:
    """Returns the name of this package's engine actor for the one that NeMo-RL's function `resolve` returns.

    Both actors share a Python environment. NeMo-RL names an environment after the actor's class. Without the sharing, it would
    build a second environment with vLLM on every node.
    """
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    from nemo_specrollout.nemo_rl.ray_calls import python_of

    native: str = resolve(*args, **kwargs)
    if native not in ACTORS:
        return native
    ACTOR_ENVIRONMENT_REGISTRY[ACTORS[native]] = python_of(native)
    return ACTORS[native]


def _refit_and_tell(refit: Any, policy: Any, policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
    with policy_generation.new_weights():
        metrics = refit(policy, policy_generation, *args, **kwargs)
    policy_generation.weights_updated()
    return metrics


def _validate_apart(validate: Any, policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
    with policy_generation.validation():
        return validate(policy_generation, *args, **kwargs)
