# SPDX-License-Identifier: Apache-2.0
"""Records what drafters propose at each position of a real model's responses, for `lab.simulation.replay`.

    python -m lab.bench.record_speculation CONFIG --out FILE.npz [key=value ...]

CONFIG is a config of the local runner. Its engine decodes plainly, while all drafters propose tokens after each token. The
batches have different tasks, in this order: mixed, free text, mixed, repetitive, tasks that the head does not know, mixed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench.bench_command import bench_parser
from lab.local.engine import RolloutEngine
from lab.local.run_config import RunConfig, read_run_config
from lab.local.run_sections import DataConfig
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from lab.simulation.replay_record import Record, Recorder
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.speculation.policy import FixedPolicy

UNKNOWN = ("gcd", "letter_counting", "spell_backward")
"""Tasks of reasoning-gym on which the head was not trained."""


class _OnlyProposes(FixedPolicy):
    """A speculation policy under which all drafters propose as many tokens as they can, and none of them are verified."""

    def num_drafts(self, num_requests: int, most: int) -> int:
        return 0


def batches_of(config: RunConfig) -> list[tuple[str, list[RolloutRequest]]]:
    """Returns the batches to record, as pairs of a name and requests. Each batch is a training step of the config."""
    tasks = config.workloads
    unknown: Any = [replace(config.data.tasks[0], name=name, options={}) for name in UNKNOWN]
    data: dict[str, DataConfig] = {**tasks, "unknown": replace(config.data, tasks=tuple(unknown))}
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    found = []
    for step, name in enumerate(("mixed", "free_text", "mixed", "repetitive", "unknown", "mixed")):
        chosen = replace(config, data=data[name])
        found.append((name, step_prompts(chosen, step, build_task(chosen.data, tokenizer)).requests))
    return found


def record(config: RunConfig) -> Record:
    """Rolls out all batches, and returns what the drafters have proposed."""
    engine = RolloutEngine(Path(config.policy.model_name), config.policy.generation, config.grpo.seed)
    recorder = Recorder()

    def watch(worker: Any) -> None:
        router = worker.specrollout_router
        board = router.board
        open_requests = router.open
        choose = board.choose
        router.policy = _OnlyProposes(board.num_positions, board.num_positions)
        recorder.names = board.names
        recorder.priors_DE = board._priors_DE.numpy()
        recorder.model = board.model

        def opened(requests: Any) -> None:
            open_requests(requests)
            recorder.open([(r.slot, r.identity.seed, r.prompt_length) for r in requests])

        def chosen(texts: Any, *args: Any, **options: Any) -> None:
            choose(texts, *args, **options)
            tables = board.tables
            recorder.proposed(
                texts.slots_B.tolist(),
                texts.total_len_S.tolist(),
                tables.tokens_DBK.numpy(),
                tables.levels_DBK.numpy(),
                tables.found_DB.numpy(),
            )

        router.open = opened
        board.choose = chosen

    engine.run_in_worker(watch)
    for number, (name, requests) in enumerate(batches_of(config)):
        rollouts = engine.generate(requests)
        for request, rollout in zip(requests, rollouts, strict=True):
            seed = request.noise_seed(config.grpo.seed)
            recorder.ended(number, request.prompt_index, seed, rollout.token_ids)
        print(f"{name}: {sum(len(r.token_ids) for r in rollouts):,} tokens", flush=True)
    engine.close()
    return recorder.record()


def main() -> None:
    """Records what the drafters propose, and writes it to the file of `--out`."""
    log_console()
    options = bench_parser(__doc__).parse_args()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    found = record(config)
    found.save(options.out)
    print(f"{len(found.tokens_P):,} positions, {options.out.stat().st_size:,} bytes in {options.out}")


if __name__ == "__main__":
    main()
