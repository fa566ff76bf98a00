# SPDX-License-Identifier: Apache-2.0
"""The online refresh in a small run of the quickstart, which is also resumed."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from conftest import QUICKSTART, STEP_ADDER
from test_run import finish, metrics, overrides, start

from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.heads.files.head_folder import NUM_KEPT

pytestmark = pytest.mark.integration

REFRESH = {
    "grpo.num_prompts_per_step": 6,
    "grpo.num_generations_per_prompt": 4,
    "policy.train_global_batch_size": 24,
    "policy.generation.specrollout.budget": "{policy: fixed, k: 3}",
    "policy.generation.specrollout.draft_refresh.trigger": "interval",
    "policy.generation.specrollout.draft_refresh.interval": 1,
    "policy.generation.specrollout.draft_refresh.rollout_capture_share": 1.0,
    "policy.generation.specrollout.draft_refresh.held_out_share": 0.5,
    "policy.generation.specrollout.draft_refresh.max_train_seconds": 15,
    "policy.generation.specrollout.draft_refresh.max_time_share": 1.0,
    "policy.generation.specrollout.draft_refresh.learning_rate": 3e-3,
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nemo_specrollout.heads.training.head import create_head, save_head

    folder = tmp_path_factory.mktemp("heads") / "untrained"
    save_head(create_head(STEP_ADDER), folder)
    return folder


def with_head(head: Path) -> dict[str, object]:
    return {**REFRESH, "policy.generation.specrollout.drafters": f"[{{type: eagle3, model: {head}}}, {{type: ngram}}]"}


@pytest.mark.slow
def test_a_run_trains_publishes_and_resumes_with_a_head(head: Path, tmp_path: Path) -> None:
    """Runs five steps with one interruption. Tokens and policy equal the ones of a run without a head."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    finish(start(run, 4, **with_head(head)))
    finish(start(run, 5, **with_head(head)))
    finish(start(plain, 5, **{k: v for k, v in REFRESH.items() if "specrollout" not in k}))
    steps = metrics(run)
    assert [s["step"] for s in steps] == list(range(5)) and all(s["head_dormant"] in (0, 1) for s in steps)
    assert all(s["tokens_checked"] == s["tokens_equal"] > 0 and not s["alarms"] for s in steps)
    for mine, others in zip(steps, metrics(plain), strict=True):
        assert (mine["reward"], mine["num_tokens"]) == (others["reward"], others["num_tokens"])
    refreshes = [s["draft_refresh"] for s in steps]
    assert steps[0]["head_age"] == 0 and all(r["capture_s"] > 0 for r in refreshes)
    assert all(r["decision"].startswith(("refreshed: ", "skipped: ")) for r in refreshes)
    assert "are needed to judge" in refreshes[0]["decision"], "one step has too few held-out prompts"
    published = [n for n, r in enumerate(refreshes) if r.get("published")]
    assert published and published[0] < 4, [r.get("gate") for r in refreshes]
    assert len(list((run / "heads").glob("step_*"))) <= NUM_KEPT + 1
    named = json.loads((run / "heads" / "published.json").read_text())["head"]
    assert named == f"step_{published[-1]}"
    card = json.loads((run / "heads" / named / "head_card.json").read_text())
    assert card["gate"]["published"] and card["policy"]["version"] == published[-1] + 1
    assert card["held_out"]["after"]["acceptance_length"] > card["held_out"]["before"]["acceptance_length"]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [len(s["samples"]) for s in samples] == [24] * 5
    assert any(s["num_accepted"] for line in samples for s in line["samples"])
    last = max(n for n in published if n < 4)
    assert samples[last + 1]["samples"][0]["head_versions"][0] > 0, "the head of a step drafts in the next"


@pytest.mark.slow
def test_a_replay_shows_what_refreshes_would_have_gained(head: Path, tmp_path: Path) -> None:
    """All triggers see the same policies and the same first step. After that, the head that learns is better."""
    from dataclasses import replace

    from lab.heads.drift import TRIGGERS, Recording, replay

    finish(start(tmp_path / "run", 4, **with_head(head), **{"logger.record_for_replay": True}))
    assert not list((tmp_path / "run" / "heads").glob("step_*")), "a recorded run refreshes nothing"
    recording, lines = Recording.read(tmp_path / "run"), {}
    for name in ("frozen", "every step"):
        config = replace(TRIGGERS[name], learning_rate=3e-3, ttt_steps=2)
        lines[name] = replay(recording, head, config, num_steps=40, num_drafts=2)
        assert [line["step"] for line in lines[name]] == list(range(4))
    frozen, refreshed = lines["frozen"], lines["every step"]
    assert frozen[0]["acceptance_length"] == refreshed[0]["acceptance_length"]
    assert not any(line["refreshed"] for line in frozen) and frozen[-1]["training_s"] == 0.0
    first = next(n for n, line in enumerate(refreshed) if line["published"])
    assert first < 3 and refreshed[first]["learning_rate"] == 3e-3
    assert refreshed[-1]["acceptance_length"] > frozen[-1]["acceptance_length"] + 0.1


def test_a_refresh_without_features_says_what_is_missing(head: Path, tmp_path: Path) -> None:
    import torch

    from nemo_specrollout.config.block import DraftRefreshConfig, SpecrolloutConfig
    from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig
    from nemo_specrollout.heads.decisions.refresh_schedule import RefreshDecision
    from nemo_specrollout.heads.features.feature_store import FeatureStore
    from nemo_specrollout.heads.features.features import SequenceFeatures
    from nemo_specrollout.heads.files.head_folder import HeadFolder
    from nemo_specrollout.heads.refresh.online_refresh import OnlineRefresh

    block = SpecrolloutConfig(drafters=(Eagle3DrafterConfig(model=str(head)),), draft_refresh=DraftRefreshConfig())
    online = OnlineRefresh(block, STEP_ADDER, head, HeadFolder(tmp_path / "heads"), temperature=1.0)
    source, decision = online.source, RefreshDecision(True, 1.0, "refreshed: as asked")
    width = source.hidden_size
    features = SequenceFeatures(
        torch.arange(12, dtype=torch.int32),
        torch.zeros(12, width * len(source.layer_ids)),
        torch.zeros(12, width),
        4,
        0,
    )
    with closing(FeatureStore(tmp_path / "features", 1 << 24, source, held_out_share=0.0)) as store:
        said = online.refresh(decision, 0, [store], 1, {})
        assert said.decision == "skipped: no sequence to learn from was captured so far" and said.published is False
        store.keep([features])
        lacking = online.refresh(decision, 0, [store], 1, {})
        assert lacking.decision.startswith("skipped: 0 held-out prompts were captured so far; 8 are needed")
        assert lacking.refresh_s is None, "no training without data to judge by"


@pytest.mark.parametrize("is_recorded", [True, False])
def test_lm_heads_of_past_policies_are_kept_for_a_replay_only(is_recorded: bool, head: Path, tmp_path: Path) -> None:
    """The LM head of a real policy would take about a hundred megabytes in each step."""
    import torch

    from lab.local.head_refresh_step import LocalRefresher
    from lab.local.run_config import read_run_config
    from nemo_specrollout.storage.model_folder import LM_HEAD

    more = with_head(head) | {"logger.record_for_replay": is_recorded}
    config, _ = read_run_config(load_config(QUICKSTART, overrides(tmp_path / "run", **more)))
    refresher = LocalRefresher(config, None, tmp_path / "run")  # type: ignore[arg-type]  # no engine is asked
    with closing(refresher):
        for version in range(2):
            refresher.policy_moves(version, iter([(LM_HEAD, torch.zeros(4, 2)), ("other", torch.zeros(9))]))
    kept = sorted(path.name for path in (tmp_path / "run").rglob("policy_*"))
    assert kept == ([f"policy_{version}.safetensors" for version in range(2)] if is_recorded else [])


def test_prompts_with_a_token_to_draft_are_counted_once() -> None:
    """Samples of a prompt count as one, and responses of one token do not count. The gate counts in the same way."""
    import torch

    from nemo_specrollout.heads.features.features import SequenceFeatures
    from nemo_specrollout.heads.refresh.candidate import num_prompts

    def sequence(prompt: list[int], response: int, cached: int = 0) -> SequenceFeatures:
        ids = torch.tensor([*prompt, *range(response)][cached:], dtype=torch.int32)
        whole = torch.tensor(prompt, dtype=torch.int32) if cached else None
        zeros = torch.zeros(len(ids), 2)
        return SequenceFeatures(ids, zeros, zeros, len(prompt), 0, cached, whole)

    assert sequence([7, 8, 9], 5).num_draftable == sequence([7, 8, 9], 5, cached=2).num_draftable == 4
    assert sequence([7, 8, 9], 1).num_draftable == 0
    assert num_prompts([sequence([7, 8, 9], 5), sequence([7, 8, 9], 4, cached=2)]) == 1
    assert num_prompts([sequence([7, 8, 9], 5), sequence([7, 8, 6], 5), sequence([5, 5], 1)]) == 2


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"policy.generation.specrollout.drafters": "[{type: ngram}]"}, "there is no head to refresh"),
        ({"policy.generation.specrollout.drafters": "[{type: eagle3}]"}, "name the folder of its weights"),
        ({"policy.generation.specrollout.drafters": "[{type: mtp, model: x}]"}, "remove it"),
        ({"policy.generation.specrollout.drafters": "[{type: mtp}, {type: eagle3, model: x}]"}, "one drafter with weights"),
        ({"policy.generation.specrollout.drafters": "[{type: eagle3, model: nowhere}]"}, "no head folder"),
        ({"policy.generation.specrollout.draft_refresh.trigger": "often"}, "is not available"),
        ({"policy.generation.specrollout.draft_refresh.trainer_gpus": "1"}, "the local runner trains on a CPU"),
    ],
)  # fmt: skip
def test_an_impossible_refresh_is_refused_at_the_start(
    more: dict[str, str], sentence: str, head: Path, tmp_path: Path
) -> None:
    from lab.cli.prepare import prepare_local

    tree = load_config(QUICKSTART, overrides(tmp_path / "run", **{**with_head(head), **more}))
    with pytest.raises(ConfigError, match=sentence):
        prepare_local(tree)


def test_a_head_of_another_policy_is_refused_at_the_start(head: Path, tmp_path: Path) -> None:
    from lab.cli.prepare import prepare_local

    config = json.loads((head / "config.json").read_text())
    config["transformer_layer_config"]["max_position_embeddings"] = 128
    short = tmp_path / "short"
    short.mkdir()
    (short / "config.json").write_text(json.dumps(config))
    (short / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="max_position_embeddings 128 is less than max_model_len"):
        prepare_local(load_config(QUICKSTART, overrides(tmp_path / "run", **with_head(short))))
    assert not (tmp_path / "run").exists()
    assert yaml.safe_load(QUICKSTART.read_text())["policy"]["generation"]["specrollout"]["enabled"]
