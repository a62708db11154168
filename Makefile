# `make bench` and `make test` need Python >= 3.10 with venv, a C++17 compiler and make; they do the rest.
#   PYTHON=python3.12   the Python to make the environment with
#   VENV=.venv          where to make it
#   ARGS="..."          passed on to the benchmark or to pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# Pinned: torch is what we are measured against and whose behaviour we copy, so a result means nothing without its
# version. Nothing here needs CUDA: where PyTorch's own page of CPU builds can be reached, pip prefers it (its local
# version `2.13.0+cpu` sorts above `2.13.0`) and is spared gigabytes; elsewhere pip takes what its index has.
TORCH ?= torch==2.13.0
TORCH_WHEELS ?= https://download.pytorch.org/whl/cpu/torch/

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD := FASTATTN_REQUIRE_NATIVE=1 $(BIN)/python setup.py --quiet
# Folders too, so that a file taken away also counts as a change.
NATIVE_SOURCES := setup.py $(shell find csrc)

.DEFAULT_GOAL := help
.PHONY: help bench test test-full build lint format clean

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

bench: build ## compare the drop-in with PyTorch on this machine: a table, a picture, a JSON file (minutes)
	$(BIN)/python -m fastattn bench run --json bench-results/bench.json --plot bench-results/bench.png $(ARGS)

test: build ## run all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

build: $(VENV)/.stamp-native ## environment and native core, rebuilt where csrc changed

$(VENV)/.stamp-python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("fastattn needs Python >= 3.10; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# Without build isolation, so that the build folder stays valid and only what changed is compiled again.
$(VENV)/.stamp-packages: pyproject.toml | $(VENV)/.stamp-python
	$(PIP) install --quiet --retries 2 --find-links $(TORCH_WHEELS) $(TORCH)
	$(PIP) install --quiet 'setuptools>=77' 'pybind11>=2.13' ninja
	FASTATTN_REQUIRE_NATIVE=1 $(PIP) install --quiet --no-build-isolation --editable '.[bench,test]'
	touch $@

$(VENV)/.stamp-native: $(NATIVE_SOURCES) $(VENV)/.stamp-packages
	$(BUILD) build_ext --inplace
	touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/.stamp-packages
	$(PIP) install --quiet '.[dev]'
	touch $@

clean: ## remove everything that was built, but not the environment
	rm -rf build dist *.egg-info bench-results fastattn/_build.json fastattn/*.so $(VENV)/.stamp-native
