# Everything runs in .venv, which the first target that needs it makes and later ones find made.
#
#   make demo        plan examples/gpt.py for 4 processes on this machine's processor, and train it
#   make test        the tests; of long sweeps a sample
#   make test-long   the tests, and every sweep whole
#   make lint        ruff and mypy
#   make clean       throw .venv and the demo's plan away

PYTHON ?= python3.11
TORCH  := torch==2.13.0
BIN    := .venv/bin

# Where PYTHONDONTWRITEBYTECODE is set, each of many processes would compile all sources anew, and
# each of pytest's own would rewrite all asserts.
COMPILE := $(BIN)/python -m compileall -q -j 0 autopipe planners runtime benchmarks examples tests

# Of torch and of what tests need most modules are never imported: pip would compile all of them, in
# one process. Those that a plan imports are compiled here, for where processes write no bytecode.
PIP    := $(BIN)/pip install -qq --no-compile --disable-pip-version-check
IMPORT := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "import torch._dynamo, torch.export, scipy.optimize"

# Processes of `make test`. Each test file runs in one of them, in the order of tests/conftest.py.
# One more than cores of a small machine: of what is told of processes much is waiting.
JOBS   ?= 3

PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20

.PHONY: demo test test-long lint clean

demo: .venv/installed
	@mkdir -p demo
	$(BIN)/autopipe plan examples/gpt.py --cluster cpu:4 --pp 2 --dp 2 -o demo/plan.json
	$(BIN)/autopipe run demo/plan.json --local 4 --steps 40

test: .venv/installed-dev
	@$(COMPILE)
	$(PYTEST)

test-long: .venv/installed-dev
	@$(COMPILE)
	AUTOPIPE_LONG=1 $(PYTEST)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=auto $(BIN)/mypy

clean:
	rm -rf .venv demo

# The stamps are younger than pyproject.toml as long as what it asks for is installed. torch goes
# first and by itself, so that its version is the one named here and not the newest allowed.
.venv/installed: pyproject.toml
	@echo "making .venv with $(TORCH): a minute or two, once" >&2
	@$(PYTHON) -m venv .venv
	@$(PIP) $(TORCH)
	@$(PIP) --editable .
	@$(COMPILE)
	@$(IMPORT)
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "adding what tests and lint need: half a minute, once" >&2
	@$(PIP) --editable '.[dev]'
	@touch $@
