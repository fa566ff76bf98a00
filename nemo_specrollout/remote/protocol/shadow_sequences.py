# SPDX-License-Identifier: Apache-2.0
"""The shadow sequences of a drafter, each of which is a copy of a verifier's request, with draft tokens at its end.

The tokens that the verifier has sampled are called the committed text. The draft tokens follow the committed text.

Shapes: N rows of a message, M shadow sequences in an engine step.
"""

import numpy as np
from numba import from_dtype, int32, int64, njit, void

from nemo_specrollout.remote.protocol.draft_buffers import RINGS, new_rings, put, text_hash
from nemo_specrollout.remote.protocol.messages import COMMIT_ROW, DRAFT_ROW

Correction = tuple[int, int, list[int]]
"""Correction of a shadow sequence. It has the number of the sequence, the number of tokens at its beginning that stay, and the
tokens that follow them from now on."""
UNCHANGED = -1
"""Outcome of a commit whose tokens the shadow sequence has drafted already, so that nothing has to be corrected."""
LACKING = -2
"""Outcome of a commit that does not continue the text of the shadow sequence, so that the request has to be opened again."""
NOT_STOPPED = -1
"""Value of `stopped` for a shadow sequence that has drafted no stop token."""

_SHADOW = np.dtype(
    [
        ("start", np.int64),  # length of the text at its opening. No earlier prefix hash is known.
        ("committed", np.int64),  # length of the text that the verifier is known to have.
        ("end", np.int64),  # length of the text with the drafts.
        ("window", np.int64),  # maximum number of draft tokens beyond the committed text.
        ("limit", np.int64),  # longest text, or 0 for a free shadow.
        ("stopped", np.int64),  # position of a drafted token that ends the text, or NOT_STOPPED.
    ]
)
_SHADOWS = from_dtype(_SHADOW)[::1]
_COMMITS = from_dtype(COMMIT_ROW)[::1]
_DRAFTS = from_dtype(DRAFT_ROW)[::1]


class ShadowSequences:
    """Owns the lengths, limits and latest tokens of all shadow sequences. The engine has their full texts and the KV cache."""

    def __init__(self, num_shadows: int, most_ahead: int) -> None:
        self.state = np.zeros(num_shadows, _SHADOW)
        # A ring reaches back behind the drafts, because commits may come late.
        self.rings = new_rings(num_shadows, 4 * most_ahead)
        self._most_ahead = most_ahead

    def open(self, shadow: int, seed: int, text: np.ndarray, limit: int, window: int) -> None:
        """Starts the shadow sequence of a request with this seed. The request's `text`, int32, counts as committed.

        `limit` is the maximum number of tokens of the sequence. `window` is the maximum number of draft tokens beyond the
        committed text, until a commit changes it.
        """
        length = len(text)
        self.state[shadow] = (length, length, length, min(window, self._most_ahead), limit, NOT_STOPPED)
        self.rings[shadow, length % self.rings.shape[1]]["prefix_hash"] = text_hash(seed, text)

    def close(self, shadow: int) -> None:
        self.state[shadow]["limit"] = 0

    def commit(
        self, shadows_N: np.ndarray, rows_N: np.ndarray, tokens: np.ndarray
    ) -> tuple[list[Correction], np.ndarray]:
        """Adds the tokens that a verifier has sampled to the committed texts, and drops draft tokens that differ from them.

        `rows_N` are the commits of a `Step`, `COMMIT_ROW` [N], and `tokens` are the new tokens of all rows. `shadows_N` has
        the number of each row's shadow sequence, or -1 for an unknown request. Returns the corrections for the engine, and
        which rows belong to requests that have to be opened again, bool [N].
        """
        kept_N = np.empty(len(shadows_N), np.int64)
        _commit(shadows_N, rows_N, tokens, self.state, self.rings, self._most_ahead, kept_N)
        stops_N = np.cumsum(rows_N["count"])
        starts_N = stops_N - (rows_N["base"] + rows_N["count"] - kept_N)
        corrections = [
            (int(shadows_N[n]), int(kept_N[n]), tokens[starts_N[n] : stops_N[n]].tolist())
            for n in np.flatnonzero(kept_N >= 0)
        ]
        return corrections, kept_N == LACKING

    def ready_to_draft(self) -> np.ndarray:
        """Returns the numbers of the shadow sequences that may draft now, int64 [M].

        Those with the fewest draft tokens come first.
        """
        state = self.state
        ahead = state["end"] - state["committed"]
        may_draft = ahead < state["window"]
        may_draft &= (state["end"] < state["limit"]) & (state["stopped"] < state["committed"])
        shadows_M = np.flatnonzero(may_draft)
        return shadows_M[np.argsort(ahead[shadows_M], kind="stable")]

    def append(self, rows_M: np.ndarray, stop_token_ids: np.ndarray) -> None:
        """Appends the tokens that the engine has drafted, `DRAFT_ROW` [M], and fills in their prefix hashes.

        After one of `stop_token_ids`, a shadow sequence does not draft again until it is corrected.
        """
        _append(rows_M, self.state, self.rings)
        stops = rows_M[np.isin(rows_M["token"], stop_token_ids)]
        self.state["stopped"][stops["owner"]] = stops["position"]


@njit(void(int64[:], _COMMITS, int32[:], _SHADOWS, RINGS, int64, int64[:]), cache=True)
def _commit(shadows_N, rows_N, tokens, states, rings, most_ahead, kept_N):  # type: ignore[no-untyped-def]
    """Applies each commit to its shadow sequence, and writes the outcome to `kept_N`.

    The outcome is `UNCHANGED`, `LACKING`, or the number of tokens at the beginning that stay when the sequence is corrected.
    """
    size = rings.shape[1]
    stop = 0
    mask = size - 1
    for n in range(len(shadows_N)):
        row = rows_N[n]
        base = row.base
        end = row.base + row.count
        stop += row.count
        first = stop - end  # index in `tokens` of the token at position 0
        kept_N[n] = LACKING
        if shadows_N[n] < 0:
            continue
        state = states[shadows_N[n]]
        ring = rings[shadows_N[n]]
        if end < state.committed:
            kept_N[n] = UNCHANGED
            continue
        oldest = max(state.start, state.end - size + 1)
        if base > state.end or base < oldest or ring[base & mask].prefix_hash != row.prefix_hash:
            continue
        state.window = min(int64(row.window), most_ahead)
        p = base
        while p < end and p < state.end and ring[p & mask].token == tokens[first + p]:
            p += 1
        if p < end and p < state.committed:
            continue
        state.committed = p
        kept_N[n] = UNCHANGED
        if p == end:
            continue
        kept_N[n] = p
        for q in range(p, end):
            put(ring, q, tokens[first + q], 0)
        state.committed = state.end = end
        if state.stopped >= p:
            state.stopped = NOT_STOPPED


@njit(void(_DRAFTS, _SHADOWS, RINGS), cache=True)
def _append(rows_M, states, rings):  # type: ignore[no-untyped-def]
    for i in range(len(rows_M)):
        row = rows_M[i]
        ring = rings[row.owner]
        row.prefix_hash = ring[row.position & (len(ring) - 1)].prefix_hash
        put(ring, row.position, row.token, row.level)
        states[row.owner].end = row.position + 1
