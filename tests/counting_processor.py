# SPDX-License-Identifier: Apache-2.0
"""A logits processor for vLLM's V2 model runner that counts from the end of the prompt, as budgets of thinking do."""

from typing import Any

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

FORCED_AT, FORCED = 15, 7
BANNED_FROM, BANNED = 19, 10


class CountingProcessor(LogitsProcessor):
    """Makes token `FORCED` the response's token number `FORCED_AT`, and forbids token `BANNED` from `BANNED_FROM` on."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompt_lengths = req_states.prompt_len

    def apply(self, logits: Any, ctx: Any) -> Any:
        number = ctx.pos + 1 - self._prompt_lengths.gpu[ctx.expanded_idx_mapping.long()].long()
        is_forced = number == FORCED_AT
        logits[is_forced] = float("-inf")
        logits[is_forced, FORCED] = 0.0
        logits[number >= BANNED_FROM, BANNED] = float("-inf")
        return logits
