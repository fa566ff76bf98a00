# SPDX-License-Identifier: Apache-2.0
"""The engine of a remote drafter, which is vLLM with its V2 model runner. Its requests are shadow sequences.

A shadow sequence is a copy of a verifier's request, which the draft model extends.
"""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.arguments import QUIET_START, set_process_environment
from nemo_specrollout.remote.protocol.drafter_side import DraftModel
from nemo_specrollout.remote.protocol.messages import Open, column
from nemo_specrollout.storage import model_folder as folders
from nemo_specrollout.storage.files import read_regular
from nemo_specrollout.storage.weights_folder import check_like

WORKER = "nemo_specrollout.remote.drafter.shadow_worker.ShadowWorker"
SCHEDULER = "nemo_specrollout.remote.drafter.shadow_scheduler.ShadowScheduler"
_CHECKED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of tensors that are checked for values that are not finite. In smaller dtypes, torch cannot detect such values."""


class DrafterEngine:
    """Owns a vLLM engine with a draft model. Each engine step drafts one token for some of the shadow sequences."""

    def __init__(self, model: Path, num_shadows: int, max_model_len: int, **vllm_kwargs: Any) -> None:
        """Starts vLLM, with `vllm_kwargs` as further arguments of vllm.LLM. Raises ConfigError if vLLM refuses them."""
        set_process_environment()
        from vllm import LLM

        from nemo_specrollout.generation.engine import compat, process_state
        from nemo_specrollout.remote.drafter.shadow_scheduler import ShadowScheduler

        compat.check_version()
        arguments = {
            **QUIET_START,
            **vllm_kwargs,
            "model": str(model),
            "max_model_len": min(max_model_len, folders.longest_text(model) or max_model_len),
            "max_num_seqs": num_shadows,
            "worker_cls": WORKER,
            "scheduler_cls": SCHEDULER,
            "async_scheduling": False,
            # A shadow's text may be corrected, and a cached prefix would then belong to another text.
            "enable_prefix_caching": False,
        }
        compat.check_arguments(arguments)
        try:
            self._llm = LLM(**arguments)
        except ValueError as error:
            raise ConfigError(f"vLLM cannot start the draft model: {' '.join(str(error).split())}") from error
        process_state.started(self._llm)
        engine = self._llm.llm_engine
        self._scheduler = compat.scheduler_of(engine)
        if not isinstance(self._scheduler, ShadowScheduler):
            raise RuntimeError(
                f"vLLM built {type(self._scheduler).__name__} although scheduler_cls names specrollout's ShadowScheduler"
            )
        # `self.model` allows one token less than vLLM does, because vLLM frees a request that reaches its limit.
        config = engine.model_config
        self._folder = model
        self._shapes = folders.tensor_shapes(folders.tensor_files(model))  # the files may change while the drafter runs
        tokenizer = folders.tokenizer_fingerprint(model)
        self.model = DraftModel(config.get_vocab_size(), tokenizer, config.max_model_len - 1)

    def open(self, shadow: int, opening: Open) -> None:
        """Adds shadow sequence number `shadow` for the request in `opening`. Its text is read in the next engine step.

        Raises ValueError if vLLM refuses the request.
        """
        from vllm import SamplingParams

        from nemo_specrollout.generation.engine import vllm_requests

        try:
            params = SamplingParams(
                temperature=opening.temperature,
                top_k=opening.top_k,
                top_p=opening.top_p,
                max_tokens=None,
                ignore_eos=True,
                detokenize=False,
                seed=opening.seed,
            )
            text = column(opening.tokens, np.int32).tolist()
            self._llm.llm_engine.add_request(str(shadow), {"prompt_token_ids": text}, params)
        except vllm_requests.REFUSALS as error:
            raise ValueError(str(error)) from error

    def close_shadow(self, shadow: int) -> None:
        self._llm.llm_engine.abort_request([str(shadow)])

    def correct(self, shadow: int, num_kept: int, tokens: list[int]) -> None:
        """Keeps the first `num_kept` tokens of a shadow sequence, and continues it with `tokens`."""
        self._scheduler.correct(shadow, num_kept, tokens)

    def load_weights(self, folder: Path) -> None:
        """Replaces the weights by those in `folder`. The texts of all shadow sequences are then read again.

        If `folder` has no checkpoint with the same tensors and shapes as the draft model, raises ValueError or OSError and
        keeps the old weights. Raises RuntimeError if vLLM cannot load the weights, for instance for lack of memory.
        """
        self.use_weights(self.read_weights(folder))

    def read_weights(self, folder: Path) -> list[tuple[str, torch.Tensor]]:
        """Reads a checkpoint of the draft model into the host's memory, and returns its tensors by name.

        It may be called in any thread. Raises ValueError or OSError if the checkpoint cannot be used.
        """
        if not self._shapes:
            raise ValueError(f"the drafter's model {self._folder} is no folder of safetensors files to compare with")
        tensors = read_like(folder, self._shapes)
        if self.model.tokenizer and _tokenizer_of(folder) not in ("", self.model.tokenizer):
            raise ValueError(
                f"{folder} has another tokenizer than the draft model; name a checkpoint of the draft model"
            )
        return tensors

    def use_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Replaces the weights by `tensors` that `read_weights` has returned. Raises RuntimeError if vLLM cannot load them."""
        weights = folders.with_tied_lm_head(self._folder, tensors)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._scheduler.read_again()

    def draft(self, shadows_M: np.ndarray) -> np.ndarray:
        """Drafts one token for each of the shadow sequences `shadows_M`, and returns the tokens as `DRAFT_ROW`.

        There is no token for a shadow sequence whose text is still being read.
        """
        self._scheduler.awake = shadows_M.tolist()
        self._llm.llm_engine.step()
        return self._scheduler.take_drafted()

    def close(self) -> None:
        """Stops the engine and frees its memory. Other engines of this process continue."""
        engine = self.__dict__.pop("_llm", None)
        if engine is not None:
            self.__dict__.pop("_scheduler", None)
            from nemo_specrollout.generation.engine import process_state

            process_state.stop(engine)
            del engine
            gc.collect()


def read_like(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a checkpoint by name.

    Raises ValueError unless they have exactly the names and shapes in `shapes`. The files are copied into memory and not
    mapped, because the process would crash if a mapped file were truncated.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    for file in check_like(folder, shapes, " on the drafter's machine"):
        try:
            tensors += load(read_regular(file)).items()
        except SafetensorError as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error}); copy or write it again") from error
    for name, tensor in tensors:
        if tensor.dtype in _CHECKED and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{folder}: {name} has values that are no finite numbers; publish an earlier checkpoint")
    return tensors


def _tokenizer_of(folder: Path) -> str:
    """Returns the fingerprint of the tokenizer in `folder`, or "" if it has none. Raises ValueError for a broken one."""
    try:
        return folders.tokenizer_fingerprint(folder)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{folder}/tokenizer.json: a value has a wrong type ({error}); copy the file again") from error
