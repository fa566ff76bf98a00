# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures and settings: the environment of in-process CPU engines, tiny random models, the shipped policy."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

# OpenMP's barriers spin, so that two threads are very slow beside another process. Numba sets OpenMP's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import pytest
from hypothesis import settings
from tiers import OTHER_TIERS, PRODUCT, TIERS, modules_of, tier_of

from lab.vllm_on_cpu import own_kernels
from nemo_specrollout.generation.engine.arguments import set_process_environment

set_process_environment()  # before any test imports vllm
own_kernels.register()

# No deadline, because the first call of a compiled kernel takes seconds. `make test-all` asks for "thorough".
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")

pytest_plugins = ["nemo_rl_host", "engines"]

ROOT = Path(__file__).parent.parent
if os.environ.get("TRITON_INTERPRET") == "1":  # `make test-vllm`
    sys.path.append(str(ROOT / "tests" / "interpreted"))
    __import__("interpreting")
STEP_ADDER = ROOT / "examples" / "models" / "step_adder"
QUICKSTART = ROOT / "examples" / "configs" / "quickstart_cpu.yaml"
TINY_ROLLOUTS = {
    "grpo.num_prompts_per_step": 2,
    "grpo.num_generations_per_prompt": 4,
    "policy.train_global_batch_size": 8,
    "policy.generation.max_new_tokens": 48,
    "policy.generation.vllm_kwargs.kv_cache_memory_bytes": 1 << 26,
    "data.max_terms": 3,
}
"""Overrides of the quickstart with fast steps: few requests, short answers, short additions."""


LONGEST = (
    "test_kernels.py",
    "test_model_families_exact.py",
    "test_run.py",
    "test_model_drafters.py",
    "test_served_heads.py",
    "test_decoupled.py",
    "test_rollout_pool.py",
    "test_request_kinds.py",
    "test_doctor_cli.py",
    "test_racing.py",
    "test_stream_exchange.py",
    "test_exchange.py",
    "test_equality.py",
)
"""Modules that take longest. They begin first, so that no process waits for another at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    names = [tier.name for tier in TIERS]
    parser.addoption("--tier", action="append", choices=names, help="take modules of this tier only (tests/tiers.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = config.getoption("--tier")
    is_module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if wanted and is_module and tier_of(collection_path).name not in wanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says which modules the product's own tests leave to other targets."""
    if config.getoption("--tier") != [PRODUCT.name]:
        return
    terminalreporter.write_line(
        "These belong to other targets, and `make test-all` runs all of them but `make test-pins`:"
    )
    for tier in OTHER_TIERS:
        number = f"{len(modules_of(tier))} modules"
        terminalreporter.write_line(f"  make {tier.target:<15} {number:>10}  {tier.about}")
    terminalreporter.write_line("  make test-slow                  tests that take minutes each")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with the task's tokenizer: two layers, one KV head, spread-out logits (about 2 nats)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
    model.save_pretrained(folder)
    _copy_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama like SmolLM2: tied LM head and embedding, three query heads to a KV head, five layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=96, intermediate_size=192, num_hidden_layers=5, num_attention_heads=3,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.mul_(8.0)
    model.save_pretrained(folder)
    _copy_tokenizer(folder)
    return folder


@pytest.fixture
def changed_vllm(tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of the installed vLLM with changes of the form (file, old text, new text); other files are links."""
    from nemo_specrollout.installed.python_source import installed_source

    def change(*changes: tuple[str, str, str]) -> Path:
        source, copy = installed_source("vllm"), tmp_path / "changed_vllm"
        if source is None:
            pytest.skip("vLLM is not installed")
        ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.json")
        shutil.copytree(source / "vllm", copy / "vllm", ignore=ignore, copy_function=os.symlink)
        for name, old, new in changes:
            text = (source / name).read_text()
            assert old in text
            (copy / name).unlink()
            (copy / name).write_text(text.replace(old, new))
        return copy

    return change


def _copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STEP_ADDER / name, folder / name)
