# SPDX-License-Identifier: Apache-2.0
"""The tiers of the test suite: which target of the Makefile runs a test module, and which changes concern it.

`make test` runs the tier `product`, which has every module that no other tier names. `make test-all` runs all tiers.
"""

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Tier:
    """Test modules that one target runs."""

    name: str
    """Name of the option `--tier`. The target is `make test-NAME`, or `make test` for the product."""
    about: str
    """What these modules test, in a few words."""
    modules: tuple[str, ...]
    """Modules of the folder `tests`, and folders of it whose modules all belong to the tier."""
    subject: tuple[str, ...]
    """Beginnings of paths of the repository. A change of such a file, or of one of the modules, makes CI run the tier."""

    @property
    def target(self) -> str:
        return "test" if self.name == "product" else f"test-{self.name}"

    def has(self, module: Path) -> bool:
        """Returns whether a test module belongs to the tier by its name or by its folder."""
        place = module.resolve().relative_to(TESTS)
        return place.name in self.modules or place.parts[0] in self.modules

    def is_about(self, changed: str) -> bool:
        """Returns whether a change of the file `changed`, a path from the root of the repository, concerns the tier."""
        in_tests = tuple(f"tests/{name}" for name in self.modules)
        return changed.startswith(self.subject + in_tests + EVERYWHERE)


EVERYWHERE = ("requirements/", "pyproject.toml", "tests/conftest.py", "tests/engines.py", "tests/tiers.py", "Makefile")
"""Beginnings of paths that concern every tier."""
_ENGINE = tuple(
    f"nemo_specrollout/{package}/"
    for package in ("config", "drafters", "generation", "heads", "remote", "sampling", "speculation", "telemetry")
)
"""What runs in an engine."""

OTHER_TIERS = (
    Tier(
        "kernels",
        "Triton kernels against their bodies for a CPU, in Triton's interpreter and compiled for a GPU that is not there",
        ("test_kernels.py", "test_interpreted_drafters.py", "interpreted", "fake_gpu"),
        (
            "lab/vllm_on_cpu/",
            "lab/gpu/",
            "lab/local/device.py",
            "lab/local/grpo.py",
            "lab/local/megatron_model.py",
            "lab/local/policy.py",
            "nemo_specrollout/drafters/",
            "nemo_specrollout/generation/drafting/",
            "nemo_specrollout/generation/step/",
            "nemo_specrollout/remote/verifier/",
            "nemo_specrollout/sampling/",
        ),
    ),
    Tier(
        "families",
        "kinds of policies and of heads that draft blocks, each in an engine of its own",
        ("test_model_families_exact.py", "test_block_drafters.py", "test_llama.py"),
        (*_ENGINE, "lab/vllm_on_cpu/"),
    ),
    Tier(
        "processes",
        "drafter processes, Ray actors, and engines that share a rollout",
        (
            "test_async_engine.py",
            "test_async_requests.py",
            "test_decoupled.py",
            "test_doctor_cli.py",
            "test_drafter_actor.py",
            "test_drafter_service.py",
            "test_exchange.py",
            "test_exchange_pause.py",
            "test_kills_amid_changes.py",
            "test_racing.py",
            "test_rolling.py",
            "test_run_ahead_driver.py",
            "test_shadow_sequences.py",
            "test_stream_exchange.py",
        ),
        (
            *_ENGINE,
            "nemo_specrollout/doctor/",
            "nemo_specrollout/nemo_rl/",
            "nemo_specrollout/run_ahead/",
            "nemo_specrollout/stragglers/",
        ),
    ),
    Tier(
        "lab",
        "the laboratory: GRPO on one machine, benchmarks, the simulator",
        ("lab",),
        (
            *_ENGINE,
            "nemo_specrollout/reports/",
            "nemo_specrollout/run_ahead/",
            "nemo_specrollout/stragglers/",
            "nemo_specrollout/storage/",
            "lab/",
            "examples/",
        ),
    ),
    Tier(
        "pins",
        "engines of the vLLMs that NeMo-RL pins, in Triton's interpreter",
        ("test_older_vllm.py", "test_older_lossless.py", "test_older_kernels.py", "test_older_families.py"),
        (*_ENGINE, "nemo_specrollout/nemo_rl/", "nemo_specrollout/run_ahead/", "nemo_specrollout/audit/"),
    ),
    Tier(
        "slurm",
        "jobs on a real Slurm of up to four nodes, which are namespaces of this machine",
        ("slurm",),
        (
            "nemo_specrollout/cli/",
            "nemo_specrollout/nemo_rl/",
            "nemo_specrollout/reports/jobs.py",
            "nemo_specrollout/reports/start_facts.py",
            "slurm/",
        ),
    ),
)
PRODUCT = Tier("product", "the product", (), ("",))
TIERS = (PRODUCT, *OTHER_TIERS)


def tier_of(module: Path) -> Tier:
    """Returns the tier of a test module."""
    return next((tier for tier in OTHER_TIERS if tier.has(module)), PRODUCT)


def modules_of(tier: Tier) -> list[Path]:
    """Returns the test modules of a tier."""
    return [path for path in sorted(TESTS.rglob("test_*.py")) if tier_of(path) is tier]
