# SPDX-License-Identifier: Apache-2.0
"""Our kernels with the noise of an older vLLM: they sample the tokens that vLLM's own kernel samples.

All kernels run in Triton's interpreter, but for the bodies that the laboratory has for a CPU.

Shapes: R rows, S request slots, V vocabulary of the drafter, K draft positions.
"""

import os
from types import ModuleType

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.older_vllm,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by `make test-pins`"),
]
NUM_ROWS, NUM_SLOTS = 12, 9
NUM_VOCAB = [1, 97, 1024, 4100, 32_003]
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rows(num_vocab: int, dtype: torch.dtype = torch.float32) -> Rows:
    """Returns logits, slots, temperatures, seeds and positions. Seeds have 64 bits, and two positions have more than 32."""
    rng = np.random.default_rng(num_vocab)
    logits_RV = torch.from_numpy(rng.standard_normal((NUM_ROWS, num_vocab + 3)) * 3).to(dtype)[:, :num_vocab]
    logits_RV[3, num_vocab // 2 :] = logits_RV[3, 0]  # ties
    slots_R = torch.from_numpy(rng.integers(0, NUM_SLOTS, NUM_ROWS))
    slots_R[2] = -1
    temperature_S = torch.tensor([0.0, 0.7, 1.0, 1.3, 1.0, 0.0, 0.5, 2.0, 1.0])
    seeds_S = torch.from_numpy(rng.integers(-(1 << 63), (1 << 63) - 1, NUM_SLOTS))
    seeds_S[:2] = torch.tensor([7, (1 << 32) + 7])
    positions_R = torch.from_numpy(rng.integers(0, 1 << 17, NUM_ROWS))
    positions_R[:2] += 1 << 33
    return logits_RV, slots_R, temperature_S, seeds_S, positions_R


def bodies() -> dict[str, ModuleType]:
    """Returns the kernels for a GPU, and their bodies for a CPU."""
    from lab.vllm_on_cpu.own_kernels import draft_sampling
    from nemo_specrollout.generation.drafting import draft_sampling_triton

    return {"kernels": draft_sampling_triton, "bodies": draft_sampling}


def sampled(module: ModuleType, given: Rows, ids_V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and evidence levels, of which only one column is written."""
    tokens_R, levels_RK = torch.empty(NUM_ROWS, dtype=torch.int64), torch.full((NUM_ROWS, 4), 99, dtype=torch.int8)
    module.sample_rows(*given, tokens_R, levels_RK, torch.tensor(2), ids_V)
    assert (levels_RK[:, [0, 1, 3]] == 99).all()
    return tokens_R, levels_RK[:, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_vocab", NUM_VOCAB)
def test_drafts_are_vllms_samples(num_vocab: int, dtype: torch.dtype) -> None:
    from nemo_specrollout.generation.engine import compat

    given = rows(num_vocab, dtype)
    expected_R = compat.draw(*given, apply_temperature=True)
    levels = []
    for module in bodies().values():
        tokens_R, levels_R = sampled(module, given, torch.empty(0, dtype=torch.int64))
        assert torch.equal(tokens_R, expected_R)
        levels.append(levels_R)
    assert (levels[0] != levels[1]).sum() <= 1, "the gaps' last bits differ at an edge at most"
    assert num_vocab < 97 or len(set(levels[0].tolist())) > 2


@pytest.mark.parametrize("num_vocab", [97, 4100])
def test_drafts_of_a_reduced_vocabulary_are_vllms_samples_of_its_tokens(num_vocab: int) -> None:
    """A token has the noise of its number in the target's vocabulary, whatever the drafter's number for it."""
    from nemo_specrollout.generation.engine import compat

    given = rows(num_vocab)
    ids_V = torch.arange(num_vocab) * 3 + 5
    all_RV = torch.full((NUM_ROWS, 3 * num_vocab + 9), -torch.inf)
    all_RV[:, ids_V] = given[0]
    expected_R = compat.draw(all_RV, *given[1:], apply_temperature=True)
    for module in bodies().values():
        assert torch.equal(sampled(module, given, ids_V)[0], expected_R)


@pytest.mark.parametrize("num_vocab", NUM_VOCAB)
def test_sampled_rows_are_vllms_samples(num_vocab: int) -> None:
    from nemo_specrollout.generation.engine import compat
    from nemo_specrollout.generation.step import row_sampling_triton
    from nemo_specrollout.generation.step.sampled_rows import Logits, RowKeys

    given = rows(num_vocab)
    scored = Logits(given[0], True)
    drawn = row_sampling_triton.draw_rows(scored, RowKeys(*given[1:]), scored, None)
    assert torch.equal(drawn.tokens_R, compat.draw(*given, apply_temperature=True))


def test_the_noise_is_the_audits() -> None:
    """The audit computes it in numpy, from the same seeds, and compares with none of our kernels."""
    from lab.vllm_on_cpu.kernels.noise import philox_gumbel, philox_row_state
    from nemo_specrollout.audit.noise import scheme_of
    from nemo_specrollout.installed.versions import vllm_version

    _, _, _, seeds_S, positions_R = rows(97)
    tokens_V = np.arange(151_000, 152_000)
    for seed in seeds_S.tolist():
        position = int(positions_R[4])
        expected_V = scheme_of(str(vllm_version())).noise(seed, np.array([position]), tokens_V)
        state = philox_row_state(seed, position)
        found_V = [philox_gumbel(state, np.uint32(token)) for token in tokens_V]
        np.testing.assert_allclose(found_V, expected_V, rtol=2e-6, atol=2e-6)
