# SPDX-License-Identifier: Apache-2.0
"""A small random grammar that writes worked responses, in habits like a person's."""

import random
import re
from collections.abc import Mapping

Grammar = Mapping[str, Mapping[str, float]]
"""Symbol -> its expansions and their odds. `<symbol>` in an expansion is expanded, `{name}` is filled in at the end."""

_SYMBOL = re.compile(r"<(\w+)>")


class Writer:
    """Writes the sentences of one response.

    With probability `habit`, a writer expands a symbol as it did the last time. The responses of two writers differ more
    than two sentences of one writer do, as with people and with language models.
    """

    def __init__(self, grammar: Grammar, rng: random.Random, habit: float) -> None:
        self._grammar = grammar
        self._rng = rng
        self._habit = habit
        self._last: dict[str, str] = {}

    def write(self, symbol: str, **values: object) -> str:
        """Returns a sentence of `symbol`. An expansion that names `{rest}` is left out where `rest` is empty."""
        return self._expand(symbol, bool(values.get("rest"))).format(**values)

    def _expand(self, symbol: str, has_rest: bool) -> str:
        odds = {text: odds for text, odds in self._grammar[symbol].items() if has_rest or "{rest}" not in text}
        last = self._last.get(symbol)
        if last in odds and self._rng.random() < self._habit:
            chosen = last
        else:
            chosen = self._rng.choices(list(odds), list(odds.values()))[0]
            self._last[symbol] = chosen
        return _SYMBOL.sub(lambda match: self._expand(match.group(1), has_rest), chosen)
