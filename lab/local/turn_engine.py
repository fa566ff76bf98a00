# SPDX-License-Identifier: Apache-2.0
"""An engine that works in turns, and that can load new weights between two turns."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from lab.local.engine import RolloutEngine
from nemo_specrollout.generation.engine.ahead_branches import begun_again
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.stragglers.turn_engine import TurnEngine


class ReloadingTurnEngine(TurnEngine):
    """A `TurnEngine` of a local run, which can also load new weights."""

    engine: RolloutEngine

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int, *, recompute_kv_cache: bool
    ) -> None:
        """Replaces the weights between two turns. Then the engine's attempts at requests continue, in one of three ways.

        Without `recompute_kv_cache`, they continue with the old policy's KV cache, as in NeMo-RL by default.

        With `recompute_kv_cache`, the new policy first reads the text of each attempt again. So the tokens that follow are
        exact samples of the new policy.

        With `recompute_kv_cache` in an engine with `run_ahead`, attempts start over. What is known of an attempt's text is
        used as drafts only. So all of the attempt's tokens are samples of the new policy.
        """
        attempts = list(self._attempts.values()) if recompute_kv_cache else []
        for attempt in attempts:
            tokens, _ = self.engine.progress(attempt.engine_id)
            text = (*attempt.request.prefix_token_ids, *tokens)
            if self.engine.runs_ahead:
                assert isinstance(attempt.request, RolloutRequest)
                ahead, branches = begun_again(text, attempt.request.ahead, attempt.request.branches)
                attempt.request = replace(attempt.request, prefix_token_ids=(), ahead=ahead, branches=branches)
            else:
                attempt.request = replace(attempt.request, prefix_token_ids=text)
            attempt.num_reported = 0
        self._abort(attempts)
        self.engine.load_weights(tensors)
        self.policy_version = policy_version
        self._submit(attempts)
