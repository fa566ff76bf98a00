# SPDX-License-Identifier: Apache-2.0
"""A drafter's vLLM worker. It corrects texts of shadow sequences in place, and grades each sampled token by its evidence.

Shapes: R rows of logits, one for each request of the batch.
"""

import inspect
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from nemo_specrollout.generation.drafting.draft_sampling import sample_with_score_gap
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.remote.drafter.shadow_scheduler import TextChange
from nemo_specrollout.sampling.platforms import native_worker

_NativeWorker: Any = native_worker(compat.device_type())
_NAMES = list(inspect.signature(Sampler.apply_sampling_params).parameters)
_POSITIONS = _NAMES.index("pos") - _NAMES.index("expanded_idx_mapping") - 1
"""Index in the tuple `rows` of `ShadowWorker.sample` at which vLLM passes the tensor of positions."""


class ShadowWorker(_NativeWorker):
    """vLLM's worker, whose requests are the shadow sequences of `ShadowScheduler`."""

    model_runner: Any
    _levels_R: torch.Tensor
    """Evidence levels of the tokens of the last engine step, int8 [R]. They are on the host as soon as the tokens are."""

    def init_device(self) -> None:
        """Builds the model runner, and checks that it is one that this package knows."""
        compat.verify_runner_choice(self.vllm_config)
        super().init_device()
        compat.verify_model_runner(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and replaces the sampler's `sample` by one that also computes evidence levels."""
        super().load_model(*args, **kwargs)
        # `sample_with_score_gap` writes to one of several columns of levels. A drafter drafts one token per engine step, so
        # there is only one column.
        self._column = torch.zeros((), dtype=torch.int64, device=self.model_runner.device)
        self.model_runner.sampler.sample = self.sample

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the corrections of texts, and then executes the engine step."""
        change_texts(self.model_runner.req_states, scheduler_output.specrollout_changes)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Samples tokens, waits for them, and adds their evidence levels to the output.

        Waiting costs nothing, because a drafter schedules synchronously and vLLM would wait right afterwards.
        """
        output = super().sample_tokens(*args, **kwargs)
        if not isinstance(output, AsyncModelRunnerOutput):
            return output
        graded: Any = output.get_output()
        # The levels were copied before the tokens, so their copy has ended too.
        graded.specrollout_levels = self._levels_R.tolist()
        return graded

    def sample(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, *rows: Any, return_logprobs: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples tokens and their evidence levels. Replaces `sample` of vLLM's sampler, and samples the same tokens.

        `rows` are the further arguments of vLLM's `apply_sampling_params`. Newer versions of vLLM have more of them. Returns
        the tokens, int64 [R], and the logits after all sampling parameters, including the temperature. The evidence levels are
        not returned, but written to `_levels_R`.
        """
        sampler = self.model_runner.sampler
        states = sampler.sampling_states
        processed = sampler.apply_sampling_params(logits, expanded_idx_mapping, *rows)
        is_noisy_S = (states.temperature.gpu != 0).float()
        levels_R1 = torch.empty(len(logits), 1, dtype=torch.int8, device=logits.device)
        tokens_R = sample_with_score_gap(
            processed, expanded_idx_mapping, is_noisy_S, states.seeds.gpu, rows[_POSITIONS], levels_R1, self._column
        )
        self._levels_R = levels_R1[:, 0].to("cpu", non_blocking=True)
        return tokens_R, processed


def change_texts(states: Any, changes: dict[str, TextChange]) -> None:
    """Replaces the end of each changed text in `states`, which are the request states of vLLM's model runner.

    vLLM then takes the text for a prompt that is computed in part.
    """
    for req_id, change in changes.items():
        slot = states.req_id_to_index[req_id]
        length = change.start + len(change.tokens)
        states.all_token_ids.stage_write(slot, change.start, change.tokens)
        states.total_len.stage_write_elem(slot, length)
        states.num_computed_tokens.stage_write_elem(slot, change.num_computed)
        states.prefill_len.np[slot] = length
    if changes:
        states.apply_staged_writes()
