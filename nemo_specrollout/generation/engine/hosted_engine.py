# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM in this process with a block, drives it one engine step at a time, and reports which settings it uses."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.arguments import QUIET_START, set_process_environment, with_specrollout
from nemo_specrollout.generation.engine.requests import Rollout


def start_vllm(arguments: Mapping[str, Any], block: SpecrolloutConfig) -> Any:
    """Returns a `vllm.LLM` with these arguments, in which the block (this package's configuration) is in effect.

    `process_state.stop` stops it. Raises ConfigError if the installed vLLM cannot run the block or refuses the arguments.
    """
    set_process_environment()
    from vllm import LLM

    from nemo_specrollout.generation.engine import compat, process_state

    compat.check_version()
    compat.check_features(block)
    if block.enabled:
        from nemo_specrollout.generation.engine.text_method import allow_text_drafters

        allow_text_drafters()
    arguments = with_specrollout(arguments, block, compat.device_type(), compat.vllm_abilities(arguments))
    compat.check_arguments(arguments)
    try:
        llm = LLM(**{**QUIET_START, **arguments})
    except ValueError as error:
        raise ConfigError(f"vLLM cannot start: {' '.join(str(error).split())}") from error
    except (MemoryError, RuntimeError) as error:
        if "does not support EAGLE3" in str(error):
            raise ConfigError(
                "policy.model_name: vLLM has no EAGLE-3 drafter for this model; use suffix and ngram"
            ) from error
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            "vLLM cannot start: there is not enough memory; lower policy.generation.vllm_kwargs.max_num_seqs or "
            "kv_cache_memory_bytes"
        ) from error
    process_state.started(llm)
    return llm


def engine_facts(llm: Any) -> dict[str, str | bool]:
    """Returns the settings that an engine uses, by name, such as vLLM's version, scheduling and CUDA graph mode."""
    from nemo_specrollout.generation.engine.compat import VLLM_VERSION

    config = llm.llm_engine.vllm_config
    return {
        "vllm": VLLM_VERSION,
        "model_runner": "V2",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": getattr(config.compilation_config.cudagraph_mode, "name", "NONE"),
        "host_chooses_drafts": llm.collective_rpc(_host_choice)[0] or False,
        "began": llm.collective_rpc(_began)[0] or False,
    }


def _host_choice(worker: Any) -> str | None:
    """Returns why the host chooses the drafts that an engine step verifies, or None if the device does.

    `worker` is a vLLM worker. For vLLM's own worker class the result is None.
    """
    return getattr(worker, "specrollout_host_chooses", None)


def _began(worker: Any) -> str:
    """Returns a phrase that says what the engine has taken over from earlier starts, or "" if it has taken over nothing."""
    kept = getattr(worker, "specrollout_kept", None)
    return "" if kept is None else ", and ".join(kept.began())


def device_facts(llm: Any) -> dict[str, Any]:
    """Returns the names of an engine's attention backends, of vLLM's platform class, and of the type of device."""
    from vllm.platforms import current_platform

    return {
        "attention": llm.collective_rpc(_attention_backends)[0],
        "platform": type(current_platform).__name__,
        "device": str(current_platform.device_type),
    }


def _attention_backends(worker: Any) -> list[str]:
    """Returns the names of a vLLM worker's attention backends. The list is empty if this vLLM does not tell them."""
    groups = [group for layers in getattr(worker.model_runner, "attn_groups", ()) for group in layers]
    return sorted({group.backend.get_name() for group in groups if hasattr(group, "backend")})


class HostedEngine:
    """Drives a `vllm.LLM` one engine step at a time. Owns the ids of its requests.

    The requests are `ShardRequest`s, each of which has its own sampling parameters.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.max_num_seqs = int(llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
        self.num_steps = self._num_requests = 0

    def submit(self, requests: Sequence[Any], sampling: Mapping[str, Any]) -> list[str]:
        """Queues requests and returns their ids.

        `sampling` must be empty here, because each request has its own sampling parameters. A subclass may accept parameters
        that override these. If vLLM refuses one of the requests, vLLM's error is raised and none of the requests is queued.
        """
        ids = [f"{type(self).__name__}-{self._num_requests + i}" for i in range(len(requests))]
        self._num_requests += len(requests)
        engine = self._llm.llm_engine
        queued: list[str] = []
        try:
            for request_id, request in zip(ids, requests, strict=True):
                text, params = self._text_and_params(request, sampling)
                engine.add_request(request_id, {"prompt_token_ids": text}, params)
                queued.append(request_id)
        except Exception:
            engine.abort_request(queued)
            raise
        return ids

    def progress(self, request_id: str, start: int = 0) -> tuple[list[int], list[float]]:
        """Returns the tokens sampled so far for an unfinished request, and their log-probs, from token `start` on."""
        outputs = self._llm.llm_engine.output_processor
        (internal_id,) = outputs.external_req_ids[request_id]
        state = outputs.request_states[internal_id]
        tokens = state.detokenizer.output_token_ids[start:]
        entries = state.logprobs_processor.logprobs[start:]
        return tokens, [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]

    def step(self) -> dict[str, Rollout]:
        """Runs one engine step. Returns the responses that have ended in it, by request id."""
        finished = {o.request_id: Rollout.from_vllm(o) for o in self._llm.llm_engine.step() if o.finished}
        self.num_steps += 1
        return finished

    def abort(self, ids: list[str]) -> None:
        """Removes the unfinished requests with these ids from the engine."""
        self._llm.llm_engine.abort_request(ids)

    def _text_and_params(self, request: Any, sampling: Mapping[str, Any]) -> tuple[list[int], Any]:
        from nemo_specrollout.generation.engine.vllm_requests import text_and_params

        assert not sampling
        return text_and_params(request, streams=False)
