# SPDX-License-Identifier: Apache-2.0
"""NeMo-Gym's rows: how a seed travels with one to the engines' HTTP server."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

_EXTRA_BODY = "extra_body"


def with_seed(row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns `row` with the OpenAI field `seed` for each of its requests, unless the row brings one of its own.

    NeMo-Gym's model server merges `metadata.extra_body`, JSON in a string, into the body of every request of a row.
    """
    params = row["responses_create_params"]
    metadata = dict(params.get("metadata") or {})
    body = json.loads(metadata.get(_EXTRA_BODY) or "{}")
    metadata[_EXTRA_BODY] = json.dumps({"seed": seed, **body})
    return {**row, "responses_create_params": {**params, "metadata": metadata}}


def seeding(prepare: Callable[..., None], seeds_of: Callable[[list[Sequence[int]]], list[int]]) -> Callable[..., None]:
    """Returns NeMo-RL's function that prepares rows in place; each row then has a seed.

    `seeds_of` gives a seed for each content, the bytes of what a row asks.
    """

    @functools.wraps(prepare)
    def prepare_with_seeds(rows: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
        prepare(rows, *args, **kwargs)
        contents: list[Sequence[int]] = [list(_question(row)) for row in rows]
        for row, seed in zip(rows, seeds_of(contents), strict=True):
            row.update(with_seed(row, seed))

    return prepare_with_seeds


def _question(row: dict[str, Any]) -> bytes:
    """Returns the question of a row as bytes. Siblings ask the same question."""
    return json.dumps(row["responses_create_params"].get("input"), sort_keys=True, default=str).encode()
