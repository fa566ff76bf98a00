# SPDX-License-Identifier: Apache-2.0
"""Makes the remote drafters of an engine a participant of its drafting, and sends them the tokens of each engine step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.worker.gpu import buffer_utils

from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig, shared_secret
from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.drafters.participant import Drafter, Put
from nemo_specrollout.generation.engine.requests import NewRequest
from nemo_specrollout.generation.engine.step_outputs import WatchedOutput
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest
from nemo_specrollout.remote.verifier.draft_stream import NOWHERE, DraftStream, RemoteDrafter
from nemo_specrollout.storage.model_folder import stop_token_ids, tokenizer_fingerprint


class RemoteParticipant(Drafter):
    """Lets remote drafters follow the engine's requests. Owns this engine's side of the connection (`RemoteDrafter`)."""

    name = RemoteDrafter.name

    def __init__(self, remote: RemoteDrafter) -> None:
        self.remote = remote

    def open(self, slots: torch.Tensor, requests: Sequence[NewRequest], put: Put) -> None:
        self.remote.open([_stream_request(r) for r in requests])

    def close(self, slots: Sequence[int]) -> None:
        self.remote.close(slots)

    def propose(self, texts: Texts, out: Proposals) -> None:
        self.remote.propose(texts, out)

    def end_step(self, slots_B: np.ndarray, output: Any) -> Any:
        return WatchedOutput(output, self.remote.token_callback(slots_B))


def remote_drafter(config: RemoteDrafterConfig, runner: Any) -> RemoteDrafter:
    """Builds the verifier's side of the connections to the remote drafters at the addresses of `config`.

    Remote drafters that the run itself starts get their addresses later. Only one rank of an engine may call this, because
    drafts arrive over the network, and different ranks would have received different drafts.
    """
    folder = Path(runner.model_config.model)
    model = PolicyModel(runner.vocab_size, tokenizer_fingerprint(folder), tuple(stop_token_ids(folder)))
    buffer_class = buffer_utils.UvaBuffer if is_uva_available() else buffer_utils.NonUvaBuffer
    table: Any = buffer_class((runner.max_num_reqs, DraftStream.columns(config.most_ahead)), torch.int32)
    on_device = table.uva if callable(table.uva) else lambda: table.uva  # `uva` is a tensor before 0.32
    stream = DraftStream(table.cpu.numpy(), on_device)
    addresses = config.addresses or (NOWHERE,) * config.workers
    return RemoteDrafter(addresses, shared_secret(config.addresses), runner.max_model_len, model, stream)


def _stream_request(request: NewRequest) -> StreamRequest:
    """Returns what remote drafters must know about a request, including the length of the text up to which they may draft."""
    params = request.sampling_params
    top_k = max(0, params.top_k)  # vLLM also writes -1 for no top-k
    limit = request.limit if request.identity.speculate else 0
    return StreamRequest(
        request.slot, request.identity.seed, params.temperature, top_k, params.top_p, limit, request.token_ids
    )
