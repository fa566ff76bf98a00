# SPDX-License-Identifier: Apache-2.0
"""An engine in this process: vLLM with our worker, rollout requests in, rollouts out."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from nemo_specrollout.config.model_folder import stop_token_ids, with_tied_lm_head
from nemo_specrollout.config.run_sections import DEFAULT_MAX_NUM_SEQS, PROCESSED_LOGPROBS, GenerationConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.arguments import QUIET_START, set_process_environment, with_specrollout
from nemo_specrollout.generation.identity import rollout_extra_args
from nemo_specrollout.sampling.seeds import request_seed

if TYPE_CHECKING:
    from nemo_specrollout.remote.verifier.drafter_pool import DrafterPool
    from nemo_specrollout.training.features.features import SequenceFeatures


_DEFAULTS = {
    "max_num_seqs": DEFAULT_MAX_NUM_SEQS,
    "logprobs_mode": PROCESSED_LOGPROBS,
}


@dataclass(frozen=True)
class RolloutRequest:
    """One sample of one prompt. `prompt_index`, `sample_index` and `policy_version` fix its noise.

    `exact_length` makes the response just that long, whatever is sampled: for timing steps.
    `prefix_token_ids` is the beginning of the response, made elsewhere: the engine goes on from there.
    """

    prompt_token_ids: Sequence[int]
    prompt_index: int
    sample_index: int
    policy_version: int = 0
    speculate: bool = True
    exact_length: int | None = None
    prefix_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Rollout:
    """A response: its tokens, their log-probs, and why it ended (`stop` or `length`).

    The log-probs are of the distribution that was sampled from. Those of greedy tokens are at temperature 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class RolloutEngine:
    """vLLM in this process. Owns the engine and its weights.

    States: running, then closed. Example: `engine.generate([RolloutRequest(ids, 0, 0)])[0].token_ids`.
    """

    def __init__(self, model: Path, generation: GenerationConfig, seed: int, **overrides: Any) -> None:
        """Starts an engine for the Hugging Face folder `model`; `overrides` are further arguments of vllm.LLM.

        Raises ConfigError for what vLLM refuses.
        """
        set_process_environment()
        from nemo_specrollout.generation import compat

        compat.check_version()
        compat.check_drafters(generation.specrollout)
        self.num_steps = 0
        self._num_requests = 0
        self._generation = generation
        self._seed = seed
        self._model = model
        self._stop_token_ids = stop_token_ids(model)
        self.drafters = self._start_drafters(generation)
        try:
            self._start(model, generation, seed, overrides)
            if self.drafters is not None:
                self.drafters.wait_until_up()
        except BaseException:
            self.close()
            raise

    def _start_drafters(self, generation: GenerationConfig) -> "DrafterPool | None":
        """The drafter processes that the block asks for: they start while this engine does."""
        block = generation.specrollout
        if not block.enabled or block.remote is None or not block.remote.workers:
            return None
        from nemo_specrollout.remote.verifier.drafter_pool import DrafterPool, drafter_spec

        return DrafterPool([drafter_spec(block.remote, generation.vllm_cfg)] * block.remote.workers)

    def _start(self, model: Path, generation: GenerationConfig, seed: int, overrides: Mapping[str, Any]) -> None:
        from vllm import LLM

        from nemo_specrollout.generation import compat

        block = generation.specrollout
        if self.drafters is not None:
            from nemo_specrollout.remote.verifier.drafter_pool import with_addresses

            block = with_addresses(block, self.drafters.addresses())
        arguments = {**_DEFAULTS, **generation.vllm_kwargs, **overrides}
        self.max_num_seqs = int(arguments["max_num_seqs"])
        arguments |= {
            "model": str(model),
            "dtype": generation.vllm_cfg.precision,
            "max_model_len": generation.vllm_cfg.max_model_len,
            "enforce_eager": generation.vllm_cfg.enforce_eager,
            "seed": seed,
        }
        arguments = with_specrollout(arguments, block, compat.device_type(), **compat.drafting_abilities())
        self._has_our_worker = "worker_cls" in arguments
        if self._has_our_worker:
            from nemo_specrollout.generation.older_runners import allow_text_drafters

            allow_text_drafters()
        compat.check_arguments(arguments)
        try:
            self._llm = LLM(**{**QUIET_START, **arguments})
        except ValueError as error:
            raise ConfigError(f"vLLM cannot start: {' '.join(str(error).split())}") from error
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
                raise
            raise ConfigError(
                "vLLM cannot start: there is not enough memory; lower policy.generation.vllm_kwargs.max_num_seqs or "
                "kv_cache_memory_bytes"
            ) from error

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        on_finished: Callable[[int], None] = lambda done: None,
        **sampling: Any,
    ) -> list[Rollout]:
        """Rollouts of `requests`, in their order; `sampling` overrides the config's sampling parameters.

        `on_finished` is told the number of finished requests whenever it grows. If interrupted, nothing stays behind.
        """
        generation = Generation(self, requests, on_finished, sampling)
        generation.advance()
        return generation.rollouts

    def stood_still(self, seconds: float) -> None:
        """No step was asked for in the last `seconds` of a rollout: the step that follows took that much less."""
        if self._has_our_worker:
            self._llm.collective_rpc("specrollout_stood_still", args=(seconds,))

    def submit(self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]) -> list[str]:
        """Queues `requests`; returns the engine's ids of them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from nemo_specrollout.generation.compat import RolloutSamplingParams

        params_class = RolloutSamplingParams if self._has_our_worker else SamplingParams
        ids = []
        for request in requests:
            params = params_class(**{**self._sampling(request), **sampling}, output_kind=RequestOutputKind.FINAL_ONLY)
            ids.append(str(self._num_requests))
            self._num_requests += 1
            text = [*request.prompt_token_ids, *request.prefix_token_ids]
            self._llm.llm_engine.add_request(ids[-1], {"prompt_token_ids": text}, params)
        return ids

    def progress(self, request_id: str, start: int = 0) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of a request under way, from number `start` of those that this engine made."""
        from nemo_specrollout.generation.compat import tokens_so_far

        return tokens_so_far(self._llm.llm_engine, request_id, start)

    def step(self) -> dict[str, Rollout]:
        """One step of all that is queued; the responses that it finished, by their ids."""
        finished = {o.request_id: rollout_of(o) for o in self._llm.llm_engine.step() if o.finished}
        self.num_steps += 1
        return finished

    def abort(self, ids: list[str]) -> None:
        """Forgets queued requests."""
        self._llm.llm_engine.abort_request(ids)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces the weights, by Hugging Face names, and forgets every cached prefix of the old ones."""
        tensors = with_tied_lm_head(self._model, tensors)
        if self._has_our_worker:
            self._llm.collective_rpc("specrollout_reload", args=(tensors,))
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
        self._llm.reset_prefix_cache()

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Replaces the weights of the EAGLE-3 head by one made for the policy that the engine holds; see the worker.

        Raises ValueError if `folder` does not hold a head like the one that the engine was started with.
        """
        self._llm.collective_rpc("specrollout_load_head", args=(str(folder), None, expected_length, num_positions))

    def take_sample_stats(self, requests: Sequence[RolloutRequest]) -> list[dict[str, Any] | None]:
        """What is written on the samples of finished requests (`sample_stats.py`); None where no drafter saw one."""
        if not self._has_our_worker:
            return [None] * len(requests)
        return self._llm.collective_rpc("specrollout_take_sample_stats", args=([self._seed_of(r) for r in requests],))[
            0
        ]

    def take_features(self) -> list["SequenceFeatures"]:
        """What was captured, since last asked, for the training of a head."""
        return self._llm.collective_rpc("specrollout_take_features")[0] if self._has_our_worker else []

    def capture_seconds(self) -> float:
        """What capturing features has taken of the engine's time, all together."""
        return float(self._llm.collective_rpc("specrollout_capture_seconds")[0]) if self._has_our_worker else 0.0

    def take_alarms(self) -> list[dict[str, Any]]:
        """What the canary of a drafter with weights raised since last asked."""
        return self._llm.collective_rpc("specrollout_take_alarms")[0] if self._has_our_worker else []

    def take_deaths(self) -> list[str]:
        """A sentence for each death of a drafter process since last asked."""
        return [] if self.drafters is None else self.drafters.take_deaths()

    def facts(self) -> dict[str, str | bool]:
        """Returns what is in force in the engine: vLLM's version, model runner, scheduling, CUDA graph mode."""
        if self._has_our_worker:
            return self._llm.collective_rpc("specrollout_engine_facts")[0]
        from nemo_specrollout.generation.compat import engine_facts

        return engine_facts(self._llm.llm_engine.vllm_config)

    def report(self, first_step: int = 0) -> dict[str, Any] | None:
        """The worker's raw counts and its steps from `first_step` on (`generation/worker.py`); None of a stock engine."""
        if not self._has_our_worker:
            return None
        return self._llm.collective_rpc("specrollout_report", args=(first_step,))[0]

    def stock_acceptance(self) -> tuple[int, list[int]]:
        """Of an engine with vLLM's own speculation and `disable_log_stats: false`: how often it drafted, and how often the
        first j + 1 draft tokens were all accepted, since its start."""
        metrics: dict[str, Any] = {m.name: m for m in self._llm.get_metrics()}
        drafts = metrics["vllm:spec_decode_num_drafts"].value
        return int(drafts), list(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values)

    def run_in_worker(self, function: Callable[[Any], Any]) -> Any:
        """Returns `function(worker)`: for tools that look inside an engine."""
        return self._llm.collective_rpc(function)[0]

    def close(self) -> None:
        """Stops the engine and its drafters, and frees its memory."""
        if self.drafters is not None:
            self.drafters.stop()
        engine = self.__dict__.pop("_llm", None)
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
            del engine
            gc.collect()

    def _sampling(self, request: RolloutRequest) -> dict[str, Any]:
        generation = self._generation
        prefix_length = len(request.prefix_token_ids)
        identity = rollout_extra_args(
            request.prompt_index,
            request.sample_index,
            request.policy_version,
            speculate=request.speculate,
            prompt_length=len(request.prompt_token_ids) if prefix_length else None,
        )
        length = request.exact_length
        return {
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k or 0,
            "max_tokens": (length or generation.max_new_tokens) - prefix_length,
            "ignore_eos": length is not None,
            "stop_token_ids": [] if length else self._stop_token_ids,
            "logprobs": 0,
            "detokenize": False,
            "extra_args": identity if self._has_our_worker else None,
            "seed": None if self._has_our_worker else self._seed_of(request),
        }

    def _seed_of(self, request: RolloutRequest) -> int:
        return request_seed(self._seed, request.prompt_index, request.sample_index, request.policy_version)


class Generation:
    """Requests under way in an engine; owns their results. May be advanced in turns, as the bench does.

    States: under way, then done; or abandoned, if a step is interrupted: nothing of it stays in the engine then.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        requests: Sequence[RolloutRequest],
        on_finished: Callable[[int], None] = lambda done: None,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        at_a_time: int | None = None,
    ) -> None:
        """Submits the requests. `at_a_time`: the most that run at once; a finished request makes room for a waiting one."""
        self._engine, self._on_finished, self._sampling = engine, on_finished, sampling
        self._waiting = list(requests[at_a_time:]) if at_a_time else []
        self._ids = engine.submit(requests[:at_a_time], sampling)
        self._done: dict[str, Rollout] = {}

    @property
    def is_done(self) -> bool:
        return len(self._done) == len(self._ids) and not self._waiting

    @property
    def num_done(self) -> int:
        """Finished requests."""
        return len(self._done)

    @property
    def rollouts(self) -> list[Rollout]:
        """The responses, in the order of the requests, when all are done."""
        return [self._done[i] for i in self._ids]

    @property
    def num_tokens(self) -> int:
        """Tokens of the responses so far."""
        done = sum(len(r.token_ids) for r in self._done.values())
        return done + sum(len(self._engine.progress(i)[0]) for i in self._ids if i not in self._done)

    def advance(self, seconds: float = math.inf) -> None:
        """Steps until all is done or `seconds` have passed, and at least once."""
        until = time.perf_counter() + seconds
        try:
            while not self.is_done:
                self._step()
                if time.perf_counter() >= until:
                    return
        except BaseException:
            self._engine.abort([i for i in self._ids if i not in self._done])
            raise

    def _step(self) -> None:
        finished = self._engine.step()
        self._done.update(finished)
        if not finished:
            return
        if self._waiting:
            self._ids += self._engine.submit(self._waiting[: len(finished)], self._sampling)
            del self._waiting[: len(finished)]
        self._on_finished(len(self._done))


def rollout_of(finished: Any) -> Rollout:
    """What vLLM says of a finished request, in short."""
    output = finished.outputs[0]
    token_ids = list(output.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, token_ids, strict=True)]
    return Rollout(token_ids, logprobs, output.finish_reason)
