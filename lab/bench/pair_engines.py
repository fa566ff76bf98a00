# SPDX-License-Identifier: Apache-2.0
"""Runs the engines for `pair_bench` in its child processes, and measures what the planner needs to know about them.

There is one engine for each layout of drafting on two cores. The speculation policy of an engine changes from rollout to
rollout and drafts nothing, a fixed number of tokens, or as many tokens as pay.
"""

import ctypes
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.bench.cost_profile import COUPLED_K, ProfileSpec, _coupled_draft_s, _decode_steps, _draft_s
from lab.bench.placement_ways import Timed, Way, decode_in
from lab.local.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig, DraftModelDrafterConfig, RemoteDrafterConfig
from nemo_specrollout.speculation.policy import FixedPolicy

if TYPE_CHECKING:
    import torch

    from lab.local.engine import RolloutEngine
    from nemo_specrollout.generation.engine.requests import RolloutRequest

PLAIN, COUPLED, DECOUPLED, BOTH = "plain", "coupled", "decoupled", "both"
LONGEST_TEXT, MOST_REQUESTS = 512, 32
KV_BYTES, DRAFTER_KV_BYTES = 288 << 20, 64 << 20
PROFILED, PROFILED_STEPS, PROFILED_TEXT = (1, 4, 16, 32), 8, 256
POSITIONS = 8
"""Largest number of draft tokens of a request in an engine step."""


@dataclass(frozen=True)
class Pair:
    """Folders of a policy and of its draft model."""

    policy: Path
    draft: Path


def block_of(mode: str, draft: str, addresses: Sequence[str] = ()) -> SpecrolloutConfig:
    """Returns the block for a layout's engine.

    Its remote drafter is the one at `addresses`. Without addresses, the engine starts a remote drafter itself.
    """
    kwargs = {"kv_cache_memory_bytes": DRAFTER_KV_BYTES}
    where = {"addresses": tuple(addresses)} if addresses else {"workers": 1}
    remote = RemoteDrafterConfig(model=draft, max_requests=2 * MOST_REQUESTS, vllm_kwargs=kwargs, **where)
    drafters: dict[str, tuple[DrafterConfig, ...]] = {
        PLAIN: (),
        COUPLED: (DraftModelDrafterConfig(model=draft),),
        DECOUPLED: (remote,),
        BOTH: (DraftModelDrafterConfig(model=draft), remote),
    }
    return SpecrolloutConfig(num_speculative_tokens=POSITIONS, drafters=drafters[mode])


def generation_of(block: SpecrolloutConfig) -> GenerationConfig:
    """Returns the config of an engine that samples in float32 at temperature 1."""
    kwargs = {
        "kv_cache_memory_bytes": KV_BYTES,
        "max_num_seqs": MOST_REQUESTS,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
    }
    engine = VllmConfig(max_model_len=LONGEST_TEXT, precision="float32", enforce_eager=True)
    return GenerationConfig(vllm_cfg=engine, max_new_tokens=LONGEST_TEXT // 2, vllm_kwargs=kwargs, specrollout=block)


_engines: "dict[str, RolloutEngine]" = {}
_policies: dict[str, Any] = {}
"""By the name of its layout, the speculation policy that each engine had at its start. This policy chooses the number of
drafts itself."""
_weights: dict[str, "torch.Tensor"] = {}
"""The policy's weights in the first engine, by name."""


def start(pair: Pair, modes: Sequence[str]) -> None:
    """Starts the engines of these layouts in this process.

    The layout with both drafters uses the remote drafter of the decoupled layout's engine.
    """
    from lab.local.engine import RolloutEngine

    for mode in modes:
        drafters = _engines[DECOUPLED].drafters if mode == BOTH else None
        block = block_of(mode, str(pair.draft), drafters.addresses() if drafters is not None else ())
        engine = _engines[mode] = RolloutEngine(pair.policy, generation_of(block), seed=1)
        _policies[mode] = engine.run_in_worker(_policy_of)
        engine.run_in_worker(_share_weights)


def _share_weights(worker: Any) -> None:
    """Lets all engines of this process share the policy's weights in memory, because they are equal and large."""
    for name, parameter in worker.model_runner.model.named_parameters():
        known = _weights.setdefault(name, parameter.data)
        if (known.shape, known.stride(), known.dtype) == (parameter.shape, parameter.stride(), parameter.dtype):
            parameter.data = known
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def roll_out(way: Way, requests: "Sequence[RolloutRequest]") -> Timed:
    """Rolls out the requests in the engine of the way's layout, which drafts in that way."""
    return decode_in(engine_for(way), requests)


def engine_for(way: Way) -> "RolloutEngine":
    """Returns the engine of the way's layout, after giving it the way's speculation policy.

    If the way's `k` is above 0, its policy drafts k tokens of each request. If it is 0, the engine gets back the policy that
    it had at its start.
    """
    engine = _engines[way.mode]
    policy = FixedPolicy(way.k, POSITIONS) if way.k else _policies[way.mode]
    engine.run_in_worker(_Given(policy))
    return engine


class _Given:
    """A callable that gives a worker a speculation policy, if the worker has drafters."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def __call__(self, worker: Any) -> None:
        if worker.specrollout_router is not None:
            worker.specrollout_router.policy = self._policy


def _policy_of(worker: Any) -> Any:
    return None if worker.specrollout_router is None else worker.specrollout_router.policy


def measure(pair: Pair, batches: tuple[int, ...], with_drafter: bool) -> Mapping[str, list[float]]:
    """Returns the seconds of verifying, of drafting in the policy's engine, and of drafting in a drafter's engine.

    Each list has the seconds for each number of requests in `batches`. The first two are measured in running engines. Drafting
    in a drafter's engine is measured only if `with_drafter` is true, because it needs a new engine.
    """
    generation = generation_of(block_of(COUPLED, str(pair.draft)))
    short = replace(generation, vllm_cfg=replace(generation.vllm_cfg, max_model_len=PROFILED_TEXT))
    spec = ProfileSpec(str(pair.policy), short, batches, PROFILED_STEPS)
    engine = engine_for(Way(COUPLED, COUPLED_K))
    found = {"coupled_draft_s": [_coupled_draft_s(engine, spec, batch) for batch in batches]}
    plain = engine_for(Way(PLAIN)) if PLAIN in _engines else _undrafted(engine)
    found["verify_s"] = [statistics.median(_decode_steps(plain, spec, batch, "seconds")) for batch in batches]
    if with_drafter:
        from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine

        kwargs = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": DRAFTER_KV_BYTES}
        with closing(DrafterEngine(pair.draft, max(batches), LONGEST_TEXT, **kwargs)) as drafter:
            found["draft_s"] = [_draft_s(drafter, spec, batch) for batch in batches]
    return found


def _undrafted(engine: "RolloutEngine") -> "RolloutEngine":
    engine.run_in_worker(_Given(_Silent()))
    return engine


class _Silent(FixedPolicy):
    """A speculation policy that drafts nothing and keeps the draft model from reading any text."""

    is_dormant = True

    def __init__(self) -> None:
        super().__init__(0, POSITIONS)


def close() -> None:
    """Stops the engines of this process. The last one is stopped first, because it may use a drafter of an earlier one."""
    while _engines:
        _engines.popitem()[1].close()
