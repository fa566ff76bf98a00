# SPDX-License-Identifier: Apache-2.0
"""The drafter `ahead`: drafts from a text that the request brings along, which older weights sampled with its own noise.

Noise is a function of the request's seed and a position, so most tokens of such a text are the policy's at the same position.
Shapes: B rows of the batch, S request slots, L longest sequence, K draft positions, W latest tokens, O offsets.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_LEVELS, Proposals, Texts
from nemo_specrollout.drafters.participant import Drafter, Put

WINDOW = NUM_LEVELS
"""Latest tokens by which text and draft are compared (W). The number that agrees is the evidence level of the drafts."""
AHEAD_PRIORS = 0.98 * (np.arange(1, NUM_LEVELS + 1) / NUM_LEVELS) ** 2
"""Assumed acceptance rate of each level before anything is observed."""
FARTHEST = 16
"""Tokens by which a text may be shifted at once, in both directions."""
ENOUGH = 4
"""Latest tokens in a row that must agree at another place of the text before drafts are taken from there."""


class AheadText(Drafter):
    """Proposes the next tokens of each request's own text.

    Owns the texts, in tensors of fixed size: 4 bytes for each slot and position of the engine. After a token that differs it
    goes on at the same position, because noise belongs to positions. Where the text reads on elsewhere, it moves there.
    """

    name = "ahead"
    is_recordable = True

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        margin = WINDOW + 2 * FARTHEST
        self._row_length = max_model_len + 2 * margin
        self._margin = margin
        self._texts_SL = torch.full((num_slots + 1, self._row_length), -1, dtype=torch.int32, device=device)
        """Text of each slot, after a margin. The last slot is of rows without a request."""
        self._end_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """Length of each text, prompt included; 0 without one."""
        self._shift_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """Place in the text, less place in the request."""
        self._latest_W = torch.arange(-WINDOW, 0, device=device)
        self._around_O = torch.arange(-WINDOW - FARTHEST, FARTHEST, device=device)
        self._offset_O = torch.arange(-FARTHEST, FARTHEST + 1, device=device)
        self._with_text: set[int] = set()
        self._is_clear = True

    def open(self, slots: torch.Tensor, requests: Sequence[Any], put: Put) -> None:
        for table in (self._end_S, self._shift_S):
            table.index_fill_(0, slots, 0)  # table[slots] = 0 would wait for a GPU
        bringing = [r for r in requests if r.identity.ahead]
        if not bringing:
            return
        self._with_text |= {r.slot for r in bringing}
        texts = []
        places = []
        ends = []
        for r in bringing:
            known = np.array(r.token_ids[max(r.prompt_length - WINDOW, 0) : r.prompt_length], np.int32)
            ahead = np.frombuffer(r.identity.ahead, np.int32, len(r.identity.ahead) // 4)
            unknown = np.flatnonzero((ahead < 0) | (ahead >= self._vocab_size))  # no embedding has a row for these
            first = r.prompt_length - len(known)
            text = np.concatenate([known, ahead[: unknown[0] if len(unknown) else None]])[: max(r.limit - first, 0)]
            texts.append(text)
            places.append(np.arange(len(text), dtype=np.int64) + r.slot * self._row_length + self._margin + first)
            ends.append(first + len(text))
        tokens = put(np.concatenate(texts), np.int32)
        where = put(np.concatenate(places), np.int64)
        slots_N = put([r.slot for r in bringing], np.int64)
        self._texts_SL.index_fill_(0, slots_N, -1)
        self._texts_SL.view(-1)[where] = tokens
        self._end_S[slots_N] = put(ends, np.int64)

    def close(self, slots: Sequence[int]) -> None:
        self._with_text.difference_update(slots)

    def propose(self, texts: Texts, out: Proposals) -> None:
        if self.prepare(out):
            self.launch(texts, out)

    def prepare(self, out: Proposals) -> bool:
        if not self._with_text and not self._is_clear:
            out.found_B.zero_()
        self._is_clear = not self._with_text
        return not self._is_clear

    def launch(self, texts: Texts, out: Proposals) -> None:
        num_requests = len(texts.slots_B)
        slots_B = texts.slots_B.long()
        row_B = slots_B.masked_fill(slots_B < 0, len(self._end_S) - 1)
        slots_B = slots_B.clamp(min=0)
        length_B = texts.total_len_S[slots_B].long()
        columns_W = (length_B[:, None] + self._latest_W).clamp_(min=0)
        start_B, level_B = self._places(row_B, length_B, texts.token_ids_SL[slots_B[:, None], columns_W])
        most = out.tokens_BK.shape[1]
        found_B = (self._end_S[row_B] - start_B).clamp_(0, most)
        out.tokens_BK[:num_requests] = self._read(row_B, start_B, torch.arange(most, device=start_B.device))
        out.levels_BK[:num_requests] = level_B[:, None]
        out.found_B[:num_requests] = found_B.masked_fill(texts.slots_B < 0, 0)

    def _places(
        self, row_B: torch.Tensor, length_B: torch.Tensor, latest_BW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns where in its text each request goes on, and the evidence level. Moves to where the text reads on better."""
        place_B = length_B + self._shift_S[row_B]
        agrees_BOW = self._read(row_B, place_B, self._around_O).unfold(1, WINDOW, 1) == latest_BW[:, None, :]
        run_BO = agrees_BOW.flip(-1).int().cumprod(-1).sum(-1)
        nearest_BO = run_BO * (FARTHEST + 1) - self._offset_O.abs()
        best_B1 = nearest_BO.argmax(1, keepdim=True)
        gain_B1 = run_BO.gather(1, best_B1) - 2 * run_BO[:, FARTHEST, None]
        chosen_B1 = best_B1.masked_fill(gain_B1 < ENOUGH, FARTHEST)
        offset_B = self._offset_O[chosen_B1[:, 0]]
        self._shift_S[row_B] += offset_B
        agreeing_B = agrees_BOW.sum(-1).gather(1, chosen_B1)[:, 0]
        return place_B + offset_B, (agreeing_B - 1).clamp_(0, NUM_LEVELS - 1)

    def _read(self, row_B: torch.Tensor, place_B: torch.Tensor, columns_C: torch.Tensor) -> torch.Tensor:
        """Returns tokens of the texts from `place_B` on, int32 [B, C]; -1 where a text has none."""
        columns_BC = (place_B[:, None] + columns_C + self._margin).clamp_(0, self._row_length - 1)
        return self._texts_SL[row_B[:, None], columns_BC]
