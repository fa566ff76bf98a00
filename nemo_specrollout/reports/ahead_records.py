# SPDX-License-Identifier: Apache-2.0
"""Figures about texts that were made ahead (`run_ahead`), for the record of a step (docs/reference/metrics.md).

A text is made ahead when an engine decodes a request of a coming step with the weights that it has now. The text is then used
as drafts in its own step.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def flight_figures(in_flight: Sequence[int]) -> dict[str, float]:
    """Returns how many tokens of each coming step had been decoded early when the current step's weights arrived.

    `in_flight` has these counts, of which the first is the current step's. The result leaves this first one out. The keys are
    `ahead_tokens_2` for the next step, `ahead_tokens_3` for the step after it, and so on. The number in a key says how many
    updates of the weights lie between the first texts of a step and the step itself.
    """
    return {f"ahead_tokens_{k}": float(tokens) for k, tokens in enumerate(in_flight, 1) if k > 1}


def kept_figures(kept: Mapping[str, Any]) -> dict[str, float]:
    """Returns what share of the tokens made ahead for a step was right, and how many texts parted from their responses.

    The keys are names of metrics, such as `ahead_right`. A text parts from its response at the first token that differs.
    `kept` has the counts of `KeptCounts` (run_ahead/texts.py) by name. The result is {} if there were no texts.
    """
    num_texts, num_flips = kept["num_texts"], kept["num_flips"]
    if not num_texts:
        return {}
    figures = {
        "ahead_texts": float(num_texts),
        "ahead_right": kept["num_right"] / max(kept["num_tokens"], 1),
        "ahead_parted": float(num_flips),
        "ahead_followed": float(kept["num_followed"]),
    }
    return figures | ({"ahead_runners_up": kept["num_runners_up"] / num_flips} if num_flips else {})


def saved_figures(figures: Mapping[str, float], acceptance: Mapping[str, Any]) -> dict[str, float]:
    """Returns the estimated seconds that texts made ahead have saved in a rollout, as {"ahead_saved_s": seconds}.

    The result is {} if the seconds are not known. The time that all drafts have saved is divided among the drafters in
    proportion to their accepted draft tokens. The drafter `ahead` proposes the texts made ahead. `figures` has the step's
    `plain_estimate_s` and `rollout_s`. `acceptance` has the step's counts of draft tokens by drafter.
    """
    accepted = {name: sum(counts["accepted"]) for name, counts in acceptance.items()}
    if "plain_estimate_s" not in figures or not accepted.get("ahead"):
        return {}
    spared_s = figures["plain_estimate_s"] - figures["rollout_s"]
    return {"ahead_saved_s": spared_s * accepted["ahead"] / sum(accepted.values())}
