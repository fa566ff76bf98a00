# SPDX-License-Identifier: Apache-2.0
"""Loads published draft heads into an engine, and looks for faults in the head that it serves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_specrollout.config.drafter_configs import BLOCK_DRAFTERS
from nemo_specrollout.heads.decisions.canary import HeadHealth
from nemo_specrollout.heads.files.head_facts import read_head_facts, read_head_tensors
from nemo_specrollout.heads.serving.head_loading import (
    EMBEDDING,
    LM_HEAD,
    aux_layer_ids,
    load_published_head,
    rope_difference,
    shared_modules,
)
from nemo_specrollout.telemetry.sample_stats import SampleStatsLog

ZERO_IF_UNUSED = (".bias", "mask_embedding")
"""Endings of the names of parameters that may be all zero in a head without faults. `mask_embedding` is the embedding of the
mask token in DFlash and DSpark heads, which is stored apart from the embedding of the vocabulary."""

Tensors = Mapping[str, torch.Tensor]


class ServedDrafter(Protocol):
    """Interface of the drafter that runs a head, for the head service and the head monitor.

    `generation/drafting/model_drafter.py` implements it.
    """

    is_allowed: bool
    """False while a broken head must not draft."""

    @property
    def board(self) -> Any:
        """The engine's draft board, which counts how many draft tokens of the head were accepted."""

    def begin_again(self) -> None:
        """Forgets what was learned about the drafts of the previous head."""

    def forbid(self) -> None:
        """Stops drafting until `is_allowed` is set again."""


class HeadService:
    """Loads heads into an engine, and owns the folder of the head that the engine serves.

    The policy version of this head is kept in the engine's `SampleStatsLog`.
    """

    def __init__(self, runner: Any, model: ServedDrafter, samples: SampleStatsLog, folder: Path | None) -> None:
        """Takes over an engine that already has a head.

        `runner` is the engine's vLLM model runner. `folder` has the head, or is None if the folder is not known.
        """
        self._runner = runner
        self._model = model
        self._samples = samples
        self._folder = folder

    def load(self, folder: Path, version: int) -> None:
        """Loads the published head in `folder`, which was trained for policy version `version`, and drafts with it.

        Raises ValueError if its weights are broken, or if it is another kind of head than the one with which the engine was
        started.
        """
        load_published_head(self._runner, folder)
        self._model.begin_again()
        self._folder = folder
        self._samples.head_version = version

    @property
    def age_in_versions(self) -> int:
        """Number of refits since the head was published."""
        return self._samples.policy_version - self._samples.head_version

    def health(self) -> HeadHealth:
        """Returns what is wrong with the head in service. The call reads every weight and waits for the device."""
        return head_health(self._runner, self._folder, self.age_in_versions)


def head_health(runner: Any, folder: Path | None, age_in_versions: int = 0) -> HeadHealth:
    """Returns the faults in the weights and the config of an engine's head. Nothing is drafted for this.

    `runner` is the engine's vLLM model runner, and `folder` has the head that the engine should serve. If a kernel has
    repacked a weight in the engine, only the weight in the folder is checked.
    """
    draft = runner.speculator.model
    owned = {id(p) for p in runner.model.parameters()}
    own = {name: p.detach() for name, p in draft.named_parameters() if id(p) not in owned and p.numel()}
    published = {} if folder is None else read_head_tensors(folder)
    floats = [(name, t) for name, t in (*own.items(), *published.items()) if t.is_floating_point()]
    in_use = aux_layer_ids(runner)
    intended = () if folder is None else read_head_facts(folder).layer_ids
    has_other_layers = in_use is not None and bool(intended) and in_use != intended
    method = runner.speculative_config.method
    configs = (runner.speculative_config.draft_model_config, runner.model_config)
    head_config, policy_config = (c.hf_text_config.to_dict() for c in configs)
    meant_to_share = (EMBEDDING, LM_HEAD) if method in ("mtp", *BLOCK_DRAFTERS) else (EMBEDDING,)
    return HeadHealth(
        non_finite=any(not bool(torch.isfinite(t).all()) for _, t in floats),
        all_zero=any(not bool(t.any()) for name, t in floats if not name.endswith(ZERO_IF_UNUSED)),
        shares_target_tensors=tuple(p for p in shared_modules(runner.model, draft) if not p.endswith(meant_to_share)),
        differs_from_published=not _holds(own, published),
        layer_ids_wrong=has_other_layers,
        rope_difference=rope_difference(head_config, policy_config) if method == "eagle3" else "",
        age_in_versions=age_in_versions,
    )


def _holds(own: Tensors, published: Tensors) -> bool:
    """Returns whether the tensors in the engine equal the published ones.

    A published tensor is skipped if the engine has none of its name and shape.
    """
    for name, tensor in published.items():
        mine = next((t for n, t in own.items() if n in (name, f"model.{name}") and t.shape == tensor.shape), None)
        if mine is not None and not torch.equal(mine.cpu(), tensor.to(mine.dtype)):
            return False
    return True
