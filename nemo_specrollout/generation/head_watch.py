# SPDX-License-Identifier: Apache-2.0
"""Watches a drafter with weights while it drafts: raises an alarm within a few steps, and turns a broken drafter off.

The counts of drafts show that something is wrong. `head_health` then finds the cause. It reads every weight, so it runs only
after an alarm.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import BLOCK_DRAFTERS
from nemo_specrollout.generation.head_loading import (
    EMBEDDING,
    LM_HEAD,
    aux_layer_ids,
    head_context,
    load_published_head,
    rope_difference,
    shared_modules,
)
from nemo_specrollout.generation.model_drafter import ModelDrafter
from nemo_specrollout.generation.transfers import HostCopy
from nemo_specrollout.scheduling.heads.canary import WEIGHT_CAUSES, Canary, ContextCanary, HeadHealth
from nemo_specrollout.telemetry.sample_stats import SampleStatsLog
from nemo_specrollout.training.head.head_facts import read_head_facts, read_head_tensors

logger = logging.getLogger(__name__)
CHECK_STEPS = 8
"""Engine steps between two checks of the counts."""
ZERO_IF_UNUSED = (".bias", "mask_embedding")
"""Endings of parameters that may be zero in a sound head: DFlash and DSpark embed masks apart from the vocabulary."""
SAME_WEIGHT = 0.5
"""Cosine above which a weight is recognized as a later version of another."""

Tensors = Mapping[str, torch.Tensor]


class HeadWatch:
    """Owns an engine's canaries and the alarms that they raised. The sample stats know the versions of policy and head.

    The counts are the draft board's. They reach the host one check late.

    A collapse of acceptance turns the drafter off until the next head or wake-up. A mere decline does not, nor does a failure
    in long contexts alone. If the drafter is asked only where it pays, a collapse without a known fault does not turn it off
    either: the tasks may have changed, so drafter and canary begin again.
    """

    def __init__(self, runner: Any, model: ModelDrafter, samples: SampleStatsLog, config: SpecrolloutConfig) -> None:
        self._runner, self._model, self._samples = runner, model, samples
        refresh = config.draft_refresh
        self._canary = Canary(max_age=None if refresh is None else refresh.max_age_alarm)
        self._contexts = ContextCanary()
        self._folder = config.head_folder
        """Folder of the head in service; None if it is not known."""
        self._previous: Path | None = None
        self._counts = HostCopy(model.board.tables.verified_DCK2[model.board.model])
        self._seen_CK2: Any = 0
        self._num_steps = 0
        self._alarms: list[dict[str, Any]] = []

    def began(self, event: str, **known: Any) -> None:
        """Starts a period after a refit, publish or wake, in which acceptance should be as before, or as the gate measured."""
        self._canary.begin(event, **known)
        self._contexts.begin(event, **known)
        if event != "refit":
            self._model.is_allowed = True

    def load(self, folder: Path, version: int, expected_length: float | None, num_positions: int) -> None:
        """Loads the published head of `folder`, trained for the policy of `version`. It drafts from now on.

        Raises ValueError for a head unlike the one that the engine was started with.
        """
        load_published_head(self._runner, folder)
        self._model.begin_again()
        self._previous, self._folder = self._folder, folder
        self._contexts = ContextCanary()
        self._samples.head_version = version
        self.began("publish", expected_length=expected_length, num_positions=num_positions)

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call, as plain values."""
        self._check()
        alarms, self._alarms = self._alarms, []
        return alarms

    def step_ended(self) -> None:
        """Counts an engine step, and checks the counts from time to time."""
        self._num_steps += 1
        if self._num_steps % CHECK_STEPS == 0:
            self._check()

    def _check(self) -> None:
        """Judges the drafts that were verified since the last check."""
        self._counts.refresh()
        new_CK2 = self._counts.values - self._seen_CK2
        self._seen_CK2 = self._counts.values.copy()
        drafted_CK, accepted_CK = new_CK2[..., 0], new_CK2[..., 1]
        context_alarm = self._contexts.observe(drafted_CK, accepted_CK, CHECK_STEPS)
        health = HeadHealth(age_in_versions=self._samples.policy_version - self._samples.head_version)
        alarm = self._canary.observe(drafted_CK.sum(axis=0), accepted_CK.sum(axis=0), health, CHECK_STEPS)
        alarm = alarm or context_alarm
        if alarm is not None:
            fails = self._contexts.fails_in_long_contexts
            with gpu_sync_allowed():
                found = head_health(self._runner, self._folder, self._previous)
            found = replace(found, age_in_versions=health.age_in_versions, fails_in_long_contexts=fails)
            self._raise(replace(alarm, health=found))

    def _raise(self, alarm: Any) -> None:
        """Records an alarm, and stops the drafter if it is broken."""
        is_collapse = self._canary.is_silent
        is_off = is_collapse and (alarm.cause in WEIGHT_CAUSES or not self._model.planner.weighs_model)
        if is_off:
            self._model.forbid()
        elif is_collapse:
            self._model.begin_again()
            self._canary.begin_again()
            self._contexts = ContextCanary()
        logger.warning("specrollout: %s", alarm.sentence)
        self._alarms.append(
            {
                "event": alarm.event, "cause": alarm.cause, "seen": alarm.seen, "expected": alarm.expected,
                "drafted": alarm.num_drafted, "drafter_off": is_off, "sentence": alarm.sentence,
                "policy_version": self._samples.policy_version, "head_version": self._samples.head_version,
            }
        )  # fmt: skip


def head_health(runner: Any, folder: Path | None, previous: Path | None) -> HeadHealth:
    """Returns what is wrong with the engine's head, found without drafting.

    The engine should have the head of `folder`, published after the head of `previous`. A kernel may have repacked a weight in
    the engine; then only the weight's file is checked.
    """
    draft = runner.speculator.model
    owned = {id(p) for p in runner.model.parameters()}
    own = {name: p.detach() for name, p in draft.named_parameters() if id(p) not in owned and p.numel()}
    published = {} if folder is None else read_head_tensors(folder)
    before = {} if previous is None else read_head_tensors(previous)
    floats = [(name, t) for name, t in (*own.items(), *published.items()) if t.is_floating_point()]
    in_use, intended = aux_layer_ids(runner), () if folder is None else read_head_facts(folder).layer_ids
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
        layer_ids_wrong=has_other_layers or _are_layers_swapped(published, before),
        qkv_interleaved=_is_interleaved(published, before),
        head_context=head_context(folder, runner.model_config.max_model_len),
        rope_difference=rope_difference(head_config, policy_config) if method == "eagle3" else "",
    )


def _holds(own: Tensors, published: Tensors) -> bool:
    """Returns whether the engine's tensors equal the published ones, where they kept their names and shapes."""
    for name, tensor in published.items():
        mine = next((t for n, t in own.items() if n in (name, f"model.{name}") and t.shape == tensor.shape), None)
        if mine is not None and not torch.equal(mine.cpu(), tensor.to(mine.dtype)):
            return False
    return True


def _are_layers_swapped(now: Tensors, before: Tensors) -> bool:
    """Returns whether a part of `fc` that reads one auxiliary layer resembles another layer's part in the previous head."""
    for new, old in _pairs(now, before, "fc.weight"):
        if new.shape[1] % new.shape[0] == 0:
            new_A, old_A = (t.float().split(t.shape[0], dim=1) for t in (new, old))
            return any(np.argmax([_cosine(part, o) for o in old_A]) != i for i, part in enumerate(new_A))
    return False


def _is_interleaved(now: Tensors, before: Tensors) -> bool:
    """Returns whether a projection resembles the previous head's only after its rows are regrouped.

    Megatron's layout looks so when it is read as Hugging Face's: attention heads and the elements of a head change places.
    """
    for new, old in _pairs(now, before, "q_proj.weight", "k_proj.weight"):
        as_it_is = _cosine(new, old)
        sizes = [n for n in range(2, len(new) // 2 + 1) if len(new) % n == 0]
        regrouped = (new.view(n, -1, new.shape[1]).transpose(0, 1).reshape(new.shape) for n in sizes)
        if as_it_is < SAME_WEIGHT and any(_cosine(t, old) > max(as_it_is, SAME_WEIGHT) for t in regrouped):
            return True
    return False


def _pairs(now: Tensors, before: Tensors, *endings: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the weights whose names have one of the `endings`, new and old, where two heads have them in one shape."""
    for ending in endings:
        new, old = ([t for name, t in tensors.items() if name.endswith(ending)][:1] for tensors in (now, before))
        yield from ((n, o) for n, o in zip(new, old, strict=False) if n.shape == o.shape)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0))
