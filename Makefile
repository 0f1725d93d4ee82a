# What developers and CI run. Needs only python3 (3.10 or newer) and make; the first target called builds .venv.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Files that begin with an underscore are shared by the benchmarks and do not run alone.
BENCHMARKS := $(filter-out benchmarks/_%,$(sort $(wildcard benchmarks/*.py)))

.DEFAULT_GOAL := help
.PHONY: help venv demo test check fix bench test-gpu clean

help:
	@echo "make demo      train a small GPT with the strategy, results under runs/"
	@echo "make test      all tests"
	@echo "make check     format, lint and types, as CI runs them"
	@echo "make fix       format, and mend what the linter can mend"
	@echo "make bench     every script in benchmarks/, one after another"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make clean     remove .venv and caches"

venv: $(STAMP)

# torch goes first and alone: pip then takes the build for this machine (a CPU wheel where one is provided)
# and the second call finds it installed, whatever the other packages ask for.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Expected Python 3.10 or newer, got $$($(PYTHON) --version 2>&1). Call make PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	    { echo "$(PYTHON) lacks the venv module. Install it (Debian and Ubuntu: apt-get install python3-venv)," \
	           "or call make PYTHON=/path/to/python3 with a Python that has it."; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)" --constraint constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable '.[cli,plot,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/train_gpt.py

# One thread each: the ranks of a test share the machine's cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict fsdp_strategy

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache *.egg-info
