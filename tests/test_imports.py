# SPDX-License-Identifier: Apache-2.0
"""The import rules of the packages (docs/architecture.md), read from the source: lazy and type-checking imports count too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.unit

PACKAGE = ROOT / "nemo_specrollout"
# Which package may import which, lowest first. A subpackage that is named here has rules of its own.
SCHEDULING = {"scheduling.speculation", "scheduling.heads", "scheduling.racing", "scheduling.placement"}
HEADS = {"training.features", "training.head", "training.checkpoints"}
ENGINE = {"config", "sampling", *SCHEDULING, "drafters", "telemetry", "remote.protocol", "remote.verifier", *HEADS}
BELOW_LOCAL = {*ENGINE, "generation", "training.refresh", "remote.drafter", "racing", "simulation", "reports"}
ALLOWED = {
    "config": set(),
    "sampling": set(),
    "scheduling.speculation": {"config"},
    "scheduling.heads": {"config"},
    "scheduling.racing": {"config"},
    "scheduling.placement": {"config"},
    "simulation": {"config", *SCHEDULING},
    "reports": {"config"},
    "drafters": {"config", "sampling"},
    "telemetry": set(),
    "remote.protocol": {"config", "sampling", "drafters"},
    "remote.verifier": {"config", "sampling", "drafters", "remote.protocol"},
    "training.features": {"config"},
    "training.checkpoints": {"config"},
    "training.head": {"config", "training.features"},
    "training.refresh": {"config", "sampling", "scheduling.heads", *HEADS},
    "generation": ENGINE,
    "remote.drafter": {"config", "remote.protocol", "remote.verifier", "telemetry", "generation"},
    "racing": {"config", *SCHEDULING, "generation"},
    "local": BELOW_LOCAL,
    "nemo_rl": BELOW_LOCAL - {"simulation"},
    "doctor": {"config", "remote.verifier", "generation", "nemo_rl"},
    "cli": BELOW_LOCAL | {"local", "nemo_rl", "doctor"},
}
# The packages that alone may import a heavy one. `lab.vllm_on_cpu` is our other package, which imports nothing of this one.
OWNERS = {
    "vllm": {"generation", "remote.drafter"},
    "lab.vllm_on_cpu": {"generation", "nemo_rl", "cli"},
    "megatron": {"local", "training.checkpoints"},
    "speculators": {"training.head"},
    "nemo_rl": {"nemo_rl"},
    "ray": {"nemo_rl", "racing"},
    "zmq": {"remote.protocol"},
}
TORCH_FREE = ("config", *sorted(SCHEDULING), "simulation", "reports", "doctor", "cli")


def imported_modules(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def sources(package: str) -> list[Path]:
    return sorted((PACKAGE / package.replace(".", "/")).rglob("*.py"))


def package_of(module: str) -> str:
    """Returns the entry of ALLOWED that a module of ours belongs to, or an empty string."""
    parts = module.split(".")[1:]
    return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in ALLOWED), "")


def test_every_package_has_a_rule() -> None:
    folders = {str(file.parent.relative_to(PACKAGE)).replace("/", ".") for file in PACKAGE.rglob("*.py")}
    holds_code = {
        f for f in folders if {p.name for p in (PACKAGE / f.replace(".", "/")).glob("*.py")} != {"__init__.py"}
    }
    assert holds_code - {"."} == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_downward_only(package: str) -> None:
    for file in sources(package):
        imported = {package_of(m) for m in imported_modules(file) if m.startswith("nemo_specrollout.")} - {""}
        assert imported <= ALLOWED[package] | {package}, f"{file.name} imports {imported - ALLOWED[package]}"


@pytest.mark.parametrize("heavy", OWNERS)
def test_heavy_packages_have_few_owners(heavy: str) -> None:
    for package in set(ALLOWED) - OWNERS[heavy]:
        for file in sources(package):
            assert heavy not in {m.split(".")[0] for m in imported_modules(file)}, (
                f"{package}/{file.name} imports {heavy}"
            )


@pytest.mark.parametrize("package", TORCH_FREE)
def test_light_packages_load_without_torch(package: str) -> None:
    modules = [f"nemo_specrollout.{package}.{p.stem}" for p in sources(package) if p.stem != "__init__"]
    heavy = "{'torch', 'vllm', 'ray', 'megatron', 'transformers'}"
    code = f"import sys; import {', '.join(modules)}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_there_is_no_import_cycle_between_packages() -> None:
    order = list(ALLOWED)
    for package, allowed in ALLOWED.items():
        assert all(order.index(other) < order.index(package) for other in allowed), package


def test_the_cpu_kernels_import_nothing_of_ours() -> None:
    for file in (ROOT / "lab.vllm_on_cpu").rglob("*.py"):
        assert not any(m.startswith("nemo_specrollout") for m in imported_modules(file)), file.name
