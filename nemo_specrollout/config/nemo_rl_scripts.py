# SPDX-License-Identifier: Apache-2.0
"""Finds the script of NeMo-RL that runs a config, by the blocks of the config."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_specrollout.config.nemo_rl_tree import Tree, at
from nemo_specrollout.config.strict import ConfigError

_GYM = "env.should_use_nemo_gym"


def _has(*paths: str) -> Callable[[Tree], bool]:
    return lambda tree: all(at(tree, path) for path in paths)


def _is_multimodal(tree: Tree) -> bool:
    """Returns whether a GRPO config has prompts with images, video or audio, which need NeMo-RL's `vlm` data processor."""
    return _has("grpo")(tree) and any(str(name).startswith("vlm") for name in _values(tree.get("data"), "processor"))


def _values(node: Any, key: str) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from (value,) if name == key else _values(value, key)
    elif isinstance(node, list):
        for item in node:
            yield from _values(item, key)


_SCRIPTS: tuple[tuple[str, Callable[[Tree], bool]], ...] = (
    ("examples/run_grpo_single_controller.py", _has("async_rl")),
    ("examples/nemo_gym/run_distillation_nemo_gym.py", _has(_GYM, "distillation")),
    ("examples/run_distillation.py", _has("distillation")),
    ("examples/run_ppo.py", _has("ppo")),
    ("examples/nemo_gym/run_grpo_nemo_gym.py", _has(_GYM, "grpo")),
    ("examples/run_grpo_sliding_puzzle.py", _has("env.sliding_puzzle_game")),
    ("examples/run_vlm_grpo.py", _is_multimodal),
    ("examples/run_grpo.py", _has("grpo")),
)
"""Scripts with their conditions; the first condition that holds decides."""
_NO_ROLLOUTS = ("teachers", "sft", "dpo", "rm")
"""Blocks of algorithms that train on given data, e.g. distillation from several teachers."""


def script_of(tree: Tree) -> str:
    """Returns the path of the script in a NeMo-RL checkout. Raises ConfigError for a config that no script runs."""
    training = next((name for name in _NO_ROLLOUTS if at(tree, name)), None)
    if training is not None:
        raise ConfigError(f"{training}: a run of this kind makes no rollouts; there is nothing to speed up")
    for script, fits in _SCRIPTS:
        if fits(tree):
            return script
    raise ConfigError("the config has no block grpo, ppo or distillation; name NeMo-RL's script with --script")
