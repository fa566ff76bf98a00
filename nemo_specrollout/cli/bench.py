# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout bench`: the same rollouts, interleaved in one run, so that only time differs."""

import argparse

from nemo_specrollout.cli.prepare import prepare, use_threads


def bench(parsed: argparse.Namespace) -> int:
    """Writes `bench.json` and `bench.png` to `logger.log_dir` and prints the table."""
    prepared = prepare(parsed.config, parsed.overrides)
    use_threads(prepared.config.cluster.threads)
    from nemo_specrollout.local.bench import run_bench

    run_bench(prepared.config)
    return 0
