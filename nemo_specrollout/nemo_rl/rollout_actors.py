# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's Ray actors that roll out with a copy of the generation, and tell that copy which rows they request."""

from contextlib import nullcontext
from typing import Any

import ray
from nemo_rl.algorithms.async_utils.trajectory_collector import AsyncTrajectoryCollector
from nemo_rl.experience import rollouts
from nemo_rl.experience.sync_rollout_actor import SyncRolloutActor

from nemo_specrollout.nemo_rl.generation import seed_gym_rows

_NativeCollector: Any = AsyncTrajectoryCollector.__ray_metadata__.modified_class
_NativeActor: Any = SyncRolloutActor.__ray_metadata__.modified_class


def _seed_gym_rows_of_this_process() -> None:
    rollouts._prepare_nemo_gym_rows = seed_gym_rows(rollouts._prepare_nemo_gym_rows)


@ray.remote
class SpecrolloutTrajectoryCollector(_NativeCollector):
    """Collector of asynchronous GRPO. It tells its generation the policy version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _seed_gym_rows_of_this_process()
        self.policy_generation.row_seeds.begin_version(self.current_weight_version)

    def set_weight_version(self, version: int) -> None:
        """Begins a policy version. NeMo-RL requests rows of that version only after this call."""
        self.policy_generation.row_seeds.begin_version(version)
        super().set_weight_version(version)


@ray.remote
class SpecrolloutRolloutActor(_NativeActor):
    """Rollout actor of the TransferQueue trainer. It counts the training steps, as the driver does."""

    _num_steps = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _seed_gym_rows_of_this_process()

    def rollout_to_tq(self, input_batch: Any, **kwargs: Any) -> Any:
        """Rolls out a batch. Only validations bring environments of their own, which distinguishes them."""
        generation, is_validation = self.policy_generation, kwargs.get("task_to_env_override") is not None
        if not is_validation and kwargs.get("first_iter", True):
            self._num_steps += 1
        steps_done = self._num_steps if is_validation else self._num_steps - 1
        generation.row_seeds.begin_version(generation.facts.first_version + steps_done)
        with generation.validation() if is_validation else nullcontext():
            return super().rollout_to_tq(input_batch, **kwargs)
