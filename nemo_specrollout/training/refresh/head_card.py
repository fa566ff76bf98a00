# SPDX-License-Identifier: Apache-2.0
"""`head_card.json`: what a head is, what it learned from, and what it was judged by. It lies in the head's folder."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.versions import installed_versions
from nemo_specrollout.training.head.acceptance import Acceptance
from nemo_specrollout.training.head.head_checks import check_head
from nemo_specrollout.training.head.trainer import TrainingSettings
from nemo_specrollout.training.refresh.refresh_round import Refresh

CARD = "head_card.json"


def write_card(
    folder: Path,
    policy_folder: Path,
    refresh: Refresh,
    settings: TrainingSettings,
    *,
    policy_version: int,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """Checks the head in `folder` against the policy and writes its card; returns the card.

    `data`: what is known of the features (hash, sequences, tokens). Raises ValueError where the head does not fit.
    """
    facts = check_head(folder, policy_folder)
    judgement = refresh.judgement
    card = {
        "policy": {"folder": str(policy_folder), "version": policy_version},
        "data": dict(data),
        "training": {
            **asdict(settings),
            "steps": refresh.training.steps if refresh.training else 0,
            "tokens_seen": refresh.training.tokens if refresh.training else 0,
            "seconds": refresh.seconds,
        },
        "held_out": {
            "before": None if judgement is None or judgement.before is None else _figures(judgement.before),
            "after": None if judgement is None else _figures(judgement.after),
            "sequences": 0 if judgement is None else len(judgement.after.sequences),
        },
        "gate": {"published": refresh.published, "reason": refresh.reason},
        "layout": {
            "format": "speculators",
            "layer_ids": list(facts.layer_ids),
            "hidden_size": facts.hidden_size,
            "vocab_size": facts.vocab_size,
            "draft_vocab_size": facts.draft_vocab_size,
            "max_position_embeddings": facts.max_position_embeddings,
            "checked": "names, shapes and values of all tensors; hidden size, vocabulary, layers and context of the policy",
        },
        "versions": installed_versions(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_atomically(folder / CARD, json.dumps(card, indent=1) + "\n")
    return card


def _figures(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_length": round(acceptance.expected_length, 4),
        "acceptance_by_position": [round(r, 4) for r in acceptance.acceptance_rate_K],
    }
