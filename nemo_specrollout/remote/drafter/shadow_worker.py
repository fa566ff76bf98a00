# SPDX-License-Identifier: Apache-2.0
"""What a drafter's vLLM workers have in common: texts are corrected in their slots, and sampled tokens come with evidence.

Shapes: R rows of logits, one for each request of the batch.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from nemo_specrollout.generation import compat
from nemo_specrollout.generation.draft_sampling import sample_with_margin
from nemo_specrollout.remote.drafter.shadow_scheduler import TextChange


class ShadowWorkerMixin:
    """What `ShadowScheduler` has to tell its workers, and they it."""

    model_runner: Any

    def init_device(self) -> None:
        """vLLM's; then a look at what it has built."""
        super().init_device()  # type: ignore[misc]
        compat.verify_model_runner(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; tokens are graded from now on."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.specrollout_sampling = GradedSampling(self.model_runner.sampler, self.model_runner.device)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; texts are changed first."""
        change_texts(self.model_runner.req_states, scheduler_output.specrollout_changes)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; with the evidence level of each token."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        is_sampled = isinstance(output, AsyncModelRunnerOutput)
        return GradedOutput(output, self.specrollout_sampling.levels_R) if is_sampled else output


class GradedSampling:
    """Stands in for `sample` of vLLM's sampler: the same tokens. `levels_R` are the evidence levels of the last ones, int8, on
    the host as soon as the step's tokens are."""

    def __init__(self, sampler: Any, device: torch.device) -> None:
        self._sampler = sampler
        self._column = torch.zeros((), dtype=torch.int64, device=device)
        self.levels_R = torch.zeros(0, dtype=torch.int8)
        sampler.sample = self.sample

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, int64 [R], and logits after sampling parameters, the temperature among them."""
        states = self._sampler.sampling_states
        processed = self._sampler.apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos,
            seq_lens_upper_bound_np,
        )  # fmt: skip
        is_noisy_S = (states.temperature.gpu != 0).float()
        levels_R1 = torch.empty(len(logits), 1, dtype=torch.int8, device=logits.device)
        tokens_R = sample_with_margin(
            processed, expanded_idx_mapping, is_noisy_S, states.seeds.gpu, pos, levels_R1, self._column
        )
        self.levels_R = levels_R1[:, 0].to("cpu", non_blocking=True)
        return tokens_R, processed


class GradedOutput(AsyncModelRunnerOutput):
    """A step's output with `specrollout_levels`, an evidence level for each request."""

    def __init__(self, output: AsyncModelRunnerOutput, levels_R: torch.Tensor) -> None:
        self._output, self._levels_R = output, levels_R

    def get_output(self) -> ModelRunnerOutput:
        """Waits until both are on the host: levels were on their way before the tokens."""
        output: Any = self._output.get_output()
        output.specrollout_levels = self._levels_R.tolist()
        return output


def change_texts(states: Any, changes: dict[str, TextChange]) -> None:
    """Gives requests other texts, in the slots that they have: to vLLM, prompts of which it has computed a part."""
    for req_id, change in changes.items():
        slot, length = states.req_id_to_index[req_id], change.start + len(change.tokens)
        states.all_token_ids.stage_write(slot, change.start, change.tokens)
        states.total_len.stage_write_elem(slot, length)
        states.num_computed_tokens.stage_write_elem(slot, change.num_computed)
        states.prefill_len.np[slot] = length
    if changes:
        states.apply_staged_writes()
