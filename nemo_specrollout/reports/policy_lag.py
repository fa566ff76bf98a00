# SPDX-License-Identifier: Apache-2.0
"""How far behind the trainer the policies were that made a step's samples."""

from collections.abc import Mapping, Sequence
from typing import Any


def policy_lag(samples: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
    """Returns the lag of the policies that began `samples`, in training steps, and how many samples got new weights amid.

    `samples` come from a line of `samples.jsonl`. Training step `step`, counted from 1, starts from policy `step - 1`.
    """
    spans = [sample["policy_spans"] for sample in samples if sample.get("policy_spans")]
    lags = [step - 1 - min(version for version, _ in of_sample) for of_sample in spans]
    if not lags:
        return {}
    return {
        "policy_lag_mean": sum(lags) / len(lags),
        "policy_lag_max": float(max(lags)),
        "samples_updated_amid": float(sum(len(of_sample) > 1 for of_sample in spans)),
    }
