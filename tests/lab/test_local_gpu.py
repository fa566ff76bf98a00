# SPDX-License-Identifier: Apache-2.0
"""A local run on one GPU, as far as a CPU can check it: the device, the sizes of engines, and weights on their way."""

import pytest
import torch

from lab.local.device import CPU, GIB, engine_memory, run_device, sized_engines
from lab.local.policy_shape import PolicyShape
from lab.local.run_sections import GenerationConfig, VllmConfig
from lab.local.shared_weights import opened, packed
from nemo_specrollout.config.strict import ConfigError

pytestmark = pytest.mark.unit

SMOLLM2 = PolicyShape(30, 576, 1536, 9, 3, 64, 49152, 2048, 1e-5, 1e5, True, False)
GENERATION = GenerationConfig(VllmConfig(1024, "float32"), max_new_tokens=768, vllm_kwargs={"max_num_seqs": 32})


def test_the_device_is_the_one_that_the_config_names() -> None:
    assert run_device(0) == CPU
    with pytest.raises(ConfigError, match=r"gpus_per_node: 1, but torch finds no CUDA GPU .*; set it to 0"):
        run_device(1)


def test_a_visible_gpu_is_not_used_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="gpus_per_node: 0, but vLLM would use the GPU here"):
        run_device(0)


def test_engines_leave_the_trainer_room() -> None:
    memory = engine_memory(GENERATION, SMOLLM2, 138 * GIB, 140 * GIB, 1)
    token_bytes = 2 * 31 * 3 * 64 * 4
    assert 32 * 1024 * token_bytes < memory["kv_cache_memory_bytes"] < 1.2 * 32 * 1024 * token_bytes
    assert memory["kv_cache_memory_bytes"] / (140 * GIB) < memory["gpu_memory_utilization"] < 0.05
    small = engine_memory(GENERATION, SMOLLM2, 9 * GIB, 80 * GIB, 1)
    assert small["kv_cache_memory_bytes"] < memory["kv_cache_memory_bytes"]
    assert small["gpu_memory_utilization"] * 80 * GIB < 4.6 * GIB
    for free, engines in ((7 * GIB, 1), (12 * GIB, 2)):
        with pytest.raises(ConfigError, match="GiB are free"):
            engine_memory(GENERATION, SMOLLM2, free, 80 * GIB, engines)


def test_sizes_that_the_user_names_stand() -> None:
    ours = {"kv_cache_memory_bytes": 5, "gpu_memory_utilization": 0.1}
    assert sized_engines({"max_num_seqs": 8}, ours) == {"max_num_seqs": 8, **ours}
    assert sized_engines({"kv_cache_memory_bytes": 9}, ours) == {**ours, "kv_cache_memory_bytes": 9}
    assert sized_engines({"gpu_memory_utilization": 0.5}, ours) == {"gpu_memory_utilization": 0.5}


def test_weights_on_a_cpu_travel_as_they_are() -> None:
    tensors = [("a", torch.arange(3.0)), ("b", torch.ones(2, 2))]
    for by_handle in (True, False):
        received = list(opened(packed(tensors, by_handle)))
        assert [name for name, _ in received] == ["a", "b"]
        assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(received, tensors, strict=True))


def test_handles_are_opened_where_they_arrive() -> None:
    assert next(opened([("a", (torch.full, ((2,), 7.0)))]))[1].tolist() == [7.0, 7.0]
