# SPDX-License-Identifier: Apache-2.0
"""Whole steps on the simulated GPU never wait: drafters of all types, capture of features, the canary, coming and going."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_step import B, DecodeStep, K, zeros
from device import GPU, FakeGpu, fake_gpu
from speculators import speculator
from vllm.v1.worker.gpu import buffer_utils

from nemo_specrollout.config.block import DraftRefreshConfig
from nemo_specrollout.config.drafter_configs import (
    DRAFT_SAMPLING,
    DRAFTERS,
    MODEL_DRAFTERS,
    REMOTE_DRAFTER,
    DrafterConfig,
    FolderDrafterConfig,
    NgramDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.drafters.board import DraftBoard
from nemo_specrollout.generation.drafting import remote_participant
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.drafting.model_drafter import ModelDrafter
from nemo_specrollout.generation.step.step_accounts import StepAccounts
from nemo_specrollout.generation.step.verification import EqualityVerifier
from nemo_specrollout.generation.step.verification_budget import VerificationBudget
from nemo_specrollout.heads.serving import feature_capture
from nemo_specrollout.heads.serving.feature_capture import FeatureCapture
from nemo_specrollout.heads.serving.head_monitor import CHECK_STEPS, HeadMonitor
from nemo_specrollout.remote.verifier.draft_stream import RemoteDrafter

NO_WEIGHTS = [(kind, "", False) for kind in DRAFTERS if kind not in MODEL_DRAFTERS]
CASES = NO_WEIGHTS + list(itertools.product(MODEL_DRAFTERS, DRAFT_SAMPLING, (False, True)))
"""Type of drafter, how it samples, and whether it leaves out most of the vocabulary."""


def config_of(kind: str, sampling: str) -> DrafterConfig:
    """Returns the options of a drafter. A remote one has an address that cannot be reached."""
    options: dict[str, Any] = {"sampling": sampling} if sampling else {}
    if issubclass(DRAFTERS[kind], FolderDrafterConfig):
        options["model"] = "a/drafter"
    if kind == REMOTE_DRAFTER:
        options |= {"model": "a/drafter", "addresses": ("tcp://127.0.0.1:9",)}
    return DRAFTERS[kind](**options)


class WholeStep(DecodeStep):
    """Steps of an engine in the order of `vllm_worker.py`: requests come, steps follow, requests leave."""

    def __init__(self, kind: str, sampling: str, reduced: bool) -> None:
        refresh = {"draft_refresh": DraftRefreshConfig(rollout_capture_share=1.0)} if kind == "eagle3" else {}
        beside = SuffixDrafterConfig() if kind == "ngram" else NgramDrafterConfig()
        network = speculator(kind, reduced) if kind in MODEL_DRAFTERS else None
        super().__init__((config_of(kind, sampling), beside), speculator=network, **refresh)
        self._accounts = StepAccounts(self.runner, self.drafting)

    def live(self) -> None:
        """Runs as many steps as the canary needs for a check, with drafts, without, and with idle drafters."""
        self.open()
        for number in range(CHECK_STEPS + 1):
            self.plan_tokens()
            self._accounts.begin_step(self.batch)
            if self.drafting.model is not None:
                self.drafting.model.depth = K * (number % 2)
            self.draft(self.verify(), K * (number % 3 > 0))
            self._accounts.end_step()
            self.drafting.end_step(self.batch, SimpleNamespace())
        self.drafting.close(list(range(B)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Yields a GPU that reads the host's pinned memory."""
    with fake_gpu() as fake:
        for module in (remote_participant, buffer_utils):
            monkeypatch.setattr(module, "is_uva_available", lambda: True)
        view = lambda memory: torch.empty(memory.shape, dtype=memory.dtype, device=GPU)  # noqa: E731
        monkeypatch.setattr(buffer_utils, "get_accelerator_view_from_cpu_tensor", view)
        yield fake


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_part_of_a_step_waits(gpu: FakeGpu, case: tuple[str, str, bool]) -> None:
    kind, sampling, _ = case
    step = WholeStep(*case)
    with gpu.step():
        step.live()
    assert ("_best_of_block" in gpu.done) == (sampling == "shared_noise")
    assert ("_align" in gpu.done) == (kind == REMOTE_DRAFTER)


def test_the_time_of_a_capture_is_the_device_s(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the simulated device's events comes 1 ms after the one before. The latest capture is not counted yet."""
    monkeypatch.setattr(feature_capture, "CAPTURE_TIME_SHARE", 1e9)
    step = WholeStep("eagle3", "", False)
    with gpu.step():
        step.live()
    capture = step.drafting.capture
    assert capture is not None and capture.seconds == pytest.approx(1e-3 * (CHECK_STEPS + 1))


PARTS = {
    "eagle3": [(DraftRouter, "open"), (DraftRouter, "begin_step"), (DraftRouter, "end_step"), (DraftRouter, "close"),
               (VerificationBudget, "get_num_tokens"), (VerificationBudget, "record_confidences"),
               (EqualityVerifier, "__call__"), (DraftBoard, "observe"), (DraftBoard, "choose"), (ModelDrafter, "propose"),
               (FeatureCapture, "observe"), (HeadMonitor, "_check"), (StepAccounts, "end_step")],
    REMOTE_DRAFTER: [(RemoteDrafter, "open"), (RemoteDrafter, "propose"), (RemoteDrafter, "close")],
}  # fmt: skip
"""Parts of a step, by a type of drafter."""


@pytest.mark.parametrize(
    ("kind", "owner", "name"), [(kind, *part) for kind, parts in PARTS.items() for part in parts], ids=str
)
def test_a_wait_in_any_part_of_a_step_is_noticed(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, kind: str, owner: type, name: str
) -> None:
    step, method = WholeStep(kind, "", False), getattr(owner, name)

    def waiting(self: Any, *args: Any, **options: Any) -> Any:
        zeros(1).item()
        return method(self, *args, **options)

    monkeypatch.setattr(owner, name, waiting)
    with pytest.raises(RuntimeError), gpu.step():
        step.live()
