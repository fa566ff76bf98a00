# SPDX-License-Identifier: Apache-2.0
"""The texts that were made ahead, as an engine has them: which one a request brings along, and how much of it was right."""

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_specrollout.generation.engine.requests import num_kept


class TextsAhead:
    """Owns an engine's texts by the seeds of their requests, and the count of tokens that the engine sampled again.

    A request and its text have the same seed, so they had the same noise. They differ where the new weights changed a token.
    """

    def __init__(self) -> None:
        self._texts: Mapping[int, bytes] = {}
        self._num_kept = self._num_tokens = 0

    def replace(self, texts: Mapping[int, bytes]) -> None:
        """Takes the texts for the requests to come, by seed. Each is the int32 numbers of its tokens."""
        self._texts = texts

    def of(self, seed: int) -> bytes:
        """Returns the text that was made ahead under this seed; empty if there is none."""
        return self._texts.get(seed, b"")

    def compare(self, seed: int, response: Sequence[int] | np.ndarray) -> None:
        """Counts how much of a text was right: the tokens up to the first one in which the response differs from it.

        `response` has the token ids of the response that the request of this seed has got. A seed without a text is left out.
        """
        if text := self.of(seed):
            self._num_kept += num_kept(text, response)
            self._num_tokens += len(response)

    def take_kept(self) -> tuple[int, int]:
        """Returns two numbers since the last call: the tokens that were right, and all tokens of the same responses."""
        counts = (self._num_kept, self._num_tokens)
        self._num_kept = self._num_tokens = 0
        return counts
