# SPDX-License-Identifier: Apache-2.0
"""Describes an engine in words, by its arguments: model runner, scheduling, CUDA graphs.

vLLM's own config also knows this, but importing vLLM takes longer than the whole command `check`. A test compares the two.
"""

from collections.abc import Mapping
from typing import Any

from nemo_specrollout.config.versions import vllm_version

_HOST_METHODS = ("ngram", "[ngram]")
"""Draft methods of vLLM that run on the host, so that a step cannot be scheduled before the previous one has ended."""


def is_asynchronous(vllm_kwargs: Mapping[str, Any]) -> bool:
    """Returns whether vLLM schedules a step before the previous one has ended."""
    given = vllm_kwargs.get("async_scheduling")
    native = vllm_kwargs.get("speculative_config")
    method = native.get("method") if isinstance(native, Mapping) else None
    return bool(given) if given is not None else method not in _HOST_METHODS


def engine_in_words(vllm_kwargs: Mapping[str, Any], *, on_gpu: bool, is_eager: bool) -> str:
    """Returns a line like the one that a run prints at its start; it says what only the run can tell."""
    version = vllm_version()
    vllm = f"vLLM {version}" if version else "vLLM (not installed here)"
    return f"{vllm}, V2 model runner, {_scheduling(vllm_kwargs)}, {_graphs(vllm_kwargs, on_gpu, is_eager)}"


def _scheduling(vllm_kwargs: Mapping[str, Any]) -> str:
    if is_asynchronous(vllm_kwargs):
        return "asynchronous scheduling"
    if vllm_kwargs.get("async_scheduling") is None:
        return "synchronous scheduling (vLLM's own n-gram drafts on the host)"
    return "synchronous scheduling (async_scheduling is false: a GPU waits while the host prepares each step)"


def _graphs(vllm_kwargs: Mapping[str, Any], on_gpu: bool, is_eager: bool) -> str:
    compilation = vllm_kwargs.get("compilation_config")
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, Mapping) else None
    if not on_gpu or is_eager:
        return f"CUDA graphs NONE ({'enforce_eager is true' if on_gpu else 'a CPU has none'})"
    if mode is not None:
        return f"CUDA graphs {mode}, if model and attention backend allow it"
    return "CUDA graphs as vLLM chooses by model and attention backend when it starts: only the run can tell"
