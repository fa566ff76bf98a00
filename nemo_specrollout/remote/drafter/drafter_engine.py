# SPDX-License-Identifier: Apache-2.0
"""A drafter's engine: vLLM on its V2 model runner, with shadow sequences as its requests."""

import gc
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.arguments import QUIET_START, set_process_environment
from nemo_specrollout.remote.protocol.drafter_side import DraftModel
from nemo_specrollout.remote.protocol.messages import Open, column
from nemo_specrollout.storage import model_folder as folders

WORKER = "nemo_specrollout.remote.drafter.shadow_worker.ShadowWorker"
SCHEDULER = "nemo_specrollout.remote.drafter.shadow_scheduler.ShadowScheduler"


class DrafterEngine:
    """Owns the engine of one draft model, which drafts one token at a time for some of its shadow sequences."""

    def __init__(self, model: Path, num_shadows: int, max_model_len: int, **vllm_kwargs: Any) -> None:
        """Starts vLLM; `vllm_kwargs` are further arguments of vllm.LLM. Raises ConfigError if vLLM refuses them."""
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
            # A shadow's text may be corrected: a cached prefix would then belong to another text.
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
        # One token less than vLLM allows, because vLLM frees a request that reaches its limit.
        config = engine.model_config
        tokenizer = folders.tokenizer_fingerprint(model)
        self.model = DraftModel(config.get_vocab_size(), tokenizer, config.max_model_len - 1)

    def open(self, shadow: int, opening: Open) -> None:
        """Adds a shadow sequence, whose text is read in the next step. Raises ValueError if vLLM refuses the request."""
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

    def draft(self, shadows_M: np.ndarray) -> np.ndarray:
        """Returns a token for each of these shadows, as `DRAFT_ROW`; none for a shadow whose text is still being read."""
        self._scheduler.awake = shadows_M.tolist()
        self._llm.llm_engine.step()
        return self._scheduler.take_drafted()

    def close(self) -> None:
        """Stops the engine and frees its memory. Other engines of this process go on."""
        engine = self.__dict__.pop("_llm", None)
        if engine is not None:
            self.__dict__.pop("_scheduler", None)
            from nemo_specrollout.generation.engine import process_state

            process_state.stop(engine)
            del engine
            gc.collect()
