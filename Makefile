# One command checks all: `make test`. One command shows all: `make demo`. `make help` lists the rest.

PYTHON ?= python3
PYTEST_PROCESSES ?= 5
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input -qq -c deploy/constraints.txt
INPUTS := pyproject.toml deploy/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo install test lint format format-check types pytest bench chaos learn learn-short clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: .venv/.local  ## Run two scripted episodes on this machine, without any account or server
	@$(BIN)/rollout-farm demo

install: .venv/.local  ## Make .venv and install what running needs

test: lint format-check types pytest  ## Lint, format, types and the whole suite

lint: .venv/.dev  ## ruff check
	$(BIN)/ruff check .

format: .venv/.dev  ## Format and sort imports
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

format-check: .venv/.dev lint
	$(BIN)/ruff format --check .

types: .venv/.dev format-check  ## mypy, strict
	$(BIN)/mypy

pytest: .venv/.dev types
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -p tests.support.warm_suite -n $(PYTEST_PROCESSES) --dist loadfile --no-loadscope-reorder tests/e2e tests/trainer tests/integration tests/unit

bench: .venv/.dev  ## Measure overheads; prints a table, writes bench.json
	$(BIN)/python -m tests.bench

chaos: .venv/.dev  ## Kill a farm piece by piece while it runs 200 episodes; nothing may be lost or left
	$(BIN)/python -m tests.chaos $(CHAOS)

learn: .venv/.dev  ## Train a tiny policy on real episodes, three seeds and a control; writes learn.png and learn.json
	$(BIN)/python -m tests.learning $(LEARN)

learn-short: .venv/.dev  ## The same with one seed, as a test
	$(BIN)/python -m pytest tests/learning

clean:  ## Remove .venv, caches and the embedded stack's data
	rm -rf .venv .farm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info bench.json learn.png learn.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each set of extras: nothing is installed again until pyproject.toml or the pins change.
.venv/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: install Python 3.11, 3.12 or 3.13, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v[:2] < (3, 14); sys.exit(None if ok else "Python 3.11, 3.12 or 3.13 is needed and $(PYTHON) is %d.%d: say make PYTHON=python3.12 or the like" % v[:2])'
	@echo "making .venv with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv .venv || { echo "could not make .venv: is Python's venv module installed? (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@touch $@

.venv/.local: .venv/.made $(INPUTS)
	@echo "installing rollout-farm into .venv (a minute or two, once)"
	@$(PIP) -e '.[local]'
	@touch $@

.venv/.dev: .venv/.made $(INPUTS)
	@echo "installing rollout-farm and its development tools into .venv (a minute or two, once)"
	@$(PIP) -e '.[local,train,dev]'
	@touch .venv/.local $@
