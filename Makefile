# `make demo` and `make test` do everything on a fresh machine: virtual environment, install, run.
# The environment is made once, and again only when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
QUIET := $(if $(CI),--quiet,)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types clean

help:
	@echo "make demo      install into $(VENV) and run the main job (three trainings, about 3 minutes)"
	@echo "make test      install into $(VENV), then lint, types and tests, as CI does"
	@echo "make test-all  the same with the slow sweeps"
	@echo "make clean     remove $(VENV), caches and demo output"

# A half-made environment has no stamp and is made anew.
$(VENV)/.created:
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install $(QUIET) --constraint constraints.txt --upgrade pip
	@touch $@

# torch on its own first: the pinned version has a small CPU wheel where one is offered.
$(VENV)/.installed-%: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install $(QUIET) --constraint constraints.txt torch
	$(PIP) install $(QUIET) --constraint constraints.txt --editable ".[$*]"
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/lightning-oom demo

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

# One thread per worker: two workers with two threads each on two cores only get in each other's way.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu"

test-all: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu"

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build runs lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
