# SPDX-License-Identifier: Apache-2.0
"""Each body for a batch, a drafter or a ratio test equals its kernel, on batches of several kinds."""

import sys
from collections.abc import Callable, Iterator

import batch_inputs
import drafting_inputs
import interpreter
import pytest
import ratio_test_inputs
from vllm.triton_utils.dispatcher import KernelOverride
from world import SIZES, Size, World

from lab.vllm_on_cpu import kernels as cpu_kernels
from lab.vllm_on_cpu.kernels import batch, drafting, estimating, rejection

MODULES = {module.__name__ for module in (batch, drafting, estimating, rejection)}
BODIES = {name: body for name, body in cpu_kernels.bodies().items() if body.__module__ in MODULES}
MAKERS = batch_inputs.MAKERS | drafting_inputs.MAKERS | ratio_test_inputs.MAKERS
ROUNDED = {name: 2e-5 for name in ratio_test_inputs.MAKERS if "rejection_sampler." not in name}
"""Tolerance by kernel, for logarithms and sums that are rounded in another order."""


def test_every_body_is_compared() -> None:
    assert set(MAKERS) == set(BODIES)


@pytest.mark.parametrize("name", MAKERS, ids=lambda name: ".".join(name.split(".")[-3:]))
def test_a_body_equals_its_kernel(name: str) -> None:
    def changes(size: Size, make: Callable[[World], interpreter.Launch]) -> bool:
        return interpreter.compare(name, BODIES[name], lambda: make(World(size)), ROUNDED.get(name, 0.0), size.name)

    changed = [changes(size, make) for size in SIZES for make in MAKERS[name]]
    assert any(changed), "the kernel changed nothing, so the inputs test nothing"


@pytest.fixture
def unregistered() -> Iterator[None]:
    cpu_kernels.register.cache_clear()
    yield
    cpu_kernels.register.cache_clear()


def test_registration_refuses_a_kernel_with_other_arguments(unregistered, monkeypatch) -> None:
    changed = {"vllm.v1.worker.gpu.input_batch._post_update_kernel": batch.expand_idx_mapping}
    monkeypatch.setattr(cpu_kernels, "bodies", lambda: changed)
    with pytest.raises(
        RuntimeError, match=r"_post_update_kernel of this vLLM takes \(idx_mapping_ptr, num_computed_tok"
    ):
        cpu_kernels.register()


@pytest.mark.parametrize("name", ["input_batch._of_another_version_kernel", "spec_decode.of_another_version._kernel"])
def test_registration_skips_kernels_that_this_vllm_lacks(unregistered, monkeypatch, name: str) -> None:
    monkeypatch.setattr(cpu_kernels, "bodies", lambda: {f"vllm.v1.worker.gpu.{name}": batch.expand_idx_mapping})
    assert cpu_kernels.register() == 0


def test_registration_replaces_every_kernel() -> None:
    """References in other modules are replaced too. Must run last, because replaced kernels cannot be compared any more."""
    assert cpu_kernels.register() == len(cpu_kernels.bodies())
    for name in BODIES:
        module, attribute = name.rsplit(".", 1)
        assert isinstance(getattr(sys.modules[module], attribute), KernelOverride)
