# SPDX-License-Identifier: Apache-2.0
"""What the V2 model runners of vLLM before 0.32 lack, made up for: drafters without weights, and a budget of drafts.

Nothing here is in force where vLLM has its own. Shapes: S request slots, B requests of the batch, K draft positions.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample import bad_words
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from nemo_specrollout.generation.arguments import TEXT_METHOD
from nemo_specrollout.generation.compat import HAS_TEXT_METHOD, agreed
from nemo_specrollout.generation.host_copy import HostCopy
from nemo_specrollout.scheduling.budget import BudgetObservation, BudgetPolicy
from nemo_specrollout.scheduling.step_time import StepCosts

if TYPE_CHECKING:
    from nemo_specrollout.generation.drafting import Drafting

_REFUSED = {"ngram/ngram_gpu speculative decoding", f"speculative method '{TEXT_METHOD}'"}
_config: Any = VllmConfig
_runner_module: Any = model_runner


class TextSpeculator(BaseSpeculator):
    """The speculator of an engine whose drafters have no weights: it holds their place, and proposes zeros in dummy runs."""

    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        shape = vllm_config.scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens
        self.draft_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.draft_logits = None
        self.model = torch.nn.Module()

    def init_cudagraph_manager(self, *args: Any) -> None:
        """It has no graphs."""

    def capture(self, *args: Any) -> None:
        """It has no graphs."""

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Zeros, int64 [B, K]."""
        return self.draft_tokens[: input_batch.num_reqs]


def allow_text_drafters() -> None:
    """Lets the V2 model runner take vLLM's method for drafters without weights, which it refuses before 0.32.

    Called in each process that makes a config or a worker. The environment tells those that vLLM starts which runner it is.
    """
    if HAS_TEXT_METHOD or hasattr(_config, "specrollout_refuses"):
        return
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    refuses, init_speculator = _config._get_v2_model_runner_unsupported_features, _runner_module.init_speculator

    def refuses_less(self: Any) -> list[str]:
        found = refuses(self)
        is_ours = self.speculative_config is not None and self.speculative_config.method == TEXT_METHOD
        return [text for text in found if not (is_ours and text in _REFUSED)]

    def init_any_speculator(vllm_config: Any, device: torch.device) -> Any:
        is_ours = vllm_config.speculative_config.method == TEXT_METHOD
        return (TextSpeculator if is_ours else init_speculator)(vllm_config, device)

    _config._get_v2_model_runner_unsupported_features, _config.specrollout_refuses = refuses_less, refuses
    _runner_module.init_speculator = init_any_speculator


def mend_bad_words(sampler: Any) -> None:
    """Lets bad words look at the draft before a row, where vLLM's kernel looks at the token before that (0.25)."""
    if "spec_offset + 1" in inspect.getsource(bad_words):
        return
    state = sampler.bad_words_state
    apply = state.apply_bad_words

    def apply_to_next(logits: Any, rows: Any, slots_np: Any, input_ids: torch.Tensor, local_pos: Any) -> None:
        apply(logits, rows, slots_np, input_ids.roll(-1), local_pos)

    state.apply_bad_words = apply_to_next


class HostBudget:
    """How many drafts a step verifies, where vLLM cannot choose on the device: the worker leaves the others out of the step.

    The scheduler takes what was left out for rejected. Each request's number is chosen on the host, by the figures of a step
    before; vLLM's draft tokens stay on the device.
    """

    def __init__(
        self,
        runner: Any,
        policy: BudgetPolicy,
        costs: Callable[[], StepCosts | None],
        drafting: "Drafting",
    ) -> None:
        """As `VerificationBudget`."""
        self._slot_of, self._speculator = runner.req_states.req_id_to_index, runner.speculator
        self._rates_SK = torch.zeros(runner.max_num_reqs, runner.num_speculative_steps, device=runner.device)
        self._known = HostCopy(self._rates_SK)
        self._policy, self._costs, self._drafting = policy, costs, drafting

    def bind(self, runner: Any) -> None:
        """Stands between the runner and its steps from now on."""
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

        def execute_within_budget(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            return execute_model(self.trimmed(scheduler_output), *args, **kwargs)

        def sample_and_record(grammar_output: Any) -> Any:
            state = runner.execute_model_state
            output = sample_tokens(grammar_output)
            if state is not None:
                self.record(state.input_batch)
            return output

        runner.execute_model, runner.sample_tokens = execute_within_budget, sample_and_record

    def record(self, batch: Any) -> None:
        """The drafts that were just proposed come true at the speculator's rates; the host hears of it a step later."""
        rates_BK = self._speculator.draft_token_confidence_probs[: batch.num_reqs]
        self._rates_SK[batch.idx_mapping] = rates_BK
        self._known.refresh()

    def trimmed(self, scheduled: Any) -> Any:
        """The scheduler's output with as many drafts as the policy wants; a copy, since the scheduler reads its own later.

        A step with structured output stays: the scheduler made masks for all its drafts.
        """
        drafts = scheduled.scheduled_spec_decode_tokens
        if not drafts or scheduled.has_structured_output_requests:
            return scheduled
        names = [name for name in scheduled.num_scheduled_tokens if name in self._slot_of]
        survival_BK = self._known.values[[self._slot_of[name] for name in names]].astype(np.float64).cumprod(axis=1)
        caps_B = np.array([len(drafts.get(name, ())) for name in names], np.int64)
        decision = agreed(self._policy.allocate(BudgetObservation(survival_BK, caps_B, self._costs())))
        counts_B = decision.counts_B
        self._drafting.budgeted(int(counts_B.sum()), decision.row_price)
        kept = {name: drafts[name][:n] for name, n in zip(names, counts_B.tolist(), strict=True) if n}
        lengths = {
            name: length - len(drafts.get(name, ())) + len(kept.get(name, ()))
            for name, length in scheduled.num_scheduled_tokens.items()
        }
        return dataclasses.replace(
            scheduled,
            num_scheduled_tokens=lengths,
            total_num_scheduled_tokens=sum(lengths.values()),
            scheduled_spec_decode_tokens=kept,
        )
