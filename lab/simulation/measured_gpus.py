# SPDX-License-Identifier: Apache-2.0
"""Fits the parameters of the roofline model to engine steps that were measured on GPUs (`docs/benchmarks/gpu*.json`).

The parameters are the shares of the peak bandwidth and of the peak arithmetic that engine steps achieve, and the seconds that
the host takes for each engine step and for each draft token (`Calibration`).

The measured steps are those of Qwen3-8B's shape on an H100 and an H200, with up to 512 rows in CUDA graphs. The drafting of a
small EAGLE-3 head was measured on an H100. No other policy, tensor-parallel engine, long context, draft model or network was
measured. For these the roofline uses the same parameters.

Shapes: N measured steps.
"""

import json
from functools import cache

import numpy as np

from lab.simulation.costs import Calibration, RooflineCosts
from lab.simulation.data_sheets import device_named, model_named
from lab.simulation.graph_edge import BENCHMARKS, VLLMS_LARGEST, measured_steps

GPUS = {"H100": "h100", "H200": "h200"}
"""The measured GPUs. A key is the name of a GPU's data sheet, and its value is the GPU's key in `graph_edge.RUNS`."""
_MODEL = "Qwen3-8B"
_CONTEXT = 256.0
"""Approximate length of the measured texts, in tokens."""


def fitted_calibration() -> Calibration:
    """Returns the default calibration, with shares of the peaks and seconds of the host that fit the measurements.

    The fixed seconds of a layer keep their default, because models with only one number of layers were measured.
    """
    memory, compute, host_s = _fit()
    return Calibration(memory_share=memory, compute_share=compute, host_s=host_s, draft_host_s=_draft_token_s())


def errors() -> dict[str, tuple[float, float, float]]:
    """Returns for each GPU the least, the median and the greatest relative error of a predicted step."""
    found = {}
    for device in GPUS:
        requests_N, rows_N, seconds_N = _steps(device)
        errors_N = _predicted(device, fitted_calibration(), requests_N, rows_N) / seconds_N - 1.0
        found[device] = float(errors_N.min()), float(np.median(errors_N)), float(errors_N.max())
    return found


@cache
def _fit() -> tuple[float, float, float]:
    """Returns the shares of bandwidth and arithmetic and the host's seconds of a step that fit the measured steps best.

    The fit minimises the squared differences of the logarithms of seconds.
    """
    from scipy.optimize import least_squares

    measured = {device: _steps(device) for device in GPUS}

    def misses(parameters: np.ndarray) -> np.ndarray:
        memory, compute, host_s = parameters.tolist()
        calibration = Calibration(memory_share=memory, compute_share=compute, host_s=host_s)
        return np.concatenate(
            [np.log(_predicted(name, calibration, n, rows) / s) for name, (n, rows, s) in measured.items()]
        )

    bounds = ([0.3, 0.2, 0.0], [1.0, 1.0, 5e-3])
    found = least_squares(
        misses, [0.8, 0.5, 1e-3], bounds=bounds, x_scale=[0.1, 0.1, 1e-3], loss="soft_l1", f_scale=0.1
    )
    memory, compute, host_s = map(float, found.x)
    return memory, compute, host_s


def _predicted(device: str, calibration: Calibration, requests_N: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
    costs = RooflineCosts(model_named(_MODEL, "model"), device_named(device, "device"), "bf16", "bf16", calibration)
    pairs = zip(requests_N.tolist(), rows_N.tolist(), strict=True)
    return np.array([float(costs.step_s(requests, rows, _CONTEXT)) for requests, rows in pairs])


def _steps(device: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the requests, rows and seconds of a GPU's measured steps whose rows fit vLLM's largest CUDA graph."""
    steps = measured_steps(GPUS[device])
    requests_N, rows_N, ms_N = steps[steps[:, 1] <= VLLMS_LARGEST].T
    return requests_N, rows_N, 1e-3 * ms_N


def _draft_token_s() -> float:
    """Returns the seconds by which each further draft token of a small head makes an engine step longer.

    All of these seconds are taken to be the host's.
    """
    report = json.loads((BENCHMARKS / "gpu-h100.json").read_text(encoding="utf-8"))
    (table,) = report["items"]["head"]["tables"].values()
    one, three = (1e-3 * table[f"{number} drafts"]["ms of drafting"] for number in (1, 3))
    return float(three - one) / 2.0
