# `make calibrate`, `make test`, `make demo` and `make lint` each create the environment
# on first use and then do their job.
#
#   PYTHON=python3.12      the interpreter of the environment
#   VENV=.venv             where the environment lives
#   TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#                          how PyTorch is installed, where the default is not what you want:
#                          on Linux PyPI's PyTorch is the CUDA build (several GB)
#   SYSTEM_PACKAGES=1      use the PyTorch that PYTHON already has (2.11 or newer); it is
#                          never replaced
#   WORKERS=2              processes that `make test` runs; as many as there are cores
#   ARGS="--help"          passed on to the command

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
SYSTEM_PACKAGES ?=
WORKERS ?= auto
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help environment calibrate calibrations test test-slow test-all demo lint docs clean

help:
	@echo "make calibrate   measure this device and write its profile"
	@echo "make test        run the tests that are quick: some minutes"
	@echo "make test-slow   run the others: exhaustive, statistical and on the demo model"
	@echo "make test-all    run all tests"
	@echo "make demo        decode with a small real model and its trained drafter, four policies side by side"
	@echo "make lint        style, types, import rules"
	@echo "make docs        build the documentation site in build/site"
	@echo "make calibrations compose the shipped calibrations again and their page"
	@echo "make clean       remove the environment"

environment: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("rooftree needs Python 3.11 or newer; choose one with make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "creating $(VENV): a few minutes, PyTorch is the largest part"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(if $(SYSTEM_PACKAGES),--system-site-packages) $(VENV)
	@grep $(if $(SYSTEM_PACKAGES),-v '^torch==',.) constraints.txt > $(VENV)/constraints.txt
	@$(if $(TORCH),$(PIP) install -qq $(TORCH))
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

calibrate: $(STAMP)
	$(BIN)/rooftree calibrate $(ARGS)

# OPERATORS: the folder with the tables of docs/calibrations.md
OPERATORS ?= ../shared/data/operators

calibrations: $(STAMP)
	$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[operators]'
	$(BIN)/python -m benchmarks.shipped write compose --operators $(OPERATORS) > /dev/null
	$(BIN)/python -m benchmarks.transfer_study --shared $(dir $(OPERATORS))..
	$(BIN)/python -m benchmarks.shipped write transfer > /dev/null
	$(BIN)/python -m benchmarks.shipped document

# One process a core, each with one thread: together they keep the machine busy and no more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m slow $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(ARGS)

demo: $(STAMP)
	$(BIN)/rooftree demo-model --run $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
