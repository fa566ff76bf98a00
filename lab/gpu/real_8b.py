# SPDX-License-Identifier: Apache-2.0
"""Item of the GPU check with real texts at the cost of an 8B policy: SmolLM2-135M and its head, widened to Qwen3-8B's size.

Five ways of rolling out, the arms A to E, take turns. In the first half of the item the order is A B C D E, in the second
half E D C B A. Each half has prompts of its own, because drafters remember texts. All engines stay up, so a machine needs the
memory of five. Before the first half, the item finds the number of drafts with which vLLM's EAGLE-3 is fastest, for arm C. If
time is short, it tries fewer numbers for this, and leaves out the end of the second half.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.gpu.arms import ARMS, BEST_OF, DEPTHS, Arm, verdict
from lab.gpu.drained import LABELS, Drained, acceptance, drain
from lab.gpu.gpu_stage import GIB, HEAD, POLICY, STOCK, Findings, block, start_engine, task_requests
from lab.gpu.items import smollm2, smollm2_head
from lab.gpu.one_update import one_update_older
from lab.gpu.real_prompts import RealPrompts
from lab.gpu.widened_loader import LOAD_FORMAT, register, widened_folder
from lab.local.engine import RolloutEngine
from lab.local.statistics import count_equal
from lab.policies.widened import QWEN3_8B, Shape, read_policy, widened, write_head
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.arguments import set_process_environment
from nemo_specrollout.generation.engine.requests import RolloutRequest, as_bytes

NUM_PROMPTS, NUM_SAMPLES, MOST_TOKENS = 8, 4, 2048
LONGEST_PROMPT = 320
LEARNING_RATE = 5e-6
"""The texts made ahead come from weights that are one update with this learning rate older than the policy. It is the largest
learning rate with figures in docs/benchmarks."""
TINY = Shape(384, 1024, 6, 8, 4)
"""The size to which a rehearsal widens the shipped policy."""
START_S = 60.0
"""Seconds that the first engine is expected to need for its start, with torch.compile. Each later engine is expected to need
the same time as the one before it."""


@dataclass(frozen=True)
class Models:
    """Folders of the original policy, the widened policy and the widened head, and the size to which they are widened."""

    source: Path
    policy: Path
    head: Path
    target: Shape


class Stage:
    """The engines of the item, by name. Owns them, and starts each of them when it is first requested."""

    def __init__(self, findings: Findings, models: Models) -> None:
        self._findings = findings
        self._models = models
        self._engines: dict[str, RolloutEngine] = {}
        self.start_s = START_S
        """Seconds that the latest start of an engine took."""

    def engine(self, name: str) -> RolloutEngine:
        """Returns the engine of an arm, or of `k=N` for vLLM's own EAGLE-3 with N drafts."""
        if name not in self._engines:
            started = time.perf_counter()
            self._engines[name] = self._start(name)
            self.start_s = time.perf_counter() - started
            facts = {"start, s": self.start_s, **self._engines[name].facts()}
            self._findings.note(name, facts, "engines")
        return self._engines[name]

    def close(self, name: str) -> None:
        """Ends an engine and frees its memory."""
        self._engines.pop(name).close()

    def close_all(self) -> None:
        """Ends all engines."""
        for name in list(self._engines):
            self.close(name)

    def _start(self, name: str) -> RolloutEngine:
        size = self._findings.size
        options: dict[str, Any] = {
            "max_num_seqs": size(NUM_PROMPTS * NUM_SAMPLES, 4),
            "kv_cache_memory_bytes": size(6 * GIB, GIB // 4),
            "load_format": LOAD_FORMAT,
        }
        if torch.cuda.is_available():
            options |= {"compilation_config": {}, "gpu_memory_utilization": 0.15}
        if name.startswith("k="):
            options["speculative_config"] = {
                "method": "eagle3",
                "model": str(self._models.head),
                "num_speculative_tokens": int(name.removeprefix("k=")),
            }
        length = size(MOST_TOKENS + LONGEST_PROMPT, 512)
        precision = size("bfloat16", "float32")
        return start_engine(
            self._models.policy, self._block(name), eager=False, precision=precision, length=length, **options
        )

    def _block(self, name: str) -> SpecrolloutConfig:
        ours = block("suffix", "ngram", "eagle3", head=self._models.head)
        return {"D": ours, "E": replace(ours, run_ahead=RunAheadConfig())}.get(name, STOCK)


def real_8b(findings: Findings) -> None:
    """Measures vLLM without drafts, vLLM's EAGLE-3 with 3 drafts and with its best number of drafts, and our drafters."""
    for arm in ARMS:
        findings.note(arm.title, {"predicted": arm.predicted}, "predicted and measured")
    set_process_environment()
    register()
    with tempfile.TemporaryDirectory() as folder:
        models = _models(findings, Path(folder))
        stage = Stage(findings, models)
        try:
            _Rounds(findings, stage, _batches(findings, models.source)).run(models)
        finally:
            stage.close_all()


def _models(findings: Findings, folder: Path) -> Models:
    source, head, target = findings.size((smollm2(), smollm2_head(), QWEN3_8B), (POLICY, HEAD, TINY))
    started = time.perf_counter()
    policy = widened_folder(source, target, folder / "policy")
    write_head(head, target, folder / "head")
    findings.note("widened", {"seconds": time.perf_counter() - started, **vars(target)}, "engines")
    return Models(source, policy, folder / "head", target)


@dataclass(frozen=True)
class Batches:
    """The batches of requests of the item. No prompt is in two of them."""

    warm_up: list[RolloutRequest]
    halves: tuple[list[RolloutRequest], list[RolloutRequest]]
    prompts: RealPrompts | None
    """The source of the prompts, which computes rewards of the responses to the warm-up. None in a rehearsal."""


def _batches(findings: Findings, policy: Path) -> Batches:
    if findings.is_rehearsal:
        requests = task_requests(6, 2)
        return Batches(requests[:4], (requests[4:8], requests[8:]), None)
    prompts = RealPrompts(policy)
    warm_up, first, second = (prompts.requests(i * NUM_PROMPTS, NUM_PROMPTS, NUM_SAMPLES) for i in (2, 0, 1))
    return Batches(warm_up, (first, second), prompts)


class _Rounds:
    """Runs the item from its start to its end. Owns what each arm has measured."""

    def __init__(self, findings: Findings, stage: Stage, batches: Batches) -> None:
        self._findings = findings
        self._stage = stage
        self._batches = batches
        self._most = findings.size(MOST_TOKENS, 64)
        self._measured: dict[str, list[Drained]] = {arm.letter: [] for arm in ARMS}
        self._names = {"A": "A", "B": "k=3", "C": "k=3", "D": "D", "E": "E"}
        """Name of the engine of each arm."""

    def run(self, models: Models) -> None:
        """Starts and warms up all engines, then plays both halves. Writes the figures after each arm."""
        plain = self._warm("A")
        self._warm("k=3")
        self._warm("D")
        older = self._older_weights(models, plain)
        texts = self._texts_ahead(models, older)
        self._choose_best()
        for half, arms in enumerate((ARMS, ARMS[::-1])):
            for arm in arms:
                if half and not self._has_time(1.3 * self._measured[arm.letter][0].seconds + 5.0):
                    self._findings.note("second half", {"left out": f"{arm.letter} and later: no time"}, "course")
                    return
                self._play(arm, half, texts[half])

    def _has_time(self, seconds: float) -> bool:
        return self._findings.seconds_left > seconds

    def _warm(self, name: str) -> Drained:
        engine = self._stage.engine(name)
        return drain(engine, self._batches.warm_up, self._most)

    def _older_weights(self, models: Models, plain: Drained) -> Mapping[str, torch.Tensor]:
        """Returns the weights of the original policy as they were before an update.

        Responses of plain decoding and their rewards give the update its direction.
        """
        requests = self._batches.warm_up
        prompts = self._batches.prompts
        rewards = prompts.rewards(requests, plain.rollouts) if prompts else []
        rule = "right answers"
        if len(set(rewards)) < 2:
            rewards = [-float(len(rollout.token_ids)) for rollout in plain.rollouts]
            rule = "short responses, because rewards do not differ"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        started = time.perf_counter()
        older = one_update_older(models.source, requests, plain.rollouts, rewards, LEARNING_RATE, device)
        _, now = read_policy(models.source)
        changed = sum(int((older[name] != weight).sum()) for name, weight in now.items())
        share = changed / sum(weight.numel() for weight in now.values())
        row = {"seconds": time.perf_counter() - started, "reward": rule, "weights changed": share}
        self._findings.note("one update", {**row, "learning rate": LEARNING_RATE}, "course")
        return older

    def _texts_ahead(self, models: Models, older: Mapping[str, torch.Tensor]) -> list[list[bytes]]:
        """Returns the texts that the weights `older` make ahead, a list for each half of the item.

        The engine that will have them as drafts makes them.
        """
        engine = self._stage.engine("E")
        config, now = read_policy(models.source)
        load(engine, config, older, models.target)
        drain(engine, self._batches.warm_up, self._most)
        made = [drain(engine, requests, self._most) for requests in self._batches.halves]
        load(engine, config, now, models.target)
        row = {"seconds": sum(each.seconds for each in made), "tokens": sum(each.num_tokens for each in made)}
        self._findings.note("texts made ahead", row, "course")
        return [[as_bytes(rollout.token_ids) for rollout in each.rollouts] for each in made]

    def _choose_best(self) -> None:
        """Finds the number of drafts with which vLLM's EAGLE-3 is fastest.

        Each number is tried with one drained batch, as long as there is time. No arm is measured with the prompts of this
        batch.
        """
        speeds = {3: self._probe("k=3")}
        for k in BEST_OF:
            # One pass of all arms must fit after it. No arm is slower than A, which has been seen.
            if not self._has_time(self._stage.start_s + 8 * self._longest_s()):
                self._findings.note(f"k={k}", {"left out": "no time"}, "vLLM's EAGLE-3 by number of drafts")
                continue
            best = max(speeds, key=lambda k: speeds[k])
            self._warm(f"k={k}")
            speeds[k] = self._probe(f"k={k}")
            loser = min((best, k), key=lambda k: speeds[k])
            if loser != 3:
                self._stage.close(f"k={loser}")
        self._names["C"] = f"k={max(speeds, key=lambda k: speeds[k])}"
        self._findings.note("C", {"is": self._names["C"]}, "course")

    def _probe(self, name: str) -> float:
        """Returns the tokens per second of a drained batch, whose noise differs from that of the warm-up."""
        requests = [replace(request, policy_version=1) for request in self._batches.warm_up]
        drained = drain(self._stage.engine(name), requests, self._most)
        speed = drained.num_tokens / drained.seconds
        row = {"tokens a second": speed, "seconds to the last token": drained.seconds}
        self._findings.note(name, row, "vLLM's EAGLE-3 by number of drafts")
        return speed

    def _longest_s(self) -> float:
        rows = self._findings.tables["vLLM's EAGLE-3 by number of drafts"]
        return 2.0 * float(rows["k=3"]["seconds to the last token"])

    def _play(self, arm: Arm, half: int, texts: Sequence[bytes]) -> None:
        requests = self._batches.halves[half]
        if arm.letter == "E":
            requests = [replace(request, ahead=text) for request, text in zip(requests, texts, strict=True)]
        drained = drain(self._stage.engine(self._names[arm.letter]), requests, self._most)
        self._measured[arm.letter].append(drained)
        self._note(arm, half)

    def _note(self, arm: Arm, half: int) -> None:
        drained = self._measured[arm.letter][half]
        plain = self._measured["A"][half] if len(self._measured["A"]) > half else None
        self._findings.note(f"{arm.title}, half {half + 1}", _figures(drained, plain))
        if arm.letter == "A" and half:  # the second half ends with A, so the others' shares are known only now
            for other in ARMS[1:]:
                row = _figures(self._measured[other.letter][half], drained)
                self._findings.note(f"{other.title}, half {half + 1}", row)
        for title, rows in summaries(self._measured).items():
            for name, row in rows:
                self._findings.note(name, row, title)
        if arm.letter == "D":
            self._findings.check(drained.num_with[1:].sum() > 0, "D: no draft was accepted")


def load(engine: RolloutEngine, config: Mapping[str, Any], small: Mapping[str, torch.Tensor], target: Shape) -> None:
    """Replaces the weights of one of our engines by widened ones, one tensor at a time, and drops its cached prefixes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def reload(worker: Any) -> None:
        started = time.perf_counter()
        worker.model_runner.reload_weights(weights_iterator=_with_lm_head(config, small, target, device))
        worker.specrollout_weights_updated(time.perf_counter() - started)

    engine.run_in_worker(reload)
    engine._llm.reset_prefix_cache()


def _with_lm_head(
    config: Mapping[str, Any], small: Mapping[str, torch.Tensor], target: Shape, device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the widened tensors with their names.

    A tied embedding is also yielded as the LM head, because vLLM reloads each layer by itself.
    """
    for name, tensor in widened(config, small, target, device):
        yield name, tensor
        if name == "model.embed_tokens.weight" and "lm_head.weight" not in small:
            yield "lm_head.weight", tensor


def _figures(drained: Drained, plain: Drained | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "seconds to the last token": drained.seconds,
        "tokens": drained.num_tokens,
        "tokens a second": drained.num_tokens / drained.seconds,
        "longest response": max(len(rollout.token_ids) for rollout in drained.rollouts),
    }
    for label, (least, most) in {"1": (1, 1), "8": (6, 10), "32": (29, 32)}.items():
        row[f"ms at {label}"] = drained.step_ms(least, most) or ""
    if plain is not None:
        equal, total = count_equal(drained.rollouts, plain.rollouts)
        row["tokens equal to A's"] = equal / total
        row["over A"] = plain.seconds / drained.seconds
    return row


def summaries(measured: Mapping[str, Sequence[Drained]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Returns the rows of the tables that compare arms, by the table's title. A row is a name and its cells.

    `measured` has the batches of each arm, one for each half of the item. An arm's row covers all of its batches.
    """
    shown = [arm for arm in ARMS if measured[arm.letter]]
    speeds = {arm.letter: _speeds(measured[arm.letter]) for arm in shown}
    plain = _seconds_and_tokens(measured["A"])
    accepted = [
        (arm.title, {str(i): share for i, share in enumerate(acceptance(measured[arm.letter]), 1)}) for arm in shown[1:]
    ]
    held = {}
    for arm in shown if plain else ():
        held[arm.letter] = sum(tokens / _nearest(speeds[arm.letter], band) for band, (_, tokens) in plain.items())
    halves = [len(each) for each in measured.values() if each]
    tables: dict[str, list[tuple[str, dict[str, Any]]]] = {
        DEPTHS: accepted,
        "tokens a second by running requests": [(arm.title, speeds[arm.letter]) for arm in shown],
        "predicted and measured": [
            (
                arm.title,
                {
                    "predicted": arm.predicted,
                    "seconds for A's texts": held[arm.letter],
                    "times A": held["A"] / held[arm.letter],
                },
            )
            for arm in shown
            if arm.letter in held
        ],
    }
    if len(held) == len(ARMS):
        tables["verdict"] = [("", {"says": verdict(held), "halves": min(halves)})]
    return tables


def _seconds_and_tokens(halves: Sequence[Drained]) -> dict[str, tuple[float, int]]:
    """Returns the seconds and tokens in each band of running requests, summed over `halves`."""
    found: dict[str, tuple[float, int]] = {}
    for drained in halves:
        for band, (seconds, tokens) in drained.bands().items():
            before = found.get(band, (0.0, 0))
            found[band] = before[0] + seconds, before[1] + tokens
    return found


def _speeds(halves: Sequence[Drained]) -> dict[str, float]:
    return {band: tokens / seconds for band, (seconds, tokens) in _seconds_and_tokens(halves).items()}


def _nearest(speeds: Mapping[str, float], band: str) -> float:
    """Returns the tokens per second at a number of running requests in `band`, such as "3-4".

    If no speed was measured in this band, the next smaller measured band counts. If there is none, the smallest measured band
    counts.
    """
    smaller = [label for label in LABELS[: LABELS.index(band) + 1] if label in speeds]
    return speeds[smaller[-1]] if smaller else next(iter(speeds.values()))
