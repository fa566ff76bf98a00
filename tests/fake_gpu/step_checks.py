# SPDX-License-Identifier: Apache-2.0
"""A decode step on the simulated GPU: nothing in it waits, and it has no more launches than recorded."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from decode_step import HEAD, TEXT, B, DecodeStep, K
from device import GPU, FakeGpu, Launch, _tensors, fake_gpu

from nemo_specrollout.drafters.base import Texts

ALL = (*TEXT, HEAD)
VERIFYING = [
    "_gather_draft_sampled_kernel", "sub", "_score_blocks", "_finish_rows", "_get_num_sampled_and_rejected_kernel"
]  # fmt: skip
"""All launches of vLLM's rejection sampler with log-probs at a temperature other than 1. Two of them are ours."""
LOADING = ["copy_", "copy_", "copy_"]
"""Copies of a step's inputs to the memory that graphs read."""
DRAFTING_WITH_WEIGHTS = ["copy_", "gt", "mul", "index", "masked_fill_", "copy_"]
INFORMING_THE_BUDGET = ["copy_"]
AFTER_WEIGHTS = [*DRAFTING_WITH_WEIGHTS, "_propose", *INFORMING_THE_BUDGET]
REPLAYS = {
    "text": [*VERIFYING, *LOADING, "replay", *INFORMING_THE_BUDGET],
    "head": [*VERIFYING, *LOADING, "replay", *DRAFTING_WITH_WEIGHTS, "replay", *INFORMING_THE_BUDGET],
    "all": [*VERIFYING, *LOADING, "replay", *DRAFTING_WITH_WEIGHTS, "replay", *INFORMING_THE_BUDGET],
}
"""The same steps with CUDA graphs of drafting. The host launches no kernel of drafting."""
LAUNCHES = {
    "text": [*VERIFYING, "_observe", "_learn", "_propose", *INFORMING_THE_BUDGET],
    "head": [*VERIFYING, "_observe", *AFTER_WEIGHTS],
    "all": [*VERIFYING, "_observe", "_learn", *AFTER_WEIGHTS],
}
"""Launches of a decode step, without vLLM's own preparation, forward pass and compaction of drafts.

For `head`, the launches of vLLM's speculator are left out too. If a change saves launches, shorten these lists."""
MAX_OWN_KERNELS = 5
"""Kernels of this package in a step: two verify, in the place of seven launches of vLLM, and three draft."""
DRAFTERS = {"text": TEXT, "head": (HEAD,), "all": ALL}


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as fake:
        yield fake


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_decode_step_never_waits_and_has_few_launches(gpu: FakeGpu, name: str) -> None:
    step = DecodeStep(DRAFTERS[name])
    with gpu.step():
        step.draft(step.verify())
    assert gpu.done == LAUNCHES[name]
    own = sum(launch.kernel.fn.__module__.startswith("nemo_specrollout") for launch in gpu.launches)
    others, operations = len(gpu.launches) - own, len(gpu.done) - len(gpu.launches)
    print(f"{name}: {own} kernels of ours, {others} of vLLM, {operations} operations of torch")
    assert own <= MAX_OWN_KERNELS


def written(launch: Launch) -> tuple[str, list[int]]:
    """Returns a kernel's name, and the sizes of the tensors that it gets."""
    return launch.kernel.__name__, [tensor.numel() for tensor in _tensors((*launch.args, *launch.options.values()))]


@pytest.mark.parametrize("name", DRAFTERS)
def test_graphs_replay_the_kernels_that_a_step_would_launch(gpu: FakeGpu, name: str) -> None:
    """Kernels get the same tensors, but for the rows of the batch, which graphs read from memory of their own."""
    step = DecodeStep(DRAFTERS[name])
    with gpu.step():
        step.draft(step.verify())
    launched = [launch for launch in gpu.launches if launch.kernel.__name__ in ("_observe", "_learn", "_propose")]
    step.drafting.warm_up()
    with gpu.step():
        step.draft(step.verify())
    assert gpu.done == REPLAYS[name]
    assert [r.kernel for r in gpu.replayed] == [u.kernel for u in launched]
    assert [r.grid for r in gpu.replayed] == [u.grid for u in launched], "the batch is as large as a graph"
    shared = {id(t) for t in _tensors((*step.drafting.board.tables, *step.drafting.board.memory.sums))}
    for replayed, launch in zip(gpu.replayed, launched, strict=True):
        ours, theirs = ([id(t) for t in _tensors(x.args) if id(t) in shared] for x in (replayed, launch))
        assert ours == theirs
        constants = [{k: v for k, v in x.options.items() if k.isupper()} for x in (replayed, launch)]
        assert constants[0] == constants[1]


def test_steps_that_graphs_do_not_fit_are_launched(gpu: FakeGpu) -> None:
    """Long new texts take more programs than a graph has, and a driver may refuse to record."""
    step = DecodeStep(TEXT)
    step.drafting.warm_up()
    step.open()
    with gpu.step():  # the prompts are read
        step.draft(step.verify())
    assert gpu.done == LAUNCHES["text"]
    with gpu.step():
        step.draft(step.verify())
    assert gpu.done == REPLAYS["text"]
    gpu.refuses_graphs = True
    step.drafting.warm_up()
    with gpu.step():
        step.draft(step.verify())
    assert gpu.done == LAUNCHES["text"]


def test_a_drafting_pause_launches_nothing_after_its_first_step(gpu: FakeGpu) -> None:
    step = DecodeStep(TEXT)
    with gpu.step():
        step.draft(step.verify(), num_drafts=0)
    assert gpu.done == [*VERIFYING, "_observe", "zero_"]
    with gpu.step():
        step.draft(step.verify(), num_drafts=0)
    assert gpu.done == VERIFYING


@pytest.mark.parametrize("name", ["head", "all"])
def test_sampling_a_draft_takes_two_launches(gpu: FakeGpu, name: str) -> None:
    step = DecodeStep(DRAFTERS[name])
    with gpu.step():
        step.sample_drafts()
    assert gpu.done == ["_best_of_block", "_best_of_row"]


def test_cuda_graphs_are_captured_with_sampling(gpu: FakeGpu) -> None:
    """The plan at capture must not matter: a graph captured without sampling would never draft anything."""
    step = DecodeStep(ALL)
    for depth in (0, K, 0):
        step.drafting.model.depth = depth
        step.draft(step.verify())
        with gpu.step():
            step.sample_drafts()
        assert gpu.launches


@pytest.mark.parametrize("budget", [0, B, B * K])
def test_the_budget_never_waits(gpu: FakeGpu, budget: int) -> None:
    step = DecodeStep(TEXT)
    step.drafting.policy = Fixed(budget)
    with gpu.step():
        step.plan_tokens()
    assert ("topk" in gpu.done) == (0 < budget < B * K)


@pytest.mark.parametrize("name", DRAFTERS)
def test_new_requests_never_make_the_host_wait(gpu: FakeGpu, name: str) -> None:
    step = DecodeStep(DRAFTERS[name])
    with gpu.step():
        step.open()


class Fixed:
    """A budget policy with a fixed number of drafts."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def num_drafts(self, *_: Any) -> int:
        return self._budget


VIOLATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda counts_B: counts_B.sum().item(),
    "tolist": lambda counts_B: counts_B.tolist(),
    "cpu": lambda counts_B: counts_B.cpu(),
    "numpy": lambda counts_B: counts_B.numpy(),
    "int": lambda counts_B: int(counts_B[0]),
    "bool": lambda counts_B: bool((counts_B > 0).all()),
    "nonzero": lambda counts_B: counts_B.nonzero(),
    "mask": lambda counts_B: counts_B[counts_B > 0],
    "repeat": torch.repeat_interleave,
    "upload": lambda counts_B: torch.tensor([1, 2], device=counts_B.device),
    "upload_array": lambda counts_B: torch.from_numpy(np.zeros(3)).to(counts_B.device),
    "scatter_a_number": lambda counts_B: counts_B.__setitem__(torch.zeros(2, dtype=torch.int64, device=GPU), 0),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_operations_that_wait_are_detected(gpu: FakeGpu, name: str) -> None:
    """The first test above fails if the board contains one of these operations."""
    step = DecodeStep(TEXT)
    board = step.drafting.board
    choose = board.choose

    def waiting(texts: Texts, *others: Any) -> None:
        VIOLATIONS[name](texts.total_len_S)
        choose(texts, *others)

    board.choose = waiting
    with pytest.raises(RuntimeError), gpu.step():
        step.draft(step.verify())
