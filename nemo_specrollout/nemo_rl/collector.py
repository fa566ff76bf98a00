# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's trajectory collector of asynchronous GRPO, which tells its generation under which weights rows are asked for."""

from typing import Any

import ray
from nemo_rl.algorithms.async_utils.trajectory_collector import AsyncTrajectoryCollector
from nemo_rl.experience import rollouts

from nemo_specrollout.nemo_rl.generation import seed_gym_rows

_NativeCollector: Any = AsyncTrajectoryCollector.__ray_metadata__.modified_class


@ray.remote
class SpecrolloutTrajectoryCollector(_NativeCollector):
    """The collector, with the policy version passed on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollouts._prepare_nemo_gym_rows = seed_gym_rows(rollouts._prepare_nemo_gym_rows)  # in this process
        self.policy_generation.identities.begin_version(self.current_weight_version)

    def set_weight_version(self, version: int) -> None:
        """NeMo-RL's; new rows start only after it."""
        self.policy_generation.identities.begin_version(version)
        super().set_weight_version(version)
