# SPDX-License-Identifier: Apache-2.0
"""What a transformer's steps cost on GPUs, from its shape and the data sheet: a roofline with few calibrated shares.

A step reads the weights (of a mixture of experts, those that any row needs) and computes its rows, whichever takes longer; it
reads the KV cache and computes attention, whichever takes longer; it exchanges activations; and it waits for launches and
the host. Source of the form: Williams et al. 2009, "Roofline"; of the collectives, ring all-reduce.
"""

from dataclasses import dataclass, replace

import numpy as np

from nemo_specrollout.config.strict import bounded
from nemo_specrollout.simulation.costs import Costs, Rows
from nemo_specrollout.simulation.devices import Device
from nemo_specrollout.simulation.transformer import ModelShape

_BYTES = {"bf16": 2.0, "fp8": 1.0}
_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True)
class Calibration:
    """What no data sheet says. Each is one figure for all batch sizes, contexts and draft lengths."""

    memory_share: float = bounded(0.75, above=0.0, high=1.0)
    """Achieved share of the HBM bandwidth when decoding."""
    compute_share: float = bounded(0.6, above=0.0, high=1.0)
    """Achieved share of the dense peak in matrix products."""
    layer_s: float = bounded(2e-5, low=0.0)
    """Seconds of a layer at no rows: launches and the latency of its collectives."""
    host_s: float = bounded(1.5e-3, low=0.0)
    """Seconds of a step that the host takes: scheduling, sampling, detokenising."""
    draft_host_s: float = bounded(2e-4, low=0.0)
    """The same, of one draft token of a drafter in the policy's engine."""
    speculation_s: float = bounded(0.0, low=0.0)
    """Seconds that a step with drafts takes beyond its rows: rejection, bookkeeping, graphs that do not fit."""
    train_share: float = bounded(0.35, above=0.0, high=1.0)
    """Achieved share of the dense bf16 peak in training."""
    logprob_share: float = bounded(0.35, above=0.0, high=1.0)
    """The same in forward passes for log-probs."""


@dataclass(frozen=True)
class Parallel:
    """How many GPUs share an engine, and how experts lie on them."""

    num_gpus: int = 1
    expert_parallel: bool = False
    """Experts whole on one GPU each, reached all-to-all, instead of cut across all."""


@dataclass(frozen=True)
class RooflineCosts(Costs):
    """An engine of a model on some GPUs. `drafter` is what its own drafting costs."""

    shape: ModelShape
    device: Device
    parallel: Parallel
    precision: str
    kv_precision: str
    calibration: Calibration
    drafter: Costs | None = None

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        calibration = self.calibration
        fixed_s = self.shape.num_hidden_layers * calibration.layer_s + calibration.host_s
        speculation_s = calibration.speculation_s * (np.asarray(num_rows) > num_requests)
        seconds = (
            self._linear_s(num_rows) + self._attention_s(num_requests, num_rows, context) + self._exchange_s(num_rows)
        )
        total = fixed_s + speculation_s + seconds
        return total if isinstance(num_rows, np.ndarray) else float(total)

    def draft_s(self, num_requests: float, context: float) -> float:
        return float(self.drafter.step_s(num_requests, num_requests, context)) if self.drafter else 0.0

    def prefill_s(self, num_tokens: float) -> float:
        return float(self.step_s(1, num_tokens, num_tokens / 2))

    def ideal_s(self, num_tokens: float) -> float:
        """Seconds of the arithmetic of `num_tokens` tokens at the data sheet's peak."""
        return 2.0 * self.shape.active_params * num_tokens / self._peak

    @property
    def kv_tokens(self) -> float:
        """Tokens for which the KV cache has room, in nine tenths of the memory that the weights leave."""
        weights = self.shape.params * _BYTES[self.precision] / self.parallel.num_gpus
        return (0.9 * self.device.hbm_bytes - weights) / self._kv_bytes

    @property
    def _peak(self) -> float:
        return self.device.flops(self.precision) * self.parallel.num_gpus

    @property
    def _bandwidth(self) -> float:
        return self.device.hbm_bytes_per_s * self.calibration.memory_share

    @property
    def _kv_bytes(self) -> float:
        """Of a token, on each GPU: where there are more GPUs than KV heads, heads are held several times."""
        copies = max(1.0, self.parallel.num_gpus / self.shape.num_key_value_heads)
        return self.shape.kv_values_per_token * _BYTES[self.kv_precision] * copies / self.parallel.num_gpus

    def _linear_s(self, num_rows: Rows) -> Rows:
        weights_s = self.shape.params_read(num_rows) * _BYTES[self.precision] / self.parallel.num_gpus / self._bandwidth
        compute_s = 2.0 * self.shape.active_params * num_rows / (self._peak * self.calibration.compute_share)
        return np.maximum(weights_s, compute_s)

    def _attention_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        read_s = num_requests * context * self._kv_bytes / self._bandwidth
        peak = self.device.bf16_flops * self.parallel.num_gpus * self.calibration.compute_share
        return np.maximum(read_s, self.shape.attention_flops(num_rows, context) / peak)

    def _exchange_s(self, num_rows: Rows) -> Rows:
        """Two all-reduces a layer; with experts apart, one, and the tokens' way to the experts and back."""
        n, shape = self.parallel.num_gpus, self.shape
        if n == 1:
            return 0.0 * num_rows
        link = self.device.link_bytes_per_s(n)
        row_bytes = _ACTIVATION_BYTES * shape.hidden_size * num_rows
        all_reduce_s = 2.0 * (n - 1) / n * row_bytes / link
        if not (self.parallel.expert_parallel and shape.num_experts):
            return shape.num_hidden_layers * 2.0 * all_reduce_s
        to_experts_s = 2.0 * (n - 1) / n * shape.num_experts_per_tok * row_bytes / n / link
        return shape.num_hidden_layers * (all_reduce_s + to_experts_s)


def drafter_costs(engine: RooflineCosts, shape: ModelShape, num_gpus: int | None = None) -> RooflineCosts:
    """A drafter of that shape: in the policy's engine, on its GPUs, or on `num_gpus` of its own; in bf16."""
    calibration = engine.calibration
    if num_gpus is None:
        calibration = replace(calibration, host_s=calibration.draft_host_s)
    parallel = Parallel(num_gpus or engine.parallel.num_gpus)
    return replace(
        engine,
        shape=shape,
        parallel=parallel,
        precision="bf16",
        kv_precision="bf16",
        calibration=calibration,
        drafter=None,
    )
