# SPDX-License-Identifier: Apache-2.0
"""Reader of measured response lengths: a run's `samples.jsonl`, or JSON lines of {prompt, sample, tokens}."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.files import read_regular
from nemo_specrollout.config.strict import ConfigError, bounded, build

_FIX = "give each prompt the same samples, from 0, as in a run's samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One line of a trace, or one sample of a line."""

    prompt: int = bounded(low=0)
    sample: int = bounded(low=0)
    tokens: int = bounded(low=1, high=1 << 24)
    step: int = bounded(0, low=0)


def read_trace(path: Path, field: str) -> list[np.ndarray]:
    """Returns the lengths of each step in order, int64 [P prompts, S samples]. Raises ConfigError with field, value and
    fix."""
    try:
        lines = read_regular(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{field}: {path} cannot be read ({type(error).__name__}); name a run's samples.jsonl"
        ) from error
    steps: dict[int, dict[tuple[int, int], int]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            for sample in _samples(line, f"{field}: {path}, line {number}"):
                _add(steps.setdefault(sample.step, {}), sample, f"{field}: {path}, line {number}")
    if not steps:
        raise ConfigError(f"{field}: {path} has no samples; name a run's samples.jsonl")
    return [_whole(steps[step], f"{field}: {path}, step {step}") for step in sorted(steps)]


def _samples(line: str, where: str) -> Iterator[Sample]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not JSON ({error}); each line is an object with prompt, sample and tokens"
        ) from error
    if isinstance(record, Mapping) and isinstance(record.get("samples"), list):
        for sample in record["samples"]:
            yield _sample({**sample, "step": record.get("step", 0)} if isinstance(sample, Mapping) else sample, where)
    else:
        yield _sample(record, where)


def _sample(record: Any, where: str) -> Sample:
    if isinstance(record, Mapping):
        record = {key: record[key] for key in ("prompt", "sample", "tokens", "step") if key in record}
    return build(Sample, record, where)


def _add(step: dict[tuple[int, int], int], sample: Sample, where: str) -> None:
    key = sample.prompt, sample.sample
    if key in step:
        raise ConfigError(f"{where}: prompt {sample.prompt}, sample {sample.sample} occurs twice; {_FIX}")
    step[key] = sample.tokens


def _whole(tokens: Mapping[tuple[int, int], int], where: str) -> np.ndarray:
    prompts = sorted({prompt for prompt, _ in tokens})
    num_samples = 1 + max(sample for _, sample in tokens)
    for prompt in prompts:
        for sample in range(num_samples):
            if (prompt, sample) not in tokens:
                raise ConfigError(f"{where}: prompt {prompt} has no sample {sample}, others have {num_samples}; {_FIX}")
    return np.array([[tokens[p, s] for s in range(num_samples)] for p in prompts], np.int64)
