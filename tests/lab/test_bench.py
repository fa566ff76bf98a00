# SPDX-License-Identifier: Apache-2.0
"""The bench: its rows, its figures, the policy that is made deeper, and a small bench of everything."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import QUICKSTART, ROOT, STEP_ADDER, TINY_ROLLOUTS
from rich.console import Console

from lab.bench.bench import _set_aside, counted, request_stream, take_batch
from lab.bench.bench_figures import FEWEST_TOKENS, best_by_running, best_fixed, figures_of, host_shares
from lab.bench.bench_rounds import Entrant, group_with
from lab.bench.bench_rows import FIXED, OURS, PLAIN, STOCK, BenchRow, bench_rows, row_groups
from lab.bench.bench_tables import rollout_table, running_table, sentences, useless_table
from lab.bench.running_bins import LABELS, MAX_RUNNING, BinnedRollout, BinnedStats, bin_of
from lab.cli.main import main
from lab.local.run_config import RunConfig, read_run_config
from lab.local.statistics import RolloutStats
from lab.policies.deep_policy import deep_index, deepen_head, deepen_policy, with_deep_policy
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.heads.features.features import hf_features, load_policy
from nemo_specrollout.heads.training.acceptance import measure_acceptance
from nemo_specrollout.heads.training.head import load_eagle3_head

WITH_HEAD = ROOT / "examples" / "configs" / "quickstart_head_cpu.yaml"
HEAD = ROOT / "examples" / "models" / "step_adder_eagle3"
ANY_GENERATION = read_run_config(load_config(QUICKSTART, []))[0].policy.generation


def config_of(path: Path, *overrides: str) -> RunConfig:
    return read_run_config(load_config(path, list(overrides)))[0]


def rows_by_name(path: Path, *overrides: str) -> dict[str, BenchRow]:
    return {row.name: row for row in bench_rows(config_of(path, *overrides))}


# Files.


@pytest.mark.unit
def test_what_an_earlier_bench_left_is_kept_under_a_number(tmp_path: Path) -> None:
    for name in ("bench.json", "bench_mixed.png", "bench_mixed.1.png", "bench.log", "run.json"):
        (tmp_path / name).write_text(name)
    _set_aside(tmp_path)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {
        "bench.1.json": "bench.json", "bench_mixed.2.png": "bench_mixed.png", "bench_mixed.1.png": "bench_mixed.1.png",
        "bench.log": "bench.log", "run.json": "run.json",
    }  # fmt: skip


# Requests.


@pytest.mark.unit
def test_no_request_of_a_constant_batch_is_seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stream = request_stream(config_of(QUICKSTART))
    requests = [request for batch in (1, 4, 32) for request in take_batch(stream, batch)]
    assert len(requests) == 4 + 8 + 64
    assert len({(r.prompt_index, r.sample_index, r.policy_version) for r in requests}) == len(requests)


# Rows.


@pytest.mark.unit
def test_rows_of_text_drafters() -> None:
    rows = rows_by_name(QUICKSTART, "bench.fixed_k=[3]")
    assert list(rows) == ["stock", "plain", "ngram k=3", "vLLM's ngram k=3", "ours"]
    lookup = rows["ngram k=3"].generation
    assert lookup.vllm_kwargs["speculative_config"]["method"] == "ngram_gpu"
    assert lookup.specrollout.enabled and lookup.specrollout.drafters == ()
    assert not rows["vLLM's ngram k=3"].generation.specrollout.enabled
    assert "speculative_config" not in rows["stock"].generation.vllm_kwargs


@pytest.mark.unit
def test_rows_of_a_head() -> None:
    rows = rows_by_name(WITH_HEAD, "bench.fixed_k=[5]")
    assert list(rows)[4:] == [
        "eagle3 greedy k=5", "vLLM's eagle3 greedy k=5", "vLLM's eagle3 probabilistic k=5", "ours, text drafters",
        "ours, head alone", "ours",
    ]  # fmt: skip
    others = [name for name, row in rows.items() if not row.has_plain_tokens]
    assert others == ["vLLM's ngram k=5", "vLLM's eagle3 greedy k=5", "vLLM's eagle3 probabilistic k=5"]
    probabilistic = rows["vLLM's eagle3 probabilistic k=5"].generation.vllm_kwargs["speculative_config"]
    assert probabilistic["draft_sample_method"] == "probabilistic" and probabilistic["num_speculative_tokens"] == 5
    assert "draft_sample_method" not in rows["vLLM's eagle3 greedy k=5"].generation.vllm_kwargs["speculative_config"]
    alone, text = rows["ours, head alone"].generation.specrollout, rows["ours, text drafters"].generation.specrollout
    assert [d.type for d in alone.drafters] == ["eagle3"] and alone.draft_refresh is None
    assert [d.type for d in text.drafters] == ["suffix", "ngram"] and text.draft_refresh is None
    for row in rows.values():
        row.generation.specrollout.check("block")


@pytest.mark.unit
def test_greedy_decoding_leaves_no_other_samples() -> None:
    rows = rows_by_name(WITH_HEAD, "policy.generation.temperature=0")
    assert all(row.has_plain_tokens for row in rows.values())


@pytest.mark.unit
def test_rows_are_picked_by_how_their_names_begin() -> None:
    assert list(rows_by_name(WITH_HEAD, "bench.rows=[ours]")) == [
        "plain", "ours, text drafters", "ours, head alone", "ours",
    ]  # fmt: skip
    assert list(rows_by_name(WITH_HEAD, 'bench.rows=[stock, "vLLM\'s ngram k=1"]')) == [
        "stock", "plain", "vLLM's ngram k=1",
    ]  # fmt: skip
    control = rows_by_name(WITH_HEAD, "bench.rows=[control]")
    assert list(control) == ["plain", "control"]
    assert control["control"].generation == control["plain"].generation
    with pytest.raises(ConfigError, match=r"bench\.rows: no row begins with 'suffix'; there are: stock, plain, ngram"):
        rows_by_name(WITH_HEAD, "bench.rows=[suffix]")


# Bins of running requests.


@pytest.mark.unit
def test_bins_are_labelled() -> None:
    assert [LABELS[bin_of(n)] for n in (1, 2, 3, 4, 5, 16, 17, 64, 65, 1000)] == [
        "1", "2", "3-4", "3-4", "5-8", "9-16", "17-32", "33-64", "more", "more",
    ]  # fmt: skip
    assert len(LABELS) == len(MAX_RUNNING) + 1


class CountingEngine:
    """An engine that makes a token for each request in each step, and takes a second of `clock` for the step."""

    max_num_seqs = 64

    def __init__(self, lengths: list[int]) -> None:
        self.num_steps, self._lengths = 0, lengths

    def clock(self) -> float:
        return float(self.num_steps)

    def counters(self) -> None:
        return None

    def submit(self, requests: Any, sampling: Any) -> list[str]:
        return [str(i) for i in range(len(requests))]

    def stood_still(self, seconds: float) -> None:
        pass

    def progress(self, request_id: str, start: int = 0) -> tuple[list[int], list[float]]:
        return [7] * self.num_steps, []

    def step(self) -> dict[str, Rollout]:
        self.num_steps += 1
        ended = [i for i, length in enumerate(self._lengths) if length == self.num_steps]
        return {str(i): Rollout([7] * self.num_steps, [], "stop") for i in ended}


@pytest.mark.unit
def test_tokens_belong_to_the_bin_in_which_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = CountingEngine([10, 30, 30, 100])
    monkeypatch.setattr("lab.local.step_rollout.time", SimpleNamespace(perf_counter=engine.clock))
    rollout = BinnedRollout(engine, [RolloutRequest([1], 0, i) for i in range(4)])
    rollout.advance(0.0)
    while not rollout.is_done:
        rollout.advance(1.0)
    found = rollout.result()
    of = dict(zip(LABELS, found.tokens_N, strict=True))
    # Four requests for ten steps and three for twenty; then one alone.
    assert of["3-4"] == 4 * 10 + 3 * 20 and of["1"] == 70 and of["2"] == 0
    assert found.tokens_N.sum() == found.stats.num_tokens == found.num_request_steps == 170
    in_bin = dict(zip(LABELS, found.seconds_N, strict=True))
    assert (in_bin["3-4"], in_bin["1"]) == (30.0, 70.0) and found.seconds_N.sum() == found.stats.seconds == 100.0


@pytest.mark.unit
def test_finished_requests_are_replaced_in_a_constant_batch() -> None:
    class Refilled(CountingEngine):
        """Every request takes as many steps as its number says, from when it was submitted."""

        def __init__(self) -> None:
            super().__init__([])
            self.left: dict[str, int] = {}
            self.running: list[int] = []

        def submit(self, requests: Any, sampling: Any) -> list[str]:
            names = [str(len(self.left) + i) for i in range(len(requests))]
            self.left |= {name: r.sample_index for name, r in zip(names, requests, strict=True)}
            return names

        def step(self) -> dict[str, Rollout]:
            self.num_steps += 1
            running = [name for name, left in self.left.items() if left > 0]
            self.running.append(len(running))
            self.left |= {name: self.left[name] - 1 for name in running}
            return {n: Rollout([7], [], "stop") for n in running if not self.left[n]}

    engine: Any = Refilled()
    lengths = [3, 1, 2, 5, 1, 4]
    rollout = BinnedRollout(engine, [RolloutRequest([1], 0, n) for n in lengths], at_a_time=2)
    rollout.advance(100.0)
    assert rollout.is_done and len(rollout.result().rollouts) == 6
    assert set(engine.running[:6]) == {2}, "who has ended is replaced at once"
    assert sum(engine.running) == sum(lengths)


@pytest.mark.unit
def test_rows_are_measured_in_groups_that_each_have_plain() -> None:
    rows = [
        BenchRow(name, PLAIN if name == "plain" else OURS, ANY_GENERATION)
        for name in ["a", "b", "plain", "c", "d", "e"]
    ]
    groups = [[row.name for row in group] for group in row_groups(rows, 3)]
    assert groups == [["plain", "a", "b"], ["plain", "c", "d"], ["plain", "e"]]
    assert row_groups(rows, 0) == [rows] == row_groups(rows, 6)


# Figures.


def binned(seconds: dict[str, float], tokens: int = 100, host_s: float = 0.01) -> BinnedStats:
    """Returns a round with these seconds, and 100 tokens, in each bin."""
    columns = ["num_requests", "seconds", "is_decode", "host_s"]
    trace = {"columns": columns, "rows": [[64, 0.1, 1, 0.001], [60, 0.1, 1, 0.003], [2, 0.1, 1, 0.1]]}
    total_s, num_tokens = sum(seconds.values()), tokens * len(seconds)
    stats = RolloutStats(total_s, num_tokens, 50, 60, 2.0 * total_s, host_s, 0, 0, {}, {}, trace)
    seconds_N = np.array([seconds.get(label, 0.0) for label in LABELS])
    return BinnedStats([], stats, seconds_N, np.where(seconds_N > 0, tokens, 0), 80)


def entrant(name: str, kind: str, *rounds: BinnedStats, enabled: bool = True) -> Entrant:
    generation = replace(ANY_GENERATION, specrollout=replace(ANY_GENERATION.specrollout, enabled=enabled))
    engine: Any = None
    return Entrant(BenchRow(name, kind, generation), engine, rounds=list(rounds), tokens_equal=7, tokens_total=7)


def some_entrants() -> list[Entrant]:
    """Speedups over plain: a fixed row 1.25, another one 1.8 with few requests and slower with many, ours 1.5 and 2.5."""
    return [
        entrant("stock", STOCK, *[binned({"1": 4.0, "33-64": 1.0})] * 3, enabled=False),
        entrant("plain", PLAIN, *[binned({"1": 4.0, "33-64": 1.0})] * 3),
        entrant("ngram k=3", FIXED, *[binned({"1": 3.2, "33-64": 0.8})] * 3),
        entrant("vLLM's ngram k=3", FIXED, *[binned({"1": 2.2, "33-64": 4.0})] * 3, enabled=False),
        entrant(
            "ours", OURS, binned({"1": 2.0, "33-64": 0.5}), binned({"1": 2.5, "33-64": 0.7}), binned({"1": 2.0})
        ),
    ]  # fmt: skip


@pytest.mark.unit
def test_ours_is_compared_with_the_best_fixed_row_per_token() -> None:
    rows = {row["mode"]: row for row in figures_of([some_entrants()])}
    best = best_fixed(list(rows.values()))
    assert best is not None and best["mode"] == "ngram k=3" and best["speedup_vs_plain"] == pytest.approx(1.25)
    ours = rows["ours"]
    assert ours["best_fixed"] == "ngram k=3" and "best_fixed" not in rows["plain"]
    assert ours["over_best_fixed"] == pytest.approx(4.0 / 3.2 / (4.0 / 4.0))
    assert ours["over_best_fixed_low"] == pytest.approx(1.0) and ours["over_best_fixed_high"] == pytest.approx(1.6)
    assert rows["vLLM's ngram k=3"]["tokens_equal"] is None and rows["stock"]["tokens_equal"] == 7
    assert rows["vLLM's ngram k=3"]["acceptance_length"] == pytest.approx(200 / 80)
    assert rows["ngram k=3"]["acceptance_length"] == pytest.approx(200 / 60)


@pytest.mark.unit
def test_rows_of_another_group_are_compared_by_their_own_plain() -> None:
    """The machine was half as fast while the second group played: the ratios are the same."""
    first = [e for e in some_entrants() if e.row.kind in (PLAIN, FIXED)]
    slow = [
        entrant("plain", PLAIN, *[binned({"1": 8.0, "33-64": 2.0})] * 3),
        entrant("ours", OURS, *[binned({"1": 4.0, "33-64": 1.0})] * 3),
    ]
    rows = {row["mode"]: row for row in figures_of([first, slow])}
    assert list(rows) == ["plain", "ngram k=3", "vLLM's ngram k=3", "ours"]
    assert rows["ours"]["speedup_vs_plain"] == pytest.approx(2.0)
    assert rows["ours"]["over_best_fixed"] == pytest.approx(2.0 / 1.25)
    # So is the plain time that ours estimates: by the plain of its own group it is right.
    assert group_with("ours", [first, slow]) is slow and group_with("nobody", [first, slow]) is first
    assert "off by +0.0%" in "\n".join(sentences(list(rows.values()), group_with("ours", [first, slow])))


@pytest.mark.unit
def test_the_best_of_each_bin_is_named() -> None:
    rows = figures_of([some_entrants()])
    winners = best_by_running(rows)
    assert {label: row["mode"] for label, row in winners.items()} == {"1": "ours", "33-64": "ours"}
    ours = {entry["running"]: entry for entry in rows[-1]["by_running"]}
    assert ours["1"]["speedup_vs_plain"] == pytest.approx(2.0) and ours["1"]["is_best"]
    assert ours["33-64"]["speedup_vs_plain"] == pytest.approx((2.0 + 1 / 0.7) / 2), "of the rounds that came there"
    assert ours["2"] == {"running": "2", "seconds": 0.0, "tokens": 0, "tokens_per_s": None, "speedup_vs_plain": None,
                         "is_best": False}  # fmt: skip
    assert ours["1"]["tokens_per_s"] == pytest.approx(300 / 6.5)
    json.dumps(rows)


@pytest.mark.unit
@pytest.mark.parametrize("of_plain", [1, FEWEST_TOKENS])
@pytest.mark.parametrize("of_ours", [1, FEWEST_TOKENS])
def test_a_few_tokens_say_nothing_of_a_bin(of_plain: int, of_ours: int) -> None:
    plain, ours = binned({"1": 4.0, "2": 1.0}), binned({"1": 2.0, "2": 0.001})
    plain.tokens_N[LABELS.index("2")], ours.tokens_N[LABELS.index("2")] = of_plain, of_ours
    row = figures_of([[entrant("plain", PLAIN, plain), entrant("ours", OURS, ours)]])[1]
    one, two = row["by_running"][:2]
    assert one["speedup_vs_plain"] == 2.0 and two["tokens"] == of_ours
    assert (two["speedup_vs_plain"] is None) == (min(of_plain, of_ours) < FEWEST_TOKENS)


@pytest.mark.unit
def test_our_host_time() -> None:
    share, share_when_full, num_requests = host_shares([binned({"1": 1.0}).stats])
    assert (share, share_when_full, num_requests) == (pytest.approx(0.01), pytest.approx(0.02), 60)


@pytest.mark.unit
def test_what_is_printed() -> None:
    entrants = some_entrants()
    rows = figures_of([entrants])
    console = Console(file=io.StringIO(), width=132, record=True)
    for table in (
        rollout_table(rows),
        running_table(rows),
        useless_table([{**rows[-1], "batch": 4, "host_share": 0.01}]),
    ):
        console.print(table)
    text = console.export_text()
    assert "46 2.00*" in text and "25 1.00" in text and "our host time" in text and "router" not in text
    said = "\n".join(sentences(rows, entrants))
    assert "best by running requests, speed over plain: 1: ours 2.00; 33-64: ours 1.71" in said
    assert (
        "best fixed row, per token: ngram k=3, 1.25 over plain" in said and "ours over that: 1.25 (1.00-1.60)" in said
    )
    assert "our host time: 0.39% of the rollout, 2.00% of decode steps with 60 or more requests" in said
    assert "counterfactual: plain time as estimated while speculating is off by" in said
    without_ours = [e for e in entrants if e.row.kind != OURS]
    assert "our host time" not in "\n".join(sentences(figures_of([without_ours]), without_ours))


def test_a_log_has_a_line_for_each_round() -> None:
    console = Console(file=io.StringIO(), width=132, record=True)
    with counted(console, 2) as count:
        count("round of mixed")
        count("round of [free text]")
    assert console.export_text() == "1 of 2: round of mixed\n2 of 2: round of [free text]\n"


# A deeper policy.


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped policy of three times as many layers, and its head."""
    folder = tmp_path_factory.mktemp("deep")
    deepen_policy(STEP_ADDER, folder / "policy", 3)
    deepen_head(HEAD, folder / "head", 3, folder / "policy")
    return folder


def some_texts() -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(5, 90, 40 + i).tolist(), 12) for i in range(3)]


def logits(folder: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits for ids, _ in some_texts()]


def save_llama(folder: Path) -> None:
    """A random one of two layers, with biases and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
        initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)


@pytest.mark.integration
def test_a_deeper_policy_has_the_same_logits(deep: Path, tmp_path: Path) -> None:
    save_llama(tmp_path / "llama")
    deepen_policy(tmp_path / "llama", tmp_path / "deep_llama", 4, seed=1)
    for shallow, deeper, num_layers in (
        (STEP_ADDER, deep / "policy", 12), (tmp_path / "llama", tmp_path / "deep_llama", 8)
    ):  # fmt: skip
        assert json.loads((deeper / "config.json").read_text())["num_hidden_layers"] == num_layers
        for a, b in zip(logits(shallow), logits(deeper), strict=True):
            assert torch.equal(a, b)
    assert (deep / "policy" / "tokenizer.json").is_file() and (deep / "policy" / "generation_config.json").is_file()


@pytest.mark.integration
def test_a_head_drafts_the_same_for_a_deeper_policy(deep: Path) -> None:
    found = []
    for policy, folder in ((STEP_ADDER, HEAD), (deep / "policy", deep / "head")):
        head = load_eagle3_head(folder, policy)
        features = hf_features(load_policy(policy), some_texts(), head.layer_ids)
        found.append((head.layer_ids, features, measure_acceptance(head, features, 4, 1.0)))
    (ids, shallow, acceptance), (deep_ids, deeper, deep_acceptance) = found
    assert deep_ids == tuple(deep_index(i, 3) for i in ids) == (5, 8, 11)
    for a, b in zip(shallow, deeper, strict=True):
        assert torch.equal(a.aux_TF, b.aux_TF) and torch.equal(a.final_TH, b.final_TH)
    for name in ("count_NK", "accepted_NK", "survived_NK"):
        assert (getattr(acceptance, name) == getattr(deep_acceptance, name)).all()


@pytest.mark.unit
def test_what_cannot_be_deepened_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 2}')
    with pytest.raises(ConfigError, match=r"bench\.deepen: .*'mamba'; it can be llama, qwen2, qwen3"):
        deepen_policy(tmp_path, tmp_path / "deep", 2)
    mtp = config_of(QUICKSTART, "policy.generation.specrollout.drafters=[{type: mtp}]", "bench.deepen=2")
    with pytest.raises(ConfigError, match=r"bench\.deepen: 2 with a drafter of type mtp"):
        with_deep_policy(mtp, tmp_path / "deep")


# All of it, small.

TINY = {
    **TINY_ROLLOUTS,
    "bench.num_rounds": 1,
    "bench.fixed_k": "[3]",
    "bench.acceptance_k": 0,
}


def bench(config: Path, log_dir: Path, **more: Any) -> dict[str, dict[str, Any]]:
    """Runs a bench in this process; its rows, by name."""
    values = {**TINY, "logger.log_dir": log_dir, **more}
    assert main(["bench", str(config), *(f"{key}={value}" for key, value in values.items())]) == 0
    return {row["mode"]: row for row in json.loads((log_dir / "bench.json").read_text())}


@pytest.mark.integration
@pytest.mark.slow
def test_the_bench_compares_like_with_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    wanted = '[stock, ngram, eagle3, "vLLM\'s eagle3 probabilistic", ours]'
    rows = bench(WITH_HEAD, tmp_path, **{"bench.rows": wanted, "bench.deepen": 2, "bench.useless_batches": "[16]"})
    assert list(rows) == [
        "stock", "plain", "ngram k=3", "eagle3 greedy k=3", "vLLM's eagle3 probabilistic k=3", "ours, text drafters",
        "ours, head alone", "ours",
    ]  # fmt: skip
    sampled_otherwise = rows.pop("vLLM's eagle3 probabilistic k=3")
    assert sampled_otherwise["tokens_equal"] is None and sampled_otherwise["acceptance_length"] > 1.5
    assert all(row["tokens_equal"] == row["tokens_total"] == rows["plain"]["tokens"] for row in rows.values())
    assert rows["plain"]["speedup_vs_plain"] == 1.0 == rows["stock"]["acceptance_length"]
    assert 0.9 < rows["plain"]["acceptance_length"] <= 1.0
    assert rows["ngram k=3"]["acceptance_length"] > 1.0 and rows["eagle3 greedy k=3"]["acceptance_length"] > 2.0
    for row in rows.values():
        assert sum(entry["tokens"] for entry in row["by_running"]) == row["tokens"]
        assert 0 < sum(entry["seconds"] for entry in row["by_running"]) <= row["seconds"]
        assert all((entry["seconds"] > 0) == (entry["tokens"] > 0) for entry in row["by_running"])
        assert [e["running"] for e in row["by_running"] if e["tokens"]][-1] == "5-8"
    assert rows["ours"]["best_fixed"] in ("ngram k=3", "eagle3 greedy k=3", "vLLM's eagle3 probabilistic k=3")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    policy = json.loads((tmp_path / "deep_policy" / "policy" / "config.json").read_text())
    assert policy["num_hidden_layers"] == 8
    output = capsys.readouterr().out
    assert "by running requests" in output and "our host time" in output
    worst = json.loads((tmp_path / "bench_useless.json").read_text())
    assert [row["batch"] for row in worst] == [16]
    assert all(row["tokens_equal"] == row["tokens_total"] > 0 and 0 < row["host_share"] < 1 for row in worst)
