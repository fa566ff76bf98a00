# SPDX-License-Identifier: Apache-2.0
"""The driver's store of the texts of coming steps between two rollouts."""

from collections.abc import Mapping

from nemo_specrollout.run_ahead.texts import TextAhead


class TextStore:
    """Owns the texts for coming steps, by the policy version of their step and the seed of their request.

    A text is replaced when newer weights have generated it again. `trim` limits the memory of all texts.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._texts: dict[int, dict[int, TextAhead]] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the texts take."""
        return self._num_bytes

    def of(self, version: int) -> dict[int, TextAhead]:
        """Returns the texts for the step with policy version `version`, by the seeds of their requests."""
        return dict(self._texts.get(version, {}))

    def num_tokens(self, version: int) -> int:
        """Returns how many tokens all texts for the step with policy version `version` have, without branches."""
        return sum(text.num_tokens for text in self._texts.get(version, {}).values())

    def num_texts(self, version: int) -> int:
        """Returns how many requests of the step with policy version `version` have a text that is not empty."""
        return sum(text.num_tokens > 0 for text in self._texts.get(version, {}).values())

    def put(self, version: int, texts: Mapping[int, TextAhead]) -> None:
        """Stores the newest texts for requests of one step, by their seeds. The other texts for the step stay."""
        known = self._texts.setdefault(version, {})
        for seed, text in texts.items():
            before = known.get(seed)
            self._num_bytes += text.num_bytes - (0 if before is None else before.num_bytes)
            known[seed] = text

    def trim(self) -> dict[int, int]:
        """Forgets texts until the others fit into the memory.

        Texts for the farthest step are forgotten first, and within a step those that were stored last. Returns how many texts
        were forgotten, by the policy version of their step.
        """
        forgotten: dict[int, int] = {}
        for version in sorted(self._texts, reverse=True):
            texts = self._texts[version]
            while texts and self._num_bytes > self._most_bytes:
                _, text = texts.popitem()
                self._num_bytes -= text.num_bytes
                forgotten[version] = forgotten.get(version, 0) + 1
        return forgotten

    def forget_before(self, version: int) -> None:
        """Forgets the texts for all steps before the one with policy version `version`."""
        for old in [known for known in self._texts if known < version]:
            self._num_bytes -= sum(text.num_bytes for text in self._texts.pop(old).values())
