# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in this process, which takes rollout requests and returns rollouts.

It has our vLLM worker if the block is enabled.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVarTuple

import torch

from lab.local import engine_stats, engine_weights
from lab.local.engine_stats import EngineStats
from lab.local.random_budgets import is_random, randomise, to_start_with
from lab.local.run_sections import DEFAULT_MAX_NUM_SEQS, PROCESSED_LOGPROBS, GenerationConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.hosted_engine import HostedEngine, device_facts, engine_facts, start_vllm
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, rollout_extra_args
from nemo_specrollout.storage.model_folder import stop_token_ids, with_tied_lm_head

if TYPE_CHECKING:
    from lab.local.drafter_pool import DrafterPool
    from nemo_specrollout.heads.features.features import SequenceFeatures
    from nemo_specrollout.run_ahead.early_texts import EarlyStart
    from nemo_specrollout.run_ahead.rolling_engine import RollingEngine

Arguments = TypeVarTuple("Arguments")
_MAX_TRIES = 50
"""Most attempts to make vLLM drop its cached prefixes."""


@dataclass(frozen=True)
class AheadRequest:
    """A request of a coming step that an engine may decode early."""

    request: RolloutRequest
    seed: int
    """Seed of the request's noise, which is the randomness of its sampling."""


class RolloutEngine(HostedEngine):
    """A vLLM engine in this process. Owns the engine, its weights and its drafter processes until `close`.

    Example: `engine.generate([RolloutRequest(ids, 0, 0)])[0].token_ids`.
    """

    drafters: "DrafterPool | None"
    """Drafter processes, or None if the block asks for none."""

    def __init__(self, model: Path, generation: GenerationConfig, seed: int, **overrides: Any) -> None:
        """Starts an engine for the Hugging Face folder `model`, with `overrides` as further arguments of vllm.LLM.

        Raises ConfigError if vLLM refuses the configuration.
        """
        self._model = model
        self._generation = generation
        self._seed = seed
        self._stop_token_ids = stop_token_ids(model)
        self._has_our_worker = generation.specrollout.enabled
        self.runs_ahead = generation.specrollout.runs_ahead
        self.drafters = None
        remote = generation.specrollout.remote
        if self._has_our_worker and remote is not None and remote.workers:
            from lab.local.drafter_pool import DrafterPool
            from nemo_specrollout.remote.drafter.drafter_spec import drafter_spec

            # The drafter processes load their models at the same time as this engine.
            self.drafters = DrafterPool([drafter_spec(remote, asdict(generation.vllm_cfg))] * remote.workers)
        try:
            super().__init__(self._start(overrides))
            if self.drafters is not None:
                self.drafters.wait_until_up()
        except BaseException:
            self.close()
            raise

    def _start(self, overrides: Mapping[str, Any]) -> Any:
        """Starts vLLM and returns its `vllm.LLM`. Raises ConfigError if vLLM refuses the configuration."""
        generation = self._generation
        block = self._generation.specrollout
        _check_config(self._model)
        arguments = {
            "max_num_seqs": DEFAULT_MAX_NUM_SEQS,
            "logprobs_mode": PROCESSED_LOGPROBS,
            **generation.vllm_kwargs,
            **overrides,
            "model": str(self._model),
            "dtype": generation.vllm_cfg.precision,
            "max_model_len": generation.vllm_cfg.max_model_len,
            "enforce_eager": generation.vllm_cfg.enforce_eager,
            "seed": self._seed,
        }
        if self.drafters is not None:
            from lab.local.drafter_pool import with_addresses

            block = with_addresses(block, self.drafters.addresses())
        llm = start_vllm(arguments, to_start_with(block))
        if is_random(block):
            llm.collective_rpc(randomise)
        return llm

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        on_finished: Callable[[int], None] = lambda done: None,
        **sampling: Any,
    ) -> list[Rollout]:
        """Returns rollouts of `requests`, in their order. If interrupted, it leaves no request in the engine.

        Args:
            requests: The requests, all of which may run at the same time.
            on_finished: Called with the number of finished requests when that number grows.
            sampling: Sampling parameters that override the configuration.
        """
        generation = Generation(self, requests, on_finished, sampling)
        generation.advance()
        return generation.rollouts

    def stood_still(self, seconds: float) -> None:
        """Excludes `seconds` from the time of the next engine step. In these seconds the engine has waited for its caller."""
        self._run(engine_stats.stand_still, seconds)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces the weights by `tensors`, which have Hugging Face names, and clears the prefix cache."""
        tensors = with_tied_lm_head(self._model, tensors)
        if self._has_our_worker:
            self._run(engine_weights.reload, tensors)
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
        self._drop_cache()

    def _drop_cache(self) -> None:
        """Makes vLLM drop the prefixes that older weights have cached.

        If vLLM refuses while requests are unfinished, the cache stays, and these requests continue with the KV cache of the
        old weights. If vLLM refuses although none is unfinished, an engine step still uses some of the prefixes. Then the
        engine makes further steps until vLLM agrees. Raises RuntimeError if vLLM refuses too often.
        """
        for _ in range(_MAX_TRIES):
            if self._llm.reset_prefix_cache() is not False or self._llm.llm_engine.has_unfinished_requests():
                return
            self._llm.llm_engine.step()
        raise RuntimeError("vLLM keeps prefixes that older weights have cached")

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Loads an EAGLE-3 head that was trained for the engine's current weights.

        `expected_length` is the acceptance length that the head had on held-out texts with `num_positions` draft tokens, or
        None if it is not known. Raises ValueError unless `folder` has a head of the same shape as the head with which the
        engine was started.
        """
        if not self._has_our_worker:
            raise ValueError("the block is disabled: this engine has no head")
        self._ask(WorkerCalls.specrollout_load_head, str(folder), None, expected_length, num_positions)

    def take_sample_stats(self, requests: Sequence[RolloutRequest]) -> list[dict[str, Any] | None]:
        """Returns `SampleStats` as a dict for each finished request, or None for a request that no drafter saw."""
        seeds = [self._seed_of(request) for request in requests]
        return self._ask(WorkerCalls.specrollout_take_sample_stats, seeds) or [None] * len(requests)

    def take_features(self) -> list["SequenceFeatures"]:
        """Returns the features that were captured since the last call, for the training of a head."""
        return self._run(engine_stats.take_features) or []

    def capture_seconds(self) -> float:
        """Returns the seconds of engine time that capturing features has taken since the engine started."""
        counters = self.counters()
        return 0.0 if counters is None else counters.capture_s

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call.

        They come from the head's canary and from the files that are kept for later starts.
        """
        return self._ask(WorkerCalls.specrollout_take_alarms) or []

    def keep_learned(self) -> None:
        """Writes what the engine has learned to the folder that the block names, for later starts.

        Does nothing if the block names no folder. Call it between two training steps.
        """
        self._ask(WorkerCalls.specrollout_keep_learned)

    def take_deaths(self) -> list[str]:
        """Returns a sentence for each drafter process that died since the last call."""
        return [] if self.drafters is None else self.drafters.take_deaths()

    def facts(self) -> dict[str, str | bool]:
        """Returns the settings that are in force, such as vLLM's version, model runner, scheduling and CUDA graph mode."""
        return engine_facts(self._llm)

    def device_facts(self) -> dict[str, Any]:
        """Returns the names of the attention backends, vLLM's platform class, and its device."""
        return device_facts(self._llm)

    def stats(self, first_step: int = 0) -> EngineStats | None:
        """Returns the engine's counters, and its engine steps from number `first_step` on.

        Returns None if the worker is vLLM's own.
        """
        return self._run(engine_stats.stats_of, first_step)

    def counters(self) -> EngineStats | None:
        """Returns the engine's counters without any engine steps, or None if the worker is vLLM's own."""
        return self._run(engine_stats.counters_of)

    def rolling(self) -> "RollingEngine":
        """Returns the object that decodes requests of coming steps in this engine (`run_ahead`)."""
        from nemo_specrollout.run_ahead.rolling_engine import RollingEngine

        chosen = self._generation.specrollout.run_ahead
        assert chosen is not None
        return RollingEngine(self._llm, self._early_request, chosen.branches)

    def _early_request(self, start: "EarlyStart") -> tuple[dict[str, list[int]], Any]:
        """Returns the prompt and the sampling parameters with which vLLM is to decode an early request.

        The prompt includes the part of the response that is already known. The parameters are None if that part is a whole
        response.
        """
        from nemo_specrollout.run_ahead.early_requests import early_params

        row = start.row.row
        assert isinstance(row, AheadRequest)
        text, params = self._text_and_params(row.request, {})
        return {"prompt_token_ids": [*text, *start.prefix]}, early_params(params, start)

    def run_in_worker(self, function: Callable[[Any], Any]) -> Any:
        """Runs `function` on the engine's vLLM worker and returns its result, for tools that look inside an engine."""
        return self._llm.collective_rpc(function)[0]

    def close(self) -> None:
        """Stops the engine and its drafters, and frees its memory. Other engines of this process continue."""
        if self.drafters is not None:
            self.drafters.stop()
        engine = self.__dict__.pop("_llm", None)
        if engine is not None:
            from nemo_specrollout.generation.engine import process_state

            process_state.stop(engine)
            del engine
            gc.collect()

    def _ask(self, method: Callable[[WorkerCalls, *Arguments], object], *arguments: *Arguments) -> Any:
        """Calls a method of our vLLM worker and returns its result, or returns None if the worker is vLLM's own."""
        return self._llm.collective_rpc(method.__name__, args=arguments)[0] if self._has_our_worker else None

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function with our vLLM worker as its first argument, and returns its result.

        Returns None if the worker is vLLM's own.
        """
        return self._llm.collective_rpc(function, args=arguments)[0] if self._has_our_worker else None

    def _text_and_params(self, request: RolloutRequest, sampling: Mapping[str, Any]) -> tuple[list[int], Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from nemo_specrollout.generation.engine.vllm_requests import RolloutSamplingParams

        params_class = RolloutSamplingParams if self._has_our_worker else SamplingParams
        params = params_class(**{**self._sampling(request), **sampling}, output_kind=RequestOutputKind.FINAL_ONLY)
        return [*request.prompt_token_ids, *request.prefix_token_ids], params

    def _sampling(self, request: RolloutRequest) -> dict[str, Any]:
        generation = self._generation
        length = request.exact_length
        is_ours = self._has_our_worker
        return {
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k or 0,
            "max_tokens": (length or generation.max_new_tokens) - len(request.prefix_token_ids),
            "ignore_eos": length is not None,
            "stop_token_ids": [] if length else self._stop_token_ids,
            "logprobs": 0,
            "detokenize": False,
            "extra_args": rollout_extra_args(request) if is_ours else None,
            "seed": None if is_ours else self._seed_of(request),
        }

    def _seed_of(self, request: RolloutRequest) -> int:
        return request.noise_seed(self._seed)


def _check_config(model: Path) -> None:
    """Raises ConfigError if transformers refuses the model's config.json, for which vLLM would only print a traceback."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(model), local_files_only=True)
    except Exception as error:  # transformers has many errors of its own
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"policy.model_name: transformers refuses {model}/config.json ({reason}); mend it") from error


class Generation:
    """Decodes a list of requests in an engine, and owns their results.

    `advance` may stop before all requests are done, so that a caller can let several engines take turns. If it is interrupted,
    the unfinished requests are removed from the engine.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        requests: Sequence[RolloutRequest],
        on_finished: Callable[[int], None] = lambda done: None,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        at_a_time: int | None = None,
    ) -> None:
        """Submits the requests, so that at most `at_a_time` run at once.

        The other arguments are as for `RolloutEngine.generate`.
        """
        self._engine = engine
        self._on_finished = on_finished
        self._sampling = sampling
        self._waiting = list(requests[at_a_time:]) if at_a_time else []
        self._ids = engine.submit(requests[:at_a_time], sampling)
        self._done: dict[str, Rollout] = {}

    @property
    def is_done(self) -> bool:
        return len(self._done) == len(self._ids) and not self._waiting

    @property
    def num_done(self) -> int:
        """Number of finished requests."""
        return len(self._done)

    @property
    def rollouts(self) -> list[Rollout]:
        """Responses in the order of the requests. All requests must be done."""
        return [self._done[i] for i in self._ids]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all responses have so far."""
        done = sum(len(r.token_ids) for r in self._done.values())
        return done + sum(len(self._engine.progress(i)[0]) for i in self._ids if i not in self._done)

    def advance(self, seconds: float = math.inf) -> None:
        """Steps the engine at least once, until all requests are done or `seconds` have passed."""
        until = time.perf_counter() + seconds
        try:
            while not self.is_done:
                finished = self._engine.step()
                self._done.update(finished)
                if finished:
                    self._ids += self._engine.submit(self._waiting[: len(finished)], self._sampling)
                    del self._waiting[: len(finished)]
                    self._on_finished(len(self._done))
                if time.perf_counter() >= until:
                    return
        except BaseException:
            self._engine.abort([i for i in self._ids if i not in self._done])
            raise
