# SPDX-License-Identifier: Apache-2.0
"""The tail, in an actor of NeMo-RL around an asynchronous engine."""

from typing import Any

from nemo_specrollout.nemo_rl.tail_link import TailStreamLink
from nemo_specrollout.racing.stream_engine import Generate, StreamEngine
from nemo_specrollout.racing.stream_shard import StreamShard


async def stream_tail(llm: Any, generate: Generate, actor: Any, worker: int) -> StreamShard:
    """Of engine number `worker`, an `AsyncLLM` whose own generate is `generate`; it takes part from now on."""
    capacity = int(llm.vllm_config.scheduler_config.max_num_seqs)
    shard = StreamShard(worker, capacity, StreamEngine(generate, capacity), TailStreamLink(actor, worker))
    await shard.begin()
    return shard
