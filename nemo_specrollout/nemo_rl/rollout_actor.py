# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's rollout actor of the TransferQueue trainer, whose generation is told what its rows are for."""

from contextlib import nullcontext
from typing import Any

import ray
from nemo_rl.experience import rollouts
from nemo_rl.experience.sync_rollout_actor import SyncRolloutActor

from nemo_specrollout.nemo_rl.generation import seed_gym_rows

_NativeActor: Any = SyncRolloutActor.__ray_metadata__.modified_class


@ray.remote
class SpecrolloutRolloutActor(_NativeActor):
    """The actor, which has a copy of the generation. It counts the training steps, as the driver does."""

    _num_steps = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollouts._prepare_nemo_gym_rows = seed_gym_rows(rollouts._prepare_nemo_gym_rows)  # in this process

    def rollout_to_tq(self, input_batch: Any, **kwargs: Any) -> Any:
        """NeMo-RL's; a validation brings environments of its own."""
        generation, is_validation = self.policy_generation, kwargs.get("task_to_env_override") is not None
        if not is_validation and kwargs.get("first_iter", True):
            self._num_steps += 1
        steps_done = self._num_steps if is_validation else self._num_steps - 1
        generation.identities.begin_version(generation.facts.first_version + steps_done)
        with generation.validation() if is_validation else nullcontext():
            return super().rollout_to_tq(input_batch, **kwargs)
