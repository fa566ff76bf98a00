# SPDX-License-Identifier: Apache-2.0
"""The drafter `ahead`, which proposes the tokens of texts that older weights have sampled for the same request.

Those weights sampled with the request's own noise. Noise depends only on the request's seed, the position and the token.
Therefore the new weights sample most tokens of such a text again, at the same positions. A request may bring several of these
texts, which are called *paths*. The first path is the text that the older weights sampled. The others are branches of it. A
branch begins at a near-tie, where the new weights may sample the second-best token of the older weights instead.

Shapes: B entries of the batch, S request slots, P paths of a request, L longest text, K draft positions, N new requests.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_LEVELS, Proposals, Texts
from nemo_specrollout.drafters.participant import Drafter, Put
from nemo_specrollout.sampling.platforms import KernelModule, kernels_for

WINDOW = NUM_LEVELS
"""Number of a request's latest tokens that are compared with a text of older weights (a path of the request). The more of
them agree, the higher is the evidence level of the path's next tokens."""
AHEAD_PRIORS = 0.98 * (np.arange(1, NUM_LEVELS + 1) / NUM_LEVELS) ** 2
"""Acceptance rate that is assumed for each evidence level before any draft token of that level was judged."""
FARTHEST = 16
"""Largest number of tokens by which, in one engine step, a request may change its position in the path that it follows."""
ENOUGH = 4
"""Margin, in tokens, by which another position in a path must agree better with a request, so that the request goes on there.

Let n be the number of the request's latest tokens that agree with the path in a row. The request changes to the other position
if n there is at least this number plus twice the n of the present position."""


class PathTables(NamedTuple):
    """The paths of all request slots, on the engine's device.

    A path is a text that older weights have sampled for the request, or a branch of that text. Each token of a path is stored
    at the position that it would have in the request's text.
    """

    tokens_SPL: torch.Tensor
    """Token ids of the paths, int32. They are defined only from `begin_SP` to `end_SP`."""
    begin_SP: torch.Tensor
    """Position of the first stored token of each path, int64. It is a position of the prompt, because the prompt's last tokens
    are stored too."""
    end_SP: torch.Tensor
    """Position after the last token of each path, int64."""
    shift_SP: torch.Tensor
    """Position in the path minus position in the request's text, int64. It is 0 at first. It changes when the request goes on
    like the path, but at an earlier or later position."""
    num_paths_S: torch.Tensor
    """Number of paths of the request in each slot, int32. It is 0 for a request that brings no texts."""
    path_S: torch.Tensor
    """Index of the path that each request follows at present, int32."""


class AheadText(Drafter):
    """Proposes the next tokens of the path that a request follows.

    A path is a text that older weights have sampled for the request, or a branch of that text. Owns the paths, which take 4
    bytes of device memory for each request slot, path and position. A request follows its path until another path agrees with
    more of the request's latest tokens in a row. After a token that no path has, the request continues at the next position of
    its path, because noise belongs to positions. If the request's latest tokens are found at another position of the path, the
    request continues from that position.
    """

    name = "ahead"
    is_recordable = True

    def __init__(
        self, num_slots: int, max_model_len: int, vocab_size: int, device: torch.device, most_paths: int = 1
    ) -> None:
        self._vocab_size = vocab_size
        self._most_paths = most_paths
        sizes = (num_slots, most_paths)
        numbers = [torch.zeros(sizes, dtype=torch.int64, device=device) for _ in range(3)]
        of_slots = [torch.zeros(num_slots, dtype=torch.int32, device=device) for _ in range(2)]
        tokens_SPL = torch.zeros(*sizes, max_model_len, dtype=torch.int32, device=device)
        self._tables = PathTables(tokens_SPL, *numbers, *of_slots)
        self._kernels: Any = kernels_for(device.type, KernelModule.AHEAD)
        self._with_text: set[int] = set()
        self._is_clear = True

    def open(self, slots: torch.Tensor, requests: Sequence[Any], put: Put) -> None:
        self._tables.num_paths_S.index_fill_(0, slots, 0)  # num_paths_S[slots] = 0 would wait for a GPU
        bringing = [r for r in requests if r.identity.ahead]
        if not bringing:
            return
        self._with_text |= {r.slot for r in bringing}
        most_paths, longest = self._tables.tokens_SPL.shape[1:]
        texts = []
        places = []
        rows = []
        bounds = []
        for r in bringing:
            for path, (first, text) in enumerate(self._paths_of(r)):
                row = r.slot * most_paths + path
                texts.append(text)
                places.append(np.arange(len(text), dtype=np.int64) + row * longest + first)
                rows.append(row)
                bounds.append((first, first + len(text), 0))
        tokens = put(np.concatenate(texts), np.int32)
        where = put(np.concatenate(places), np.int64)
        self._tables.tokens_SPL.view(-1)[where] = tokens
        rows_N = put(rows, np.int64)
        bounds_3N = put(np.array(bounds).T.copy(), np.int64)
        for table, values_N in zip(self._tables[1:4], bounds_3N, strict=True):
            table.view(-1)[rows_N] = values_N
        slots_N = put([r.slot for r in bringing], np.int64)
        self._tables.path_S.index_fill_(0, slots_N, 0)
        counts = [min(1 + len(r.identity.branches), most_paths) for r in bringing]
        self._tables.num_paths_S[slots_N] = put(counts, np.int32)

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
        self._kernels.propose(self._tables, texts, out)

    def _paths_of(self, request: Any) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the position of the first stored token of each path, and the path's tokens from that position on, int32.

        The first path is the text that older weights sampled. The others are its branches, including the tokens before they
        branch off.
        """
        prompt_length = request.prompt_length
        known = np.array(request.token_ids[max(prompt_length - WINDOW, 0) : prompt_length], np.int32)
        first = prompt_length - len(known)
        for ahead in request.paths[: self._most_paths]:
            unknown = np.flatnonzero((ahead < 0) | (ahead >= self._vocab_size))  # the embedding has no row for these
            text = np.concatenate([known, ahead[: unknown[0] if len(unknown) else None]])
            yield first, text[: max(request.limit - first, 0)]
