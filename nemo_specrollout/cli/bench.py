# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout bench`: the same rollouts with and without speculation, interleaved, so that only time differs."""

import argparse
import sys
from pathlib import Path

import nemo_specrollout
from nemo_specrollout.cli.prepare import prepare, use_threads
from nemo_specrollout.config.strict import ConfigError


def bench(parsed: argparse.Namespace) -> int:
    """Writes `bench.json` and `bench.png` to `logger.log_dir` and prints the table."""
    repository = Path(nemo_specrollout.__file__ or "").parents[1]
    if not (repository / "benchmarks").is_dir():
        raise ConfigError(
            "bench: the benchmarks are part of the repository, not of the package; clone it, run it there"
        )
    prepared = prepare(parsed.config, parsed.overrides)
    use_threads(prepared.config.cluster.threads)
    sys.path.insert(0, str(repository))
    from benchmarks.rollouts.bench import run_bench

    run_bench(prepared.config)
    return 0
