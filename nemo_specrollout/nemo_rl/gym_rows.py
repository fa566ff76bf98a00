# SPDX-License-Identifier: Apache-2.0
"""NeMo-Gym's rows: how a seed travels with one to the engines' HTTP server."""

import json
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
