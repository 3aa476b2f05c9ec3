# Every target sets up what it needs: `make test` on a fresh clone is enough.
# Another interpreter: make PYTHON=python3.12 clean test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HOROVOD := $(VENV)/.horovod

# Everything is found through the virtual environment alone.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick lint types clean

help:  ## say what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: $(READY)  ## create or update .venv; the other targets do it by themselves

# The stamp is written last and removed first, so a .venv without one was interrupted half-way and
# is made from scratch, while one that is only out of date is updated in place.
$(READY): pyproject.toml constraints.txt
	@if [ -e $@ ]; then \
	  echo "==> Updating $(VENV): $? changed since it was installed"; \
	else \
	  echo "==> Creating $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV); \
	fi
	@rm -f $@
	@echo "==> Installing the package and its pinned development environment (minutes, the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
	@echo "==> $(VENV) is ready"

demo: $(READY)  ## train the handwritten digits on two processes and compare with DDP
	@echo "==> Running the demo: examples/demo.py"
	@$(BIN)/python examples/demo.py

# Optional on a developer's machine, where its tests are then skipped; not where CI is set. The
# wheel is kept, so only the first time takes minutes.
$(HOROVOD): $(READY) scripts/install_horovod.sh constraints.txt
	@echo "==> Installing Horovod for the tests that need it"
	@if PYTHON=$(BIN)/python PIP_CONSTRAINT=$(CURDIR)/constraints.txt scripts/install_horovod.sh; then \
	  touch $@; \
	elif [ -n "$$CI" ]; then \
	  exit 1; \
	else \
	  echo "==> Going on without Horovod: the tests that need it will be skipped"; \
	fi

# One thread per process: the tests start several, and must not fight over the cores.
test test-quick: export OMP_NUM_THREADS := 1

test: $(READY) $(HOROVOD)  ## run all tests; builds Horovod for them, once
	@echo "==> Running all tests"
	@$(BIN)/python -m pytest

test-quick: $(READY)  ## run the tests that are not marked slow: two minutes on two cores
	@echo "==> Running the quick tests"
	@$(BIN)/python -m pytest -m "not slow"

lint: $(READY)  ## check style and format with ruff
	@echo "==> Checking style and format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY)  ## check types with mypy
	@echo "==> Checking types"
	@$(BIN)/mypy

clean:  ## remove .venv, builds and caches; never logs or checkpoints
	@echo "==> Removing $(VENV), builds and caches"
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
