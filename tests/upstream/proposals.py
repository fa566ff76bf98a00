# SPDX-License-Identifier: Apache-2.0
"""The proposals of docs/upstream that have a patch: which tree each is for, and what shows that it is needed and right."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "upstream"
CASES = ROOT / "tests" / "upstream" / "cases"
VLLM_0_28 = ROOT / ".vllm-0.28.0"


class Tree(Enum):
    """The source tree that a patch applies to."""

    VLLM = "vLLM 0.32.0"
    VLLM_0_28 = "vLLM 0.28.0"
    NEMO_RL = "NeMo-RL 7ea279a"


@dataclass(frozen=True)
class Proposal:
    """A document and a patch of the same name, and what is run on the tree without the patch and with it."""

    name: str
    tree: Tree
    case: str
    """A script of `CASES`, or a test file of NeMo-RL's that the patch changes or brings along."""

    @property
    def patch(self) -> Path:
        return DOCS / "patches" / f"{self.name}.patch"

    @property
    def document(self) -> Path:
        return DOCS / f"{self.name}.md"


PROPOSALS = (
    Proposal("vllm-exact-verification", Tree.VLLM, "exact_verification.py"),
    Proposal("vllm-cpu-expand-kernel", Tree.VLLM, "expand_kernel.py"),
    Proposal("vllm-0.28-draft-noise", Tree.VLLM_0_28, "draft_noise.py"),
    Proposal("vllm-dummy-lm-head", Tree.VLLM, "dummy_lm_head.py"),
    Proposal("nemo-rl-draft-refit", Tree.NEMO_RL, "tests/unit/models/generation/test_vllm_backend.py"),
    Proposal("nemo-rl-synchronize-device", Tree.NEMO_RL, "tests/unit/models/generation/test_vllm_backend.py"),
    Proposal("nemo-rl-rollout-seeds", Tree.NEMO_RL, "tests/unit/experience/test_rollout_seeds.py"),
)


@dataclass(frozen=True)
class Original:
    """A tree as it is on this machine, and how its Python is started with a scratch tree laid over it."""

    root: Path
    python: str
    paths: tuple[Path, ...]
    """Searched for modules after the scratch tree."""
    settings: Mapping[str, str]


def find_original(tree: Tree) -> Original | str:
    """The tree, or a sentence that says what is missing."""
    if tree is Tree.NEMO_RL:
        return _nemo_rl()
    if tree is Tree.VLLM_0_28:
        if not (VLLM_0_28 / ".installed").is_file():
            return f"`make {VLLM_0_28.name}/.installed` fetches vLLM 0.28.0"
        interpreted = {"TRITON_INTERPRET": "1", "NEMO_SPECROLLOUT_V2_ON_CPU": "1", "OMP_NUM_THREADS": "1"}
        return Original(
            VLLM_0_28, sys.executable, (VLLM_0_28, ROOT, CASES, ROOT / "tests" / "interpreted"), interpreted
        )
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return "vLLM is not installed"
    return Original(Path(spec.origin).parents[1], sys.executable, (ROOT, CASES), {})


def _nemo_rl() -> Original | str:
    missing = [name for name in ("NEMO_RL_SRC", "NEMO_RL_PYTHON") if not os.environ.get(name)]
    if missing:
        return f"set {' and '.join(missing)} (CONTRIBUTING.md)"
    cpu_host = ROOT / "tests" / "nemo_rl" / "cpu_host"
    return Original(
        Path(os.environ["NEMO_RL_SRC"]), os.environ["NEMO_RL_PYTHON"], (cpu_host,), {"OMP_NUM_THREADS": "1"}
    )
