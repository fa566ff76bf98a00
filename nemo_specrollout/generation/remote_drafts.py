# SPDX-License-Identifier: Apache-2.0
"""Drafters elsewhere, for vLLM's V2 model runner: the table that host and device share, and tokens as they reach the host."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu import buffer_utils

from nemo_specrollout.config.addresses import shared_secret
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig
from nemo_specrollout.config.model_folder import stop_token_ids, tokenizer_fingerprint
from nemo_specrollout.generation.identity import RequestIdentity
from nemo_specrollout.remote.protocol.peers import PolicyModel, Sampling
from nemo_specrollout.remote.verifier.draft_stream import DraftStream
from nemo_specrollout.remote.verifier.remote_drafter import NOWHERE, RemoteDrafter, StreamRequest


def build_remote_drafter(config: RemoteDrafterConfig, runner: Any) -> RemoteDrafter:
    """The drafters at the addresses of `config`; `workers` that somebody else starts are nowhere until one tells.

    Only one rank of an engine may have it: what comes by network comes to no two alike.
    """
    folder = Path(runner.model_config.model)
    model = PolicyModel(runner.vocab_size, tokenizer_fingerprint(folder), tuple(stop_token_ids(folder)))
    buffer_class = buffer_utils.UvaBuffer if is_uva_available() else buffer_utils.NonUvaBuffer
    table = buffer_class((runner.max_num_reqs, DraftStream.columns(config.most_ahead)), torch.int32)
    stream = DraftStream(table.cpu.numpy(), table.uva)
    addresses = config.addresses or (NOWHERE,) * config.workers
    return RemoteDrafter(addresses, shared_secret(config.addresses), runner.max_model_len, model, stream)


class ToldOutput(AsyncModelRunnerOutput):
    """A step's output, of whose tokens somebody is told when they are on the host: in the thread that waits for them."""

    def __init__(self, output: AsyncModelRunnerOutput, tell: Callable[[Sequence[Sequence[int]]], None]) -> None:
        self._output, self._tell = output, tell

    def get_output(self) -> ModelRunnerOutput:
        """vLLM's."""
        output = self._output.get_output()
        self._tell(output.sampled_token_ids)
        return output


def stream_request(
    slot: int, identity: RequestIdentity, params: Any, limit: int, token_ids: Sequence[int]
) -> StreamRequest:
    """A request of vLLM's, for drafters elsewhere."""
    sampling = Sampling(params.temperature, max(0, params.top_k), params.top_p)  # -1 is no top-k, too
    return StreamRequest(slot, identity.seed, sampling, limit, token_ids)
