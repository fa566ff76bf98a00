# SPDX-License-Identifier: Apache-2.0
"""Cost models, which predict the seconds of an engine's work.

The numbers of `TabledCosts` are measured by `specrollout-lab profile`. `RoundCosts` and `LinearCosts` have the forms of the
two papers. `RooflineCosts` follow from the model's shape, the GPU's data sheet, and a few calibrated shares of its peaks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from lab.placement.cost_tables import CostCurve
from lab.simulation.data_sheets import Device, ModelShape
from nemo_specrollout.config.measured_file import check_columns
from nemo_specrollout.config.strict import bounded

Rows = np.ndarray | float
_BYTES = {"bf16": 2.0, "fp8": 1.0}
_ACTIVATION_BYTES = 2.0


class Costs(ABC):
    """Interface of a cost model, which predicts the seconds of an engine's work."""

    @abstractmethod
    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        """Returns the seconds of an engine step with `num_rows` rows, at a mean length of `context` tokens.

        Drafts count as rows. If `num_rows` is an array, the result is an array too.
        """

    def draft_s(self, num_requests: float, context: float) -> float:
        """Returns the seconds that the engine takes to draft one token for each request, or 0 if it drafts without a model."""
        return 0.0

    def prefill_s(self, num_tokens: float) -> float:
        """Returns the seconds of a prefill of `num_tokens` tokens.

        By default it takes as long as an engine step with as many rows.
        """
        return float(self.step_s(1, num_tokens, num_tokens / 2))


@dataclass(frozen=True)
class TabledCosts(Costs):
    """Costs from measured tables. They do not depend on the context."""

    verify: CostCurve
    drafting: CostCurve | None = None

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        if isinstance(num_rows, np.ndarray):
            return np.array([self.verify.at(float(n)) for n in num_rows])
        return self.verify.at(num_rows)

    def draft_s(self, num_requests: float, context: float) -> float:
        return self.drafting.at(num_requests) if self.drafting else 0.0


@dataclass(frozen=True)
class RoundCosts(Costs):
    """Costs from the figures of Paper B (arXiv 2604.26779).

    The figures give the seconds of an engine step with k drafts per request, relative to those of a step without drafts. This
    ratio is the acceptance length divided by the speedup. Without drafts it is 1. Between two figures it is interpolated
    linearly, and beyond the last one it is extrapolated. A step without drafts takes equally long for all batch sizes, because
    the paper does not say more.
    """

    plain_step_s: float = bounded(above=0.0)
    """Seconds of an engine step without drafts."""
    num_drafts: tuple[int, ...] = bounded(low=1)
    """Numbers of drafts per request, ascending."""
    plain_steps: tuple[float, ...] = bounded(low=1.0)
    """Seconds of an engine step with each number of drafts in `num_drafts`, divided by `plain_step_s`."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the lists differ in length, are empty or not ascending."""
        check_columns(path, num_drafts=self.num_drafts, plain_steps=self.plain_steps)

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        k = np.asarray(num_rows, float) / num_requests - 1.0
        ks = np.array([0, *self.num_drafts])
        rounds = np.array([1.0, *self.plain_steps])
        slope = (rounds[-1] - rounds[-2]) / (ks[-1] - ks[-2])
        seconds = self.plain_step_s * (np.interp(k, ks, rounds) + slope * np.maximum(k - ks[-1], 0.0))
        return seconds if isinstance(num_rows, np.ndarray) else float(seconds)

    def prefill_s(self, num_tokens: float) -> float:
        return 0.0


@dataclass(frozen=True)
class LinearCosts(Costs):
    """Costs in the form of SpecActor (arXiv 2511.16193), which are linear in the batch size b.

    Drafting a token takes `b * D' + alpha` seconds. Verification takes `b * V' + beta` seconds in the paper, where V' depends
    on the number of drafts. In this class, V' is a constant for each row instead. The paper's coefficients are not public.
    """

    verify_fixed_s: float = bounded(above=0.0)
    """Seconds of an engine step in addition to those of its rows (beta in the paper)."""
    verify_row_s: float = bounded(low=0.0)
    """Seconds that each row adds to an engine step. With one row per request, this is V' in the paper."""
    draft_fixed_s: float = bounded(0.0, low=0.0)
    """Seconds to draft a token for the whole batch, in addition to those of its requests (alpha in the paper)."""
    draft_request_s: float = bounded(0.0, low=0.0)
    """Seconds that each request of the batch adds to the drafting of a token (D' in the paper)."""

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        return self.verify_fixed_s + self.verify_row_s * num_rows

    def draft_s(self, num_requests: float, context: float) -> float:
        return self.draft_fixed_s + self.draft_request_s * num_requests


@dataclass(frozen=True)
class Calibration:
    """Calibrated figures of the roofline. Each holds for all batch sizes, contexts and draft lengths."""

    memory_share: float = bounded(0.75, above=0.0, high=1.0)
    """Share of the HBM bandwidth that decoding achieves."""
    compute_share: float = bounded(0.6, above=0.0, high=1.0)
    """Share of the dense peak that matrix products achieve."""
    layer_s: float = bounded(2e-5, low=0.0)
    """Seconds of a layer in addition to those of its rows, for kernel launches and the latency of collectives."""
    host_s: float = bounded(1.5e-3, low=0.0)
    """Seconds of the host in each engine step, for scheduling, sampling and detokenising."""
    draft_host_s: float = bounded(2e-4, low=0.0)
    """Seconds of the host for each draft token that the policy's engine makes."""
    speculation_s: float = bounded(0.0, low=0.0)
    """Additional seconds of an engine step that has drafts, for rejection, bookkeeping and CUDA graphs of an unsuitable
    size."""
    train_share: float = bounded(0.35, above=0.0, high=1.0)
    """Share of the dense bf16 peak that training achieves."""
    logprob_share: float = bounded(0.35, above=0.0, high=1.0)
    """Share of the dense bf16 peak that forward passes for log-probs achieve."""


@dataclass(frozen=True)
class RooflineCosts(Costs):
    """Costs of an engine with a given model and GPUs. `drafter` has the costs of drafting in the same engine.

    The seconds of an engine step are the sum of four parts. The first is the time to read the weights or to compute the rows,
    whichever is longer. Of a mixture of experts, only experts that get a row are read. The second is the time to read the KV
    cache or to compute attention, whichever is longer. The others are the exchange of activations between GPUs, and the time
    for launches and the host. Sources: Williams et al. 2009 ("Roofline"), and ring all-reduce for collectives.
    """

    shape: ModelShape
    device: Device
    precision: str
    kv_precision: str
    calibration: Calibration
    num_gpus: int = 1
    """Number of GPUs of an engine."""
    expert_parallel: bool = False
    """Whether each expert is on one GPU, to which an all-to-all sends tokens. Otherwise all GPUs share each expert."""
    drafter: Costs | None = None
    reads_for_each_row: bool = False
    """Whether attention reads the KV cache of a request once for each of its rows, and not once for all of them."""

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        calibration = self.calibration
        fixed_s = self.shape.num_hidden_layers * calibration.layer_s + calibration.host_s
        speculation_s = calibration.speculation_s * (np.asarray(num_rows) > num_requests)
        attention_s = self._attention_s(num_requests, num_rows, context)
        total = fixed_s + speculation_s + (self._linear_s(num_rows) + attention_s + self._exchange_s(num_rows))
        return total if isinstance(num_rows, np.ndarray) else float(total)

    def draft_s(self, num_requests: float, context: float) -> float:
        return float(self.drafter.step_s(num_requests, num_requests, context)) if self.drafter else 0.0

    def ideal_s(self, num_tokens: float) -> float:
        """Returns the seconds that the arithmetic of `num_tokens` tokens takes at the peak of the data sheet."""
        return 2.0 * self.shape.active_params * num_tokens / self._peak

    @property
    def kv_tokens(self) -> float:
        """Number of tokens for which the KV cache has room if 90 % of the memory is used."""
        weights = self.shape.params * _BYTES[self.precision] / self.num_gpus
        return (0.9 * self.device.hbm_bytes - weights) / self._kv_bytes

    @property
    def _peak(self) -> float:
        return self.device.flops(self.precision) * self.num_gpus

    @property
    def _bandwidth(self) -> float:
        return self.device.hbm_bytes_per_s * self.calibration.memory_share

    @property
    def _kv_bytes(self) -> float:
        """Bytes of the KV cache per token on each GPU. With more GPUs than KV heads, heads are replicated."""
        copies = max(1.0, self.num_gpus / self.shape.num_key_value_heads)
        return self.shape.kv_values_per_token * _BYTES[self.kv_precision] * copies / self.num_gpus

    def _linear_s(self, num_rows: Rows) -> Rows:
        weights_s = self.shape.params_read(num_rows) * _BYTES[self.precision] / self.num_gpus / self._bandwidth
        compute_s = 2.0 * self.shape.active_params * num_rows / (self._peak * self.calibration.compute_share)
        return np.maximum(weights_s, compute_s)

    def _attention_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        num_readers = num_rows if self.reads_for_each_row else num_requests
        read_s = num_readers * context * self._kv_bytes / self._bandwidth
        peak = self.device.bf16_flops * self.num_gpus * self.calibration.compute_share
        return np.maximum(read_s, self.shape.attention_flops(num_rows, context) / peak)

    def _exchange_s(self, num_rows: Rows) -> Rows:
        """Returns the seconds of communication between GPUs in an engine step.

        A layer makes two all-reduces, or with expert parallelism one all-reduce and two all-to-alls.
        """
        n = self.num_gpus
        shape = self.shape
        if n == 1:
            return 0.0 * num_rows
        link = self.device.link_bytes_per_s(n)
        row_bytes = _ACTIVATION_BYTES * shape.hidden_size * num_rows
        all_reduce_s = 2.0 * (n - 1) / n * row_bytes / link
        if not (self.expert_parallel and shape.num_experts):
            return shape.num_hidden_layers * 2.0 * all_reduce_s
        to_experts_s = 2.0 * (n - 1) / n * shape.num_experts_per_tok * row_bytes / n / link
        return shape.num_hidden_layers * (all_reduce_s + to_experts_s)


def drafter_costs(engine: RooflineCosts, shape: ModelShape, num_gpus: int | None = None) -> RooflineCosts:
    """Returns the costs of a drafter in bf16, on the GPUs of the policy's engine or on `num_gpus` separate GPUs."""
    calibration = engine.calibration
    if num_gpus is None:
        calibration = replace(calibration, host_s=calibration.draft_host_s)
    return RooflineCosts(shape, engine.device, "bf16", "bf16", calibration, num_gpus or engine.num_gpus)
