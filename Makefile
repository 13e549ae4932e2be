# Every target does its own set-up: a virtual environment in .venv with the pinned versions, and the compiled core.
# Needs Python 3.10 or newer (3.11 is the tested one), a C++20 compiler and pip.
#   PYTHON=python3.11 make test      another interpreter
#   make demo DEMO_ARGS="--help"     arguments for the demo
#   make bench BENCH_ARGS="--help"   arguments for the benchmarks
#   make test-fast T=tests/x/test_y.py   one file or folder of the tests; the same for `make test`
PYTHON ?= python3
ifeq ($(origin CXX),default)
  CXX := c++
endif
export CXX
# Compiled modules are kept whatever the shell says: each process of the tests would compile the sources anew, and
# rewrite the assertions of all tests.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
# What is imported is compiled then: of torch, a tenth.
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
TAKES_OVER := src/gleanrl/takeover.py src/gleanrl/_takeover/child.py # importing them is what they are for
CORE_SOURCES := $(wildcard cpp/*.cc cpp/*.h) CMakeLists.txt pyproject.toml
# Share of the full numbers that `make chaos` runs, and where else than in tests/chaos calls are interrupted.
CHAOS ?= 1
INTERRUPTED = $(shell grep -rl --include='test_*.py' 'from tests.interrupts' tests)
CPP := cpp/*.cc cpp/*.h tests/devices/pretended/*.cc
PRETENDED := $(CURDIR)/build/pretended.so
PEERS := .venv-peers
FOREIGN := .venv-foreign
FOREIGN_TESTS := tests/foreign tests/_takeover tests/envs/transforms/test_torchrl.py tests/test_takeover.py tests/test___main__.py

.DEFAULT_GOAL := help
.PHONY: help build demo test test-fast test-devices test-foreign test-programs chaos bench bench-peers lint lint-prose format docs clean

help:
	@echo "make demo         learn CartPole on collected and stored data"
	@echo "make test         every test, doctests included"
	@echo "make test-fast    the tests that start no processes and take no seconds"
	@echo "make test-devices what concerns devices, on an accelerator that is pretended, and on CUDA if there is one"
	@echo "make test-foreign environments, losses and transforms of TorchRL, in a virtual environment of their own"
	@echo "make test-programs training scripts for TorchRL on it, taken over, and ported; there, too (half an hour)"
	@echo "make chaos        workers killed, starved and stopped by the thousand, calls interrupted at more lines (40 minutes; a share is in make test)"
	@echo "make bench        the benchmarks; make bench-peers: other libraries in the same run"
	@echo "make lint         all static checks; make format: let the formatters write"
	@echo "make lint-prose   the idioms in the prose of changed folders, and the rate of each folder"
	@echo "make docs         the documentation in site/"
	@echo "make build        the environment and the compiled core only"
	@echo "make clean        remove what the targets made"

# The environment: torch first, at its pinned version, then everything else around it.
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

# The core, beside the sources in src/gleanrl.
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

# A device of its own for torch, for machines without an accelerator; all processes of the tests have it.
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

test-programs: build
	PYTHON=$(PYTHON) bash tests/foreign/make_env.sh $(FOREIGN)
	PYTHONPATH=src $(FOREIGN)/bin/python -m pytest -q tests/programs $(TEST_ARGS)

chaos: build
	GLEANRL_CHAOS=$(CHAOS) $(BIN)/python -m pytest -q -s tests/chaos tests/test_hooks.py $(INTERRUPTED) $(TEST_ARGS)

bench: build
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-peers: build
	PYTHON=$(PYTHON) bash benchmarks/make_peers.sh $(PEERS)
	$(BIN)/python -m benchmarks --peers $(PEERS)/bin/python $(BENCH_ARGS)

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
	rm -rf $(VENV) $(PEERS) $(FOREIGN) src/gleanrl/_core.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
