# SPDX-License-Identifier: Apache-2.0
"""Remote drafters for vLLM's V2 model runner: the table that host and device share, and tokens as they reach the host."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu import buffer_utils

from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig, shared_secret
from nemo_specrollout.config.model_folder import stop_token_ids, tokenizer_fingerprint
from nemo_specrollout.generation.runner_binding import NewRequest
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest
from nemo_specrollout.remote.verifier.remote_drafter import NOWHERE, DraftStream, RemoteDrafter


def build_remote_drafter(config: RemoteDrafterConfig, runner: Any) -> RemoteDrafter:
    """Builds the verifier's half of the drafters at the addresses of `config`.

    Drafters that another process starts have no address until it is told. Only one rank of an engine may call this: what
    arrives by network differs from rank to rank.
    """
    folder = Path(runner.model_config.model)
    model = PolicyModel(runner.vocab_size, tokenizer_fingerprint(folder), tuple(stop_token_ids(folder)))
    buffer_class = buffer_utils.UvaBuffer if is_uva_available() else buffer_utils.NonUvaBuffer
    table = buffer_class((runner.max_num_reqs, DraftStream.columns(config.most_ahead)), torch.int32)
    stream = DraftStream(table.cpu.numpy(), table.uva)
    addresses = config.addresses or (NOWHERE,) * config.workers
    return RemoteDrafter(addresses, shared_secret(config.addresses), runner.max_model_len, model, stream)


def stream_request(request: NewRequest, limit: int) -> StreamRequest:
    """Returns a request of vLLM's for remote drafters, which may draft up to `limit` tokens of text."""
    params = request.sampling_params
    top_k = max(0, params.top_k)  # vLLM also writes -1 for no top-k
    seed, text = request.identity.seed, request.token_ids
    return StreamRequest(request.slot, seed, params.temperature, top_k, params.top_p, limit, text)


class WatchedOutput(AsyncModelRunnerOutput):
    """A step's output that passes its tokens on as soon as they are on the host, in the thread that waits for them."""

    def __init__(self, output: AsyncModelRunnerOutput, tell: Callable[[Sequence[Sequence[int]]], None]) -> None:
        self._output, self._tell = output, tell

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the step's output, and tells the tokens."""
        output = self._output.get_output()
        self._tell(output.sampled_token_ids)
        return output
