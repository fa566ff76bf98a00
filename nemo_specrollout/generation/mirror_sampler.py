# SPDX-License-Identifier: Apache-2.0
"""The sampler of a drafter's engine: ours, with the evidence of what it samples, and several tokens in one step of vLLM's.

Shapes: B requests of the batch, N tokens that each of them gets, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput

from nemo_specrollout.decoupled.mirrors import Burst
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.sampler import BatchKeys, CoupledSampler, evidence_levels
from nemo_specrollout.sampling.sampler import sample_tokens_with_margin


class MirrorSampler(CoupledSampler):
    """Goes on from the token that it has sampled: a pass of the model alone costs a fraction of a step of vLLM's.

    To vLLM it looks as if all but the last token had been drafts. Invariant: the KV of all but the last is written. `burst`
    is of the step under way; every request of it has room for so many.
    """

    burst = Burst()
    levels_BN = np.zeros((0, 1), np.int8)

    def _sample_plain(self, raw_RV: torch.Tensor, metadata: Any, keys: BatchKeys) -> SamplerOutput:
        positions_B = compat.next_positions(self.runner, len(keys.req_ids))
        sampled = [self._next(raw_RV, positions_B, metadata, keys)]
        if self.burst.most > 1:
            passes = compat.DecodePasses(self.runner, positions_B)
            while len(sampled) < self.burst.most and self.burst.goes_on():
                logits_BV = passes.advance(sampled[-1][0])
                sampled.append(self._next(logits_BV, passes.next_positions_B, metadata, keys))
        tokens, margins = zip(*sampled, strict=True)
        self.levels_BN = evidence_levels(torch.stack(margins, dim=1).cpu().numpy())
        return SamplerOutput(torch.stack(tokens, dim=1).to(torch.int32), None)

    def _next(
        self, raw_BV: torch.Tensor, positions_B: torch.Tensor, metadata: Any, keys: BatchKeys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        processed_BV = self._process(raw_BV.to(torch.float32), metadata, keys, None, None)
        return sample_tokens_with_margin(processed_BV, keys.seeds_B, positions_B, keys.greedy_B)
