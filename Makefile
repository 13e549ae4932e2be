# Each target sets up a virtual environment in .venv with the pinned versions, and compiles the core.
# This needs Python 3.10 or newer (all tests run on 3.11), a C++20 compiler and pip.
#   PYTHON=python3.11 make test      another interpreter
#   make demo DEMO_ARGS="--help"     arguments for the demo
#   make bench BENCH_ARGS="--help"   arguments for the benchmarks
#   make test-fast T=tests/x/test_y.py   one file or folder of the tests; the same for `make test`
PYTHON ?= python3
ifeq ($(origin CXX),default)
  CXX := c++
endif
export CXX
# Keep compiled modules even if the shell forbids it. Otherwise each process of the tests compiles all sources again and
# rewrites the assertions of all tests.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles modules when they are imported, which is only a tenth of torch.
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
TAKES_OVER := src/gleanrl/takeover.py src/gleanrl/_takeover/child.py # not for doctests: their import has effects
CORE_SOURCES := $(wildcard cpp/*/*.cc cpp/*/*.h) CMakeLists.txt pyproject.toml
# CHAOS is the share of all kills and interrupts that `make chaos` runs. INTERRUPTED are tests outside of tests/chaos that
# interrupt calls.
CHAOS ?= 1
INTERRUPTED = $(shell grep -rl --include='test_*.py' 'from tests.interrupts' tests)
CPP := cpp/*/*.cc cpp/*/*.h tests/devices/pretended/*.cc
PRETENDED := $(CURDIR)/build/pretended.so
PEERS := .venv-peers
FOREIGN := .venv-foreign
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
FOREIGN_TESTS := tests/foreign tests/_takeover tests/envs/transforms/test_torchrl.py tests/test_takeover.py tests/test___main__.py

.DEFAULT_GOAL := help
.PHONY: help build demo test test-fast test-devices test-foreign test-pythons test-programs chaos bench bench-peers bench-compact lint lint-prose format docs clean

help:
	@echo "make demo          run DQN on CartPole: collect, store and learn"
	@echo "make test          run all tests and doctests"
	@echo "make test-fast     run the fast tests, which start no process"
	@echo "make test-devices  run the device tests on a simulated accelerator, and on CUDA if available"
	@echo "make test-foreign  run tests with TorchRL's environments, losses and transforms, in .venv-foreign"
	@echo "make test-programs run training scripts on TorchRL, under takeover and ported, in .venv-foreign (half an hour)"
	@echo "make test-pythons  run the fast tests with each Python of PYTHONS that is installed, in .venv-pythons"
	@echo "make chaos         kill, starve and stop thousands of workers, interrupt calls at more lines (40 minutes; make test runs a part)"
	@echo "make bench         run the benchmarks; make bench-peers: with other libraries in the same run"
	@echo "make bench-compact compare compact buffers with the ones of other libraries: memory, speed, wrong rows"
	@echo "make lint          run all static checks; make format: apply the formatters"
	@echo "make lint-prose    print the idioms in the prose of changed folders, and the rate of each folder"
	@echo "make docs          build the documentation in site/"
	@echo "make build         only set up the environment and compile the core"
	@echo "make clean         remove everything that the targets made"

# The environment. torch is installed first, at its pinned version, so that no other package chooses its version.
$(VENV)/.installed: constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "No $(PYTHON) here: install Python 3.11, or name another one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than 3.10: name a newer one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) can't make virtual environments: install its venv package (Debian, Ubuntu: python3-venv)."; exit 1; }
	@echo "Setting up $(VENV) (the first time takes a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) cmake nanobind ninja scikit-build-core
	@$(MAKE) --no-print-directory compiler
	$(PIP) --no-build-isolation --editable '.[dev,docs]'
	@touch $@

# The core, in src/gleanrl with the Python sources.
$(VENV)/.built: $(VENV)/.installed $(CORE_SOURCES)
	@$(MAKE) --no-print-directory compiler
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

.PHONY: compiler
compiler:
	@command -v $(CXX) >/dev/null 2>&1 || { echo "No C++ compiler ($(CXX)) here: install g++ 11 or clang 14 or newer (Debian, Ubuntu: g++), or name one with CXX=..."; exit 1; }

build: $(VENV)/.built

demo: build
	$(BIN)/python examples/dqn_cartpole.py $(DEMO_ARGS)

test: build
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(or $(T),tests) $(TEST_ARGS)
ifndef T
	@$(MAKE) --no-print-directory test-devices
	$(BIN)/python -m pytest -q --doctest-modules $(TAKES_OVER:%=--ignore %) src/gleanrl
endif

test-fast: build
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not slow" $(or $(T),tests) $(TEST_ARGS)

# A simulated device for torch, for machines without an accelerator. All processes of the device tests load it.
$(PRETENDED): tests/devices/pretended/pretended.cc $(VENV)/.installed
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O1 -shared -fPIC $< -o $@ $$($(BIN)/python -c 'from torch.utils.cpp_extension import \
		include_paths as i, library_paths as l; print(*(f"-isystem {p}" for p in i()), *(f"-L{p}" for p in l()))') \
		-ltorch_cpu -lc10

test-devices: build $(PRETENDED)
	GLEANRL_PRETENDED=$(PRETENDED) PYTHONPATH=tests/devices/pretended \
		$(BIN)/python -m pytest -q -n 2 --dist loadgroup -k "pretended or cuda" tests/devices

test-foreign: build
	PYTHON=$(PYTHON) bash tests/foreign/make_env.sh $(FOREIGN)
	PYTHONPATH=src $(FOREIGN)/bin/python -m pytest -q $(FOREIGN_TESTS) $(TEST_ARGS)

test-pythons:
	bash tests/pythons.sh "$(PYTHONS)" $(or $(T),tests) $(TEST_ARGS)

test-programs: build
	PYTHON=$(PYTHON) bash tests/foreign/make_env.sh $(FOREIGN)
	PYTHONPATH=src $(FOREIGN)/bin/python -m pytest -q tests/programs $(TEST_ARGS)

chaos: build
	GLEANRL_CHAOS=$(CHAOS) $(BIN)/python -m pytest -q -s tests/chaos tests/docs tests/test_hooks.py $(INTERRUPTED) $(TEST_ARGS)

bench: build
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-peers: build
	PYTHON=$(PYTHON) bash benchmarks/make_peers.sh $(PEERS)
	$(BIN)/python -m benchmarks --peers $(PEERS)/bin/python $(BENCH_ARGS)

bench-compact: build
	PYTHON=$(PYTHON) bash benchmarks/make_peers.sh $(PEERS)
	$(BIN)/python -m benchmarks.compact_peers $(PEERS)/bin/python $(BENCH_ARGS)

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/python tools/check_commits.py
	$(BIN)/python tools/lint_prose.py

lint-prose: build
	$(BIN)/python tools/lint_prose.py --changed

format: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

docs: build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf $(VENV) .venv-pythons $(PEERS) $(FOREIGN) src/gleanrl/_core.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
