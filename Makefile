# `make demo` and `make test` are all that a newcomer needs; both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= examples/configs/quickstart_cpu.yaml
LOG_DIR ?= results/demo-$(shell date +%Y%m%d-%H%M%S)

BIN = $(VENV)/bin
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --no-deps
PIP = $(BIN)/python $(PIP_INSTALL)

.PHONY: demo test test-slow test-nemo-rl test-gpu bench check format setup clean

demo: setup
	$(BIN)/nemo-specrollout run $(CONFIG) logger.log_dir=$(LOG_DIR)

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow -s

# NeMo-RL's own loop on this CPU, from a work tree (CONTRIBUTING.md): most of an hour.
test-nemo-rl: setup
	$(BIN)/python -m pytest -m nemo_rl tests

# On a machine with a CUDA GPU and vLLM's own wheel; not in .venv, which is made for a CPU. GPU_CHECK=--quick is shorter.
test-gpu:
	$(PYTHON) -m nemo_specrollout.local.gpu_check --out results/gpu_check.json $(GPU_CHECK)

bench: setup
	$(BIN)/nemo-specrollout bench $(CONFIG) logger.log_dir=results/bench 'bench.useless_batches=[1,4,16,64]'

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.installed

# torch's CPU build: where pip finds it by itself, else from PyTorch's own CPU index, which uv knows.
$(VENV)/.installed: requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing pinned packages into $(VENV): about 2 GB, a few minutes"
	@$(PIP) $$(grep '^torch==' requirements/cpu.lock) 2>/dev/null || \
	  ($(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --torch-backend cpu $$(grep '^torch==' requirements/cpu.lock))
	@$(PIP) -r requirements/cpu.lock
	@$(PIP) --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) results
