# SPDX-License-Identifier: Apache-2.0
"""vLLM workers of an engine under NeMo-RL, which combine this package's vLLM worker with NeMo-RL's worker extension.

vLLM refuses a worker extension if the worker class already has an attribute of the same name. It does not check classes that
are already bases of the worker class. Here NeMo-RL's extension is such a base, so `with_worker_names` does the check instead.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from nemo_rl.models.generation.vllm.vllm_backend import (
    VllmInternalWorkerExtension,
    VllmInternalWorkerExtensionWithCheckpointEngine,
)

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.vllm_worker import SpecrolloutWorker
from nemo_specrollout.heads.serving.head_loading import part_from_policy
from nemo_specrollout.nemo_rl.engine_inputs import MTP_FROM_FOLDER
from nemo_specrollout.nemo_rl.patch_point_table import WORKER_POINTS
from nemo_specrollout.nemo_rl.patch_points import SHARED_NAMES, check_patch_points

logger = logging.getLogger(__name__)

_TRAINED_HEAD_METHODS = ("eagle", "eagle3")
"""vLLM's speculative methods whose heads NeMo-RL can train."""

check_patch_points(WORKER_POINTS)


class ExtensionOverrides:
    """This package's overrides of NeMo-RL's worker extension.

    They load the draft weights of a trainer into the drafter, and never into a module of the policy. They also time weight
    updates.
    """

    model_runner: Any
    vllm_config: Any
    specrollout_router: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the models, and gives a drafter whose weights come by refit an LM head of its own.

        This must happen before CUDA graphs are captured, because these keep the addresses of weights.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = self.vllm_config
        speculative = config.speculative_config
        if config.additional_config.get(MTP_FROM_FOLDER):
            self._mtp_drafter_from_disk = True
        comes_by_refit = config.load_config.load_format == "dummy"
        if comes_by_refit and speculative is not None and speculative.method in _TRAINED_HEAD_METHODS:
            self._part_drafter(["lm_head.weight"])

    def specrollout_policy_is(self, version: int) -> None:
        """Notes the policy version. Draft heads that NeMo-RL trains with the policy have the same version."""
        super().specrollout_policy_is(version)  # type: ignore[misc]
        if self.specrollout_router is not None and self._mtp_drafter_refit_enabled():  # type: ignore[attr-defined]
            self.specrollout_router.samples.head_version = version

    def _get_drafter_model(self, *_: Any, **__: Any) -> Any:
        """Returns the drafter's model. NeMo-RL's own method looks for `model_runner.drafter`, which the V2 runner lacks."""
        return getattr(self.model_runner.speculator, "model", None)

    def _load_draft_weights(self, draft_weights: list[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        self._part_drafter([name for name, _ in draft_weights])
        return super()._load_draft_weights(draft_weights, *args, **kwargs)  # type: ignore[misc]

    def _part_drafter(self, weight_names: list[str]) -> None:
        draft = self._get_drafter_model()
        if draft is None or not weight_names:
            return
        for path in part_from_policy(self.model_runner.model, draft, weight_names):
            logger.warning("specrollout: the drafter shared the policy's %s; it has its own now", path)

    @contextmanager
    def _weight_update_lifecycle(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        started = time.perf_counter()
        with super()._weight_update_lifecycle(*args, **kwargs) as finalize:  # type: ignore[misc]
            yield finalize
        self.specrollout_weights_updated(time.perf_counter() - started)  # type: ignore[attr-defined]


def with_worker_names(cls: type) -> type:
    """Gives `cls` vLLM's own methods under the names in `SHARED_NAMES`, and returns `cls`.

    The bases of `cls` are overrides, NeMo-RL's worker extension and vLLM's worker. Raises ConfigError if extension and worker
    share another name, because the extension's method would replace vLLM's.
    """
    _, extension, worker = cls.__bases__
    shared = {name for name in dir(extension) if not name.startswith("__") and hasattr(worker, name)}
    if unknown := sorted(shared.difference(SHARED_NAMES)):
        raise ConfigError(
            f"NeMo-RL's {extension.__name__} and vLLM's worker both have {', '.join(unknown)}: this NeMo-RL does not fit this "
            "vLLM. Install the vLLM that NeMo-RL pins"
        )
    for name in shared:
        setattr(cls, name, getattr(worker, name))
    return cls


@with_worker_names
class NemoRlWorker(ExtensionOverrides, VllmInternalWorkerExtension, SpecrolloutWorker):
    """vLLM worker that NeMo-RL refits through IPC or collectives."""


@with_worker_names
class NemoRlCheckpointEngineWorker(
    ExtensionOverrides, VllmInternalWorkerExtensionWithCheckpointEngine, SpecrolloutWorker
):
    """vLLM worker that NeMo-RL refits through its checkpoint engine."""
