# SPDX-License-Identifier: Apache-2.0
"""The calculation of a GPU's step, the predictions made from it, and the page that shows both."""

import ast
import json
import re
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

from lab.gpu import prediction, step_floor
from lab.gpu.geometries import hf_config
from lab.gpu.prediction import FIXED, NEAR, RATES, Predictions, all_predictions, as_json
from lab.gpu.step_floor import BATCHES, NAMES, Part, Step, drafting, fits, floor_s, likely_s, network, parts_of
from lab.simulation.data_sheets import DEVICES, MODELS

pytestmark = pytest.mark.unit
H100, H200 = DEVICES["H100"], DEVICES["H200"]
DENSE, EXPERTS = (MODELS[name] for name in NAMES)
DRAFTERS = ROOT / "nemo_specrollout" / "drafters"
VLLM = Path(str(util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def predictions() -> Predictions:
    return all_predictions()


def literal(path: Path, name: str) -> Any:
    """Returns the value that a file gives to a name: a literal, or the argument of `tl.constexpr`."""
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value
            return ast.literal_eval(value.args[0] if isinstance(value, ast.Call) else value)
    raise AssertionError(f"{path.name} has no {name}")


def test_shapes_are_those_of_the_check() -> None:
    for name in NAMES:
        config = hf_config(name)
        assert {field: config.get(field, 0) for field in vars(MODELS[name])} == vars(MODELS[name])


def test_weights_and_experts_are_read_once() -> None:
    dense, cache, output = network(Step(DENSE, 1, 1, 2048))
    layer = 4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12_288
    assert dense.num_bytes == 2 * 36 * layer
    assert cache.num_bytes == 2 * 36 * 2048 * 2 * 8 * 128
    assert output.num_bytes == 2 * (4096 + 1) * 151_936
    assert dense.floor_s(H100) == pytest.approx(13.892e9 / 3.35e12, rel=1e-3)
    one, many = (network(Step(EXPERTS, n, n, 0))[1] for n in (1, 100_000))
    assert one.num_bytes == pytest.approx(2 * 48 * 8 * 3 * 2048 * 768)
    assert many.num_bytes == pytest.approx(2 * 48 * 128 * 3 * 2048 * 768)


def test_many_rows_are_bound_by_arithmetic() -> None:
    weights = [network(Step(DENSE, n, n, 0))[0].floor_s(H100) for n in (1, 256, 2048)]
    assert weights[0] == weights[1]
    assert weights[2] == pytest.approx(2 * 6.946e9 * 2048 / 989e12, rel=1e-3)


def test_a_part_takes_its_longest_limit() -> None:
    part = Part("", num_bytes=3.35e9, flops=989e9, kernels=10, round_trips=4, instructions=33.5e9)
    assert part.floor_s(H100) == pytest.approx(1e-3)
    assert part.likely_s(H100) == pytest.approx(1e-3 / 0.65 + 20e-6)
    assert Part("", 0, round_trips=100).likely_s(H100) == pytest.approx(50e-6)


def test_no_step_is_likely_below_its_floor() -> None:
    for shape in (DENSE, EXPERTS):
        for batch in BATCHES:
            for k in (0, 1, 3, 7):
                step = Step(shape, batch, batch * (1 + k), 2048)
                floors = [floor_s(parts_of(step), device) for device in (H200, H100)]
                likely = [likely_s(step, device) for device in (H200, H100)]
                assert floors[0] < floors[1] < likely[1] and floors[0] < likely[0] <= likely[1]
                assert (drafting(step)[-1] in parts_of(step)) == (k > 0)


def test_a_published_step_is_near_the_likely_one() -> None:
    """vLLM's pull request 23151: 13.18 ms on one H100 with 10 requests of 2,048 + 1,024 tokens."""
    assert likely_s(Step(EXPERTS, 10, 10, 2048 + 512), H100) == pytest.approx(13.18e-3, rel=0.1)


def test_long_texts_do_not_fit_beside_weights() -> None:
    assert fits(Step(DENSE, 128, 128, 2048), H100) and not fits(Step(DENSE, 256, 256, 2048), H100)
    assert fits(Step(DENSE, 256, 256, 2048), H200)


def test_counts_are_those_of_the_kernels() -> None:
    logprob = (VLLM / "v1/worker/gpu/sample/logprob.py").read_text()
    assert logprob.count("for i in range(0, vocab_size, BLOCK_SIZE)") == 3
    sizes = [int(size) for size in re.findall(r"BLOCK_SIZE=(\d+),", logprob)]
    assert sizes == [step_floor.GRADE_BLOCK, step_floor.RANK_BLOCK]
    assert literal(DRAFTERS / "step_triton.py", "MAX_PARTS") == step_floor.LEARNING_PARTS
    assert literal(DRAFTERS / "index_triton.py", "_KEYS") == step_floor.KEYS_AT_A_TIME
    assert literal(DRAFTERS / "board_triton.py", "_ROWS") == step_floor.SUMS_AT_A_TIME


def test_cells_are_those_of_the_check() -> None:
    check = ROOT / "lab" / "gpu" / "forced_acceptance.py"
    assert sorted(literal(check, "rates")) == list(RATES) and sorted(literal(check, "batches")) == list(BATCHES)
    assert sorted(literal(check, "fixed")) == list(FIXED)
    assert literal(check, "MAX_DRAFTS") == step_floor.NUM_POSITIONS
    prompt, response = literal(check.with_name("gpu_speed.py"), "PROMPT_LENGTH"), literal(check, "length")
    assert prompt + response / 2 == prediction.CONTEXT


def test_predictions_are_sane(predictions: Predictions) -> None:
    for name in NAMES:
        for batch in BATCHES:
            cells = [predictions[name, batch, p] for p in RATES]
            assert np.all(np.diff([cell.over_plain for cell in cells]) >= 0)
            for cell in cells:
                assert cell.over_plain >= max(1.0, NEAR * cell.best_fixed_over_plain)
                assert cell.tokens_per_s == pytest.approx(cell.over_plain * batch / cell.plain_ms * 1e3)


def test_learning_finds_most_of_the_gain(predictions: Predictions) -> None:
    """The page lists the cells that miss it."""
    near = [cell.over_plain_learning >= NEAR * cell.best_fixed_over_plain for cell in predictions.values()]
    assert np.mean(near) > 0.8
    assert min(cell.over_plain_learning for cell in predictions.values()) > 0.9


def test_the_stored_figures_are_those_of_the_code(predictions: Predictions) -> None:
    assert json.loads(prediction.STORED.read_text()) == json.loads(as_json(predictions)), (
        "python -m lab.gpu.prediction --out docs/benchmarks/gpu-prediction.json"
    )
