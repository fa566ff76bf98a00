# SPDX-License-Identifier: Apache-2.0
"""The warm start: what an engine keeps for later ones, who begins with it, and that no token depends on what a file holds."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, STEP_ADDER

from lab.local.engine import RolloutEngine
from lab.local.statistics import count_equal
from lab.local.step_addition import encode_prompt, make_problems
from lab.local.step_rollout import load_tokenizer
from nemo_specrollout.config.block import LearnedConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig, NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.generation.kept import Kept
from nemo_specrollout.generation.warm_start import Learning
from nemo_specrollout.learned.weights import weights_digest

pytestmark = pytest.mark.integration

HEAD = ROOT / "examples" / "models" / "step_adder_eagle3"
DRAFTERS = (SuffixDrafterConfig(), NgramDrafterConfig(), Eagle3DrafterConfig(model=str(HEAD)))
Start = Callable[..., RolloutEngine]


def block(folder: Path | None, **options: Any) -> SpecrolloutConfig:
    learned = LearnedConfig(folder=None if folder is None else str(folder))
    return replace(SpecrolloutConfig(drafters=DRAFTERS, learned=learned), **options)


def requests(num_prompts: int, first: int = 0) -> list[RolloutRequest]:
    tokenizer = load_tokenizer(STEP_ADDER)
    prompts = [encode_prompt(p, tokenizer) for p in make_problems(3, num_prompts, first)]
    return [RolloutRequest(ids, first + i, s) for i, ids in enumerate(prompts) for s in range(4)]


def warm_start(engine: RolloutEngine, function: Callable[[Any], Any]) -> Any:
    return engine.run_in_worker(lambda worker: function(worker.specrollout_kept.warm_start))


def heaviest(worker: Any) -> dict[str, float]:
    """Returns the largest number of trials of a kind of evidence, by drafter."""
    board = worker.specrollout_router.board
    return {name: float(board.tables.evidence_DE2[i, :, 1].max()) for i, name in enumerate(board.names)}


def heaviest_in(path: Path) -> dict[str, float]:
    """Returns the same of a file, as far as it counts."""
    drafters = json.loads(path.read_bytes().split(b"\n")[1])["drafters"]
    return {name: min(max(trials for _, trials in of["evidence_E2"]), 64.0) for name, of in drafters.items()}


def kept(engine: RolloutEngine) -> Path:
    """Lets the engine keep what it has learned, and returns the file."""
    engine.run_in_worker(lambda worker: worker.specrollout_keep_learned())
    warm_start(engine, lambda it: it.settle())
    path: Path = warm_start(engine, lambda it: it._file.path)
    return path


@pytest.fixture(scope="module")
def expected(start_engine: Start) -> dict[float, list[Rollout]]:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    return {t: plain.generate(requests(8), temperature=t) for t in (0.0, 1.0)}


def assert_equal(engine: RolloutEngine, expected: dict[float, list[Rollout]]) -> None:
    for temperature, rollouts in expected.items():
        equal, total = count_equal(engine.generate(requests(8), temperature=temperature), rollouts)
        assert equal == total


@pytest.fixture(scope="module")
def written(start_engine: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file of an engine that has made some rollouts."""
    folder = tmp_path_factory.mktemp("learned")
    engine = start_engine(STEP_ADDER, block(folder))
    assert warm_start(engine, lambda it: it.sentence) is None, "nothing was kept, so there is nothing to tell"
    for first in range(100, 140, 8):
        engine.generate(requests(8, first))
    return kept(engine)


def test_an_engine_begins_with_what_another_has_learned(
    start_engine: Start, expected: dict[float, list[Rollout]], written: Path
) -> None:
    engine = start_engine(STEP_ADDER, block(written.parent))
    assert "rates and step times of" in warm_start(engine, lambda it: it.sentence)
    assert engine.facts()["began"].startswith(warm_start(engine, lambda it: it.sentence))

    def known(worker: Any) -> tuple[bool, float]:
        policy = worker.specrollout_router.policy
        return policy.costs is not None, policy._forecast.num_seen

    has_costs, num_seen = engine.run_in_worker(known)
    state = json.loads(written.read_bytes().split(b"\n")[1])
    assert has_costs and num_seen == min(state["policy"]["_forecast"]["_weight_F"][1], 32.0)
    assert engine.run_in_worker(heaviest) == pytest.approx(heaviest_in(written))
    assert_equal(engine, expected)
    assert engine.take_alarms() == []


def test_the_same_engine_reads_what_it_has_written(start_engine: Start, written: Path) -> None:
    """What was kept is what was learned, but for its weight."""
    before = json.loads(written.read_bytes().split(b"\n")[1])
    engine = start_engine(STEP_ADDER, block(written.parent))
    after = warm_start(engine, lambda it: it._state())
    assert after["policy"]["_sizes"] == before["policy"]["_sizes"]
    for part in ("_steps", "_drafting"):
        assert after["step_model"][part]["coefficients_X"] == before["step_model"][part]["coefficients_X"]
    for name, tables in before["drafters"].items():
        old, new = (
            np.array(of["evidence_E2"])[..., 0] / np.array(of["evidence_E2"])[..., 1]
            for of in (tables, after["drafters"][name])
        )
        assert np.allclose(old, new, rtol=1e-4)


def resealed(path: Path, change: Callable[[dict[str, Any]], None], to: Path) -> Path:
    """Writes a copy of a file whose state was changed, with the right checksum, and returns its folder."""
    head, body = map(json.loads, path.read_bytes().split(b"\n"))
    change(body)
    text = json.dumps(body).encode()
    head["sha256"] = hashlib.sha256(text).hexdigest()
    (to / path.name).write_bytes(json.dumps(head).encode() + b"\n" + text)
    return to


def set_all(value: float) -> Callable[[Any], Any]:
    def change(thing: Any) -> Any:
        if isinstance(thing, dict):
            return {key: change(item) for key, item in thing.items()}
        if isinstance(thing, list):
            return [change(item) for item in thing]
        return value if isinstance(thing, float) else thing

    return change


def evidence_of(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for tables in body["drafters"].values():
            tables["evidence_E2"] = [[value, 1.0] for _ in tables["evidence_E2"]]

    return change


def other_step_model(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["step_model"]["_steps"] |= values

    return change


REFUSED: dict[str, Callable[[dict[str, Any]], None]] = {
    "NaN": lambda body: body.update(set_all(math.nan)(body)),
    "infinities": lambda body: body.update(set_all(math.inf)(body)),
    "negative": lambda body: body.update(set_all(-1.0)(body)),
    "rates above 1": evidence_of(2.0),
    "rates that are no numbers": evidence_of("often"),
    "other shape": lambda body: body["drafters"]["suffix"].update(evidence_E2=[[1.0, 2.0]]),
    "no covariance": other_step_model(covariance_XX=[[-1.0]]),
    "no state": lambda body: body.clear(),
    "a list of drafters": lambda body: body.update(drafters=[1, 2]),
    "other fields": lambda body: body["policy"].pop("_sizes"),
    "endless looks": lambda body: body["policy"].update(_to_look_at=10**9),
}
WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "certain": evidence_of(1.0),
    "hopeless": evidence_of(0.0),
    "steps take hours": other_step_model(coefficients_X=None, _scale_s=1e4),
    "dormant": lambda body: body["policy"].update(is_dormant=True),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_nonsense_is_refused(
    start_engine: Start, expected: dict[float, list[Rollout]], written: Path, tmp_path: Path, change: Any
) -> None:
    engine = start_engine(STEP_ADDER, block(resealed(written, change, tmp_path)))
    (alarm,) = engine.take_alarms()
    assert written.name in alarm["sentence"] and "does not fit" in alarm["sentence"]
    assert engine.take_alarms() == []
    assert engine.run_in_worker(lambda worker: worker.specrollout_router.policy.costs) is None, "it began cold"
    assert_equal(engine, expected)


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_wrong_rates_and_times_change_no_token(
    start_engine: Start, expected: dict[float, list[Rollout]], written: Path, tmp_path: Path, change: Any
) -> None:
    engine = start_engine(STEP_ADDER, block(resealed(written, change, tmp_path)))
    assert "rates and step times of" in warm_start(engine, lambda it: it.sentence)
    assert_equal(engine, expected)


def test_rates_of_other_weights_are_not_taken(start_engine: Start, written: Path, tmp_path: Path) -> None:
    folder = resealed(written, lambda body: body.update(weights="other"), tmp_path)
    engine = start_engine(STEP_ADDER, block(folder))

    known = heaviest_in(written)
    assert engine.run_in_worker(heaviest) == pytest.approx(known | {"eagle3": 4.0})
    assert not engine.run_in_worker(lambda worker: worker.specrollout_router.policy._forecast.num_seen)
    # When the engine then loads the weights that the file is about, it begins with their rates.
    warm_start(engine, lambda it: it._found.state.update(weights=weights_digest(HEAD)))
    engine.load_head(HEAD)
    assert engine.run_in_worker(heaviest) == pytest.approx(known)


def test_a_damaged_file_is_told_and_replaced(start_engine: Start, tmp_path: Path, written: Path) -> None:
    content = written.read_bytes()
    path = tmp_path / written.name
    path.write_bytes(content[: len(content) // 2])
    engine = start_engine(STEP_ADDER, block(tmp_path))
    assert "is damaged" in warm_start(engine, lambda it: it.sentence)
    (alarm,) = engine.take_alarms()
    assert "is damaged" in alarm["sentence"]
    engine.generate(requests(2))
    assert kept(engine) == path
    later = start_engine(STEP_ADDER, block(tmp_path))
    assert "rates and step times of" in warm_start(later, lambda it: it.sentence)


def test_a_folder_that_cannot_be_written_costs_one_sentence(
    start_engine: Start, expected: dict[float, list[Rollout]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    engine = start_engine(STEP_ADDER, block(tmp_path / "file" / "folder"))
    assert_equal(engine, expected)
    engine.take_alarms()  # of reading
    for _ in range(2):
        engine.generate(requests(2))
        warm_start(engine, lambda it: setattr(it._file, "_next_s", 0.0))
        kept(engine)
    (alarm,) = engine.take_alarms()
    assert "cannot be written" in alarm["sentence"]


def test_other_engines_begin_cold(start_engine: Start, written: Path) -> None:
    others = [
        block(written.parent, drafters=DRAFTERS[:2]),
        block(written.parent, num_speculative_tokens=4),
        block(written.parent, drafters=(SuffixDrafterConfig(max_order=5), *DRAFTERS[1:])),
    ]
    for other in others:
        engine = start_engine(STEP_ADDER, other)
        assert "because what was kept is of others" in warm_start(engine, lambda it: it.sentence)
    off = LearnedConfig(folder=str(written.parent), warm_start=False)
    engine = start_engine(STEP_ADDER, block(None, learned=off))
    assert warm_start(engine, lambda it: it.sentence) is None
    assert engine.take_alarms() == []


def test_a_host_that_chooses_the_drafts_begins_with_its_foresight(start_engine: Start, tmp_path: Path) -> None:
    engine = start_engine(STEP_ADDER, block(tmp_path))

    def use_host(worker: Any) -> None:
        own = worker.worker  # vLLM's wrapper has other attributes than our worker
        own._settle_budget("a test")
        learning = Learning(own.specrollout_router, own.specrollout_accounts, own.specrollout_host_budget.foresight)
        own.specrollout_kept = Kept.begun(own.specrollout_config, own.model_runner, learning)

    engine.run_in_worker(use_host)
    engine.run_in_worker(lambda worker: setattr(worker.specrollout_host_budget.foresight, "_together", 0.25))
    engine.generate(requests(2))
    engine.run_in_worker(lambda worker: setattr(worker.specrollout_host_budget.foresight, "_together", 0.25))
    kept(engine)
    later = start_engine(STEP_ADDER, block(tmp_path))
    later.run_in_worker(use_host)
    assert later.run_in_worker(lambda worker: worker.specrollout_host_budget.foresight._together) == 0.25
