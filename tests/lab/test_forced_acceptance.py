# SPDX-License-Identifier: Apache-2.0
"""The drafter of the GPU check that is right with a forced probability, alone and in a real engine."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab.gpu.forced_acceptance import MAX_DRAFTS, ForcedEngine, OracleDrafter
from lab.gpu.geometries import VOCAB_SIZE, model_folder
from lab.gpu.gpu_speed import PROMPT_LENGTH, random_requests
from lab.gpu.gpu_stage import GIB, SEED
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.generation.engine.requests import RequestIdentity, Rollout
from nemo_specrollout.generation.engine.transfers import to_device
from nemo_specrollout.sampling.seeds import request_seed

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")


def drafted(oracle: OracleDrafter, lengths: list[int]) -> Proposals:
    """Returns what the oracle proposes to one request in each slot, whose texts have these lengths."""
    slots_B = torch.arange(len(lengths))
    empty_BK = torch.zeros(len(lengths), MAX_DRAFTS, dtype=torch.int32)
    out = Proposals(empty_BK, empty_BK.to(torch.int8), torch.zeros(len(lengths), dtype=torch.int32))
    oracle.propose(Texts(slots_B, torch.tensor(lengths, dtype=torch.int32), empty_BK), out)
    return out


def test_the_oracle_knows_texts_and_spoils_a_share() -> None:
    requests = random_requests(3, 500)
    texts = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 500)).tolist()
    longest = PROMPT_LENGTH + 500
    oracle = OracleDrafter(4, longest, CPU)
    oracle.know(requests, [Rollout(text, [], "length") for text in texts])
    identities = [RequestIdentity(request_seed(SEED, r.prompt_index, r.sample_index, 0), 0) for r in requests]
    opened = [SimpleNamespace(identity=i) for i in [*identities, RequestIdentity(5, 0)]]
    oracle.open(torch.arange(4), opened, partial(to_device, device=CPU))
    out = drafted(oracle, [64, 100, longest - 2, 64])
    assert out.found_B.tolist() == [MAX_DRAFTS, MAX_DRAFTS, 2, 0]
    assert out.tokens_BK[0].tolist() == texts[0][:MAX_DRAFTS]
    assert out.tokens_BK[1].tolist() == texts[1][36 : 36 + MAX_DRAFTS]
    for rate in (0.6, 0.9):
        oracle.force(rate)
        right = [
            drafted(oracle, [64 + i] * 4).tokens_BK[b, 0].item() == texts[b][i] for i in range(500) for b in range(3)
        ]
        assert abs(np.mean(right) - rate) < 4 * (rate * (1 - rate) / 1500) ** 0.5


@pytest.mark.slow
def test_an_engine_accepts_the_forced_share() -> None:
    """The texts stay right after a rejected draft, so every draft is judged by the forced rate alone."""
    requests = random_requests(16, 96)
    with model_folder("tiny") as folder:
        options = {"max_num_seqs": 16, "length": PROMPT_LENGTH + 96, "kv_cache_memory_bytes": GIB // 4}
        forced = ForcedEngine(folder, options)
        forced.use_budget(None)
        plain = forced.engine.generate(requests)
        forced.oracle.know(requests, plain)
        for rate, k in ((0.6, 1), (0.8, 4), (0.9, 7)):
            forced.oracle.force(rate)
            forced.use_budget(BudgetConfig("fixed", k=k))
            assert [r.token_ids for r in forced.engine.generate(requests)] == [r.token_ids for r in plain]
            figures = forced.measure(requests)
            error = (rate * (1 - rate) / figures["first drafts"]) ** 0.5
            assert figures["first drafts"] > 250
            assert abs(figures["right"] - rate) < 4 * error
            expected = sum(rate**i for i in range(k + 1))
            tokens_a_step = figures["tokens a second"] * figures["ms a step"] / 1e3 / len(requests)
            assert tokens_a_step == pytest.approx(expected, rel=0.15)
        forced.engine.close()
