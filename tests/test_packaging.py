# SPDX-License-Identifier: Apache-2.0
"""The installed package: the declared dependencies, the files of a wheel, and all commands in a fresh environment.

The fresh environments need a package index, as `make setup` does.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER
from nemo_rl_standin import make_nemo_rl
from test_launch import BASE, RECORDING_RAY_SUB

from nemo_specrollout.cli.examples import RECIPES
from nemo_specrollout.cli.main import COMMANDS, main

PROJECTS = {"nemo_specrollout": ROOT / "pyproject.toml", "lab": ROOT / "lab" / "pyproject.toml"}
"""The project file of each package: each is a distribution of its own."""
PRODUCT, LABORATORY = (tomllib.loads(path.read_text())["project"] for path in PROJECTS.values())
DISTRIBUTIONS = {
    "hydra": "hydra-core", "yaml": "PyYAML", "zmq": "pyzmq", "huggingface_hub": "huggingface-hub", "megatron": "megatron-core",
    "reasoning_gym": "reasoning-gym",
}  # fmt: skip
"""Distributions whose names differ from their modules' names."""
NEVER_INSTALLED = {"nemo_rl", "nemo_gym"}
"""NeMo-RL is no distribution. NeMo-Gym is imported by a function that runs in the process of its own actor."""
EXTRAS = {
    "config": set(),
    "installed": set(),
    "storage": set(),
    "learned": set(),
    "reports": set(),
    "audit": {"heads"},
    "speculation": {"engine"},
    "stragglers": {"engine"},
    "telemetry": {"engine"},
    "doctor": {"engine"},
    "sampling": {"engine"},
    "drafters": {"engine"},
    "history": {"engine"},
    "generation": {"engine"},
    "remote": {"engine"},
    "heads": {"engine", "heads"},
    "run_ahead": {"engine", "nemo-rl"},
    "nemo_rl": {"engine", "nemo-rl"},
    "cli": {"heads"},
}
"""Extras that each package of the product may use beside the dependencies of all."""
LOGIN_NODE = ("config", "installed", "storage", "reports", "cli")
"""Packages that the dependencies of all are for."""
PYTHONS = ("3.11", "3.12", "3.13")
"""Versions of Python with which the commands must work; NeMo-RL asks for 3.13."""
CONFIG = RECIPES / "grpo-qwen3-8b-1n8g-megatron-specrollout.yaml"


def declared(project: dict[str, Any], extra: str = "") -> set[str]:
    """Returns the names of the distributions of an extra, without versions; of all without an extra."""
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {re.split(r"[<>=\[; ]", line)[0] for line in lines} - {PRODUCT["name"]}


def imports(file: Path) -> Iterator[str]:
    """Yields the distributions that a file imports, lazily too, but not for type checks."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    for_types = {
        id(n) for i in nodes if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test) for n in ast.walk(i)
    }
    for node in nodes:
        if id(node) not in for_types and isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            modules = {name.partition(".")[0] for name in names} - {
                *sys.stdlib_module_names,
                *PROJECTS,
                *NEVER_INSTALLED,
            }
            yield from (DISTRIBUTIONS.get(module, module) for module in modules)


def all_imports(folder: Path) -> set[str]:
    return set().union(*(imports(file) for file in folder.rglob("*.py")))


@pytest.mark.unit
@pytest.mark.parametrize("package", EXTRAS)
def test_imports_are_declared(package: str) -> None:
    allowed = declared(PRODUCT).union(*(declared(PRODUCT, extra) for extra in EXTRAS[package]))
    for file in (ROOT / "nemo_specrollout" / package).rglob("*.py"):
        assert set(imports(file)) <= allowed, file


@pytest.mark.unit
def test_imports_of_the_laboratory_are_declared() -> None:
    """The laboratory asks for the product with two extras, and has what these bring."""
    (product,) = (line for line in LABORATORY["dependencies"] if line.startswith(PRODUCT["name"]))
    extras = re.findall(r"[\w-]+", product.removeprefix(PRODUCT["name"]))
    brought = declared(PRODUCT).union(*(declared(PRODUCT, extra) for extra in extras))
    own = declared(LABORATORY).union(*(declared(LABORATORY, extra) for extra in LABORATORY["optional-dependencies"]))
    found = all_imports(ROOT / "lab")
    assert found <= brought | own
    assert own - declared(LABORATORY, "real-model") <= found


@pytest.mark.unit
def test_every_package_is_compared() -> None:
    folders = {folder.name for folder in (ROOT / "nemo_specrollout").iterdir() if list(folder.glob("**/*.py"))}
    assert folders - {"__pycache__"} == set(EXTRAS)


@pytest.mark.unit
def test_declared_distributions_are_imported() -> None:
    """The extra `dev` is for tests."""
    found = {package: all_imports(ROOT / "nemo_specrollout" / package) for package in EXTRAS}
    assert declared(PRODUCT) <= set().union(*(found[package] for package in LOGIN_NODE))
    for extra in ("engine", "heads", "nemo-rl"):
        users = (found[package] for package, extras in EXTRAS.items() if extra in extras)
        assert declared(PRODUCT, extra) <= set().union(*users), extra


@pytest.mark.unit
def test_every_extra_of_a_command_exists() -> None:
    assert {command.extra for command in COMMANDS} - {""} <= set(PRODUCT["optional-dependencies"])


@pytest.mark.unit
def test_the_package_has_every_recipe_and_the_cluster_file() -> None:
    shipped = {path.resolve() for path in RECIPES.glob("*.yaml")}
    recipes = set((ROOT / "examples" / "configs").glob("*-specrollout.yaml"))
    assert shipped == {*recipes, ROOT / "slurm" / "cluster.example.yaml"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without the models, in which builds leave their files."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if not name.startswith(("examples/models", "tests/")) and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("package", PROJECTS)
def test_wheel_and_source_archive_are_complete(source: Path, tmp_path: Path, package: str) -> None:
    """The wheel is built from the source archive, so both have what it has. It holds one package, and no test."""
    folder = source / PROJECTS[package].parent.relative_to(ROOT)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,), (_,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    files = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*") if p.suffix in (".py", ".yaml", ".template")
    }
    assert wanted <= files
    assert {name.partition("/")[0] for name in files if ".dist-info/" not in name} == {package}
    assert [name for name in files if name.endswith("licenses/LICENSE")] or package == "lab"


def python_of(version: str) -> str | None:
    """Returns the path of a Python of this version that runs; None if there is none."""
    known = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in (f"python{version}", *map(str, known)):
        try:
            done = subprocess.run([path, "-c", "import ensurepip"], capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return path
    return None


def install(source: Path, python: str, home: Path) -> Path:
    """Runs the first block of docs/get-started/install.md as it stands, with `python` as python3; returns its commands."""
    page = (ROOT / "docs" / "get-started" / "install.md").read_text()
    block = page.split("```\n")[1]
    (home / "shim").mkdir(parents=True)
    (home / "shim" / "python3").write_text(f'#!/bin/bash\nexec "{shutil.which(python)}" "$@"\n')
    (home / "shim" / "python3").chmod(0o755)
    environment = {**os.environ, "HOME": str(home), "PATH": f"{home / 'shim'}:/usr/bin:/bin"}
    block += "command -v nemo-specrollout\n"
    done = subprocess.run(
        ["bash", "-ec", block], cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1]).parent


def run(command: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    """Returns the output of a command that ends with `code` and without a stack trace, in an almost empty environment."""
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(folder), "NEMO_RL_DIR": str(folder / "RL"), "MPLCONFIGDIR": str(folder),
    }  # fmt: skip
    done = subprocess.run(
        [str(command), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    assert done.returncode == code, output
    return output


def use_as_a_newcomer(bin_: Path, folder: Path) -> None:
    """Runs what a newcomer on a login node runs. No package of an engine or of NeMo-RL is there."""
    command = bin_ / "nemo-specrollout"
    make_nemo_rl(folder / "RL")
    (folder / "RL" / "examples" / "configs").mkdir(parents=True)
    (folder / "RL" / "ray.sub").write_text(RECORDING_RAY_SUB)
    (folder / "RL" / "examples" / "configs" / "grpo_math_8B_megatron.yaml").write_text(BASE)
    assert "launch" in run(command, folder, "--help")
    assert "launch" in run(bin_ / "python", folder, "-m", "nemo_specrollout", "--help")
    for name in (c.name for c in COMMANDS):
        assert "usage" in run(command, folder, name, "--help")
    run(command, folder, "examples", "mine")
    recipe, cluster = f"mine/{CONFIG.name}", "mine/cluster.example.yaml"
    assert "suffix" in run(command, folder, "check", recipe)
    assert "0 fail" in run(command, folder, "doctor", recipe)
    (folder / "mine" / "mine.yaml").write_text(
        (folder / cluster)
        .read_text()
        .replace("/shared/code/RL", str(folder / "RL"))
        .replace("/shared/containers/nemo-rl.sqsh", "IMAGE")
    )
    launch = ("launch", recipe, "--nodes", "1", "--cluster", "mine/mine.yaml", "--run-dir", "first", "--dry-run")
    assert "sbatch" in run(command, folder, *launch)
    assert (folder / "first" / "addon" / "nemo_specrollout" / "__main__.py").is_file()
    (folder / "logs" / "specrollout").mkdir(parents=True)
    (folder / "logs" / "specrollout" / "run.json").write_text('{"records": 1}')
    step = '{"step": 1, "loss": 0.5, "reward": 0.5, "speedup_estimate": 1.5}\n'
    (folder / "logs" / "specrollout" / "metrics.jsonl").write_text(step)
    assert "report.html" in run(command, folder, "report", "logs")
    assert "uv is not on PATH" in run(command, folder, "run", recipe, code=2)
    model = f"policy.model_name={STEP_ADDER}"
    for name in ("check", "run"):
        assert "use `specrollout-lab`" in run(command, folder, name, str(QUICKSTART), model, code=2)


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_a_fresh_environment_has_working_commands(source: Path, tmp_path: Path, version: str) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version}")
    use_as_a_newcomer(install(source, python, tmp_path / "home"), tmp_path)


@pytest.mark.unit
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = next(command for command in COMMANDS if command.name == "serve-drafter")

    def fail(*_: object) -> int:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr(type(command), "run", fail)
    assert main(["serve-drafter", str(CONFIG)]) == 2
    shown = capsys.readouterr().err
    assert "serve-drafter needs the Python package msgspec, which is not installed here" in shown
    assert "pip install '.[engine]'" in shown
