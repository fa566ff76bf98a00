# SPDX-License-Identifier: Apache-2.0
"""Tests the publish gate and the canary with deliberate faults.

The gate must refuse faulty refreshes, and the canary must notice broken heads.

    python -m lab.heads.fault_drill RUN --head FOLDER --out DIR [--refreshes 100] [--healthy 200]
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file

from lab.heads.drift import Recording
from lab.local.engine import RolloutEngine
from lab.local.run_config import RunConfig
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from nemo_specrollout.config.block import BudgetConfig, VerifyConfig
from nemo_specrollout.config.drafter_configs import FolderDrafterConfig
from nemo_specrollout.heads.decisions.publish_gate import PublishGate
from nemo_specrollout.heads.features.features import SequenceFeatures
from nemo_specrollout.heads.files.head_facts import check_head
from nemo_specrollout.heads.refresh.candidate import Judge, RefreshData, refresh_head
from nemo_specrollout.heads.training.acceptance import measure_acceptance
from nemo_specrollout.heads.training.head import DraftHead, load_eagle3_head, save_head
from nemo_specrollout.heads.training.trainer import Budget, TrainingSettings
from nemo_specrollout.storage.files import write_atomically

NUM_DRAFTS = 3
"""Number of draft tokens of a request in an engine step."""
TRAINING_TOKENS = 10_000
"""Largest number of tokens that a refresh trains on."""
HELD_OUT_TOKENS = 6_000
"""Number of tokens on which the publish gate judges a candidate."""
TRUTH_TOKENS = 20_000
"""Number of tokens on which the drill measures whether a candidate is worse than the head in service."""
LAST_VERSION = 5
"""The last policy version whose features are used."""
WORSE_BY = 0.01
"""A candidate counts as worse if its acceptance length is at least this much shorter."""
DataFault = Callable[[SequenceFeatures], SequenceFeatures]
HeadFault = Callable[[DraftHead], None]


def _shuffled_tokens(features: SequenceFeatures) -> SequenceFeatures:
    order = torch.randperm(features.num_tokens, generator=torch.Generator().manual_seed(0))
    return replace(features, token_ids_T=features.token_ids_T[order])


DATA_FAULTS: dict[str, DataFault] = {
    "tokens shuffled": _shuffled_tokens,
    "hidden states one late": lambda f: replace(f, aux_TF=f.aux_TF.roll(1, 0)),
    "another policy's hidden states": lambda f: replace(f, aux_TF=-f.aux_TF, final_TH=f.final_TH.flip(1)),
    "NaN among the features": lambda f: replace(f, aux_TF=f.aux_TF.clone().fill_(torch.nan)),
    "layers in another order": lambda f: replace(f, aux_TF=torch.cat(f.aux_TF.chunk(3, 1)[::-1], 1)),
}


def _swap_layers(head: DraftHead) -> None:
    head.model.fc.weight.data = torch.cat(head.model.fc.weight.data.chunk(3, 1)[::-1], 1)


def _interleave(head: DraftHead) -> None:
    attention: Any = head.model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        weight = projection.weight.data
        projection.weight.data = weight.view(-1, attention.head_dim, weight.shape[1]).transpose(0, 1).reshape_as(weight)


def _zero(head: DraftHead) -> None:
    mlp: Any = head.model.layers[0].mlp
    mlp.down_proj.weight.data.zero_()
    head.model.lm_head.weight.data.zero_()


def _shuffle_lm_head(head: DraftHead) -> None:
    weight = head.model.lm_head.weight
    weight.data = weight.data[torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))]


def _not_a_number(head: DraftHead) -> None:
    head.model.norm.weight.data[3] = torch.nan


HEAD_FAULTS: dict[str, HeadFault] = {
    "swapped layers": _swap_layers,
    "interleaved QKV": _interleave,
    "zeroed": _zero,
    "LM head of another vocabulary": _shuffle_lm_head,
    "NaN": _not_a_number,
}
DIVERGED = "diverged training"
FAULTS = (*DATA_FAULTS, *HEAD_FAULTS, DIVERGED, "none")


@dataclass(frozen=True)
class Material:
    """Features for the refreshes of the drill."""

    training: list[SequenceFeatures]
    held_out: list[SequenceFeatures]
    """Features on which the publish gate judges a candidate."""
    truth: list[SequenceFeatures]
    """A larger set of features, on which a candidate's true acceptance is measured."""


def material_of(recording: Recording) -> Material:
    """Returns features of the first policy versions, for which the head in service was trained."""
    held = recording.newest(LAST_VERSION, True, HELD_OUT_TOKENS + TRUTH_TOKENS)
    tokens, split = 0, 0
    while tokens < HELD_OUT_TOKENS:
        tokens += held[split].num_tokens
        split += 1
    return Material(recording.newest(LAST_VERSION, False, TRAINING_TOKENS), held[:split], held[split:])


def drill_refresh(
    head: DraftHead, fault: str, material: Material, seed: int, out: Path, policy: Path
) -> dict[str, Any]:
    """Runs a refresh with a fault. Returns the publish gate's decision and the candidate's true gain in acceptance length."""
    damage = DATA_FAULTS.get(fault, lambda f: f)
    settings = TrainingSettings(
        learning_rate=30.0 if fault == DIVERGED else 1e-3,
        schedule="constant",
        warmup_steps=0,
        ttt_steps=NUM_DRAFTS,
        batch_tokens=256,
        max_grad_norm=1e9 if fault == DIVERGED else 1.0,
        seed=seed,
    )
    judge = Judge(PublishGate(), NUM_DRAFTS)
    data = RefreshData([damage(f) for f in material.training], material.held_out)
    refresh = refresh_head(head, head, data, settings, Budget(steps=8), judge)
    published = refresh.published
    reason = refresh.reason
    if fault in HEAD_FAULTS:
        HEAD_FAULTS[fault](refresh.candidate)
        judgement = judge.compare(refresh.candidate, head, material.held_out)
        published = judgement.decision.published
        reason = judgement.decision.reason
    if published:
        save_head(refresh.candidate, out)
        try:
            check_head(out, policy)
        except ValueError as error:
            published = False
            reason = f"refused: {error}"
    lengths = [measure_acceptance(h, material.truth, NUM_DRAFTS).expected_length for h in (refresh.candidate, head)]
    difference = lengths[0] - lengths[1]
    return {
        "fault": fault,
        "published": published,
        "reason": reason,
        "true_difference": difference,
        "worse": not difference > -WORSE_BY,
    }


def drill_canary(
    config: RunConfig, head_folder: Path, expected_length: float, healthy_steps: int, out: Path, console: Console
) -> dict[str, Any]:
    """Runs rollouts with the intact head, each after a reload of the policy's weights, and then one with each broken head.

    A broken head is published with the `expected_length` of the intact one. Returns the alarms that the canary raised.
    """
    model = Path(config.policy.model_name)
    generation = config.policy.generation
    drafter = generation.specrollout.model_drafter
    assert isinstance(drafter, FolderDrafterConfig)
    block = replace(
        generation.specrollout,
        drafters=(replace(drafter, model=str(head_folder)),),
        draft_refresh=None,
        budget=BudgetConfig("fixed", k=NUM_DRAFTS),
        verify=VerifyConfig(),
    )
    engine = RolloutEngine(model, replace(generation, specrollout=block), config.grpo.seed)
    task = build_task(config.data, load_tokenizer(model))
    tensors = list(_policy_tensors(model))
    small = replace(config, grpo=replace(config.grpo, num_prompts_per_step=4, num_generations_per_prompt=4))

    def step(index: int) -> list[dict[str, Any]]:
        engine.generate(step_prompts(small, index, task).requests)
        return engine.take_alarms()

    false_alarms: list[dict[str, Any]] = []
    with Progress(console=console) as bar:
        for index in bar.track(range(healthy_steps), description="healthy steps"):
            engine.load_weights(iter(tensors))
            false_alarms += step(index)
        raised: dict[str, dict[str, Any] | None] = {}
        for number, (fault, damage) in enumerate(bar.track(HEAD_FAULTS.items(), description="broken heads")):
            head = load_eagle3_head(head_folder, model)
            damage(head)
            save_head(head, out / "broken")
            try:
                engine.load_head(out / "broken", expected_length, NUM_DRAFTS)
            except ValueError as error:
                raised[fault] = {"cause": "refused at the door", "sentence": str(error)}
                continue
            alarms = step(healthy_steps + 2 * number)
            raised[fault] = alarms[0] if alarms else None
            engine.load_head(head_folder, expected_length, NUM_DRAFTS)
            false_alarms += step(healthy_steps + 2 * number + 1)
    engine.close()
    return {"healthy_steps": healthy_steps + len(HEAD_FAULTS), "false_alarms": false_alarms, "raised": raised}


def _policy_tensors(model: Path) -> Any:
    for file in sorted(model.glob("*.safetensors")):
        yield from load_file(file).items()


def main() -> None:
    """Runs both drills, prints their results, and writes them to `fault_drill.json` in the folder `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory, recorded with logger.record_for_replay: true")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--refreshes", type=int, default=100)
    parser.add_argument("--healthy", type=int, default=200)
    args = parser.parse_args()
    console = Console(highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    recording = Recording.read(args.run)
    policy = Path(recording.config.policy.model_name)
    result: dict[str, Any] = {"refreshes": []}
    head = load_eagle3_head(args.head, policy)
    material = material_of(recording)
    rng = random.Random(0)
    head.set_policy_weights(recording.teacher(0))
    if args.refreshes:
        with Progress(console=console) as bar:
            for seed in bar.track(range(args.refreshes), description="refreshes"):
                fault = FAULTS[seed % len(FAULTS)] if seed < len(FAULTS) else rng.choice(FAULTS)
                result["refreshes"].append(drill_refresh(head, fault, material, seed, args.out / "candidate", policy))
    if args.healthy:
        expected_length = measure_acceptance(head, material.held_out, NUM_DRAFTS).expected_length
        result["canary"] = drill_canary(recording.config, args.head, expected_length, args.healthy, args.out, console)
    write_atomically(args.out / "fault_drill.json", json.dumps(result, indent=1, default=str))
    for fault in FAULTS:
        of_fault = [r for r in result["refreshes"] if r["fault"] == fault]
        if of_fault:
            worse = sum(r["worse"] for r in of_fault)
            bad = sum(r["worse"] and r["published"] for r in of_fault)
            published = sum(r["published"] for r in of_fault)
            console.out(
                f"{fault:32} {len(of_fault):3} refreshes, {worse:3} worse, {published:3} published, {bad} of them worse"
            )
    if args.healthy:
        canary = result["canary"]
        console.out(f"false alarms over {canary['healthy_steps']} healthy steps: {len(canary['false_alarms'])}")
        for fault, alarm in canary["raised"].items():
            console.out(f"{fault:32} {'no alarm' if alarm is None else alarm['cause'] + ': ' + alarm['sentence']}")


if __name__ == "__main__":
    main()
