# SPDX-License-Identifier: Apache-2.0
"""Options that the V2 model runner of an older vLLM refuses, and what `check` says of them with each vLLM of the engines."""

from pathlib import Path

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from test_nemo_rl_config import CLEAN, tree

from nemo_specrollout.cli.main import main
from nemo_specrollout.config import engine_vllm
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl, prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, VLLM_KWARGS
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.v2_lacks import V2_LACKS, v2_lacks
from nemo_specrollout.config.vllm_features import FEATURES
from nemo_specrollout.installed.versions import VLLM_RANGE

pytestmark = pytest.mark.unit

REPLAY = "policy.router_replay.enabled=true"
CASES = [
    (REPLAY, "0.26.0", "0.28.0"),
    (f"{VLLM_KWARGS}.enable_return_routed_experts=true", "0.25.1", "0.28.0"),
    (f"{VLLM_KWARGS}.logits_processors=[a.b]", "0.31.0", "0.32.0"),
    (f"{VLLM_KWARGS}.enable_prompt_embeds=true", "0.28.0", "0.29.0"),
    (f"{VLLM_KWARGS}.kv_sharing_fast_prefill=true", "0.29.0", "0.32.0"),
    (f"{VLLM_KWARGS}.ec_transfer_config={{a: 1}}", "0.26.0", "0.28.0"),
    (f"{VLLM_KWARGS}.enable_elastic_ep=true", "0.29.0", "0.32.0"),
    (f"{VLLM_KWARGS}.enable_dbo=true", "0.29.0", "0.32.0"),
    (f"{VLLM_KWARGS}.prefill_context_parallel_size=2", "0.25.1", "0.26.0"),
    (f"{VLLM_CFG}.logprobs_mode=raw_logits", "0.25.1", "0.26.0"),
    (f"{VLLM_KWARGS}.logprobs_mode=processed_logits", "0.25.1", "0.26.0"),
]


@pytest.mark.parametrize(("override", "refused", "taken"), CASES)
def test_an_option_is_refused_up_to_a_version(override: str, refused: str, taken: str) -> None:
    (error,) = v2_lacks(tree(override), refused)
    assert (error.kind, error.subject) == ("error", override.partition("=")[0])
    assert f"the engines have {refused}: " in error.text and error.text.endswith(f", or use vLLM {taken}")
    assert list(v2_lacks(tree(override), taken)) == []


def test_every_option_has_a_case_and_concerns_a_supported_version() -> None:
    fields = {override.partition("=")[0] for override, _, _ in CASES}
    assert fields == {path for lack in V2_LACKS for path in lack.paths}
    assert all(VLLM_RANGE[0] < lack.taken_since < VLLM_RANGE[1] for lack in V2_LACKS)


@pytest.mark.parametrize(
    "override",
    [
        "policy.router_replay.enabled=false",
        f"{VLLM_KWARGS}.prefill_context_parallel_size=1",
        f"{VLLM_KWARGS}.logits_processors=[]",
        f"{VLLM_CFG}.logprobs_mode=processed_logprobs",
    ],
)
def test_an_option_that_is_off_is_not_refused(override: str) -> None:
    assert list(v2_lacks(tree(override), "0.25.1")) == []


def test_a_version_that_is_not_known_leaves_a_note() -> None:
    (note,) = v2_lacks(tree(REPLAY), None)
    assert note.kind == "note" and "before vLLM 0.28.0" in note.text and "not known here" in note.text


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder on a login node without vLLM, where a checkout of NeMo-RL pins vLLM 0.25.1."""
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\nvllm = ["vllm==0.25.1"]\n')
    monkeypatch.setattr(engine_vllm, "vllm_version", lambda: None)
    monkeypatch.setattr(engine_vllm, "nemo_rl_checkout", lambda: tmp_path)
    return tmp_path


def test_check_refuses_router_replay_on_a_login_node(pinned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = pinned / "run.yaml"
    config.write_text(OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(CLEAN), OmegaConf.from_dotlist([REPLAY]))))
    assert main(["check", str(config)]) == 2
    sentence = (
        "policy.router_replay.enabled: True; before vLLM 0.28.0 the V2 model runner cannot return the experts of each token "
        '("routed experts capture"), and the engines have 0.25.1: set it to false, or use vLLM 0.28.0'
    )
    assert sentence in capsys.readouterr().err


def test_install_refuses_it_before_anything_starts(pinned: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_replay\.enabled: True; before vLLM"):
        prepare_nemo_rl(tree(REPLAY))
    assert not [f for f in check_nemo_rl(tree(REPLAY, f"{BLOCK_PATH}.enabled=false")) if f.kind == "error"]


@pytest.mark.parametrize("type_", [drafter for feature in FEATURES for drafter in feature.drafters])
def test_drafters_that_the_pinned_vllm_lacks_are_refused(pinned: Path, type_: str) -> None:
    more = ", addresses: ['tcp://127.0.0.1:1']" if type_ == "remote" else ""
    config = tree(f"{BLOCK_PATH}.drafters=[{{type: {type_}, model: a/model{more}}}]")
    errors = [str(finding) for finding in check_nemo_rl(config) if finding.kind == "error"]
    assert any(f"drafters[0].type: {type_}; with vLLM 0.25.1 " in error for error in errors)


PAGE = ROOT / "docs" / "reference" / "nemo-rl-vllm.md"


def rows_of(heading: str) -> list[str]:
    """Returns the rows of the page's table under a first line."""
    after = PAGE.read_text().partition(heading)[2].splitlines()[2:]
    return after[: next(i for i, line in enumerate(after) if not line.startswith("|"))]


def test_the_page_shows_what_older_versions_lack() -> None:
    features = [f"| {f.name} | {'.'.join(map(str, f.since))} | {f.otherwise} |" for f in FEATURES]
    assert rows_of("| feature | since vLLM | with an older one |") == features
    options = [
        f"| {', '.join(f'`{path}`' for path in lack.paths)} | {'.'.join(map(str, lack.taken_since))} |"
        for lack in V2_LACKS
    ]
    assert rows_of("| option | V2 takes it since vLLM |") == options
