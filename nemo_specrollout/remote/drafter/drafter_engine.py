# SPDX-License-Identifier: Apache-2.0
"""A drafter's engine: vLLM on its V2 model runner, whose requests are shadows of other engines' requests."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from nemo_specrollout.config.model_folder import longest_text, tensor_shapes, tokenizer_fingerprint, with_tied_lm_head
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.arguments import QUIET_START, set_process_environment
from nemo_specrollout.remote.protocol.orders import DraftModel, ShadowOpening
from nemo_specrollout.remote.protocol.shadow_sequences import Correction, Drafted

WORKERS = {
    "cpu": "nemo_specrollout.remote.drafter.shadow_cpu_worker.ShadowCPUWorker",
    "cuda": "nemo_specrollout.remote.drafter.shadow_gpu_worker.ShadowGPUWorker",
}
SCHEDULER = "nemo_specrollout.remote.drafter.shadow_scheduler.ShadowScheduler"


class DrafterEngine:
    """Owns the engine of one draft model: shadows are opened, corrected, closed; `draft` makes a token for some of them."""

    def __init__(self, model: Path, num_shadows: int, max_model_len: int, **vllm_kwargs: Any) -> None:
        """Starts vLLM; `vllm_kwargs` are further arguments of vllm.LLM. Raises ConfigError for what vLLM refuses."""
        set_process_environment()
        from vllm import LLM

        from nemo_specrollout.generation import compat
        from nemo_specrollout.remote.drafter.shadow_scheduler import ShadowScheduler

        compat.check_version()
        arguments = {
            **QUIET_START,
            **vllm_kwargs,
            "model": str(model),
            "max_model_len": min(max_model_len, longest_text(model) or max_model_len),
            "max_num_seqs": num_shadows,
            "worker_cls": WORKERS[compat.device_type()],
            "scheduler_cls": SCHEDULER,
            "async_scheduling": False,
            # A shadow's text is not final: what is cached of it would be another text's.
            "enable_prefix_caching": False,
        }
        compat.check_arguments(arguments)
        try:
            self._llm = LLM(**arguments)
        except ValueError as error:
            raise ConfigError(f"vLLM cannot start the draft model: {' '.join(str(error).split())}") from error
        self._folder = Path(model)
        engine = self._llm.llm_engine
        self._scheduler = compat.scheduler_of(engine)
        if not isinstance(self._scheduler, ShadowScheduler):
            raise RuntimeError(
                f"vLLM built {type(self._scheduler).__name__} where specrollout's ShadowScheduler was named"
            )
        # One token less than vLLM would allow: a request that reaches its end is freed.
        self.model = DraftModel(
            engine.model_config.get_vocab_size(), tokenizer_fingerprint(model), engine.model_config.max_model_len - 1
        )

    def open(self, opening: ShadowOpening) -> None:
        """A new shadow; its text is read in the next step. Raises ValueError for what vLLM does not take."""
        from nemo_specrollout.generation import compat

        try:
            self._add(opening)
        except compat.REFUSALS as error:
            raise ValueError(str(error)) from error

    def _add(self, opening: ShadowOpening) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=opening.temperature,
            top_k=opening.top_k,
            top_p=opening.top_p,
            max_tokens=None,
            ignore_eos=True,
            detokenize=False,
            seed=opening.seed,
        )
        self._llm.llm_engine.add_request(str(opening.shadow), {"prompt_token_ids": opening.text.tolist()}, params)

    def close_shadow(self, shadow: int) -> None:
        """Forgets a shadow and frees its KV."""
        self._llm.llm_engine.abort_request([str(shadow)])

    def correct(self, correction: Correction) -> None:
        """A shadow keeps its first tokens, with their KV, and goes on with others."""
        self._scheduler.correct(correction)

    def load_weights(self, folder: Path) -> None:
        """Drafts with the weights in `folder` from now on; shadows are read again. Raises ValueError, and goes on with the old
        ones, if they are not those of a model like the one that it was started with."""
        weights = with_tied_lm_head(folder, read_like(folder, self._folder))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._scheduler.read_again()

    def draft(self, shadows_M: np.ndarray) -> Drafted:
        """A token for each of these shadows; none for one whose text is still being read."""
        self._scheduler.awake = shadows_M.tolist()
        self._llm.llm_engine.step()
        return self._scheduler.take_drafted()

    def close(self) -> None:
        """Stops the engine and frees its memory."""
        engine = self.__dict__.pop("_llm", None)
        if engine is not None:
            self.__dict__.pop("_scheduler", None)
            engine.llm_engine.engine_core.shutdown()
            del engine
            gc.collect()


def read_like(folder: Path, known: Path) -> list[tuple[str, torch.Tensor]]:
    """The checkpoint tensors in `folder`. Raises ValueError unless names and shapes are those of the checkpoint in `known`."""
    files = sorted(folder.glob("*.safetensors"))
    found, expected = tensor_shapes(files), tensor_shapes(sorted(known.glob("*.safetensors")))
    if found != expected:
        odd = sorted(set(found.items()) ^ set(expected.items()))
        raise ValueError(f"{folder}: not a checkpoint like {known}: {odd[0][0] if odd else 'no tensors'} differs")
    return [(n, t) for file in files for n, t in load_file(file).items()]
