# SPDX-License-Identifier: Apache-2.0
"""Online refresh: a head that learns while the policy does. What a local run and NeMo-RL share."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.scheduling.heads.refresh_schedule import StepFacts
from nemo_specrollout.scheduling.heads.refresh_trigger import RefreshDecision
from nemo_specrollout.training.features.feature_index import FeatureSource
from nemo_specrollout.training.features.feature_reader import FeatureReader, newest_sequences
from nemo_specrollout.training.features.rollout_files import tokenizer_hash
from nemo_specrollout.training.head.head import DraftHead, load_eagle3_head, save_head
from nemo_specrollout.training.head.head_folder import HeadFolder, PublishedHead, RefreshRecord
from nemo_specrollout.training.refresh.head_card import write_card
from nemo_specrollout.training.refresh.head_in_service import HeadInService, RefreshData
from nemo_specrollout.training.refresh.offline_refresh import source_of
from nemo_specrollout.training.refresh.refresh_round import Refresh

# Tokens of the newest features that a refresh learns from, and those that judge it, at most.
TRAINING_TOKENS, HELD_OUT_TOKENS = 60_000, 6_000


class OnlineRefresh:
    """Owns the head in service and makes its successors in `folder`, where it publishes those that pass the gate.

    Example: `decision = online.decide(facts)`; if it says refresh, `online.refresh(...)` trains, judges, and says what
    became of it. Loading a published head into engines is the caller's.
    """

    def __init__(
        self,
        block: SpecrolloutConfig,
        policy_folder: Path,
        folder: HeadFolder,
        *,
        configured_head: Path,
        temperature: float,
        device: torch.device | str = "cpu",
        in_background: bool = False,
    ) -> None:
        """Begins with the head that `folder` names, or else the configured one. Raises ValueError if it does not fit."""
        assert block.draft_refresh is not None
        self._policy_folder, self._folder = policy_folder, folder
        published = folder.published()
        head = load_eagle3_head(configured_head if published is None else published.folder, policy_folder, device)
        self._service = HeadInService(
            head, block.draft_refresh, num_drafts=block.num_speculative_tokens, temperature=temperature,
            in_background=in_background,
        )  # fmt: skip

    @property
    def head(self) -> DraftHead:
        """The head in service."""
        return self._service.head

    @property
    def source(self) -> FeatureSource:
        """Whose features the head learns from."""
        return source_of(self.head, self._policy_folder, tokenizer_hash(self._policy_folder))

    def decide(self, facts: StepFacts) -> RefreshDecision:
        """Whether to refresh; asked once an RL step."""
        return self._service.decide(facts)

    def refresh(
        self,
        decision: RefreshDecision,
        step: int,
        stores: Sequence[FeatureReader],
        policy_version: int,
        policy_tensors: Mapping[str, torch.Tensor],
    ) -> RefreshRecord:
        """Trains a head on the newest features and publishes it if it passes the gate. `policy_tensors`: LM head and embedding
        of the policy of `policy_version`, which is what the head is made for."""
        data = RefreshData(
            newest_sequences(stores, held_out=False, max_tokens=TRAINING_TOKENS),
            newest_sequences(stores, held_out=True, max_tokens=HELD_OUT_TOKENS),
        )
        if (lacking := data.lacking) is not None:
            return RefreshRecord(f"skipped: {lacking}", decision.gain_s, published=False)
        self._service.teach(policy_tensors)
        settings = self._service.settings()
        refresh = self._service.refresh(data, settings)
        folder = self._folder.candidate(step, refresh.published)
        save_head(refresh.candidate, folder)
        counts = {"hash": _hash_of(stores), "sequences": len(data.training), "held_out": len(data.held_out)}
        write_card(folder, self._policy_folder, refresh, settings, policy_version=policy_version, data=counts)
        if refresh.published:
            self._folder.publish(PublishedHead(folder, policy_version, _length_of(refresh)))
        return RefreshRecord(
            decision=decision.reason,
            gain_s=decision.gain_s,
            gate=refresh.reason,
            published=refresh.published,
            refresh_s=refresh.seconds,
            head=folder.name if refresh.published else None,
            policy_version=policy_version,
            expected_length=_length_of(refresh),
        )


def _length_of(refresh: Refresh) -> float | None:
    return None if refresh.judgement is None else refresh.judgement.after.expected_length


def _hash_of(stores: Sequence[FeatureReader]) -> str:
    """A store's own hash; of several, one of all."""
    hashes = [store.data_hash() for store in stores]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()
