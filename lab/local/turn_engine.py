# SPDX-License-Identifier: Apache-2.0
"""An engine that works in turns and gets new weights between two of them."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from lab.local.engine import RolloutEngine
from nemo_specrollout.generation.engine.requests import RolloutRequest, as_bytes
from nemo_specrollout.stragglers.turn_engine import TurnEngine


class ReloadingTurnEngine(TurnEngine):
    """A `TurnEngine` of a local run."""

    engine: RolloutEngine

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int, *, recompute_kv_cache: bool
    ) -> None:
        """Replaces the weights between two turns; attempts go on.

        With `run_ahead`, attempts begin again and their longest known text is drafts, so all their tokens are the new
        policy's.

        With `recompute_kv_cache`, the new policy reads the text of each attempt again, so its tokens are exact samples of
        the new policy. Without it, attempts go on from the old policy's KV cache, as NeMo-RL does by default.
        """
        attempts = list(self._attempts.values()) if recompute_kv_cache else []
        for attempt in attempts:
            tokens, _ = self.engine.progress(attempt.engine_id)
            text = (*attempt.request.prefix_token_ids, *tokens)
            if self.engine.runs_ahead:
                assert isinstance(attempt.request, RolloutRequest)
                made = as_bytes(text)
                # What an earlier policy made beyond it stays: weights may change before an attempt has got as far again.
                ahead = made + attempt.request.ahead[len(made) :]
                attempt.request = replace(attempt.request, prefix_token_ids=(), ahead=ahead)
            else:
                attempt.request = replace(attempt.request, prefix_token_ids=text)
            attempt.num_reported = 0
        self._abort(attempts)
        self.engine.load_weights(tensors)
        self.policy_version = policy_version
        self._submit(attempts)
