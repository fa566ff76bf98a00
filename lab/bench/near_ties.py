# SPDX-License-Identifier: Apache-2.0
"""Recomputes the near-ties of a text under given weights, by one forward pass and the engine's own sampling kernels.

Shapes: P tokens of a text, V tokens of the vocabulary, S request slots (one), L positions of prompt and text, R rows of
logits.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_specrollout.generation.step.row_sampling import draw_rows
from nemo_specrollout.generation.step.sampled_rows import Logits, RowKeys, TieTables

Array = np.ndarray[Any, Any]
_ROWS = 128
"""Number of rows of logits that are computed at a time, because logits are the largest tensors of the computation."""


class Ties(NamedTuple):
    """The best and the second-best token under given weights at each position of a text, after the text's tokens before it."""

    token_P: Array
    """The token with the best noisy score, int32."""
    gap_P: Array
    """Score gap between the best and the second-best token, in nats, float32."""
    runner_up_P: Array
    """The token with the second-best noisy score, int32."""

    def cut(self, length: int | None) -> "Ties":
        """Returns the values for the first `length` tokens, or for all tokens if `length` is None."""
        return Ties(*(values[:length] for values in self))


class TieFinder:
    """Finds the near-ties of texts. Owns a model of Hugging Face's transformers, whose weights can be replaced."""

    def __init__(self, folder: Path, dtype: torch.dtype, temperature: float) -> None:
        """Builds the model that `folder` describes. Its weights are undefined at first."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(dtype).eval()
        self._temperature_S = torch.tensor([temperature], dtype=torch.float32)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces the model's weights. `tensors` has pairs of a Hugging Face name and a tensor.

        Raises ValueError if the model has no tensor of such a name.
        """
        loaded = self._model.load_state_dict(dict(tensors), strict=False)
        if loaded.unexpected_keys:
            raise ValueError(f"{loaded.unexpected_keys[0]} is not a tensor of the model")
        self._model.tie_weights()

    @torch.inference_mode()
    def ties(self, prompt: Sequence[int], text: Sequence[int], seed: int) -> Ties:
        """Returns the ties of the response `text` to a prompt. The noise is that of a request with this seed."""
        whole = [*prompt, *text]
        hidden_PH = self._model.model(torch.tensor([whole[:-1]])).last_hidden_state[0, len(prompt) - 1 :]
        tables = TieTables(torch.zeros(1, len(whole)), torch.zeros(1, len(whole), dtype=torch.int32), torch.ones(1) > 0)
        seed_S = torch.tensor([seed])
        positions_P = torch.arange(len(prompt) - 1, len(whole) - 1)
        tokens = []
        for rows in torch.arange(len(text)).split(_ROWS):
            logits_RV = self._model.lm_head(hidden_PH[rows]).contiguous()
            slots_R = torch.zeros(len(rows), dtype=torch.int32)
            keys = RowKeys(slots_R, self._temperature_S, seed_S, positions_P[rows])
            tokens.append(draw_rows(Logits(logits_RV, True), keys, None, None, tables).tokens_R)
        own = slice(len(prompt), None)
        return Ties(
            torch.cat(tokens).numpy().astype(np.int32),
            tables.gap_SL[0, own].numpy(),
            tables.runner_up_SL[0, own].numpy(),
        )
