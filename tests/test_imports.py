# SPDX-License-Identifier: Apache-2.0
"""The rooms' import rules (docs/architecture.md), read from the source: lazy and type-checking imports count too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.unit

PACKAGE = ROOT / "nemo_specrollout"
# Who may import whom. `config` and `sampling` are leaves.
BELOW_LOCAL = {
    "config", "sampling", "scheduling", "simulation", "reports", "drafters", "decoupled", "training", "generation",
}  # fmt: skip
ALLOWED = {
    "config": set(),
    "sampling": set(),
    "scheduling": {"config"},
    "simulation": {"config", "scheduling"},
    "reports": {"config"},
    "drafters": {"config", "sampling"},
    "decoupled": {"config", "sampling", "drafters"},
    "training": {"config", "sampling", "scheduling"},
    "generation": {"config", "sampling", "scheduling", "drafters", "decoupled", "training"},
    "local": BELOW_LOCAL,
    "nemo_rl": {"config", "sampling", "scheduling", "reports", "decoupled", "training", "generation"},
    "doctor": {"config", "generation", "nemo_rl"},
    "cli": BELOW_LOCAL | {"local", "nemo_rl", "doctor"},
}
# Which rooms alone may touch a heavy package.
OWNERS = {
    "vllm": {"generation"},
    "megatron": {"local", "training"},
    "speculators": {"training"},
    "nemo_rl": {"nemo_rl"},
    "ray": {"nemo_rl", "generation"},
    "zmq": {"decoupled"},
}
TORCH_FREE = ("config", "scheduling", "simulation", "reports", "doctor", "cli")


def imported_modules(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def sources(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def test_every_room_has_a_rule() -> None:
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(ALLOWED)


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_downward_only(room: str) -> None:
    for file in sources(room):
        rooms = {m.split(".")[1] for m in imported_modules(file) if m.startswith("nemo_specrollout.")}
        assert rooms <= ALLOWED[room] | {room}, f"{file.name} imports {rooms - ALLOWED[room] - {room}}"


@pytest.mark.parametrize("package", OWNERS)
def test_heavy_packages_have_one_owner(package: str) -> None:
    for room in set(ALLOWED) - OWNERS[package]:
        for file in sources(room):
            assert package not in {m.split(".")[0] for m in imported_modules(file)}, (
                f"{room}/{file.name} imports {package}"
            )


@pytest.mark.parametrize("room", TORCH_FREE)
def test_light_rooms_load_without_torch(room: str) -> None:
    modules = [f"nemo_specrollout.{room}.{p.stem}" for p in sources(room) if p.stem != "__init__"]
    heavy = "{'torch', 'vllm', 'ray', 'megatron', 'transformers'}"
    code = f"import sys; import {', '.join(modules)}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_there_is_no_import_cycle_between_rooms() -> None:
    order = list(ALLOWED)
    for room, allowed in ALLOWED.items():
        assert all(order.index(other) < order.index(room) for other in allowed)
